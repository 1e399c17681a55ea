"""The arithmetic of one step on so many ranks: prompts, completions, tokens and passes, each as large as it can get."""

from dataclasses import dataclass
from typing import Any

from trainer.batch import Completion, Prompt
from trainer.config import RunConfig
from trainer.models.packing import micro_batches, tokens_of
from trainer.rollout.rope_guard import Lengths


@dataclass(frozen=True)
class Batch:
    """Of a step whose prompts are as long as the longest and whose completions all reach rollout.max_new_tokens."""

    ranks: int
    prompts: int
    generations: int
    lengths: Lengths
    prompts_a_rank: tuple[int, int]
    """Fewest and most."""
    micro_batches: int
    """Passes of the rank with most prompts, as many on every rank."""
    largest: tuple[int, int]
    """Completions and tokens of the largest pass."""
    tokens: int
    """Tokens that the passes of that rank hold."""
    steps: int
    updates: int
    """Optimizer steps of a rollout step."""
    epochs: float
    """Passes over the prompts in all steps."""

    def record(self) -> dict[str, Any]:
        """JSON-safe; tokens are at most."""
        fewest, most = self.prompts_a_rank
        completions = self.prompts * self.generations
        return {
            "ranks": self.ranks,
            "prompts_per_step": self.prompts,
            "num_generations": self.generations,
            "completions_per_step": completions,
            "completion_tokens_per_step": completions * self.lengths.new,
            "prompts_per_rank": [fewest, most],
            "completions_per_rank": [fewest * self.generations, most * self.generations],
            "micro_batches_per_rank": self.micro_batches,
            "completions_per_micro_batch": self.largest[0],
            "tokens_per_micro_batch": self.largest[1],
            "tokens_per_rank": self.tokens,
            "updates_per_step": self.updates,
            "steps": self.steps,
            "updates": self.steps * self.updates,
            "epochs": round(self.epochs, 3),
        }


def batch_of(
    config: RunConfig, lengths: Lengths, *, ranks: int, token_budget: int, shared: bool, steps: int, rows: int
) -> Batch:
    """``shared``: a pass holds a group's prompt once. ``rows``: prompts to train on."""
    rollout = config.rollout
    fewest, rest = divmod(rollout.prompts_per_step, ranks)
    most = fewest + bool(rest)
    prompt = Prompt(0, "", (0,) * lengths.prompt, None, {})
    ids = (0,) * lengths.new
    longest = [
        Completion(group, generation, prompt, ids, (), "length", "")
        for group in range(most)
        for generation in range(rollout.num_generations)
    ]
    passes = list(
        micro_batches(longest, micro_batch=config.engine.micro_batch, token_budget=token_budget, shared=shared)
    )
    tokens = [tokens_of(part, shared) for part in passes]
    return Batch(
        ranks=ranks,
        prompts=rollout.prompts_per_step,
        generations=rollout.num_generations,
        lengths=lengths,
        prompts_a_rank=(fewest, most),
        micro_batches=len(passes),
        largest=(max(map(len, passes)), max(tokens)),
        tokens=sum(tokens),
        steps=steps,
        updates=config.grpo.updates_per_rollout,
        epochs=steps * rollout.prompts_per_step / rows,
    )
