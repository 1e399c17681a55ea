"""The records of a run, as its checks read them."""

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer import run_status
from trainer.config import RunConfig, load
from trainer.doctor.finding import Finding
from trainer.errors import Refused
from trainer.record.run_dir import read_lines, read_metrics, read_object

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
    files = sorted((folder / "rollouts").glob("step-*.jsonl"))
    places = sorted({round(i * (len(files) - 1) / (READ_ROLLOUTS - 1)) for i in range(READ_ROLLOUTS)}) if files else []
    rollouts = {int(files[place].stem.removeprefix("step-")): read_lines(files[place]) for place in places}
    vocabulary = read_object(folder / "rollouts" / "vocabulary.json")
    return Recorded(
        load(str(folder / "config.toml")),
        read_metrics(folder),
        {step: rows for step, rows in rollouts.items() if rows},
        run_status.read(folder),
        vocabulary.get("tokens", {}),
        read_object(max((folder / "histograms").glob("step-*.json"), default=folder / "none")),
    )
