"""The records of a run, as its checks read them."""

import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer import run_status
from trainer.config import RunConfig, load
from trainer.doctor.finding import Finding
from trainer.errors import Refused
from trainer.record.rollout_rows import is_whole
from trainer.record.run_dir import is_step, read_lines, read_metrics, read_object
from trainer.report.read import by_step

Row = dict[str, Any]
Verdict = list[Finding] | str
"""Findings; or what is fine, in words; or nothing, where the records do not say."""

READ_ROLLOUTS = 12
"""Step files that are read, spread over the run, the first and the last among them."""
ENOUGH = 5
"""Steps below which a trend is chance."""


@dataclass(frozen=True)
class Recorded:
    """The records of one run."""

    config: RunConfig
    metrics: list[Row]
    rollouts: dict[int, list[Row]]
    """By step; some of them."""
    status: Row
    tokens: dict[str, int]
    """The policy's vocabulary; empty where the run has not kept it."""
    histogram: Row
    """The newest one of the KL; empty where the run makes none."""
    notes: list[str] = field(default_factory=list)
    """Records that were passed over."""

    def last(self, key: str) -> float | None:
        """Median over the last fifth of the run, five steps at least."""
        rows = self.metrics[-max(ENOUGH, len(self.metrics) // 5) :]
        values = [row[key] for row in rows if key in row]
        return statistics.median(values) if values else None

    def first(self, key: str) -> float | None:
        """At step 1, before any update."""
        return self.metrics[0].get(key) if self.metrics and self.metrics[0]["step"] == 1 else None

    @property
    def same(self) -> float:
        """Nats below which two log-probs of one token are equal: of a computation in fp32, else of one in bf16."""
        exact = self.config.model.dtype == "fp32" or self.config.engine.device == "cpu"
        return 1e-3 if exact and self.config.model.dtype != "bf16" else 0.05


def read(folder: Path) -> Recorded:
    if not (folder / "config.toml").is_file():
        raise Refused(
            f"doctor: {folder} holds no run: there is no config.toml. Expected the run.dir of a run, or a run file."
        )
    notes: list[str] = []
    files = by_step((folder / "rollouts").glob("step-*.jsonl"))
    steps = list(files)
    places = sorted({round(i * (len(steps) - 1) / (READ_ROLLOUTS - 1)) for i in range(READ_ROLLOUTS)}) if steps else []
    rollouts = {steps[place]: _rows(files[steps[place]], notes) for place in places}
    tokens = read_object(folder / "rollouts" / "vocabulary.json").get("tokens")
    return Recorded(
        load(str(folder / "config.toml")),
        read_metrics(folder, notes),
        {step: rows for step, rows in rollouts.items() if rows},
        {name: value for name, value in run_status.read(folder).items() if isinstance(value, str)},
        tokens if isinstance(tokens, dict) and all(is_step(number) for number in tokens.values()) else {},
        read_object(max((folder / "histograms").glob("step-*.json"), default=folder / "none")),
        notes,
    )


def _rows(file: Path, notes: list[str]) -> list[Row]:
    rows = read_lines(file, notes)
    whole = [row for row in rows if is_whole(row)]
    if len(whole) < len(rows):
        notes.append(f"{file.name}: {len(rows) - len(whole)} rows are not as a run writes them and were passed over")
    return whole
