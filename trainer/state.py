"""What a run holds between its steps."""

from dataclasses import dataclass, field

from trainer.batch import Prompt
from trainer.config import RunConfig
from trainer.engine import ZeroEngine
from trainer.models.policy import Policy
from trainer.models.reference import Reference
from trainer.record.memory import PeakMemory
from trainer.rewards.runtime import RewardRuntime
from trainer.rollout.hf import Decoder, Group
from trainer.rollout.hooks import Hook, HookContext
from trainer.world import World


@dataclass
class State:
    """The parts of a run, made once by ``preflight.build``, and the three numbers that move."""

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
    token_budget: int
    memory: PeakMemory

    step: int = 0
    """Rollout steps done."""
    updates: int = 0
    """Optimizer steps tried; the position in the learning-rate schedule."""
    kl_coefficient: float = 0.0
    """Of the current step; the adaptive controller's state."""
    nonfinite_in_a_row: int = 0
    nonfinite_losses: list[str] = field(default_factory=list)
    """Losses of this rank since the last optimizer step that are NaN or infinite, in words."""
    notes: list[str] = field(default_factory=list)
    """What the user should read once, in the order it came up."""

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
