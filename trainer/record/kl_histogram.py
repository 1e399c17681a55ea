"""How the KL of single response tokens is spread: counts over ranks, the document's readings of them, a picture."""

import importlib
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_TENTHS = (1.0, 1.25, 1.6, 2.0, 2.5, 3.15, 4.0, 5.0, 6.3, 8.0)
_POSITIVE = (*(float(f"{mantissa}e{power}") for power in range(-6, 2) for mantissa in _TENTHS), 100.0)
EDGES = (*(-edge for edge in reversed(_POSITIVE)), *_POSITIVE)
"""Ten bins a decade from 1e-6 to 100 nats on either side of 0, fixed, so that ranks and steps add up."""


class KLHistogram:
    """Counts of one rank since they were last taken; a value beyond the last edge is counted in the last bin."""

    def __init__(self) -> None:
        self.counts = [0] * (len(EDGES) - 1)

    @torch.no_grad()
    def add(self, kl: Tensor) -> None:
        """``kl``: (N,) nats of single response tokens."""
        edges = torch.tensor(EDGES, dtype=torch.float64, device=kl.device)
        bins = torch.bucketize(kl.double(), edges, right=True).sub_(1).clamp_(0, len(self.counts) - 1)
        new = torch.bincount(bins, minlength=len(self.counts)).tolist()
        self.counts = [old + count for old, count in zip(self.counts, new, strict=True)]

    def take(self) -> list[int]:
        counts, self.counts = self.counts, [0] * len(self.counts)
        return counts


def record(step: int, counts: Sequence[float], metrics: Mapping[str, float]) -> dict[str, Any]:
    """The histogram of a step as JSON. ``counts``: of all ranks; mean, std and max are the step's own metrics."""
    whole = [int(count) for count in counts]
    numbers = {name: metrics[key] for name, key in (("mean", "kl"), ("std", "kl_std"), ("max", "kl_max"))}
    return {
        "step": step,
        "unit": "nats per response token",
        "tokens": sum(whole),
        **numbers,
        "edges": list(EDGES),
        "counts": whole,
        "readings": [vars(one) for one in readings(whole, numbers["mean"], numbers["std"])],
    }


@dataclass(frozen=True)
class Reading:
    """One of the document's three ways to read the histogram, with what it is worth."""

    reading: str
    holds: bool
    numbers: str
    fact: str


def readings(counts: Sequence[int], mean: float, std: float) -> list[Reading]:
    near, low, valley, broad = (share(counts, *span) for span in ((-0.01, 0.01), (0.01, 0.05), (0.05, 0.5), (0.5, 2.0)))
    ratio = std / mean if mean > 0 else 0.0
    return [
        Reading(
            "a peak near 0 and a broad one from 0.5 to 2",
            near >= 0.2 and broad >= 0.1 and broad > valley,
            f"{near:.1%} within 0.01 of 0, {valley:.1%} from 0.05 to 0.5, {broad:.1%} from 0.5 to 2",
            "The document: padding is counted. Here only response tokens are; two peaks are many certain tokens and a "
            "few open ones.",
        ),
        Reading(
            "all from 0.01 to 0.05",
            low >= 0.95,
            f"{low:.1%} from 0.01 to 0.05",
            "The document, where the text is garbled all the same: dropout in the reference. Qwen2 has none, and such "
            "a KL is healthy: look at tokenizer, weights and RoPE.",
        ),
        Reading(
            "std / mean above 5",
            ratio > 5,
            f"{ratio:.1f}",
            "The document: gradients of the ranks were not averaged. They are; the ratio does not change with any "
            "factor. It says that few tokens carry most of the KL.",
        ),
    ]


def share(counts: Sequence[int], low: float, high: float) -> float:
    """Share of the tokens between two edges."""
    first, last = bisect_left(EDGES, low), bisect_left(EDGES, high)
    return sum(counts[first:last]) / max(sum(counts), 1)


def draw(histogram: Mapping[str, Any], path: Path) -> None:
    """The picture as PNG. Raises ImportError where matplotlib is missing."""
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    axes.stairs(histogram["counts"], histogram["edges"], fill=True)
    # Linear between the innermost edges, so that 0 has a place.
    axes.set_xscale("symlog", linthresh=_POSITIVE[0], linscale=0.1)
    used = [at for at, count in enumerate(histogram["counts"]) if count]
    if used:
        axes.set_xlim(histogram["edges"][used[0]], histogram["edges"][used[-1] + 1])
    numbers = f"mean {histogram['mean']:.4g}, std {histogram['std']:.4g}, max {histogram['max']:.4g}"
    axes.set_title(f"KL of single response tokens, step {histogram['step']}\n{numbers} nats", fontsize=10)
    axes.set_xlabel("KL of a token, nats")
    axes.set_ylabel("tokens")
    figure.savefig(path, dpi=120)
