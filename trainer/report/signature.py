"""The shape of a reward curve in words: climb, plateau, breakthrough, saw-tooth. Information: it decides nothing.

The user's document reads a run's health from this shape (fast climb to 0.65 by step 200, plateau of 0.68 ± 0.03 to step
800, then above 0.72; saw-tooth or a stay below 0.3 where something is still wrong). Its numbers are those of one task,
so the shape is found here from the curve's own level and noise, and the document's numbers stand beside it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

Curve = Sequence[tuple[int, float]]

MOST_WINDOWS, WINDOW_STEPS = 40, 5
"""The curve is cut into so many windows at most, of so many steps at least."""
LEAST_WINDOWS = 4
FLAT, REVERSAL = 0.1, 0.3
"""Shares of the curve's range: a phase that moves less is a plateau, and a turn that is smaller is none."""
SLOW = 0.2
"""A climb of less than this share of the slope before it is a slow one."""
STANDARD_ERRORS = 3
"""What moves less than so many standard errors has not moved."""
SAW_TEETH = 4
"""Turns that make a saw-tooth."""
DOCUMENT_STEPS = (200, 800)


@dataclass(frozen=True)
class Phase:
    kind: str
    """climb, slow climb (after a steeper one), plateau, breakthrough (a climb after a plateau) or fall."""
    first: int
    last: int
    start: float
    end: float
    """Of the line through the phase's window means."""

    @property
    def slope(self) -> float:
        return (self.end - self.start) / (self.last - self.first)


@dataclass(frozen=True)
class Signature:
    phases: tuple[Phase, ...]
    words: str
    """For example "climb, plateau, breakthrough"."""
    numbers: tuple[str, ...]
    """What led to it, in words."""


def signature(curve: Curve) -> Signature:
    """``curve``: (step, mean reward). Shorter than 20 steps it has no shape yet."""
    if len(curve) < LEAST_WINDOWS * WINDOW_STEPS:
        return Signature((), "too short to tell", (f"{len(curve)} steps; at least {LEAST_WINDOWS * WINDOW_STEPS}",))
    windows = np.array_split(np.array(curve, dtype=float), min(MOST_WINDOWS, len(curve) // WINDOW_STEPS))
    steps, means = np.array([one.mean(axis=0) for one in windows]).T
    # Of neighbouring steps, so that a trend within a window is no noise.
    noise = float(np.sqrt(np.mean([(np.diff(one[:, 1]) ** 2).mean() / 2 / len(one) for one in windows])))
    spread = float(means.max() - means.min())
    sure = max(STANDARD_ERRORS * math.sqrt(2) * noise, 1e-9)
    least, turn = max(FLAT * spread, sure), max(REVERSAL * spread, sure)
    turns = reversals(means, turn)
    # Straight lines say nothing of a saw-tooth.
    phases = () if turns >= SAW_TEETH else _phases(windows, steps, means, noise, least)
    words = ", ".join(phase.kind for phase in phases) or "saw-tooth"
    numbers = (
        f"{len(curve)} steps in {len(windows)} windows of {len(windows[0])}; standard error of a window's mean "
        f"{noise:.3g}, range of the means {spread:.3g}",
        f"a phase that moves less than {least:.3g} is a plateau",
        f"turns of at least {turn:.3g}: {turns} (saw-tooth from {SAW_TEETH})",
        *against_document(curve),
    )
    return Signature(phases, words, numbers)


def _phases(windows: Sequence[Any], steps: Any, means: Any, noise: float, least: float) -> tuple[Phase, ...]:
    found: list[Phase] = []
    for start, end in segments(steps, means, noise):
        slope, level = np.polyfit(steps[start:end], means[start:end], 1)
        first, last = int(windows[start][0, 0]), int(windows[end - 1][-1, 0])
        phase = Phase("", first, last, float(level + slope * first), float(level + slope * last))
        kind = _kind(phase, found, least)
        if found and found[-1].kind == kind:  # two lines of one kind are one phase
            found[-1] = replace(found[-1], last=last, end=phase.end)
        else:
            found.append(replace(phase, kind=kind))
    return tuple(found)


def _kind(phase: Phase, before: Sequence[Phase], least: float) -> str:
    if abs(phase.end - phase.start) < least:
        return "plateau"
    if phase.end < phase.start:
        return "fall"
    if any(one.kind == "plateau" for one in before):
        return "breakthrough"
    return "slow climb" if before and before[-1].slope * SLOW > phase.slope else "climb"


def segments(steps: Any, means: Any, noise: float) -> list[tuple[int, int]]:
    """The windows as one to four straight lines, as many as the noise calls for (least squares; BIC picks)."""
    count = len(means)
    cost = np.full((count, count + 1), np.inf)
    for start in range(count):
        for end in range(start + 2, count + 1):
            line = np.polyfit(steps[start:end], means[start:end], 1) if end - start > 2 else None
            rest = means[start:end] - np.polyval(line, steps[start:end]) if line is not None else np.zeros(2)
            cost[start, end] = float((rest**2).sum())
    variance = max(noise**2, 1e-12, 1e-6 * float(np.var(means)))
    best, cuts = cost[0].copy(), [[0]] * (count + 1)
    chosen, score = [0], best[count] / variance
    for _ in range(3):
        # best[end]: least squares of windows [0, end) with one line more than before.
        totals = best[:, None] + cost_rows(cost)
        before = totals.argmin(axis=0)
        best, cuts = totals.min(axis=0), [[*cuts[before[end]], int(before[end])] for end in range(count + 1)]
        penalty = 3 * len(cuts[count][1:]) * math.log(count)
        if best[count] / variance + penalty < score:
            chosen, score = cuts[count], best[count] / variance + penalty
    edges = [*chosen, count]
    return list(pairwise(edges))


def cost_rows(cost: Any) -> Any:
    """(count + 1, count + 1): no line begins after the last window."""
    return np.vstack([cost, np.full(cost.shape[1], np.inf)])


def reversals(means: Sequence[float], least: float) -> int:
    """How often the curve turns by at least ``least``; small turns on the way do not count."""
    low = high = means[0]
    direction, turns = 0, 0
    for value in means:
        low, high = min(low, value), max(high, value)
        if direction >= 0 and value <= high - least:
            turns += direction > 0
            direction, low, high = -1, value, value
        elif direction <= 0 and value >= low + least:
            turns += direction < 0
            direction, low, high = 1, value, value
    return turns


def against_document(curve: Curve) -> list[str]:
    """The same places of this curve beside the document's numbers, which are of one task."""
    early, late = DOCUMENT_STEPS
    parts = {
        f"up to step {early}": [value for step, value in curve if step <= early],
        f"from there to step {late}": [value for step, value in curve if early < step <= late],
        f"after step {late}": [value for step, value in curve if step > late],
    }
    said = ("0.25 to 0.65", "0.68 ± 0.03", "above 0.72, rising")
    lines = []
    for (where, part), words in zip(parts.items(), said, strict=True):
        if len(part) >= 2 * WINDOW_STEPS:
            ends = [float(np.mean(part[:WINDOW_STEPS])), float(np.mean(part[-WINDOW_STEPS:]))]
            shown = f"{ends[0]:.3g} to {ends[1]:.3g}, ± {np.std(part):.2g}"
            lines.append(f"{where}: {shown} (the document's run: {words})")
    level = float(np.mean([value for _, value in curve[-max(WINDOW_STEPS, len(curve) // 4) :]]))
    lines.append(f"last quarter: {level:.3g} on average (the document: a stay below 0.3 is a fault)")
    return lines
