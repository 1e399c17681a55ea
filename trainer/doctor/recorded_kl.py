"""What the records say of where the KL comes from: of the response alone, and by the document's three readings."""

from trainer.doctor.finding import Finding
from trainer.doctor.records import Recorded, Verdict


def response_alone(run: Recorded) -> Verdict:
    """KL of tokens that nobody sampled: measured in every step, and 0 but for a mask that is wrong."""
    found = {row["step"]: row["kl_outside_response"] for row in run.metrics if "kl_outside_response" in row}
    if not found:
        return ""
    step = max(found, key=lambda at: found[at])
    if found[step] > 0:
        return [Finding("kl_outside_response", 0.97, {"step": step, "kl_outside_response": found[step]})]
    return f"KL of tokens that nobody sampled: 0 in each of {len(found)} steps"


def document_readings(run: Recorded) -> Verdict:
    """The document's three readings of a KL histogram, each beside what it wants to know, measured."""
    low, high, first = run.last("kl_rank_min"), run.last("kl_rank_max"), run.first("kl")
    outside = run.last("kl_outside_response")
    measured = (
        f"padding: KL outside the response {'unknown' if outside is None else f'{outside:.2g}'}",
        f"dropout: KL at step 1 {'unknown' if first is None else f'{first:.2g}'}",
        f"ranks: {'one' if low is None or high is None else f'KL from {low:.3g} to {high:.3g}'}",
    )
    told = run.histogram.get("readings")
    fields = {"reading", "holds", "numbers"}
    readings = [one for one in told if isinstance(one, dict) and one.keys() >= fields] if isinstance(told, list) else []
    said = [
        f"{one['reading']}: {'yes' if one['holds'] else 'no'} ({one['numbers']}); {fact}"
        for one, fact in zip(readings, measured, strict=False)
    ]
    return f"of step {run.histogram.get('step')}: " + " | ".join(said) if said else ""


KL_CHECKS = (response_alone, document_readings)
