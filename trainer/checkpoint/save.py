"""Saving: every rank writes into a temporary folder, all hash it, rank 0 signs, and one rename makes it a checkpoint.

DeepSpeed's own save names a checkpoint as the latest before every rank has written its part, so none of its bookkeeping
is used. A run killed at any moment leaves the checkpoints of before, and at most a folder that nobody reads.
"""

import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from trainer import heartbeat
from trainer.checkpoint import manifest
from trainer.checkpoint.export import write_weights
from trainer.checkpoint.manifest import Facts, Manifest
from trainer.checkpoint.store import Found, Store, step_of
from trainer.config import RunConfig, dump
from trainer.engine import ZeroEngine
from trainer.errors import NoCheckpoint, RunEnd, Stopped, refused_by_disk
from trainer.models.policy import Policy
from trainer.plan.on_disk import Parameters, checkpoint_bytes
from trainer.world import World

T = TypeVar("T")

PROGRESS = "progress.json"


def random_file(rank: int) -> str:
    return f"random-{rank:05d}.json"


class Checkpoints:
    """The checkpoints that this run writes."""

    def __init__(
        self, config: RunConfig, policy: Policy, engine: ZeroEngine, world: World, facts: Facts, run_id: str
    ) -> None:
        self.config, self.policy, self.engine, self.world = config, policy, engine, world
        self.facts, self.run_id = facts, run_id
        self.store = Store(Path(config.run.dir))
        self.resumed_from: Path | None = None
        self.best: Path | None = None
        self.good: Path | None = None
        """The newest one from before any sign of trouble."""
        self.best_of_good: Path | None = None
        """What was the best when that one was saved: a run that goes back to it has no later one."""
        self.saved_step: int | None = None
        """Step of the newest checkpoint."""
        self.oldest = 0
        """Step of the oldest of ``checkpoint.keep``: as far back goes a run whose newer ones are damaged."""
        self.bytes = 0
        """Of the newest checkpoint that this process has saved."""
        self.notes: list[str] = []
        """Rank 0's, of what went wrong and costs nothing."""

    def resumed(self, found: Found, best: Mapping[str, Any] | None, good_step: int | None, *, in_place: bool) -> None:
        """The run went on from ``found``; pruning leaves it, the best and the good one alone."""
        if not self.run_id.isalnum():  # it becomes part of a folder's name
            raise ValueError(f"run_id {self.run_id!r}")
        self.resumed_from = found.path
        if not in_place:
            return
        if found.path.resolve() == self.store.folder(found.manifest.step).resolve():  # and not a copy of another name
            self.saved_step = found.manifest.step
        self.best = self._folder_of(best)
        self.keep_good(good_step)
        try:
            progress = json.loads((self.good / PROGRESS).read_text(encoding="utf-8")) if self.good else {"best": None}
            self.best_of_good = self._folder_of(progress["best"])
        except (OSError, ValueError, LookupError, TypeError):  # the run could not go back there
            self.best_of_good = None

    def _folder_of(self, best: Mapping[str, Any] | None) -> Path | None:
        return self.store.folder(int(best["step"])) if best else None

    def tidy(self, step: int, going_on: Path | None, best: dict[str, Any] | None) -> dict[str, Any] | None:
        """Before a run goes on in its directory from ``going_on``, after ``step``: what is left of others goes or is
        set aside. Returns ``best`` if it is still there. A collective."""
        self.agreed(
            lambda: self.store.tidy(step, going_on) if self.world.is_main else None,
            "what lies there from before cannot be set aside",
        )
        return self.still_best(best)

    def save(self, step: int, progress: Mapping[str, Any], random_states: Mapping[str, Any]) -> Path:
        """A collective. ``progress`` is rank 0's, ``random_states`` are each rank's own.

        Stopped on every rank where the disk refuses on one; the checkpoints of before are as they were.
        """
        free, folder = self.agreed(lambda: self._begin(step) if self.world.is_main else (0, Path()))[0]
        try:
            self._write(folder, step, progress, random_states)
        except Stopped as stopped:
            if self.world.is_main:
                shutil.rmtree(folder, ignore_errors=True)
            raise Stopped(
                f"{stopped} A checkpoint needs {_size(self._needed())}; {_size(free)} were free when it began. The "
                "checkpoints of before are whole."
            ) from stopped
        self.saved_step = step  # a checkpoint from the rename on, whatever fails after it
        if self.world.is_main:
            self._or_note(lambda: self.store.settle(step))
            self._or_note(self._prune)
        self.oldest = self.world.gather_objects(self.oldest)[0]
        return self.store.folder(step)

    def _write(self, folder: Path, step: int, progress: Mapping[str, Any], random_states: Mapping[str, Any]) -> None:
        self.agreed(lambda: self.engine.save(folder / "deepspeed"))
        heartbeat.enter("save.after_shard")
        write_weights(self.policy, self.engine, self.world, folder)
        self.agreed(lambda: self._write_records(folder, progress, random_states))
        lists = self.agreed(lambda: manifest.listed(folder))
        # Shares of the hashing. Its end is the barrier that DeepSpeed lacks: every rank's files are on disk. All lists
        # together, since one of them may lag on a shared file system.
        mine = sorted({name for names in lists for name in names})[self.world.rank :: self.world.size]
        shares = self.agreed(lambda: {name: manifest.measured(folder, name) for name in mine})
        files = {name: found for share in shares for name, found in share.items()}
        self.agreed(lambda: self._commit(folder, step, files) if self.world.is_main else None)

    def _begin(self, step: int) -> tuple[int, Path]:
        """Bytes that are free, and the folder to write to."""
        self.store.path.mkdir(parents=True, exist_ok=True)
        free, needed = shutil.disk_usage(self.store.path).free, self._needed()
        if free < needed:
            raise Stopped(
                f"{self.store.path}: a checkpoint needs {_size(needed)}, and {_size(free)} are free. Fix: make room; a "
                "smaller checkpoint.keep holds fewer of them."
            )
        folder = self.store.begin(step, self.run_id)
        (folder / "deepspeed").mkdir()
        return free, folder

    def _needed(self) -> int:
        """The bytes of the last one, or of the first one by formula."""
        trained = sum(math.prod(shape) for shape in self.facts.trained.values())
        parameters = Parameters(trained, trained, self.policy.dtype.itemsize)
        return self.bytes or checkpoint_bytes(parameters, stage=self.facts.zero_stage, optimizer=self.config.optim.name)

    def _write_records(self, folder: Path, progress: Mapping[str, Any], random_states: Mapping[str, Any]) -> None:
        _write_json(folder / random_file(self.world.rank), random_states)
        if self.world.is_main:
            _write_json(folder / PROGRESS, progress)
            (folder / "config.toml").write_text(dump(self.config), encoding="utf-8")

    def _commit(self, folder: Path, step: int, files: dict[str, tuple[int, str]]) -> None:
        if unmeasured := set(manifest.listed(folder)) ^ set(files):
            raise OSError(f"hosts see different files there ({', '.join(sorted(unmeasured)[:3])})")
        for inner in {(folder / name).parent for name in files}:
            manifest.sync(inner)
        manifest.write(folder, Manifest(step, self.run_id, self.facts, dict(sorted(files.items()))))
        manifest.sync(folder)
        self.store.commit(folder, step)
        self.bytes = sum(size for size, _ in files.values())

    def _prune(self) -> None:
        keep = self.config.checkpoint.keep
        protected = {kept for kept in (self.resumed_from, self.best, self.good, self.best_of_good) if kept is not None}
        self.store.prune(keep, protected)
        self.oldest = step_of(self.store.folders()[:keep][-1])

    def _or_note(self, work: Callable[[], None]) -> None:
        try:
            work()
        except OSError as failed:
            self.notes.append(f"{self.store.path}: {failed}; the checkpoints are whole, and the run goes on")

    def agreed(self, work: Callable[[], T], what: str = "the checkpoint cannot be written") -> list[T]:
        """``work()`` of every rank, in rank order; where it fails on one, all are Stopped. It fails in no collective,
        which would leave the others waiting."""
        result: T | None = None
        error: RunEnd | None = None
        try:
            result = work()
        except RunEnd as end:
            error = end
        except OSError as failed:
            error = refused_by_disk(self.store.path, failed, what)
        self.world.agree(error)
        return cast(list[T], self.world.gather_objects(result))

    def go_back(self) -> Path:
        """Verifies ``good``, and takes away every later checkpoint. A collective; Stopped where it is damaged."""
        good = self.good
        assert good is not None

        def check_and_remove() -> None:
            try:
                manifest.verify(good, self.config.checkpoint.verify)
            except NoCheckpoint as damaged:
                raise Stopped(f"the run cannot go back: {damaged}.") from damaged
            self.store.remove_after(step_of(good))

        self.agreed(lambda: check_and_remove() if self.world.is_main else None)
        self.saved_step = step_of(good)
        return good

    def still_best(self, best: dict[str, Any] | None) -> dict[str, Any] | None:
        """``best`` as it was then, after the run has gone back; None where pruning has taken its checkpoint. A
        collective."""
        folder = None if best is None else self.store.folder(int(best["step"]))
        there = bool(self.world.gather_objects(folder is not None and folder.is_dir())[0])
        self.best = None
        if self.world.is_main:
            self._or_note(lambda: self.store.unpoint("best"))
        self.keep_best(folder if there else None)
        return best if there else None

    def keep_good(self, step: int | None) -> None:
        """Pruning leaves that checkpoint alone, while the signals of the run speak against every later one."""
        good = None if step is None else self.store.folder(step)
        if good != self.good:
            self.good, self.best_of_good = good, self.best

    def keep_best(self, folder: Path | None) -> None:
        """Pruning leaves ``folder`` alone from now on, and no longer the best one before it."""
        if folder is None:
            return
        self.best = folder
        if self.world.is_main:
            self._or_note(lambda: self.store.point("best", folder))


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"


def _write_json(path: Path, record: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(record) + "\n", encoding="utf-8")
