"""A pass over a token of each row as a CUDA graph: recorded for a shape, replayed while the shape lasts.

A token of a small batch costs a card less than the launches of its hundreds of kernels cost the host; a replay is one
launch. A graph reads the addresses that it was recorded with, so it lives for one rollout, as the buffers do, and under
ZeRO-3 the gathered weights. Recording costs some passes, and a rollout has a handful of shapes: as rows leave, their
number is rounded up to a power of two, and the room for their tokens doubles.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from trainer.launcher import say
from trainer.models.prefix_cache import FixedLayout, PrefixCache

Step = Callable[[], Tensor]
Capture = Callable[[Step], tuple[Callable[[], None], Tensor]]
"""Of a step: what replays it, and the tensor that holds its result after each replay."""


class Unrecorded(Exception):
    """A pass cannot be recorded here, or a replay is not what it recorded."""


def cuda_graph(step: Step) -> tuple[Callable[[], None], Tensor]:
    """Never tried on a card yet."""
    here, aside = torch.cuda.current_stream(), _aside()
    aside.wait_stream(here)
    waits = torch.cuda.get_sync_debug_mode()
    # A recording that fails leaves torch's allocator in pieces. A pass that asks the card for a number, as dynamic RoPE
    # does, would fail in it: here it fails beforehand.
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(aside):
            step()  # libraries set themselves up in their first call, which cannot be recorded
    finally:
        torch.cuda.set_sync_debug_mode(waits)
    here.wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    try:
        # Other threads, such as NCCL's, may ask the driver something: "global" would take that for a fault of ours.
        with torch.cuda.graph(graph, stream=aside, capture_error_mode="thread_local"):
            result = step()
    finally:
        torch.cuda.set_stream(here)  # torch does not where the recording fails
    return graph.replay, result


@cache
def _aside() -> torch.cuda.Stream:
    """One for all recordings: cuBLAS keeps a workspace for every stream that it has seen."""
    return torch.cuda.Stream()


@dataclass
class Graphs:
    """How this run records, and on which type of device."""

    capture: Capture = cuda_graph
    device: str = "cuda"
    stopped: bool = False

    def on(self, device: torch.device) -> bool:
        return device.type == self.device and not self.stopped

    def stop(self, why: str) -> None:
        """For the rest of the run."""
        self.stopped = True
        say(f"rank {os.environ.get('RANK', '0')} decodes without CUDA graphs from here on: {why}")


class TokenGraph:
    """The passes over a token of each row of one rollout."""

    def __init__(self, capture: Capture, fixed_pass: Callable[[PrefixCache, FixedLayout], Tensor]) -> None:
        self.capture = capture
        self.fixed_pass = fixed_pass
        self.layout: FixedLayout | None = None
        self.recorded: tuple[Callable[[], None], Tensor] | None = None

    def __call__(self, cache: PrefixCache, ids: Sequence[int], positions: Sequence[int], launched: Step) -> Tensor:
        """(R, V) fp32 logits; ``launched`` computes them kernel by kernel."""
        shape = cache.shape
        if self.layout is None or self.layout.shape != shape:
            # Recorded when it comes again: some shapes last for one token, and buffers may grow in this one.
            self.recorded, self.layout = None, FixedLayout(shape, cache.device)
            return launched()
        self.layout.fill(cache, ids, positions)
        if self.recorded is None:
            return self._record(cache, launched())
        replay, result = self.recorded
        replay()
        return result[: len(ids)]

    def _record(self, cache: PrefixCache, expected: Tensor) -> Tensor:
        assert self.layout is not None
        try:
            self.recorded = replay, result = self.capture(partial(self.fixed_pass, cache, self.layout))
            replay()
            apart = float(((result[: len(expected)] - expected).norm(dim=1) / expected.norm(dim=1)).max())
        except Exception as error:  # the driver and every library in a layer raise kinds of their own
            raise Unrecorded(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from error
        if not apart < LIMIT:
            raise Unrecorded(f"a replayed pass gives logits {apart:.1g} from those of its kernels one by one")
        return expected


LIMIT = 0.05
"""Relative distance of a row. Other shapes are other kernels, which bf16 rounds otherwise; a row that reads another's
keys is further off by far."""
