"""What a run holds between its steps."""

from dataclasses import dataclass, field
from typing import Any

from trainer.batch import Prompt
from trainer.checkpoint import random_states
from trainer.checkpoint.manifest import Facts
from trainer.config import RunConfig
from trainer.engine import ZeroEngine
from trainer.models.policy import Policy
from trainer.models.reference import Reference
from trainer.plan.parts import Plan
from trainer.record.kl_histogram import KLHistogram
from trainer.record.memory import PeakMemory
from trainer.rewards.runtime import RewardRuntime
from trainer.rollout.decoder import Decoder, Group
from trainer.rollout.hooks import Hook, HookContext
from trainer.watch.signals import Slope
from trainer.watch.stragglers import Stragglers
from trainer.world import World

NUMBERS: dict[str, type[int] | type[float]] = {
    "step": int,
    "updates": int,
    "kl_coefficient": float,
    "nonfinite_in_a_row": int,
    "rollbacks": int,
}
PROGRESS = (*NUMBERS, "best")
"""What moves, and what a resumed run takes over."""


@dataclass(frozen=True)
class Boundary:
    """A moment between two steps: what a checkpoint keeps beside the engine's own state."""

    progress: dict[str, Any]
    random_states: dict[str, Any]
    """Of this rank."""


@dataclass
class State:
    """The parts of a run, made once by ``preflight.prepare``, and the numbers that move."""

    config: RunConfig
    world: World
    policy: Policy
    engine: ZeroEngine
    reference: Reference | None
    """None when the KL coefficient is 0 for the whole run."""
    decoder: Decoder
    rewards: RewardRuntime
    hooks: list[Hook]
    prompts: list[Prompt]
    eval_prompts: list[Prompt]
    steps: int
    """Rollout steps of the whole run."""
    shared_prompts: bool
    """Training and reference passes hold a group's prompt once."""
    token_budget: int
    plan: Plan | None
    """What a step should take; None of an architecture without formulas."""
    memory: PeakMemory
    facts: Facts
    """What a checkpoint of this run is signed with."""

    step: int = 0
    """Rollout steps done."""
    updates: int = 0
    """Optimizer steps tried; the position in the learning-rate schedule."""
    kl_coefficient: float = 0.0
    """Of the current step; the adaptive controller's state."""
    nonfinite_in_a_row: int = 0
    rollbacks: int = 0
    """How often an alarm has taken the run back; added to the seed of its samples, which else would be the same."""
    best: dict[str, Any] | None = None
    """Metric, step and value of the best evaluation so far."""
    kl_histogram: KLHistogram = field(default_factory=KLHistogram)
    """Of this rank's tokens in the current step, where ``log.histogram_every`` asks for it."""
    memory_slope: Slope = field(default_factory=Slope)
    stragglers: Stragglers = field(default_factory=Stragglers)
    nonfinite_losses: list[str] = field(default_factory=list)
    """Losses of this rank since the last optimizer step that are NaN or infinite, in words."""
    notes: list[str] = field(default_factory=list)
    """What the user should read once, in the order it came up."""
    boundary: Boundary | None = None
    """The state between two steps, as it was when the current one began; None once an update has left it."""

    def at_boundary(self) -> None:
        """Notes what a checkpoint of this moment holds, so that a step that is given up leaves no trace."""
        self.boundary = Boundary(
            {name: getattr(self, name) for name in PROGRESS},
            random_states.capture(self.world.device),
        )

    def restore(self, progress: dict[str, Any]) -> None:
        """The numbers of a checkpoint's ``Boundary.progress``."""
        for name, kind in NUMBERS.items():
            setattr(self, name, kind(progress[name]))
        best = progress["best"]
        self.best = best and {"metric": str(best["metric"]), "step": int(best["step"]), "value": float(best["value"])}

    def hook_context(self, groups: list[Group]) -> HookContext:
        """What a before-rollout hook may look at; a collective, since ``longest_prompt`` is that of all ranks'
        prompts."""
        longest = max((len(group.prompt.ids) for group in groups), default=0)
        return HookContext(
            step=self.step,
            policy=self.policy.causal,
            reference=self.reference.copy.causal if self.reference and self.reference.copy else None,
            tokenizer=self.policy.tokenizer,
            longest_prompt=int(self.world.all_reduce_max([longest])[0]),
            max_new_tokens=self.config.rollout.max_new_tokens,
            world_rank=self.world.rank,
        )
