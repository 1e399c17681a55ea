"""The run directory: what a run leaves behind. Rank 0 alone writes here."""

import fcntl
import json
import math
import os
import re
import shutil
import socket
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from trainer import run_status
from trainer.errors import Refused, redacted
from trainer.outside import NotJson, parsed, read
from trainer.record.own_files import open_new, open_to_append
from trainer.record.rollout_rows import FIELDS, is_number, rollout_file

RunState = Literal["running", "done", "stopped", "lost", "preempted", "interrupted"]
RUN_FILES = ("config.toml", "metrics.jsonl", run_status.NAME)
LINES = ("metrics.jsonl", "alarms.jsonl")
FILES = {
    "rollouts": r"step-(\d+)\.jsonl",
    "samples": r"step_(\d+)\.(?:txt|jsonl)",
    "histograms": r"step-(\d+)\.(?:json|png)",
    "eval": r"step-(\d+)\.json",
}
"""Records of steps: a line each, and a file each by folder and name."""


class RunDirectory:
    """Writes the files of one run; each is complete or absent at any moment, or grows by whole lines."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def holds_a_run(self) -> bool:
        return any((self.path / name).exists() for name in RUN_FILES)

    def check(self) -> None:
        """Refused when the directory already holds a run, or cannot be written. Writes nothing."""
        self.check_writable()
        if self.holds_a_run():
            found = [name for name in RUN_FILES if (self.path / name).exists()]
            raise Refused(
                f"run.dir: {self.path} already holds a run (found {', '.join(found)}), expected a new directory. "
                "Fix: set run.dir to another path, or go on with that run: --resume auto."
            )

    def result(self) -> Path | None:
        """``adapter/`` or ``model/``, where a run has come to its end."""
        return next((self.path / name for name in ("adapter", "model") if (self.path / name).is_dir()), None)

    def check_writable(self) -> None:
        """Refused where the directory, or one of its folders, cannot be written."""
        check_can_write(self.path, "run.dir")
        if links := sorted(one for one in self._entries() if one.is_symlink() and one.name != "checkpoints"):
            raise Refused(
                f"run.dir: {links[0]} is a link, and a run writes in its own directory alone (checkpoints may be one). "
                "Fix: remove it, or another run.dir."
            )
        for name in ("checkpoints", "rollouts", "samples"):
            check_can_write(self.path / name, "run.dir")

    def warnings(self) -> list[str]:
        """What a user of this machine should know of the directory."""
        if (
            self.path.parts
            and self.path.is_dir()
            and self.path.stat().st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH
        ):
            return [f"run.dir: every user of this machine may write in {self.path}. chmod o-w takes that back"]
        return []

    def _entries(self) -> list[Path]:
        return list(self.path.iterdir()) if self.path.is_dir() else []

    def create(self) -> None:
        """Checks, then makes the directory with its folders."""
        self.check()
        try:
            for folder in ("rollouts", "samples"):
                (self.path / folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Refused(
                f"run.dir: cannot create {self.path}: {error.strerror}. Fix: set run.dir to a path you can write."
            ) from error

    def lock(self) -> None:
        """Refused while another process trains here. The kernel lets go of it with the process, however that ends."""
        self.check_writable()
        handle = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(handle, 200).decode(errors="replace").strip()
            os.close(handle)
            raise Refused(
                f"run.dir: {self.path}: another process trains in it ({holder}). Fix: wait for it, end it, or another "
                "run.dir."
            ) from None
        except OSError:  # a file system without locks
            pass
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def cut_after(self, step: int) -> None:
        """Takes back the records of later steps, which a run that is resumed after ``step`` makes again."""
        for name in LINES:
            if (self.path / name).exists():
                kept = [row for row in read_lines(self.path / name) if row["step"] <= step]
                self._replace(name, "".join(json.dumps(row) + "\n" for row in kept))
        for file in self._files_after(step):
            file.unlink()

    def set_aside(self, step: int) -> Path:
        """Moves the files of later steps to ``rolled-back-1`` (2, ...), with all metrics and alarms: the run as it was.
        Takes their lines back here.

        In this order, since a kill may come at any moment: the run that is resumed makes them again.
        """
        aside = self.path / f"rolled-back-{self.rollbacks() + 1}"
        beside = aside.with_name(f".{aside.name}")
        shutil.rmtree(beside, ignore_errors=True)
        (beside / "rollouts").mkdir(parents=True)
        for name in ("config.toml", "rollouts/vocabulary.json", *LINES):
            if (self.path / name).exists():
                shutil.copy(self.path / name, beside / name)
        for file in self._files_after(step):
            (beside / file.parent.name).mkdir(exist_ok=True)
            os.rename(file, beside / file.parent.name / file.name)
        os.rename(beside, aside)
        self.cut_after(step)
        return aside

    def rollbacks(self) -> int:
        """How often records were set aside: the highest number, since a user may have removed some, or copied one."""
        found = (re.fullmatch(r"rolled-back-(\d+)", path.name) for path in self.path.glob("rolled-back-*"))
        return max((int(match[1]) for match in found if match), default=0)

    def _files_after(self, step: int) -> list[Path]:
        """Files of one later step each."""
        found = []
        for folder, pattern in FILES.items():
            (self.path / folder).mkdir(parents=True, exist_ok=True)
            for file in (self.path / folder).iterdir():
                if (match := re.fullmatch(pattern, file.name)) and int(match[1]) > step:
                    found.append(file)
        return found

    def write_config(self, text: str) -> None:
        self._replace("config.toml", text)

    def write_environment(self, environment: Mapping[str, Any]) -> None:
        self._replace("environment.json", json.dumps(environment, indent=2, ensure_ascii=False) + "\n")

    def append_metrics(self, metrics: Mapping[str, float | None]) -> None:
        """One line. None is dropped; NaN or infinity raises ValueError: a number that does not exist is absent."""
        present = {key: value for key, value in metrics.items() if value is not None}
        bad = {key: value for key, value in present.items() if isinstance(value, float) and not math.isfinite(value)}
        if bad:
            raise ValueError(f"metrics of step {present.get('step')} that are not finite: {bad}")
        with open_to_append(self.path / "metrics.jsonl") as file:
            file.write(json.dumps(present) + "\n")

    def append_alarm(self, alarm: Mapping[str, Any]) -> None:
        """One line of alarms.jsonl."""
        with open_to_append(self.path / "alarms.jsonl") as file:
            file.write(json.dumps(alarm) + "\n")

    def write_rollouts(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """rollouts/step-000001.jsonl: the rows of all ranks, put into global order (group, then index)."""
        lines = []
        for row in sorted(rows, key=lambda row: (row["group"], row["index"])):
            if set(row) != set(FIELDS):
                raise ValueError(f"a rollout row holds {sorted(row)}, expected {sorted(FIELDS)}")
            lines.append(json.dumps({name: row[name] for name in FIELDS}, ensure_ascii=False, allow_nan=False) + "\n")
        self._replace(rollout_file(self.path, step).relative_to(self.path), "".join(lines))

    def write_evaluation(self, step: int, record: Mapping[str, Any]) -> None:
        (self.path / "eval").mkdir(exist_ok=True)
        self._replace(Path("eval") / f"step-{step:06d}.json", json.dumps(record) + "\n")

    def write_samples(self, step: int, text: str, lines: str) -> None:
        """The same completions for people, and as JSONL."""
        self._replace(Path("samples") / f"step_{step}.txt", text)
        self._replace(Path("samples") / f"step_{step}.jsonl", lines)

    def write_histogram(self, step: int, record: Mapping[str, Any]) -> Path:
        """histograms/step-000100.json; returns where its picture belongs."""
        (self.path / "histograms").mkdir(exist_ok=True)
        name = Path("histograms") / f"step-{step:06d}.json"
        self._replace(name, json.dumps(record) + "\n")
        return (self.path / name).with_suffix(".png")

    def status(
        self,
        state: RunState,
        exit_code: int | None,
        step: int,
        reason: str,
        *,
        host: str,
        rank: int,
        pid: int,
        run_id: str,
    ) -> None:
        """run_status.json, the truth about how the run stands. exit_code: None while it runs."""
        who = {"host": host, "rank": rank, "pid": pid, "run_id": run_id}
        run_status.amend(self.path, state=state, exit_code=exit_code, step=step, reason=redacted(reason), **who)

    def _replace(self, name: Path | str, text: str) -> None:
        """Whole file or nothing: written beside and moved over, so that a reader never sees half of it."""
        path = self.path / name
        beside = path.with_name(f".{path.name}.tmp")
        with open_new(beside) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)


def check_can_write(path: Path, key: str) -> None:
    """Refused where the folder ``path``, the value of ``key``, cannot be written, or cannot be made."""
    if path.exists() and not path.is_dir():
        raise Refused(f"{key}: {path} is a file, expected a directory. Fix: set {key} to another path.")
    above = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not (above.is_dir() and os.access(above, os.W_OK | os.X_OK)):
        what = "cannot be written" if above.is_dir() else "is a file"
        raise Refused(f"{key}: {path} cannot be created: {above} {what}. Fix: set {key} to a path you can write.")


def read_object(file: Path) -> dict[str, Any]:
    """The object of a JSON file; empty where none can be read."""
    try:
        found = read(file)
    except (OSError, NotJson):
        return {}
    return found if isinstance(found, dict) else {}


def read_metrics(run_dir: Path, notes: list[str] | None = None) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl, of each what is a number."""
    rows = read_lines(run_dir / "metrics.jsonl", notes)
    return [{key: value for key, value in row.items() if is_number(value)} for row in rows]


def read_lines(file: Path, notes: list[str] | None = None) -> list[dict[str, Any]]:
    """The objects of a file of one a line, each of a step; none where there is no file. What is none of them is passed
    over and told in ``notes``: a last line that a kill has cut or that is being written just now, or damage."""
    # Not splitlines(): a completion may hold U+2028 or U+0085, which JSON does not escape.
    lines = file.read_bytes().split(b"\n") if file.is_file() else []
    found = [_of_a_step(line) for line in lines if line.strip()]
    torn = bool(found and lines[-1].strip() and not found[-1])
    bad = found.count(None) - torn
    if notes is not None and torn:
        notes.append(f"{file.name}: the last line is not complete yet and was passed over")
    if notes is not None and bad:
        notes.append(f"{file.name}: {bad} lines are no JSON objects of a step and were passed over")
    return [row for row in found if row]


def _of_a_step(line: bytes) -> dict[str, Any] | None:
    try:
        row = parsed(line)
    except NotJson:
        return None
    return row if isinstance(row, dict) and is_step(row.get("step")) else None


def is_step(value: Any) -> bool:
    return type(value) is int and value >= 0
