"""What a run leaves behind: its weights in a checkpoint, and the verified adapter or model at its end."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError

from trainer.checkpoint import weights
from trainer.checkpoint.card import read_records
from trainer.checkpoint.deliver import deliver
from trainer.config import RunConfig
from trainer.engine import ZeroEngine
from trainer.errors import RunEnd, refused_by_disk
from trainer.models.policy import Policy
from trainer.world import World


def write_weights(policy: Policy, engine: ZeroEngine, world: World, folder: Path) -> Path:
    """Writes ``folder/adapter`` or ``folder/model`` on rank 0, weights and configuration alone, and returns its path on
    every rank. A collective. Raises Stopped on every rank where a weight is empty or the disk refuses."""
    target = folder / weights.kind(policy)
    with engine.whole(weights.written_parameters(policy)), torch.no_grad():
        error = _on_main(world, lambda: weights.save(policy, target), target)
    world.agree(error)
    return target


def export(policy: Policy, engine: ZeroEngine, world: World, run_dir: Path, config: RunConfig) -> Path:
    """Writes ``adapter/`` or ``model/`` on rank 0, loads it again and compares; returns its path on every rank.

    A collective. Raises Stopped on every rank where what was written is not the policy, or cannot be written.
    """
    target = run_dir / weights.kind(policy)

    def write() -> None:
        deliver(policy, target, config, read_records(run_dir))

    with engine.gathered():
        error = _on_main(world, write, target)
    world.agree(error)
    return target


def _on_main(world: World, work: Callable[[], None], target: Path) -> RunEnd | None:
    """``work()`` on rank 0. What ended it, to be agreed on by all ranks: they wait for each other when parameters are
    partitioned again."""
    try:
        if world.is_main:
            work()
    except RunEnd as end:
        return end
    except (OSError, RuntimeError, SafetensorError) as error:  # torch's and safetensors' words for a full disk
        return refused_by_disk(target, error if isinstance(error, OSError) else OSError(str(error)))
    return None
