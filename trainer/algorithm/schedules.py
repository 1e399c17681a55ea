"""Coefficients over steps: pure functions of the step (from 0), and the one controller that has a state."""

import math
from typing import Literal

KLSchedule = Literal["constant", "warmup_constant", "warmup_decay", "adaptive"]
LRSchedule = Literal["constant", "linear", "cosine"]


def kl_coefficient(
    step: int, *, schedule: KLSchedule, peak: float, start: float, minimum: float, warmup: int, total: int
) -> float:
    """KL coefficient at ``step`` (0 .. total-1) for the schedules without state.

    ``warmup_constant``: start -> peak, linear over ``warmup`` steps, then peak. ``warmup_decay``: the same, then
    linear to 0 at ``total``, not below ``minimum``. With total <= warmup there is no decay phase: the peak holds.
    """
    if schedule == "constant":
        return peak
    if step < warmup:
        return start + (peak - start) * step / warmup
    if schedule == "warmup_constant" or total <= warmup:
        return peak
    return max(minimum, peak * (1 - (step - warmup) / (total - warmup)))


def adapted_coefficient(
    coefficient: float, measured_kl: float, *, target: float, horizon: float, completions: int
) -> float:
    """One step of the proportional controller of Ziegler et al. (arXiv 1909.08593, section 2.2).

    ``measured_kl`` in nats per token over all ranks, so that every rank holds the same coefficient. ``horizon`` in
    completions: an error of 20 % kept for `horizon` completions changes the coefficient by about 20 %.
    """
    error = min(max(measured_kl / target - 1.0, -0.2), 0.2)
    return coefficient * (1.0 + error * completions / horizon)


def learning_rate(step: int, *, schedule: LRSchedule, peak: float, warmup: int, total: int) -> float:
    """Learning rate of the update at ``step`` (from 0). Warm-up reaches the peak at step ``warmup``:
    (step+1)/(warmup+1)."""
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    if schedule == "constant" or total <= warmup:
        return peak
    progress = (step - warmup) / (total - warmup)
    return peak * (1 - progress) if schedule == "linear" else peak * 0.5 * (1 + math.cos(math.pi * progress))
