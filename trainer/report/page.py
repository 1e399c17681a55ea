"""The page: one HTML file that needs nothing else. What a model wrote is data in it, never markup."""

import base64
import hashlib
import json
import math
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from trainer.errors import Refused, printable
from trainer.record.own_files import open_new
from trainer.record.rollout_rows import is_number
from trainer.record.run_dir import read_object
from trainer.report.curves import charts
from trainer.report.read import Row, Run, read_runs
from trainer.report.rollouts import choose
from trainer.report.signature import signature

SCRIPTS = ("chart.js", "histogram.js", "rollouts.js", "page.js")
MOST_HISTOGRAMS, MOST_ALARMS = 24, 500
ALARM_FIELDS = ("step", "alarm", "event", "signal", "cause", "cause_in_words", "message", "fix", "count")
"""Shown in columns of their own; whatever else an alarm holds is shown as JSON."""


def write_report(paths: Sequence[Path], out: Path | None = None) -> Path:
    """Writes the page of these runs into the first one's directory, or to ``out``; returns its path."""
    runs = read_runs(paths)
    target = out or paths[0] / "report.html"
    beside = target.with_name(f".{target.name}.tmp")
    try:
        with open_new(beside) as file:
            file.write(page(runs))
        os.replace(beside, target)
    except OSError as error:
        raise Refused(
            f"--out: cannot write {target}: {error.strerror}. Fix: --out with a path you can write."
        ) from error
    return target


def page(runs: Sequence[Run]) -> str:
    """The page as text."""
    style, script = _part("page.css"), "".join(map(_part, SCRIPTS))
    filled = {
        "POLICY": f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; base-uri 'none'; "
        "form-action 'none'",
        "STYLE": style,
        "SCRIPT": script,
        "DATA": embedded(content(runs)),
    }
    text = _part("page.html")
    # In one pass over the template: what is filled in is never looked at again.
    head, *rest = text.split("{{")
    parts = [head]
    for part in rest:
        name, _, after = part.partition("}}")
        parts += [filled[name], after]
    return "".join(parts)


def embedded(data: Any) -> str:
    """JSON that cannot end the script element it stands in: ASCII alone, without <, > and &."""
    text = json.dumps(finite(data), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for char in "<>&":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


def finite(data: Any) -> Any:
    """NaN and infinity, which JSON does not have, as null."""
    if isinstance(data, dict):
        return {str(key): finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def content(runs: Sequence[Run]) -> dict[str, Any]:
    """All that the page shows."""
    chosen = [choose(run, number, len(runs)) for number, run in enumerate(runs)]
    return {
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "runs": [{**_run(run), "notes": run.notes + picked.notes} for run, picked in zip(runs, chosen, strict=True)],
        "charts": charts(runs),
        "rollouts": [row for picked in chosen for row in picked.rows],
    }


def _run(run: Run) -> dict[str, Any]:
    found = signature(run.column("reward_mean"))
    steps = [row["step"] for row in run.metrics]
    return {
        "name": printable(run.name),
        "path": printable(str(run.path)),
        "steps": [steps[0], steps[-1], len(steps)] if steps else None,
        "last": {key: value for key, value in run.metrics[-1].items() if is_number(value)} if run.metrics else {},
        "status": {key: printable(str(value)) for key, value in run.status.items() if value is not None},
        "config": printable(run.config),
        "environment": printable(run.environment),
        "alarms": [_alarm(alarm) for alarm in run.alarms[:MOST_ALARMS]],
        "signature": {
            "words": found.words,
            "numbers": found.numbers,
            "phases": [[phase.kind, phase.first, phase.last, phase.start, phase.end] for phase in found.phases],
        },
        "histograms": _histograms(run),
    }


def _alarm(alarm: Row) -> dict[str, Any]:
    known = {key: printable(str(alarm[key]))[:1000] for key in ALARM_FIELDS[1:] if alarm.get(key) not in (None, "")}
    known["cause"] = known.pop("cause_in_words", known.get("cause", ""))
    known.setdefault("message", _seen(alarm))
    others = {key: value for key, value in alarm.items() if key not in ALARM_FIELDS}
    more = printable(json.dumps(others, ensure_ascii=False, indent=1))[:4000] if others else ""
    return {"step": alarm["step"], **known, "more": more}


def _seen(alarm: Row) -> str:
    """The signal in words: ``0.52 (limit 0.4, 0.01 at the beginning)``."""
    value, limit, beginning = (alarm.get(name) for name in ("value", "limit", "baseline"))
    if not is_number(value):
        return ""
    beside = [f"limit {limit:.3g}"] if is_number(limit) else []
    beside += [f"{beginning:.3g} at the beginning"] if is_number(beginning) else []
    return f"{value:.3g}" + (f" ({', '.join(beside)})" if beside else "")


def _histograms(run: Run) -> list[Row]:
    """Evenly spread over the run, first and last among them."""
    steps = list(run.histograms)
    most = min(MOST_HISTOGRAMS, len(steps))
    wanted = sorted({steps[round(at * (len(steps) - 1) / max(most - 1, 1))] for at in range(most)})
    found = (read_object(run.histograms[step]) for step in wanted)
    return [one for one in found if isinstance(one.get("edges"), list) and isinstance(one.get("counts"), list)]


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _part(name: str) -> str:
    return files("trainer.report").joinpath(name).read_text(encoding="utf-8")
