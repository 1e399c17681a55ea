"""What a run leaves behind: an adapter in PEFT's own form, or a model in transformers' own form."""

from pathlib import Path

import torch
from torch import Tensor

from trainer.engine import ZeroEngine
from trainer.errors import Stopped
from trainer.models.policy import Policy, adapter_weights
from trainer.world import World


def export(policy: Policy, engine: ZeroEngine, world: World, run_dir: Path) -> Path:
    """Writes ``adapter/`` or ``model/`` on rank 0 and returns its path on every rank. A collective under ZeRO-3.

    The tokenizer and the checkpoint's own generation config go along: they hold the template and the stop ids.
    """
    target = run_dir / ("model" if policy.peft is None else "adapter")
    parameters = (
        list(policy.causal.parameters())
        if policy.peft is None
        else [p for p in policy.causal.parameters() if p.requires_grad]
    )
    with engine.whole(parameters), torch.no_grad():
        if world.is_main:
            _write(policy, target)
    world.barrier()
    return target


def _write(policy: Policy, target: Path) -> None:
    if policy.peft is None:
        weights: dict[str, Tensor] = policy.causal.state_dict()
        _refuse_empty(weights)
        policy.causal.save_pretrained(target, state_dict=weights)
    else:
        weights = adapter_weights(policy.peft)
        _refuse_empty(weights)
        policy.peft.save_pretrained(str(target), selected_adapters=["default"])
    policy.tokenizer.save_pretrained(target)
    policy.generation_config.save_pretrained(target)


def _refuse_empty(weights: dict[str, Tensor]) -> None:
    """A partitioned parameter that was not gathered looks like a tensor of no elements."""
    empty = [name for name, tensor in weights.items() if tensor.numel() == 0]
    if empty:
        raise Stopped(f"export: {len(empty)} weights are empty (first: {empty[0]}); nothing was written")
