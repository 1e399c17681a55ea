"""Room for checkpoints: the bytes of one, by formula, beside what is free where run.dir lies."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config import RunConfig
from trainer.errors import Refused
from trainer.plan.state import MOMENTS

DISK_BYTES_A_SECOND = 5e8
"""A SATA SSD, or a share of a network file system. Hashing is three times as fast on one core."""


@dataclass(frozen=True)
class Parameters:
    """Of the policy."""

    total: int
    trained: int
    itemsize: int
    """Bytes of one in the forward pass."""


@dataclass(frozen=True)
class Disk:
    """Bytes."""

    path: Path
    """The nearest folder to run.dir that exists."""
    checkpoint: int
    keep: int
    free: int

    @property
    def needed(self) -> int:
        """The oldest one goes when the newest is whole."""
        return self.checkpoint * (self.keep + 1)

    def record(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "checkpoint_bytes": self.checkpoint,
            "keep": self.keep,
            "needed_bytes": self.needed,
            "free_bytes": self.free,
        }


def checkpoint_bytes(parameters: Parameters, *, stage: int, optimizer: str) -> int:
    """Of all ranks' shards and the exported weights together.

    Of each trained parameter the fp32 master copy (plain stage 0 in fp32 has none) and Adam's moments; its value in the
    compute dtype, which stage 3 does not save a second time; and again in adapter/ or model/.
    """
    master = 0 if stage == 0 and parameters.itemsize == 4 else 4
    values = parameters.itemsize * (1 if stage == 3 else 2)
    return int(parameters.trained * (master + MOMENTS[optimizer] + values))


def time_to_save(size: int) -> str:
    """What a plan says of a checkpoint of ``size`` bytes."""
    return (
        f"A checkpoint: {size / 1e9:.1f} GB, written in {size / DISK_BYTES_A_SECOND:.0f} s at "
        f"{DISK_BYTES_A_SECOND / 1e9:g} GB/s; after a SIGTERM the scheduler must leave a micro-batch and that much."
    )


def room_for_checkpoints(config: RunConfig, one: int) -> tuple[Disk, str]:
    """What is needed and free, and a warning, or "". Refused where not even one checkpoint of ``one`` bytes fits."""
    run_dir = Path(config.run.dir).absolute()
    above = next(folder for folder in (run_dir, *run_dir.parents) if folder.is_dir())
    disk = Disk(above, one, config.checkpoint.keep, shutil.disk_usage(above).free)
    free = f"{disk.free / 1e9:.1f} GB are free in {above}"
    if disk.free < disk.checkpoint:
        raise Refused(
            f"run.dir = {config.run.dir}: a checkpoint takes {one / 1e9:.1f} GB, and {free}. Fix: make room, or set "
            "run.dir to a larger disk."
        )
    if disk.free < disk.needed:
        return disk, (
            f"checkpoint.keep = {disk.keep}: with the one being written {disk.keep + 1} checkpoints of "
            f"{one / 1e9:.1f} GB are {disk.needed / 1e9:.1f} GB, and {free}. Make room, lower checkpoint.keep, or set "
            "run.dir to a larger disk."
        )
    return disk, ""
