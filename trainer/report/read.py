"""From a run directory to records, also while the run goes on: what is torn, foreign or missing is passed over."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer import run_status
from trainer.errors import Refused
from trainer.record.rollout_rows import is_number
from trainer.record.run_dir import is_step, read_lines, read_metrics, read_object

Row = dict[str, Any]


@dataclass
class Run:
    """What a run has written so far, but for its rollouts, which are read as they are needed."""

    path: Path
    name: str = ""
    metrics: list[Row] = field(default_factory=list)
    """In order of steps, each step once: the last row of a step that was done again."""
    evaluations: list[Row] = field(default_factory=list)
    alarms: list[Row] = field(default_factory=list)
    """Each has a ``step``."""
    histograms: dict[int, Path] = field(default_factory=dict)
    """By step."""
    rollouts: dict[int, Path] = field(default_factory=dict)
    """By step."""
    status: Row = field(default_factory=dict)
    config: str = ""
    environment: str = ""
    notes: list[str] = field(default_factory=list)
    """What was passed over."""

    def column(self, key: str) -> list[tuple[int, float]]:
        """(step, value) of one metric, where it exists and is a finite number."""
        return [(row["step"], row[key]) for row in self.metrics if is_number(row.get(key))]


def read_run(path: Path) -> Run:
    """Refused where ``path`` holds no run."""
    if not path.is_dir() or not any((path / name).exists() for name in ("metrics.jsonl", "config.toml")):
        raise Refused(
            f"{path} holds no run: expected a directory with metrics.jsonl, as `zero-grpo train` writes it. Fix: give "
            "the run.dir of a run."
        )
    run = Run(path, path.resolve().name)
    run.metrics = ordered(read_metrics(path, run.notes))
    run.alarms = read_lines(path / "alarms.jsonl", run.notes)
    evaluations = (read_object(file) for file in sorted((path / "eval").glob("step-*.json")))
    run.evaluations = [one for one in evaluations if is_step(one.get("step"))]
    run.histograms = by_step(sorted((path / "histograms").glob("step-*.json")))
    run.rollouts = by_step(sorted((path / "rollouts").glob("step-*.jsonl")))
    run.status = run_status.read(path)
    run.config = read_text(path / "config.toml")
    run.environment = read_text(path / "environment.json")
    for aside in sorted(path.glob("rolled-back-*")):
        run.notes.append(f"steps that were rolled back lie in {aside.name}: zero-grpo report {path} {aside}")
    return run


def read_runs(paths: Iterable[Path]) -> list[Run]:
    """Names that two runs share get the folder above before them."""
    runs = [read_run(path) for path in paths]
    names = [run.name for run in runs]
    for run in runs:
        if names.count(run.name) > 1:
            run.name = f"{run.path.resolve().parent.name}/{run.name}"
    return runs


def read_text(path: Path) -> str:
    """Empty where there is no file."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):
        return ""


def ordered(rows: Iterable[Row]) -> list[Row]:
    by_number = {row["step"]: row for row in rows}
    return [by_number[step] for step in sorted(by_number)]


def by_step(files: Iterable[Path]) -> dict[int, Path]:
    return dict(sorted(_numbered(files)))


def _numbered(files: Iterable[Path]) -> Iterator[tuple[int, Path]]:
    for file in files:
        number = file.stem.removeprefix("step-")
        if number.isascii() and number.isdigit():
            yield int(number), file
