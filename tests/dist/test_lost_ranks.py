"""Two ranks of one machine, one of what holds them together killed: all end soon, with one code and the reason."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dist.launch import run_ranks
from tests.dist.test_launch import RUN, ZERO_GRPO, left, of_a_run, started, wait_for
from tests.tiny_run import write_run

LONG = ("--gpus", "2", "--run.steps", "5000", "--log.samples_every", "0", "--checkpoint.every", "0")


@pytest.fixture
def training(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A run that has made its first step."""
    write_run(tmp_path)
    (tmp_path / "run.toml").write_text(RUN)
    process = started(tmp_path, (*ZERO_GRPO, *LONG))
    try:
        wait_for(lambda: (tmp_path / "out/metrics.jsonl").exists() or process.poll() is not None)
        yield process
    finally:
        process.kill()
        process.communicate()


def pids(folder: Path, words: str) -> list[int]:
    """Processes of a run in the folder that have the words on their command line."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if of_a_run(process, folder) and words in (process / "cmdline").read_text().replace("\0", " "):
                found.append(int(process.name))
        except OSError:
            continue
    return sorted(found)


def rank_of(pid: int) -> str:
    variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return next(value for name, _, value in (variable.partition("=") for variable in variables) if name == "RANK")


def ended(process: subprocess.Popen[str], folder: Path, seconds: float) -> list[str]:
    """The last lines, of a run that was lost."""
    out, err = process.communicate(timeout=seconds)
    assert (process.returncode, err) == (4, ""), out
    status = json.loads((folder / "out/run_status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("lost", 4)
    assert "Traceback" not in out and left(folder) == []
    lines = out.strip().splitlines()
    assert lines[-1] == "What all ranks and the launcher printed: out/launcher.log" and status["reason"] == lines[-2]
    return lines


def test_a_killed_rank_is_named(training: subprocess.Popen[str], tmp_path: Path) -> None:
    (victim,) = [pid for pid in pids(tmp_path, " -u -m trainer @") if rank_of(pid) == "1"]
    os.kill(victim, signal.SIGKILL)
    said = ended(training, tmp_path, 45)[-2]
    assert said.startswith("lost: rank 1 of host ") and "was killed (SIGKILL), perhaps because the machine ran" in said


def test_a_killed_launcher_takes_its_ranks_along(training: subprocess.Popen[str], tmp_path: Path) -> None:
    (victim,) = pids(tmp_path, "deepspeed.launcher.launch ")
    os.kill(victim, signal.SIGKILL)
    assert "launcher itself may have been killed" in ended(training, tmp_path, 10)[-2]


def test_ranks_do_not_outlive_the_command(training: subprocess.Popen[str], tmp_path: Path) -> None:
    assert len(pids(tmp_path, " -u -m trainer @")) == 2
    training.kill()
    training.wait()
    wait_for(lambda: left(tmp_path) == [], seconds=10)


def test_a_rank_that_hangs_before_the_ranks_have_met_is_missed(tmp_path: Path) -> None:
    """Of three: rank 2 does not get beyond its imports. Rank 1 alone is asked to end meanwhile, and does at once."""
    write_run(tmp_path)
    (tmp_path / "run.toml").write_text(RUN)
    worker = [str(Path(__file__).with_name("absent.py")), "train", "run.toml", "--watch.phase_timeout.start", "6"]
    waiting, asked, _ = run_ranks([*worker, "--reward.score.timeout", "2"], 3, 29745, folder=tmp_path, timeout=60)
    assert waiting.code == 4 and "Traceback" not in waiting.output, waiting.output[-3000:]
    (said,) = [line for line in waiting.output.splitlines() if line.startswith("lost: ")]
    assert "in 6 s: of 3 ranks, there was no sign of rank 2." in said
    assert asked.code == 75 and float((tmp_path / "asked").read_text()) < 2, asked.output[-3000:]
    assert not (tmp_path / "out").exists()


def test_b35_a_rank_that_hangs_is_told_with_rank_and_step(tmp_path: Path) -> None:
    """Without our launcher: the watchdog speaks, and every rank ends with the code."""
    write_run(tmp_path)
    (tmp_path / "run.toml").write_text(RUN)
    arguments = ["-m", "trainer", "train", "run.toml", "--checkpoint.every", "1"]
    arguments += ["--watch.hang_timeout", "6", "--reward.score.timeout", "2"]
    fault = {"ZERO_GRPO_TEST": "1", "ZERO_GRPO_FAULT": "spin@rank1:step2:phase=rollout"}
    waiting, hanging = run_ranks(arguments, 2, 29741, folder=tmp_path, timeout=120, **fault)
    assert waiting.code == hanging.code == 4 and "Traceback" not in waiting.output, waiting.output[-3000:]
    (said,) = [line for line in waiting.output.splitlines() if line.startswith("lost: ")]
    assert said.startswith("lost: rank 1 of host ") and " hangs in phase rollout of step 2: no sign of life" in said
    assert said.endswith("Fix: --resume auto goes on from the newest checkpoint.")
    status = json.loads((tmp_path / "out/run_status.json").read_text())
    assert (status["state"], status["exit_code"], status["step"], status["rank"]) == ("lost", 4, 1, 1)
    assert "in _spin" in (tmp_path / "out/stacks-rank1.txt").read_text()
    assert "in all_reduce" in (tmp_path / "out/stacks-rank0.txt").read_text()
    wait_for(lambda: left(tmp_path) == [], seconds=10)
