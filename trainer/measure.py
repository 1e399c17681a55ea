"""From the sums of every rank to the one row of metrics.jsonl."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch

from trainer.algorithm.advantages import group_statistics
from trainer.batch import Completion
from trainer.record.metrics import Sums
from trainer.world import World

T = TypeVar("T")


class Stopwatch:
    """Seconds of each phase of a step, on this rank."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.own: dict[str, float] = {}
        """Of this rank's own work, without waiting for others."""
        self.last = time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] = now - self.last
        self.last = now

    @contextmanager
    def working(self, part: str) -> Iterator[None]:
        """Around work of this rank alone, in which there is no collective."""
        began = time.perf_counter()
        yield
        self.own[part] = self.own.get(part, 0.0) + time.perf_counter() - began

    def timed(self, part: str, work: Callable[[], T]) -> Callable[[], T]:
        """``work``, as such work."""

        def timed() -> T:
            with self.working(part):
                return work()

        return timed


def measure_rollout(completions: Sequence[Completion], sums: Sums) -> None:
    """What this rank's completions say: rewards and their spread, lengths, cuts."""
    scored = [c for c in completions if c.reward is not None]
    rewards = [c.reward for c in scored if c.reward is not None]
    sums.add("unscored_fraction", len(completions) - len(scored), len(completions))
    sums.add("truncated_fraction", sum(c.finish == "length" for c in completions), len(completions))
    # Lengths of what was sampled, before any mask.
    sums.add("completion_tokens_mean", sum(len(c.ids) for c in completions), len(completions))
    sums.add("reward_mean", sum(rewards), len(rewards))
    sums.add("reward_square", sum(reward * reward for reward in rewards), len(rewards))
    for name in sorted({name for c in completions for name in c.rewards}):
        parts = [value for c in completions if (value := c.rewards.get(name)) is not None]
        sums.add(f"reward/{name}", sum(parts), len(parts))
    sums_of = per_group_sums(completions)
    sums.add("advantage_bias", sum(map(abs, sums_of)), sum(abs(c.advantage) for c in completions))
    if scored:
        groups = [c.group for c in scored]
        _, std, _ = group_statistics(torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups))
        spread = dict(zip(groups, std.tolist(), strict=True))
        sums.add("zero_std_fraction", sum(value == 0 for value in spread.values()), len(spread))
        sums.add("reward_group_std", sum(spread.values()), len(spread))


def per_group_sums(completions: Sequence[Completion]) -> list[float]:
    """Of the advantages of each prompt's completions: 0, whatever baseline and scale."""
    found: dict[int, float] = {}
    for completion in completions:
        found[completion.group] = found.get(completion.group, 0.0) + completion.advantage
    return list(found.values())


def all_reduced(world: World, sums: Sums) -> Sums:
    """The sums of all ranks, on every rank: one explicit all_reduce of (sum, count) pairs, one of maxima.

    A mean of the ranks' means would weigh a rank with few tokens like one with many. Ranks may hold different names
    (a rank without completions holds few), so they agree on the names first.
    """
    names = world.gather_objects((list(sums.totals), list(sums.maxima)))
    pairs = sorted({name for pair_names, _ in names for name in pair_names})
    maxima = sorted({name for _, maximum_names in names for name in maximum_names})
    flat = world.all_reduce_sum([number for name in pairs for number in sums.totals.get(name, (0.0, 0.0))])
    highest = world.all_reduce_max([sums.maxima.get(name, float("-inf")) for name in maxima])
    total = Sums()
    total.totals = {name: (flat[2 * i], flat[2 * i + 1]) for i, name in enumerate(pairs)}
    total.maxima = dict(zip(maxima, highest, strict=True))
    return total


def step_metrics(world: World, sums: Sums, seconds: dict[str, float], peak_bytes: int) -> dict[str, float]:
    """The metrics of one step, equal on all ranks. Seconds are of the slowest rank, memory of the fullest."""
    for phase, value in seconds.items():
        sums.maximum(f"seconds_{phase}", value)
    sums.maximum("peak_memory_gib", peak_bytes / 2**30)
    if world.size > 1 and (mean := sums.means().get("kl")) is not None:
        sums.maximum("kl_rank_max", mean)
        sums.maximum("kl_rank_min", -mean)
    total = all_reduced(world, sums)
    # A number that does not exist is absent: the loss of a refused step, say, which its note has named.
    metrics = {name: value for name, value in total.means().items() if math.isfinite(value)}
    if "kl_rank_min" in metrics:
        metrics["kl_rank_min"] *= -1
    for name in ("kl", "reward"):
        mean = metrics.get("kl" if name == "kl" else "reward_mean")
        square = metrics.pop(f"{name}_square", None)
        if mean is not None and square is not None:
            metrics[f"{name}_std"] = max(0.0, square - mean * mean) ** 0.5
    if metrics.get("kl", 0.0) * metrics["kl_coef"] > 1e-6 and metrics.get("reward_mean", 0.0) > 0:
        metrics["reward_kl_ratio"] = metrics["reward_mean"] / (metrics["kl"] * metrics["kl_coef"])
    tokens, _ = total.totals["completion_tokens_mean"]
    metrics["tokens_per_second"] = tokens / sum(metrics[f"seconds_{phase}"] for phase in seconds)
    return metrics
