"""What the doctor has found, and which of it is the cause rather than its consequence."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trainer.doctor.causes import CAUSES

CERTAIN_ENOUGH = 0.5
"""A confidence from which on a finding is a cause; below it is a hint, and the run counts as healthy."""
IF_EXPLAINED = 0.3
"""Of its confidence, what is left to a finding that another one explains."""

EVERYTHING = frozenset(CAUSES)
EXPLAINS: dict[str, frozenset[str]] = {
    "non_finite": EVERYTHING - {"refused"},
    "loss_overflow": frozenset({"stopped", "gradient_overflow"}),
    "gradient_overflow": frozenset({"stopped"}),
    "tokenizer_mismatch": frozenset(
        {"not_from_training", "weights_not_loaded", "decoding", "runs_on", "stopped", "reward_constant"}
    ),
    "weights_not_loaded": frozenset({"not_from_training", "runs_on", "reward_constant"}),
    "rope_differs": frozenset(
        {"reference_differs", "sampling_differs", "temperature_mismatch", "decoding", "not_from_training", "kl_sign"}
    ),
    "rope_window": frozenset({"sampling_differs", "padding_changes_scores", "decoding", "rope_differs"}),
    # What a step on the KL term does is foretold for a policy that is near its reference.
    "reference_differs": frozenset({"kl_no_gradient", "kl_sign", "coefficient_scaled", "outliers"}),
    "dropout": frozenset(
        {"reference_differs", "padding_changes_scores", "sampling_differs", "temperature_mismatch", "normalisation"}
        | {"kl_wrong", "filtered_sampling", "reference_moves"}
    ),
    "temperature_mismatch": frozenset({"sampling_differs", "filtered_sampling", "decoding"}),
    "filtered_sampling": frozenset({"sampling_differs", "temperature_mismatch"}),
    "kl_outside_response": frozenset(
        {"normalisation", "end_not_trained", "padding_changes_scores", "loss_sign", "sampling_differs"}
    ),
    "padding_changes_scores": frozenset({"sampling_differs", "normalisation"}),
    "kl_wrong": frozenset({"reference_differs"}),
    "reference_moves": frozenset({"kl_sign", "kl_no_gradient"}),
    "loss_sign": frozenset({"wrong_direction", "update_too_large"}),
    "kl_sign": frozenset({"update_too_large", "outliers", "pull_too_strong"}),
    "no_gradient": frozenset({"kl_no_gradient"}),
    "reward_constant": frozenset({"nothing_to_choose", "no_gradient"}),
    "fallback_reward": frozenset({"reward_fails"}),
    "reward_fails": frozenset({"unscored"}),
    "group_layout": frozenset({"wrong_direction"}),
    "wrong_direction": frozenset({"stopped", "update_too_large"}),
    "update_too_large": frozenset(
        {"stopped", "nothing_to_choose", "outliers", "off_policy", "runs_on", "decoding", "reward_constant"}
    ),
    "nothing_to_choose": frozenset({"stopped", "reward_constant", "decoding"}),
    "not_from_training": frozenset({"stopped", "runs_on"}),
}
"""A cause, and what follows from it in other places."""


@dataclass(frozen=True)
class Finding:
    """One cause, how sure it is (0 to 1), the numbers that speak for it, and the setting to change."""

    cause: str
    """A key of ``CAUSES``."""
    confidence: float
    evidence: dict[str, Any]
    fix: str = ""
    """Where it is more exact than that of the cause."""

    def record(self) -> dict[str, Any]:
        cause = CAUSES[self.cause]
        return {
            "cause": self.cause,
            "what": cause.what,
            "confidence": round(self.confidence, 3),
            "evidence": self.evidence,
            "fix": self.fix or cause.fix,
        }


@dataclass(frozen=True)
class Diagnosis:
    """Everything that one look has brought."""

    target: str
    findings: list[Finding]
    """Likeliest cause first."""
    fine: dict[str, str] = field(default_factory=dict)
    """What was checked and is as it should be: by name, in one line."""
    not_checked: dict[str, str] = field(default_factory=dict)
    """By name, why."""

    @property
    def causes(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.confidence >= CERTAIN_ENOUGH]

    def record(self) -> dict[str, Any]:
        """For --json. The names are stable."""
        hints = [finding.record() for finding in self.findings if finding.confidence < CERTAIN_ENOUGH]
        return {
            "target": self.target,
            "healthy": not self.causes,
            "causes": [finding.record() for finding in self.causes],
            "hints": hints,
            "fine": self.fine,
            "not_checked": self.not_checked,
        }

    def text(self) -> str:
        found = self.record()
        lines = [f"{self.target}: {'no cause found' if found['healthy'] else 'causes, likeliest first'}"]
        for number, finding in enumerate(found["causes"], start=1):
            lines += ["", f"{number}. {_in_words(finding)}"]
        if found["hints"]:
            lines += ["", "follows from these, or too little to say:" if found["causes"] else "too little to say:"]
            lines += [f"- {_in_words(finding)}" for finding in found["hints"]]
        if self.fine:
            lines += ["", "checked, and fine:", *(f"- {name}: {said}" for name, said in self.fine.items())]
        if self.not_checked:
            lines += ["", "not checked:", *(f"- {name}: {why}" for name, why in self.not_checked.items())]
        return "\n".join(lines)


def ranked(findings: Sequence[Finding]) -> list[Finding]:
    """One finding a cause, likeliest first; what another cause explains comes after it."""
    by_cause: dict[str, Finding] = {}
    for finding in findings:
        known = by_cause.get(finding.cause)
        if known is None:
            by_cause[finding.cause] = finding
        else:
            surer = max(known, finding, key=lambda one: one.confidence)
            by_cause[finding.cause] = replace(surer, evidence=finding.evidence | known.evidence | surer.evidence)
    explained = {
        cause
        for one in by_cause.values()
        if one.confidence >= CERTAIN_ENOUGH
        for cause in EXPLAINS.get(one.cause, frozenset()) - {one.cause}
        # Of two that explain each other, the surer one.
        if cause in by_cause
        and (one.cause not in EXPLAINS.get(cause, ()) or one.confidence >= by_cause[cause].confidence)
    }
    kept = [
        replace(one, confidence=one.confidence * IF_EXPLAINED) if one.cause in explained else one
        for one in by_cause.values()
    ]
    return sorted(kept, key=lambda one: -one.confidence)


def _in_words(finding: dict[str, Any]) -> str:
    evidence = ", ".join(f"{name} {_short(value)}" for name, value in finding["evidence"].items())
    return (
        f"{finding['cause']} ({finding['confidence']:.0%}): {finding['what']}\n"
        f"   evidence: {evidence}\n   fix: {finding['fix']}"
    )


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
