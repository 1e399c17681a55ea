"""A run that is killed again and again at any moment, whatever of it, and started again by the same command."""

import json
import os
import random
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.dist.test_launch import RUN, ZERO_GRPO, left, started, wait_for
from tests.dist.test_lost_ranks import pids, rank_of
from tests.tiny_run import repeatable, write_run
from trainer.checkpoint.store import Store

TARGETS = ("rank 0", "rank 1", "both ranks", "launcher", "command", "everything")
COMMAND = (*ZERO_GRPO, "--gpus", "2", "--resume", "auto", "--log.samples_every", "0", "--log.rollouts_every", "0")
EVERY = ("--checkpoint.every", "2", "--checkpoint.keep", "1", "--watch.level", "quiet")
WITHOUT_END = 10**6
"""Steps. The last start says how many there are to be, since by chance no one knows how far the others come."""


def victims(folder: Path, target: str, command: int) -> list[int]:
    ranks = {rank_of(pid): pid for pid in pids(folder, " -u -m trainer @")}
    launcher = pids(folder, "deepspeed.launcher.launch ")
    match target:
        case "rank 0" | "rank 1":
            return [pid for rank, pid in ranks.items() if rank == target[-1]]
        case "both ranks":
            return list(ranks.values()) if len(ranks) == 2 else []
        case "launcher":
            return launcher
        case "command":
            return [command]
        case _:
            return [command, *launcher, *ranks.values()] if len(ranks) == 2 else []


class Soak:
    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.chance = folder, random.Random(seed)
        self.kills = dict.fromkeys(TARGETS, 0)
        self.steps = self.left_over = 0
        self.killed = 0.0
        self.until_a_step: list[float] = []

    def kill(self, target: str, seconds: float, *, in_training: bool) -> None:
        """Starts it and kills the target so long after the start, or after its first step; later where there is no such
        process yet."""
        before = Store(self.folder / "out").newest()
        killed, self.killed = self.killed, 0.0
        self.stepped()  # one of the start before, after the kill
        self.killed = killed
        process = started(self.folder, (*COMMAND, *EVERY, "--run.steps", f"{WITHOUT_END}"))
        try:
            moment = None if in_training else time.monotonic() + seconds
            found: list[int] = []
            while moment is None or time.monotonic() < moment or not found:
                assert process.poll() is None, process.communicate()[0]
                if self.stepped() and moment is None:
                    moment = time.monotonic() + seconds
                found = victims(self.folder, target, process.pid)
                time.sleep(0.05)
            for pid in found:
                os.kill(pid, signal.SIGKILL)
            self.killed = time.monotonic()
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
        assert process.returncode == (-9 if process.pid in found else 4) and "Traceback" not in out + err, out + err
        if before is not None and " | reward " in out:
            assert f"after step {before.manifest.step}\n" in out, out
        self.kills[target] += 1
        wait_for(lambda: time.monotonic() > self.killed + 40 or left(self.folder) == [], seconds=60)
        self.left_over += len(left(self.folder))

    def stepped(self) -> bool:
        """Whether the run has written a step since this was asked last."""
        try:
            steps = (self.folder / "out/metrics.jsonl").read_text().count("\n")
        except OSError:
            return False
        written, self.steps = steps > self.steps, steps
        if written and self.killed:
            self.until_a_step.append(time.monotonic() - self.killed)
            self.killed = 0.0
        return written

    def finish(self) -> int:
        """Two more steps and the end; as many in one go. Returns how many bits of the weights differ."""
        newest = Store(self.folder / "out").newest()
        assert newest is not None
        steps = ("--run.steps", f"{newest.manifest.step + 2}")
        for name in ("out", "unharmed"):
            process = started(self.folder, (*COMMAND, *EVERY, *steps, "--run.dir", name))
            out, _ = process.communicate(timeout=900)
            assert process.returncode == 0, out
        assert self.metrics("out") == self.metrics("unharmed")
        adapters = (
            (self.folder / name / "adapter/adapter_model.safetensors").read_bytes() for name in ("out", "unharmed")
        )
        one, other = (int.from_bytes(adapter) for adapter in adapters)
        return (one ^ other).bit_count()

    def metrics(self, name: str) -> list[dict[str, float]]:
        return [
            repeatable(json.loads(line)) for line in (self.folder / name / "metrics.jsonl").read_text().splitlines()
        ]


@pytest.mark.full
@pytest.mark.timeout(5400)
def test_fifty_kills_at_any_moment(tmp_path: Path, results: Any) -> None:
    seed = random.SystemRandom().randrange(10**6)
    sys.stdout.write(f"seed {seed}\n")
    write_run(tmp_path)
    (tmp_path / "run.toml").write_text(RUN)
    soak = Soak(tmp_path, seed)
    for _ in range(50):
        soak.kill(soak.chance.choice(TARGETS), soak.chance.uniform(0, 8), in_training=soak.chance.random() < 0.6)
    unequal = soak.finish()
    results(
        "soak",
        {
            "seed": seed,
            "kills": soak.kills,
            "steps_of_the_run": len(soak.metrics("out")),
            "unequal_bits": unequal,
            "processes_left": soak.left_over,
            "kills_followed_by_a_step_of_the_next_start": len(soak.until_a_step),
            "median_seconds_from_kill_to_step": round(statistics.median(soak.until_a_step), 1),
            "most_seconds_from_kill_to_step": round(max(soak.until_a_step), 1),
        },
    )
    assert unequal == soak.left_over == 0
