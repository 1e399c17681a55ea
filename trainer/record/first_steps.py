"""What the first steps of a run have in common and its user should hear: said once, after the last of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

STEPS, CUT_SHARE = 10, 0.3
"""How many steps are looked at; more than this share of cut completions is worth a note."""


@dataclass
class FirstSteps:
    """The first steps of a run, of which a shorter one has fewer. A resumed run takes over the two lists."""

    steps: int
    """Of the whole run."""
    cut: list[float] = field(default_factory=list)
    """Share of cut completions of each step."""
    flat: list[float] = field(default_factory=list)
    """1 for each step in which every group had one reward alone, else 0."""

    def notes(self, metrics: Mapping[str, float], *, max_new_tokens: int, ends: str) -> list[str]:
        """To be asked with the metrics of every step. ``ends``: what ends a completion, in words."""
        wanted = min(STEPS, self.steps)
        if len(self.cut) >= wanted:
            return []
        self.cut.append(metrics["truncated_fraction"])
        self.flat.append(float(metrics.get("zero_std_fraction") == 1))
        if len(self.cut) < wanted:
            return []
        notes = []
        share = sum(self.cut) / wanted
        if share > CUT_SHARE:
            notes.append(
                f"{share:.0%} of the completions of the first {wanted} steps were cut off at rollout.max_new_tokens = "
                f"{max_new_tokens}, and were scored unfinished. What ends a completion: {ends}. Fix: a larger "
                "rollout.max_new_tokens; or, where the samples show finished answers that run on, name their end in "
                "rollout.stop."
            )
        if all(self.flat):
            notes.append(
                f"In each of the first {wanted} steps every completion of a prompt got the same reward "
                "(zero_std_fraction = 1): an advantage compares the completions of a prompt, so the reward teaches "
                "nothing. Fix: read the samples. Where none succeeds: easier prompts, a model that sometimes does, or "
                "a reward with partial credit; where all do: harder prompts; else mend the reward."
            )
        return notes
