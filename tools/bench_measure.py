"""Measuring inside a side of tools/bench.py: seconds by phase, peak memory, FLOPs, and the machine's GEMM rate."""

import ctypes
import gc
import math
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

PHASES = ("rollout", "reference", "forward_backward", "optimizer", "other")


def _sdpa(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query, key, value)


def _sdpa_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return sdpa_backward_flop_count(grad, query, key, value)


def _blocked_linear(hidden: Any, weight: Any, *_: Any, **__: Any) -> int:
    return 2 * math.prod(hidden) * weight[0]


# The counter knows CUDA's attention kernels alone. Attention counts as if no key were masked, on both sides.
CPU_KERNELS = {
    torch.ops.mkldnn._linear_pointwise: _blocked_linear,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _sdpa,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _sdpa_backward,
}


def cap_memory(device: torch.device, memory_gib: float) -> None:
    """The most that this process may allocate on a GPU; 0: all of it. Before a model is loaded: our own side plans its
    passes by what it may have."""
    if device.type == "cuda" and memory_gib:
        whole = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, memory_gib * 2**30 / whole), device)


class Meter:
    """One step of this process: ``begin``, a ``lap`` as each phase ends, ``end``."""

    def __init__(self, device: torch.device, memory_gib: float) -> None:
        """``memory_gib``: what each side may have of a GPU; 0: all of it."""
        self.cuda = device.type == "cuda"
        self.shares_card = (
            self.cuda
            and memory_gib > 0
            and 2 * memory_gib * 2**30 > torch.cuda.get_device_properties(device).total_memory
        )
        self.seconds: dict[str, dict[str, float]] = {}
        self.last = (0.0, 0.0)
        self.counter: FlopCounterMode | None = None
        self.peak = 0

    def begin(self, *, count_flops: bool) -> None:
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        if count_flops:
            self.counter = FlopCounterMode(display=False, custom_mapping=CPU_KERNELS)
            self.counter.__enter__()
        self.seconds = {clock: dict.fromkeys(PHASES, 0.0) for clock in ("wall", "cpu")}
        self.peak = 0  # by laps: our own step begins CUDA's measurement anew at its end
        self.last = self._now()

    def lap(self, phase: str) -> None:
        """The time since the last lap was spent on ``phase``."""
        now = self._now()
        for clock, then, since in zip(("wall", "cpu"), now, self.last, strict=True):
            self.seconds[clock][phase] += then - since
        self.last = now
        self.peak = max(self.peak, self._peak())

    def end(self) -> dict[str, Any]:
        """Seconds by clock and phase, peak memory in GiB, FLOPs where they were counted."""
        self.lap("other")
        measured: dict[str, Any] = {"seconds": self.seconds, "peak_gib": self.peak / 2**30}
        if self.counter is not None:
            self.counter.__exit__(None, None, None)
            measured["flops"] = self.counter.get_total_flops()
            self.counter = None
        self._release()
        return measured

    def _now(self) -> tuple[float, float]:
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter(), time.process_time()

    def _peak(self) -> int:
        if self.cuda:
            return torch.cuda.max_memory_allocated()
        (kib,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        return int(kib) * 1024

    def _release(self) -> None:
        """While the other side takes its step, this one keeps what it needs between steps and nothing more."""
        gc.collect()
        if not self.cuda:
            ctypes.CDLL(None).malloc_trim(0)
        elif self.shares_card:
            torch.cuda.empty_cache()


def gemm_rate(model: nn.Module, rows: int, head_rows: int, head: nn.Module) -> dict[str, float]:
    """GFLOP/s, by clock, of the three products of every linear layer: forward, and both of the backward pass.

    ``rows`` tokens go through the layers and ``head_rows`` through the head, as in our training pass.
    """
    weight = next(model.parameters())
    clock = Meter(weight.device, 0)._now
    sizes = Counter(
        (head_rows if part is head else rows, *part.weight.shape)
        for part in model.modules()
        if isinstance(part, nn.Linear)
    )
    flops, seconds = 0.0, [0.0, 0.0]
    for (tokens, columns, inputs), count in sizes.items():
        states, matrix, gradient = (
            torch.randn(size, dtype=weight.dtype, device=weight.device)
            for size in ((tokens, inputs), (columns, inputs), (tokens, columns))
        )
        for left, right in ((states, matrix.T), (gradient, matrix), (gradient.T, states)):
            out = left @ right
            begin = clock()
            for _ in range(3):
                torch.mm(left, right, out=out)
            seconds = [one + count * (b - a) / 3 for one, a, b in zip(seconds, begin, clock(), strict=True)]
            flops += count * 2.0 * tokens * columns * inputs
    return {name: flops / one / 1e9 for name, one in zip(("wall", "cpu"), seconds, strict=True)}
