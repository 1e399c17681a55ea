"""kill -9 of any rank at any point of a save: the next ``--resume auto`` goes on, and nothing shows in the end."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.dist.launch import Rank, run_ranks
from tests.tiny_run import repeatable, run_config, write_run
from trainer.checkpoint.store import Store
from trainer.config import dump

SIGKILL = -9
STEPS = {6: 16, 40: 84}
"""Kills -> steps: each start makes two saves before it is killed."""


class Runs:
    """One run of 2 ranks that is killed again and again, and the same one unharmed."""

    def __init__(self, folder: Path, steps: int, port: int, *, every: int = 1) -> None:
        write_run(folder)
        self.folder, self.port = folder, port
        settings: dict[str, Any] = {
            "run.steps": steps,
            "checkpoint.every": every,
            "checkpoint.keep": 1,
            "watch.level": "quiet",  # pruning would spare a checkpoint from before the alarms of a random model
            "optim.name": "adamw",
            "optim.lr": 1e-3,
            "rollout.max_new_tokens": 4,
            "log.rollouts_every": 0,
        }
        for name in ("unharmed", "killed"):
            config = run_config(folder, settings | {"run.dir": str(folder / name)})
            (folder / f"{name}.toml").write_text(dump(config))
        for rank in self.start("unharmed", -1, 0):
            assert rank.code == 0, rank.output[-3000:]
        self.events: list[list[str]] = [json.loads((folder / f"events.{rank}").read_text()) for rank in range(2)]

    def start(self, name: str, rank: int, point: int) -> list[Rank]:
        worker = str(Path(__file__).with_name("killed.py"))
        train = ["train", f"{name}.toml", "--resume", "auto"]
        arguments = [worker, str(self.folder / "events"), str(rank), str(point), *train]
        return run_ranks(arguments, 2, self.port, folder=self.folder)

    def kill(self, rank: int, point: int) -> None:
        """Starts the run, which is killed; before that it must have gone on from the newest checkpoint."""
        newest = Store(self.folder / "killed").newest()
        ranks = self.start("killed", rank, point)
        what = f"rank {rank} before {self.events[rank][point]!r}"
        assert ranks[rank].code == SIGKILL, f"{what}: {ranks[rank].output[-3000:]}"
        assert ranks[1 - rank].code not in (0, SIGKILL), f"{what}: the other rank did not notice"
        if newest is not None:
            assert f"after step {newest.manifest.step}\n" in ranks[0].output, f"{what}: {ranks[0].output[-3000:]}"
            assert Store(self.folder / "killed").newest().manifest.step > newest.manifest.step, what  # type: ignore

    def finish(self) -> int:
        """The last start ends the run; it must not differ from the unharmed one. Returns the bits compared."""
        for rank in self.start("killed", -1, 0):
            assert rank.code == 0, rank.output[-3000:]
        adapter = "adapter/adapter_model.safetensors"
        weights = (self.folder / "unharmed" / adapter).read_bytes()
        assert (self.folder / "killed" / adapter).read_bytes() == weights
        assert self.metrics("killed") == self.metrics("unharmed")
        left = {path.name for path in (self.folder / "killed/checkpoints").iterdir()}
        assert {name for name in left if not re.fullmatch(r"step-\d+", name)} == {"latest"}, left
        return 8 * len(weights)

    def metrics(self, name: str) -> list[dict[str, float]]:
        lines = (self.folder / name / "metrics.jsonl").read_text().splitlines()
        return [repeatable(json.loads(line)) for line in lines]


def spread(events: list[str], kills: int) -> list[int]:
    """So many different points, from the first to the last operation."""
    points = [round(number * (len(events) - 1) / (kills - 1)) for number in range(kills)]
    assert len(set(points)) == kills, f"a save has {len(events)} operations only: {events}"
    return points


def first(events: list[str], wanted: Callable[[str], bool]) -> int:
    return next(number for number, event in enumerate(events) if wanted(event))


@pytest.mark.timeout(900)
def test_b71_kill_9_in_a_save_costs_at_most_that_save(tmp_path: Path) -> None:
    """Six points: rank 1 in the middle of its shard, rank 0 before manifest, commit, ``latest``, pruning, and in it."""
    runs = Runs(tmp_path, STEPS[6], 29721)
    main, other = runs.events
    runs.kill(1, first(other, lambda event: event.startswith("half of")))
    for wanted in ("MANIFEST.json", "os.rename /tmp.", "os.rename /.latest", "os.rename /step-", "shutil.rmtree"):
        runs.kill(0, first(main, lambda event, wanted=wanted: wanted in event))
    runs.finish()


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_b71_kill_9_at_twenty_points_of_each_rank(tmp_path: Path, results: Any) -> None:
    runs = Runs(tmp_path, STEPS[40], 29722)
    points = [(rank, point) for rank in (0, 1) for point in spread(runs.events[rank], 20)]
    for rank, point in points:
        runs.kill(rank, point)
    bits = runs.finish()
    operations = [f"rank {rank}: {runs.events[rank][point]}" for rank, point in points]
    results("kills", {"kills": len(points), "equal_bits_of_the_weights": bits, "before": operations})
