"""Scores that were paid for, kept until no checkpoint of before is: a step done again asks for none of them."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any, TextIO

from trainer.batch import Completion
from trainer.errors import Stopped
from trainer.record.rollout_rows import json_safe
from trainer.record.run_dir import read_lines
from trainer.rewards.answers import Scores

FIELDS = {"step", "key", "value", "metrics", "columns"}


class Ledger:
    """RUN_DIR/paid/rank-00000.jsonl: one line a score, written when it comes."""

    def __init__(self, run_dir: Path, rank: int, *, ranks: int) -> None:
        """``ranks``: of this run. With as many as before or not, what any of them paid for is known: a prompt may be
        another rank's now."""
        self.file = run_dir / "paid" / f"rank-{rank:05d}.jsonl"
        self._open: TextIO | None = None
        files = sorted(self.file.parent.glob("rank-*.jsonl"))
        try:
            self._entries: dict[str, dict[str, Any]] = {
                entry["key"]: entry for one in files for entry in read_lines(one) if entry.keys() >= FIELDS
            }
        except OSError as error:
            raise self._cannot(error, "read", "let this user read it, or delete it and pay again") from None
        gone = [one for one in files if int(one.stem.removeprefix("rank-")) >= ranks]
        self._of_lost_ranks = gone if rank == 0 else []

    @staticmethod
    def key(reward: str, settings: str, step: int, completion: Completion) -> str:
        """Of one question to a service: the same one again has the same answer."""
        prompt = completion.prompt
        row = [prompt.index, completion.generation, prompt.text, completion.ids, prompt.columns]
        record = json.dumps([reward, settings, step, row], sort_keys=True, default=str)
        return hashlib.sha256(record.encode(errors="backslashreplace")).hexdigest()

    def known(self, key: str) -> Scores | None:
        """What was answered, with what was logged of it."""
        if (entry := self._entries.get(key)) is None:
            return None
        metrics = [(name, value) for name, value in entry["metrics"]]
        columns = {name: [value] for name, value in entry["columns"].items()}
        return Scores([entry["value"]], metrics=metrics, columns=columns)

    def keep(self, key: str, step: int, scores: Scores) -> None:
        """``scores`` of one completion. With the kernel when this returns, so that a killed process loses nothing."""
        columns = {name: json_safe(values[0]) for name, values in scores.columns.items()}
        entry = {"step": step, "key": key, "value": scores.values[0], "metrics": scores.metrics, "columns": columns}
        try:
            if self._open is None:
                self._write()  # without the half of a line that a kill has left
                self.file.parent.mkdir(exist_ok=True)
                self._open = self.file.open("a", encoding="utf-8")
            self._open.write(json.dumps(entry) + "\n")
            self._open.flush()
        except OSError as error:
            raise self._cannot(error) from None
        self._entries[key] = entry

    def flush(self) -> None:
        """On the disk, so that a machine that goes down loses nothing either."""
        if self._open is not None:
            try:
                os.fsync(self._open.fileno())
            except OSError as error:
                raise self._cannot(error) from None

    def forget_before(self, step: int) -> None:
        """A checkpoint holds the first ``step`` steps."""
        self._entries = {key: entry for key, entry in self._entries.items() if entry["step"] >= step}
        if self._open is not None:
            self._open.close()
            self._open = None
        try:
            self._write()
            for file in self._of_lost_ranks:
                file.unlink(missing_ok=True)
        except OSError as error:
            raise self._cannot(error) from None
        self._of_lost_ranks = []

    def _write(self) -> None:
        if not self._entries:
            self.file.unlink(missing_ok=True)
            return
        beside = self.file.with_suffix(".tmp")
        with beside.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(entry) + "\n" for entry in self._entries.values())
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, self.file)

    def _cannot(self, error: OSError, what: str = "written", fix: str = "make room") -> Stopped:
        return Stopped(f"{self.file}: scores that were paid for cannot be {what}: {error.strerror}. Fix: {fix}.")
