"""The bytes of a checkpoint, by formula."""

from dataclasses import dataclass

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


def checkpoint_bytes(parameters: Parameters, *, stage: int, optimizer: str) -> int:
    """Of all ranks' shards and the exported weights together.

    Of each trained parameter the fp32 master copy (plain stage 0 in fp32 has none) and Adam's moments; its value in the
    compute dtype, which stage 3 does not save a second time; and again in adapter/ or model/.
    """
    master = 0 if stage == 0 and parameters.itemsize == 4 else 4
    values = parameters.itemsize * (1 if stage == 3 else 2)
    return int(parameters.trained * (master + MOMENTS[optimizer] + values))


def time_to_save(size: int, grace_seconds: float) -> str:
    """What a plan says of a checkpoint of ``size`` bytes. ``grace_seconds``: run.grace_seconds."""
    seconds = size / DISK_BYTES_A_SECOND
    if seconds < grace_seconds:
        grace = (
            "that much, and what a rank does in one piece (a micro-batch, a hook, the reference's pass, all updates of "
            f"a rollout after the first), must fit into run.grace_seconds = {grace_seconds:g}, and the scheduler's."
        )
    else:
        grace = (
            f"more than run.grace_seconds = {grace_seconds:g}, so that a SIGTERM would lose the steps since the last "
            f"one. Fix: run.grace_seconds = {2 * seconds:.0f}, and as much from the scheduler."
        )
    return (
        f"A checkpoint: {size / 1e9:.1f} GB, written in {seconds:.0f} s at {DISK_BYTES_A_SECOND / 1e9:g} GB/s; {grace}"
    )
