"""What was noticed of a lab's run and what was named as its cause: by the alarms, by both doctors, and by peers' tools.

All of it from the records of the run, so that a changed rule is judged without training again.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools import lab_peers
from tools.lab_runs import LabRun
from trainer.doctor.finding import CERTAIN_ENOUGH, Finding, ranked
from trainer.doctor.recorded import diagnose_records
from trainer.doctor.records import Recorded, read
from trainer.watch.alarms import Alarms

GARBLED = 0.4
"""Share of the completions that is too late for an alarm."""

Row = dict[str, Any]


def judge(run: LabRun, record: Mapping[str, Any], folder: Path) -> Row:
    """One row of the results. ``folder``: that of ``run_once``."""
    row: Row = {"name": run.name, "causes": list(run.causes), "held_out": run.held_out}
    row |= {"note": run.note} if run.note else {}
    row |= {key: record[key] for key in ("settings", "patches", "state", "seconds", "commit")}
    if record["state"] == "crashed":
        return row | {"reason": record["reason"]}
    if record["reason"]:
        row["reason"] = record["reason"].splitlines()[0][:200]
    live = ranked(_findings(record["doctor"]))
    row["by_parts"] = _named(live)
    if record["state"] == "refused":
        return row | {"steps": 0, "first_alarm": None, "by_records": [], "named": _named(live)}
    recorded = read(folder / "run")
    found = diagnose_records(recorded, run.name).findings
    row |= {"steps": len(recorded.metrics), **_garble(recorded), **_alarms(recorded, record, found, run.steps)}
    row |= {"by_records": _named(found), "named": _named(ranked([*found, *live]))}
    if recorded.metrics:
        last = ("reward_mean", "kl", "entropy", "garble_rate")
        row["end"] = {key: round(value, 4) for key in last if (value := recorded.last(key)) is not None}
    return row | {"peers": lab_peers.ask_all(recorded, folder / "run")}


def _findings(diagnosis: Mapping[str, Any]) -> list[Finding]:
    """Of a diagnosis' record."""
    found = [*diagnosis.get("causes", ()), *diagnosis.get("hints", ())]
    return [Finding(one["cause"], one["confidence"], one["evidence"]) for one in found]


def _named(findings: list[Finding]) -> list[list[Any]]:
    """[cause, confidence] of what is sure enough, likeliest first."""
    return [[one.cause, round(one.confidence, 2)] for one in findings if one.confidence >= CERTAIN_ENOUGH]


def _garble(recorded: Recorded) -> Row:
    rates = [(row["step"], row["garble_rate"]) for row in recorded.metrics if "garble_rate" in row]
    past = [step for step, rate in rates if rate > GARBLED]
    return {
        "garbled_at": past[0] if past else None,
        "garble_most": round(max((rate for _, rate in rates), default=0), 3),
    }


def _alarms(recorded: Recorded, record: Mapping[str, Any], found: list[Finding], wanted: int) -> Row:
    """Those of the rules as they are now, each by the step that first told it; a guard that ended the run is one, but
    not an export that was refused after the last of the ``wanted`` steps."""
    machine = Alarms.of(recorded.config)
    told: dict[str, Row] = {}
    for metrics in recorded.metrics:
        for alarm in machine.look(metrics["step"], {key: float(value) for key, value in metrics.items()}):
            if alarm.event == "raised":
                told.setdefault(alarm.alarm, {"step": alarm.step, "alarm": alarm.alarm, "cause": alarm.cause})
    if record["state"] == "stopped" and len(recorded.metrics) < wanted:
        cause = next((one.cause for one in found if "reason" in one.evidence), "")
        told["guard"] = {"step": len(recorded.metrics) + 1, "alarm": "guard", "cause": cause}
    first = min(told.values(), key=lambda one: one["step"], default=None)
    return {"first_alarm": first, "alarms": {name: one["step"] for name, one in told.items()}}
