"""Sums and maxima of a step, as Python floats: a tensor kept here would keep its graph, so memory would grow."""

from dataclasses import dataclass, field


@dataclass
class Sums:
    """What one rank saw. A mean over ranks is one all_reduce of sums and counts and one division, not a mean of means.

    >>> sums = Sums()
    >>> sums.add("kl", 3.0, 12)
    >>> sums.add("kl", 3.0, 4)
    >>> sums.means()
    {'kl': 0.375}
    """

    totals: dict[str, tuple[float, float]] = field(default_factory=dict)
    """(sum, count) by key."""
    maxima: dict[str, float] = field(default_factory=dict)

    def add(self, key: str, total: float, count: float) -> None:
        """A count of 0 still enters the key, so that every rank holds the same keys for the reduction."""
        old_total, old_count = self.totals.get(key, (0.0, 0.0))
        self.totals[key] = (old_total + float(total), old_count + float(count))

    def maximum(self, key: str, value: float) -> None:
        self.maxima[key] = max(float(value), self.maxima.get(key, float("-inf")))

    def means(self) -> dict[str, float]:
        """Mean by key; a key whose count is 0 has no mean and is absent. Maxima under their own keys, -inf absent."""
        means = {key: total / count for key, (total, count) in self.totals.items() if count}
        return means | {key: value for key, value in self.maxima.items() if value != float("-inf")}
