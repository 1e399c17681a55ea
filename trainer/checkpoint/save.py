"""Saving: every rank writes into a temporary folder, all hash it, rank 0 signs, and one rename makes it a checkpoint.

DeepSpeed's own save names a checkpoint as the latest before every rank has written its part, so none of its bookkeeping
is used. A run killed at any moment leaves the checkpoints of before, and at most a folder that nobody reads.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.checkpoint import manifest
from trainer.checkpoint.export import write_weights
from trainer.checkpoint.manifest import Facts, Manifest
from trainer.checkpoint.store import Found, Store
from trainer.config import RunConfig, dump
from trainer.engine import ZeroEngine
from trainer.models.policy import Policy
from trainer.world import World

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
        self.saved_step: int | None = None
        """Step of the newest checkpoint."""

    def resumed(self, found: Found, best: Mapping[str, float] | None, *, in_place: bool) -> None:
        """The run went on from ``found``; pruning leaves it and the best one alone."""
        self.resumed_from = found.path
        if in_place:
            self.saved_step = found.manifest.step
            self.best = self.store.folder(int(best["step"])) if best else None

    def save(self, step: int, progress: Mapping[str, Any], random_states: Mapping[str, Any]) -> Path:
        """A collective. ``progress`` is equal on all ranks, ``random_states`` are this rank's."""
        folder = self._begin(step)
        self.engine.save(folder / "deepspeed")
        write_weights(self.policy, self.engine, self.world, folder)
        _write_json(folder / random_file(self.world.rank), random_states)
        if self.world.is_main:
            _write_json(folder / PROGRESS, progress)
            (folder / "config.toml").write_text(dump(self.config), encoding="utf-8")
        self.world.barrier()
        # Shares of the hashing. Its end is the barrier that DeepSpeed lacks: every rank's files are on disk.
        mine = manifest.listed(folder)[self.world.rank :: self.world.size]
        shares = self.world.gather_objects({name: manifest.measured(folder, name) for name in mine})
        if self.world.is_main:
            files = {name: found for share in shares for name, found in share.items()}
            for inner in {(folder / name).parent for name in files}:
                manifest.sync(inner)
            manifest.write(folder, Manifest(step, self.run_id, self.facts, dict(sorted(files.items()))))
            manifest.sync(folder)
            self.store.commit(folder, step)
            protected = {folder for folder in (self.resumed_from, self.best) if folder is not None}
            self.store.prune(self.config.checkpoint.keep, protected)
        self.world.barrier()
        self.saved_step = step
        return self.store.folder(step)

    def keep_best(self, folder: Path | None) -> None:
        """Pruning leaves ``folder`` alone from now on, and no longer the best one before it."""
        if folder is None:
            return
        self.best = folder
        if self.world.is_main:
            self.store.point("best", folder)

    def _begin(self, step: int) -> Path:
        name = str(self.store.begin(step, self.run_id)) if self.world.is_main else ""
        return Path(self.world.gather_objects(name)[0])


def _write_json(path: Path, record: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(record) + "\n", encoding="utf-8")
