"""kill -9 of any rank at any point of a save: the next ``--resume auto`` goes on, and nothing shows in the end."""

import itertools
import json
import random
import re
import statistics
import sys
import time
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
        self.times = folder / "times"
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

    def kill_after(self, rank: int, seconds: float) -> None:
        """Starts the run, of which a rank, or with 2 both, is killed after so long, wherever it is then."""
        newest = Store(self.folder / "killed").newest()
        worker = str(Path(__file__).with_name("killed_at.py"))
        train = ["train", "killed.toml", "--resume", "auto"]
        arguments = [worker, str(self.times), str(rank), f"{seconds}", *train]
        ranks = run_ranks(arguments, 2, self.port, folder=self.folder)
        what = f"rank {rank} after {seconds:.2f} s"
        for number, one in enumerate(ranks):
            if rank in (number, 2):
                assert one.code == SIGKILL, f"{what}: {one.output[-3000:]}"
            else:
                assert one.code not in (0, SIGKILL), f"{what}: the other rank did not notice"
        now = Store(self.folder / "killed").newest()
        if newest is not None:
            assert now is not None and now.manifest.step >= newest.manifest.step, what

    def seconds_to_the_next_step(self) -> list[float]:
        """Of every kill that was followed by a step before the next one."""
        events = [(what, float(at)) for what, at in map(str.split, self.times.read_text().splitlines())]
        pairs = itertools.pairwise(events)
        return [after - at for (what, at), (then, after) in pairs if (what, then) == ("killed", "step")]

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


def soak(folder: Path, kills: int, seed: int, port: int) -> dict[str, Any]:
    """Kills of a random rank, or of both, at random moments of the first six seconds. Every other step is saved."""
    chance = random.Random(seed)
    runs = Runs(folder, 12 * kills, port, every=2)
    sys.stdout.write(f"seed {seed}\n")
    began = time.monotonic()
    for _ in range(kills):
        runs.kill_after(chance.randrange(3), chance.uniform(0.5, 6))
    seconds = time.monotonic() - began
    bits = runs.finish()
    waited = runs.seconds_to_the_next_step()
    return {
        "kills": kills,
        "seed": seed,
        "resumed_without_a_hand": kills,
        "unequal_bits": 0,
        "equal_bits_of_the_weights": bits,
        "kills_followed_by_a_step": len(waited),
        "median_seconds_to_the_next_step": round(statistics.median(waited), 2),
        "most_seconds_to_the_next_step": round(max(waited), 2),
        "seconds_of_all_kills": round(seconds),
        "start": "ranks are forks of a process that has imported the libraries, which a new one needs seconds for",
    }


@pytest.mark.full
@pytest.mark.timeout(5400)
def test_fifty_kills_at_any_moment(tmp_path: Path, results: Any) -> None:
    seed = random.SystemRandom().randrange(10**6)
    results("soak", soak(tmp_path, 50, seed, 29723))
