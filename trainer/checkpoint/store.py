"""The checkpoints of a run on disk: found newest first, committed by one rename, pruned last. Rank 0 alone."""

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from trainer.checkpoint import manifest
from trainer.checkpoint.manifest import Check, Manifest
from trainer.errors import NoCheckpoint
from trainer.record.own_files import open_new

STEP = re.compile(r"step-(\d{6,})")
UNFINISHED, REMOVED, ASIDE = "tmp.", "removed.", "aside."
"""What a folder that is no checkpoint begins with."""


@dataclass(frozen=True)
class Found:
    """A checkpoint that was verified."""

    path: Path
    manifest: Manifest
    skipped: list[str]
    """Why each newer one cannot be used, in words."""


class Store:
    """``RUN_DIR/checkpoints``."""

    def __init__(self, run_dir: Path, check: Check = "full") -> None:
        """``check``: how ``newest`` verifies."""
        self.path, self.check = run_dir / "checkpoints", check

    def folders(self) -> list[Path]:
        """Every committed checkpoint, the newest first, valid or not. ``latest`` is not asked: it may lag or lie."""
        if not self.path.is_dir():
            return []
        return sorted((path for path in self.path.iterdir() if STEP.fullmatch(path.name)), key=step_of, reverse=True)

    def folder(self, step: int) -> Path:
        return self.path / f"step-{step:06d}"

    def newest(self) -> Found | None:
        """The newest valid checkpoint; None where none was ever committed. NoCheckpoint when all are damaged."""
        try:
            return self._newest()
        except OSError as error:
            raise NoCheckpoint(
                f"{error.filename or self.path}: cannot be read ({error.strerror}). Fix: let this user read it, or "
                "name another run."
            ) from error

    def _newest(self) -> Found | None:
        skipped: list[str] = []
        for folder in self.folders():
            try:
                found = manifest.verify(folder, self.check)
            except NoCheckpoint as damaged:
                skipped.append(str(damaged))
                continue
            if found.step == step_of(folder):
                return Found(folder, found, skipped)
            skipped.append(f"{folder}: its manifest is of step {found.step}")
        latest = self.path / "latest"
        if latest.exists() and not skipped:
            skipped.append(f"{latest} names {latest.read_text(errors='replace').strip()!r}, which is not there")
        if skipped:
            raise NoCheckpoint(
                f"{self.path}: none of its checkpoints can be used:\n"
                + "\n".join(skipped)
                + "\nFix: copy one back, or begin again in a new run.dir."
            )
        return None

    def begin(self, step: int, run_id: str) -> Path:
        """The folder that a save writes to; what an earlier save has left of it is gone."""
        folder = self.path / f"{UNFINISHED}step-{step:06d}.{run_id}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        manifest.sync(self.path.parent)
        return folder

    def commit(self, folder: Path, step: int) -> Path:
        """From here on it is a checkpoint: one rename. Returns where it lies now."""
        final = self.folder(step)
        os.rename(folder, final)
        return final

    def settle(self, step: int) -> None:
        """Makes the rename outlive a power cut; then ``latest``, for people and tools."""
        manifest.sync(self.path)
        self.point("latest", self.folder(step))

    def point(self, name: str, folder: Path) -> None:
        """``latest`` or ``best``: a file that holds the folder's name. Advice: resuming looks for itself."""
        beside = self.path / f".{name}.tmp"
        with open_new(beside) as file:
            file.write(f"{folder.name}\n")
        manifest.sync(beside)
        os.replace(beside, self.path / name)

    def unpoint(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)

    def prune(self, keep: int, protected: set[Path]) -> None:
        """Removes all but the newest ``keep`` and the protected. Called after a commit: the newest one is valid."""
        safe = {path.resolve() for path in protected}
        for folder in self.folders()[keep:]:
            if folder.resolve() not in safe:
                self._remove(folder)

    def _remove(self, folder: Path) -> None:
        """Renamed first, so that a half-removed folder is never taken for a damaged checkpoint."""
        gone = folder.with_name(REMOVED + folder.name)
        shutil.rmtree(gone, ignore_errors=True)
        os.rename(folder, gone)
        # What cannot be removed just now goes when the run is resumed: no run ends for a rest.
        shutil.rmtree(gone, ignore_errors=True)

    def remove_after(self, step: int) -> None:
        """What was saved later is no part of the run any more."""
        for folder in self.folders():
            if step_of(folder) > step:
                self._remove(folder)
        self.point("latest", self.folder(step))

    def tidy(self, step: int, going_on: Path | None) -> None:
        """Before a run goes on after ``step``: rests of unfinished saves go. Newer ones, all damaged, are set aside, as
        is another one of that step, in whose place it will save. ``latest`` names ``going_on``."""
        if not self.path.is_dir():
            return
        for folder in self.path.iterdir():
            if folder.is_dir() and folder.name.startswith((UNFINISHED, REMOVED)):
                shutil.rmtree(folder, ignore_errors=True)
        for folder in self.folders():
            same = going_on is not None and folder.resolve() == going_on.resolve()
            if step_of(folder) > step or (step_of(folder) == step and not same):
                os.rename(folder, _free_name(folder.with_name(ASIDE + folder.name)))
        if going_on is not None:
            self.point("latest", going_on)


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _free_name(path: Path) -> Path:
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}.{number}")
    return free
