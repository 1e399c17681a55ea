"""RunConfig: a whole run file."""

from typing import Annotated

from pydantic import Field, Strict

from trainer.config.grpo import Grpo, Reward, Rollout
from trainer.config.section import Section
from trainer.config.sections import (
    Checkpoint,
    Data,
    Engine,
    Eval,
    Hooks,
    Log,
    Lora,
    Model,
    Optim,
    Quant,
    Reference,
    Run,
)
from trainer.config.watch import Watch


class RunConfig(Section):
    """Everything a run was asked to do. Frozen; no value is rewritten after parsing, derived counts are properties."""

    run: Run = Field(default_factory=Run, description="Where a run writes and how long it trains.")
    model: Model = Field(description="The model that is trained.")
    lora: Lora = Field(default_factory=Lora, description="Low-rank adapters instead of all weights.")
    quant: Quant = Field(default_factory=Quant, description="Quantised base weights under the adapters.")
    data: Data = Field(default_factory=Data, description="The prompts.")
    rollout: Rollout = Field(default_factory=Rollout, description="How completions are sampled.")
    reward: Annotated[tuple[Reward, ...], Strict(False)] = Field(
        default=(), description="What a completion is worth: one [[reward]] table each, summed by weight."
    )
    grpo: Grpo = Field(default_factory=Grpo, description="Advantage and policy loss.")
    optim: Optim = Field(default_factory=Optim, description="The optimizer and its learning rate.")
    engine: Engine = Field(default_factory=Engine, description="How the update is spread over ranks and memory.")
    reference: Reference = Field(
        default_factory=Reference, description="The frozen model that the KL term compares with."
    )
    watch: Watch = Field(default_factory=Watch, description="Guards of a running job.")
    checkpoint: Checkpoint = Field(default_factory=Checkpoint, description="What a run can be resumed from.")
    eval: Eval = Field(default_factory=Eval, description="Evaluation during a run.")
    log: Log = Field(default_factory=Log, description="What is recorded, and how often.")
    hooks: Hooks = Field(default_factory=Hooks, description="Functions of yours.")

    @property
    def completions_per_step(self) -> int:
        """Completions of one rollout step over all ranks."""
        return self.rollout.prompts_per_step * self.rollout.num_generations

    @property
    def is_lora(self) -> bool:
        return self.lora.r > 0
