"""Ranks that keep the others waiting, step after step."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

RATIO = 1.5
"""To the median of the others. Lengths of completions alone make a rank of a few prompts a fifth slower or so."""
SHARE_OF_STEP, LEAST_SECONDS = 0.1, 0.2
"""That the others lose by it in every step, or it does not matter."""
STEPS = 3
"""In a row."""


@dataclass
class Stragglers:
    in_a_row: dict[tuple[str, int], int] = field(default_factory=dict)
    """By part of a step and rank."""
    told: set[tuple[str, int]] = field(default_factory=set)

    def look(
        self, step: int, seconds: Sequence[Mapping[str, float]], hosts: Sequence[str], whole: float
    ) -> tuple[float, list[str]]:
        """Largest ratio of a rank to the median of the others, and notes of those that were slow ``STEPS`` times in a
        row, once each. ``seconds``: each rank's own, by part; ``whole``: of the step."""
        largest, slow, notes = 1.0, {}, []
        for part in sorted({part for rank in seconds for part in rank}):
            values = [rank.get(part, 0.0) for rank in seconds]
            slowest = max(range(len(values)), key=values.__getitem__)
            others = statistics.median(values[:slowest] + values[slowest + 1 :])
            if others <= 0 or values[slowest] - others < max(SHARE_OF_STEP * whole, LEAST_SECONDS):
                continue
            ratio = values[slowest] / others
            largest = max(largest, ratio)
            if ratio < RATIO:
                continue
            key = part, slowest
            slow[key] = self.in_a_row.get(key, 0) + 1
            if slow[key] >= STEPS and key not in self.told:
                self.told.add(key)
                notes.append(
                    f"rank {slowest} (host {hosts[slowest]}) is slow: in step {step}, the {STEPS}. in a row, its "
                    f"{part} took {values[slowest]:.2f} s, {ratio:.1f} times the median of the others, which wait for "
                    "it. Look for other work on its host, a hot card, a slow service; or its completions are longer"
                )
        self.in_a_row = slow
        return largest, notes
