"""A policy's weights as files: an adapter in PEFT's own form, or a model in transformers' own form."""

from pathlib import Path
from typing import Literal

from torch import nn

from trainer.errors import Stopped
from trainer.models.files import write_generation_config, write_model
from trainer.models.policy import Policy


def kind(policy: Policy) -> Literal["adapter", "model"]:
    """What is written, which is also the name of its folder."""
    return "model" if policy.peft is None else "adapter"


def written_parameters(policy: Policy) -> list[nn.Parameter]:
    """What has to be whole before it is written. With an adapter, the base model stays where it is."""
    return [parameter for _, parameter in _written(policy)]


def save(policy: Policy, target: Path) -> None:
    """Writes weights and configuration into ``target``. One process, with whole parameters.

    Raises Stopped for a tensor without elements, as a partitioned parameter is that was not gathered.
    """
    empty = [name for name, parameter in _written(policy) if parameter.numel() == 0]
    if empty:
        raise Stopped(f"export: {len(empty)} weights are empty (first: {empty[0]}); nothing was written")
    if policy.peft is None:
        write_model(policy.causal, target)
        write_generation_config(policy.generation_config, (), target)
    else:
        policy.peft.save_pretrained(str(target), selected_adapters=["default"], save_embedding_layers=False)
        (target / "README.md").unlink()  # PEFT's form for a model card, not filled in


def _written(policy: Policy) -> list[tuple[str, nn.Parameter]]:
    everything = policy.peft is None
    return [(name, one) for name, one in policy.causal.named_parameters() if everything or one.requires_grad]
