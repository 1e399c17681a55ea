"""Which signals stand in which chart, with title and unit; and long curves made short without losing their extremes."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from trainer.record.rollout_rows import is_number
from trainer.report.read import Run

MOST_POINTS = 400
"""Of one curve. A longer one becomes buckets of steps: mean, lowest and highest value of each."""


@dataclass(frozen=True)
class Chart:
    group: str
    title: str
    unit: str
    keys: tuple[str, ...]
    """A key that ends in "/" or "_" stands for all that begin with it."""


CHARTS = (
    Chart("Reward", "Reward", "reward", ("reward_mean", "reward/")),
    Chart("Reward", "Spread of the rewards", "reward", ("reward_std", "reward_group_std")),
    Chart("Reward", "No spread in a group, no reward", "share", ("zero_std_fraction", "unscored_fraction")),
    Chart("Reward", "Rewards that failed", "share", ("rewards/",)),
    Chart("KL", "KL of policy and reference", "nats per token", ("kl",)),
    Chart("KL", "KL over tokens: deviation and largest", "nats per token", ("kl_std", "kl_max")),
    Chart("KL", "KL of the ranks", "nats per token", ("kl_rank_min", "kl_rank_max")),
    Chart("KL", "Tokens in the tail of the KL", "share", ("kl_tail_fraction",)),
    Chart("KL", "KL of tokens that nobody sampled: 0", "nats per token", ("kl_outside_response",)),
    Chart("KL", "KL coefficient", "coefficient", ("kl_coef",)),
    Chart("KL", "Reward / (KL x coefficient)", "ratio", ("reward_kl_ratio",)),
    Chart("KL", "Sampler against policy", "nats per token", ("sampling_logp_gap", "sampling_logp_gap_max")),
    Chart("Text", "Entropy, and surprise at the samples", "nats per token", ("entropy", "surprise")),
    Chart("Text", "Garbled completions", "share", ("garble_rate",)),
    Chart("Text", "Garble by part, but for those that stay 0", "share", ("garble/",)),
    Chart("Text", "Repetition, most frequent token", "share", ("repetition", "top_token_share")),
    Chart("Text", "Length of a completion", "tokens", ("completion_tokens_mean",)),
    Chart("Text", "Completions cut off", "share", ("truncated_fraction",)),
    Chart("Gradient", "Gradient norm, before clipping", "L2 norm", ("grad_norm",)),
    Chart("Gradient", "Loss", "loss", ("loss",)),
    Chart("Gradient", "Tokens with a clipped ratio", "share", ("clip_fraction",)),
    Chart("Gradient", "Scored / sampled tokens: 1", "ratio", ("scored_per_sampled",)),
    Chart("Gradient", "Advantages, text: 0, or another's", "share", ("advantage_bias", "text_unlike_ids")),
    Chart("Gradient", "Learning rate", "rate", ("lr",)),
    Chart("Speed and memory", "Seconds of a step", "s", ("seconds_",)),
    Chart("Speed and memory", "Slowest rank / median of the others", "ratio", ("slowest_rank_ratio",)),
    Chart("Speed and memory", "Speed", "completion tokens per s", ("tokens_per_second",)),
    Chart("Speed and memory", "Peak memory", "GiB", ("peak_memory_gib", "held_memory_gib")),
    Chart("Speed and memory", "Growth of what is held between steps", "MiB a step", ("memory_slope_mib",)),
)
OTHERS = "Others"
HELD_OUT = (("sampled", "held-out, sampled"), ("greedy", "held-out, greedy"))


def charts(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """All curves as JSON. One run: the charts of the table. Several: a chart a signal, a colour a run."""
    present = sorted({key for run in runs for row in run.metrics for key in row} - {"step"})
    present = [key for key in present if any(_says_something(key, run) for run in runs)]
    made: list[dict[str, Any]] = []
    for chart, keys in arranged(present):
        parts = [keys] if len(runs) == 1 else [[key] for key in keys]
        for part in parts:
            title = chart.title if part == keys else f"{chart.title}: {part[0]}"
            series = [
                {"run": number, "key": key, **thinned(run.column(key))}
                for key in part
                for number, run in enumerate(runs)
                if run.column(key)
            ]
            points = [one for number, run in enumerate(runs) for one in held_out(run, number)]
            made.append(
                {
                    "group": chart.group,
                    "title": title,
                    "unit": chart.unit,
                    "series": series,
                    "points": points if "reward_mean" in part else [],
                }
            )
    return made


def _says_something(key: str, run: Run) -> bool:
    column = run.column(key)
    return any(value for _, value in column) if key.startswith("garble/") else bool(column)


def arranged(present: Sequence[str]) -> Iterator[tuple[Chart, list[str]]]:
    """Each chart with those of its keys that exist; keys that no chart names get one of their own each, at the end."""
    left = list(present)
    for chart in CHARTS:
        keys = [key for wanted in chart.keys for key in left if key == wanted or _begins(key, wanted)]
        if keys:
            left = [key for key in left if key not in keys]
            yield chart, keys
    for key in left:
        yield Chart(OTHERS, key, "value", (key,)), [key]


def _begins(key: str, wanted: str) -> bool:
    return wanted.endswith(("/", "_")) and key.startswith(wanted)


def held_out(run: Run, number: int) -> Iterator[dict[str, Any]]:
    """Mean and standard error of every evaluation, sampled and greedy."""
    for kind, label in HELD_OUT:
        scores = [(one["step"], one[kind]) for one in run.evaluations if isinstance(one.get(kind), dict)]
        scores = [(step, score) for step, score in scores if is_number(score.get("mean"))]
        if scores:
            errors = [score["stderr"] if is_number(score.get("stderr")) else 0 for _, score in scores]
            yield {
                "run": number,
                "key": label,
                "s": [step for step, _ in scores],
                "m": [short(score["mean"]) for _, score in scores],
                "error": [short(error) for error in errors],
            }


def thinned(curve: Sequence[tuple[int, float]]) -> dict[str, list[float]]:
    """``s`` first step, ``m`` mean; of a long curve also ``e`` last step, ``lo`` lowest, ``hi`` highest, by bucket."""
    if len(curve) <= MOST_POINTS:
        return {"s": [step for step, _ in curve], "m": [short(value) for _, value in curve]}
    first, last = curve[0][0], curve[-1][0]
    width = -(-(last - first + 1) // MOST_POINTS)
    buckets = [list(bucket) for _, bucket in groupby(curve, lambda one: (one[0] - first) // width)]
    return {
        "s": [bucket[0][0] for bucket in buckets],
        "e": [bucket[-1][0] for bucket in buckets],
        "m": [short(sum(values(bucket)) / len(bucket)) for bucket in buckets],
        "lo": [short(min(values(bucket))) for bucket in buckets],
        "hi": [short(max(values(bucket))) for bucket in buckets],
    }


def values(bucket: Iterable[tuple[int, float]]) -> list[float]:
    return [value for _, value in bucket]


def short(value: float) -> float:
    """Five digits: more than a chart shows, and half the bytes."""
    return float(f"{value:.5g}")
