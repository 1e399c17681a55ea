"""What the memory of a rank depends on, and the largest pass that its settings allow."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from trainer.plan.networks import Network
from trainer.plan.shape import Shape


@dataclass(frozen=True)
class Zero:
    """The table zero_optimization; absent keys are DeepSpeed's defaults."""

    stage: int
    bucket: int
    """Elements of a reduction bucket."""
    live: int
    """Most elements that stage 3 keeps gathered."""
    offload_optimizer: bool
    offload_parameters: bool


def zero_of(table: dict[str, Any]) -> Zero:
    def away(key: str) -> bool:
        return bool((table.get(key) or {}).get("device", "none") != "none")

    return Zero(
        table.get("stage", 0),
        int(table.get("reduce_bucket_size", 5e8)),
        int(table.get("stage3_max_live_parameters", 1e9)),
        away("offload_optimizer"),
        away("offload_param"),
    )


@dataclass(frozen=True)
class Pass:
    """One forward and backward pass over completions and their prompts."""

    tokens: int
    """Through the blocks; padding is some of them."""
    scored: int
    """Rows that reach the head."""
    copied: int
    """Keys that the completions of shared prompts see: each has the prompt's, and its own."""
    seen: int
    """Elements of the attention masks of all rows: queries times keys."""


@dataclass(frozen=True)
class Settings:
    shape: Shape
    rank: int
    """Of LoRA; 0: all weights are trained."""
    targets: frozenset[str]
    """Linear layers that have an adapter."""
    bits: Literal[0, 4]
    itemsize: int
    """Bytes of a weight in the forward pass: 2 or 4."""
    cuda: bool
    ranks: int
    zero: Zero
    optimizer: Literal["adamw", "adamw8bit", "sgd"]
    reference: Literal["none", "adapter", "resident", "streamed", "sharded"]
    """adapter: the policy's own weights. streamed: from the host, two layers at a time.
    sharded: likewise, each rank holding a part."""
    exact: bool
    """The KL is that over the whole vocabulary."""
    prompt: int
    new: int
    generations: int
    prompts: int
    """Of a step, all ranks together."""
    shared: bool
    """A pass holds a group's prompt once."""
    decodes_shared: bool
    """So does a rollout."""
    micro_batch: int
    token_budget: int
    checkpointing: bool
    rests: bool = False
    """What only an update reads lies on the host during a rollout: models/resting.py."""
    networks: tuple[Network, ...] = ()
    """Of rewards. They are kept on the host, and on a card while they score."""

    @property
    def may_rest(self) -> bool:
        """Whether there is anything that could."""
        return self.cuda and self.zero.stage > 0 and not self.zero.offload_optimizer

    @property
    def trained(self) -> int:
        """Parameters."""
        return self.shape.adapter(self.rank, self.targets) if self.rank else self.shape.total

    @property
    def groups(self) -> int:
        """Prompts of this rank in a step."""
        return math.ceil(self.prompts / self.ranks)

    @property
    def group_tokens(self) -> int:
        if self.shared:
            return self.prompt + self.generations * self.new
        return self.generations * (self.prompt + self.new)

    @property
    def limit(self) -> str:
        """Of a pass, in words."""
        return f"{self.micro_batch} completions" if self.micro_batch else f"{self.token_budget} tokens"

    @property
    def least_budget(self) -> int:
        """One completion; a smaller budget changes nothing."""
        return self.prompt + self.new

    def largest_pass(self) -> Pass:
        """The most that micro_batch or token_budget let into one pass.

        Masks are those of the longest rows. Keys are copied most where completions are as short as it takes to fit all
        groups into the budget: n (P + G c) = budget.
        """
        rows, alone = self.prompts * self.generations, self.prompt + self.new
        if self.micro_batch:
            rows = min(rows, self.micro_batch)
            prompts = min(rows, 1 + math.ceil((rows - 1) / self.generations)) if self.shared else rows
            tokens = prompts * self.prompt + rows * self.new
            return Pass(tokens, rows * self.new, rows * alone, rows * alone * (self.new if self.shared else alone))
        tokens = max(alone, min(self.token_budget, self.prompts * self.group_tokens))
        share = self.generations * self.new / self.group_tokens
        scored = min(tokens, math.ceil(tokens * share))
        if not self.shared:
            return Pass(tokens, scored, 0, tokens * alone)
        short = min(self.new, max(0.0, (tokens / self.prompts - self.prompt) / self.generations))
        fitting = min(rows, tokens * self.generations / (self.prompt + self.generations * short))
        copied = math.ceil(max(fitting * (self.prompt + short), alone))
        return Pass(tokens, scored, copied, scored * alone)

    def passes(self) -> tuple[int, int]:
        """Passes of a step of this rank, and the tokens of all of them, where all rows are the longest: cut as
        models/packing.py cuts them. A group that is cut has its prompt in each of its passes."""
        alone = self.prompt + self.new
        many, total, rows, held = 1, 0, 0, 0
        for row in range(self.groups * self.generations):
            more = self.new if self.shared and rows and row % self.generations else alone
            full = rows == self.micro_batch if self.micro_batch else held + more > self.token_budget
            if rows and full:
                many, total, rows, held, more = many + 1, total + held, 0, 0, alone
            rows, held = rows + 1, held + more
        return many, total + held
