"""The live parts that are asked: loaded as the run would, one process, a few prompts, short completions."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from trainer.batch import Completion
from trainer.config import RunConfig
from trainer.config.deepspeed_json import resolve
from trainer.minibatch import MicroBatch
from trainer.preflight.prepare import Checked, check, load_models, start_engine
from trainer.record.metrics import Sums
from trainer.rollout.decoder import Group
from trainer.rollout.rope_guard import Lengths
from trainer.state import State
from trainer.update import ask_reference, forward, global_count, kl_in_loss, micro_batch_loss, passes, with_gradient
from trainer.world import World

PROMPTS, GENERATIONS, NEW_TOKENS = 4, 4, 32
"""At most; 512 tokens are enough for every probe, and seconds of a 1.5B model on a card."""


@dataclass
class Parts:
    """What probes are asked of."""

    state: State
    lengths: Lengths
    """Of the whole run, not of the short completions here."""
    completions: list[Completion]
    """Sampled by the run's decoder, not scored; empty where nothing could be sampled."""
    moved: float = 0.0
    """Length of the steps that probes have taken, in the space of the trained weights."""

    @property
    def same(self) -> float:
        """Nats below which two log-probs of one token are equal: sums in another order, in the policy's dtype."""
        return 1e-3 if self.state.policy.dtype == torch.float32 else 0.1


def load_parts(config: RunConfig, folder: Path, world: World) -> Parts:
    """Refused as the run would be. ``folder``: where the run file lies."""
    checked = check(config, folder, world)
    lengths = checked.lengths
    checked = _asking(checked, world)
    return Parts(start_engine(checked, load_models(checked, world), world), lengths, [])


def _asking(checked: Checked, world: World) -> Checked:
    """Plain gradient descent on one process: a step of a known length, that remembers nothing of the one before."""
    config = checked.config
    engine: dict[str, object] = {"deepspeed": "zero2", "micro_batch": 0}
    if config.engine.gradient_checkpointing == "auto":
        engine["gradient_checkpointing"] = "on" if world.device.type == "cuda" else "off"
    config = config.model_copy(
        update={
            "optim": config.optim.model_copy(update={"name": "sgd", "weight_decay": 0.0, "max_grad_norm": 0.0}),
            "engine": config.engine.model_copy(update=engine),
            "rollout": config.rollout.model_copy(
                update={
                    "max_new_tokens": min(NEW_TOKENS, config.rollout.max_new_tokens),
                    "num_generations": max(2, min(GENERATIONS, config.rollout.num_generations)),
                    "replay": "",
                }
            ),
            "grpo": config.grpo.model_copy(update={"updates_per_rollout": 1}),
        }
    )
    deepspeed = resolve(
        config,
        world.size,
        dtype="bf16" if checked.dtype == torch.bfloat16 else "fp32",
        hidden_size=checked.model_config.get_text_config(decoder=True).hidden_size,
    )
    return replace(checked, config=config, deepspeed=deepspeed)


def sample(parts: Parts) -> None:
    """Fills in the completions. Stopped where the logits are not finite."""
    state = parts.state
    groups = [Group(place, prompt) for place, prompt in enumerate(state.prompts[:PROMPTS])]
    with state.engine.gathered():
        parts.completions = state.decoder.generate(groups, step=0, generations=state.config.rollout.num_generations)


@torch.no_grad()
def logps(state: State, completions: Sequence[Completion]) -> Tensor:
    """(N,) fp32 on the CPU: of each token, as training scores it, in the order of the completions."""
    return torch.cat([forward(state, batch).logps for batch in passes(state, completions)]).float().cpu()


def reference_logps(state: State, completions: Sequence[Completion]) -> Tensor:
    """The same of the reference."""
    batches = passes(state, completions)
    ask_reference(state, batches)
    return torch.cat([batch.reference.logps for batch in batches if batch.reference]).float().cpu()


def differing(completions: Sequence[Completion]) -> list[Completion]:
    """Copies with advantages +1 and -1 in turn within each group: a direction that no reward has to give."""
    return [replace(one, advantage=1.0 if one.generation % 2 else -1.0, reward=0.0) for one in completions]


def accumulate(state: State, completions: Sequence[Completion]) -> list[MicroBatch]:
    """Forward and backward passes of one optimizer step, as ``grpo_step`` makes them."""
    count = global_count(state, completions)
    batches = passes(state, with_gradient(state, completions))
    if kl_in_loss(state):
        ask_reference(state, batches)
    for number, batch in enumerate(batches):
        loss_sum = micro_batch_loss(state, batch, Sums(), first=False)
        state.engine.backward_sum(loss_sum, count, last=number == len(batches) - 1)
    return batches


def gradient_norm(state: State, completions: Sequence[Completion]) -> float:
    """Norm of the gradient that the engine has summed; the step that it needs has the length 0."""
    accumulate(state, completions)
    return state.engine.step(0.0).grad_norm


def of_kl_alone(completions: Sequence[Completion]) -> list[Completion]:
    return [replace(one, advantage=0.0, reward=0.0) for one in completions]


def one_pass_each(state: State) -> State:
    """The same run with one completion in each forward pass."""
    engine = state.config.engine.model_copy(update={"micro_batch": 1})
    return replace(state, config=state.config.model_copy(update={"engine": engine}))
