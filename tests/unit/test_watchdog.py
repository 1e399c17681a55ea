"""The watchdog beside processes that beat as ranks do: who hangs is named, who waits for it is not, and slow is not
hung."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from trainer import faults, heartbeat
from trainer.errors import Refused
from trainer.launcher.hosts import Host
from trainer.launcher.outcome import Outcome
from trainer.launcher.speech import Report

ROOT = Path(__file__).parents[2]
HANG_TIMEOUT = 1.5

RANKS = """
import json, os, sys, threading, time
from pathlib import Path
from trainer import faults, heartbeat
from trainer.launcher import watchdog
import collective

def rank(number, read, write, ends):
    os.environ["RANK"] = str(number)
    faults.read_environment()
    own = watchdog.Rank.here(number, heartbeat.share())
    os.write(write, json.dumps([own.rank, own.host, *vars(own.shared).values()]).encode().ljust(500))
    if number == 0:
        told = [json.loads(os.read(read, 500)) for _ in range(2)]
        ranks = [watchdog.Rank(r, host, heartbeat.Shared(*shared)) for r, host, *shared in sorted(told)]
        guard = watchdog.start(own, ranks, HANG_TIMEOUT, Path.cwd())
    heartbeat.enter("rollout", step=7)
    Path("begun").touch()
    run(number)
    if number == 0:
        watchdog.stop(guard)

read, write = os.pipe()
pid = os.fork()
rank(0 if pid else 1, read, write, None)
if pid:
    os.waitpid(pid, 0)
"""
"""Two processes, the first of which starts the watchdog; ``run`` is what each does in step 7."""

COLLECTIVE = "import time\n\ndef all_reduce(seconds=60):\n    time.sleep(seconds)\n"
"""Lies where torch's lie, as far as a stack shows it."""
WAITS = "    if number == 0:\n        collective.all_reduce()\n"
RUNS = {
    "stop": WAITS + "    heartbeat.enter('backward')",
    "gil": WAITS + "    heartbeat.enter('reward')",
    "spin": WAITS + "    heartbeat.enter('reference')",
    "kill": WAITS
    + "    for _ in range(40):\n        time.sleep(0.1)\n        heartbeat.beat()\n    heartbeat.enter('save')",
    "kill at once": WAITS + "    os.kill(os.getpid(), 9)",
    # The one that waits has been silent for longer, and is further on.
    "late": """
    if number == 0:
        heartbeat.met()
        collective.all_reduce()
    for _ in range(12):
        time.sleep(0.1)
        heartbeat.beat()
    heartbeat.enter("save")
    time.sleep(60)""",
    "all wait": "    collective.all_reduce()",
    # On a card every rank computes until it asks for a number. The one with fewer collectives behind it is the cause.
    "on a card": """
    if number == 0:
        heartbeat.met()
    time.sleep(60)""",
    "slow": """
    if number == 0:
        collective.all_reduce(4.5)
    for _ in range(8 * number):
        time.sleep(0.5)
        heartbeat.beat()""",
}
FAULTS = {"kill": "save", "stop": "backward", "gil": "reward", "spin": "reference"}


@dataclass(frozen=True)
class Ended:
    said: str
    status: dict[str, object]
    stacks: list[str]
    seconds: float
    """From the last beat to the word."""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Ended]]:
    """All runs, at the same time."""
    started = {}
    for name, run in RUNS.items():
        folder = tmp_path_factory.mktemp("run")
        library = folder / "torch/distributed"
        library.mkdir(parents=True)
        (library / "collective.py").write_text(COLLECTIVE)
        (folder / "run_status.json").write_text('{"state": "running", "step": 6}')
        source = RANKS.replace("HANG_TIMEOUT", str(HANG_TIMEOUT)).replace(
            "\nread,", f"\ndef run(number):\n{run}\nread,"
        )
        (folder / "ranks.py").write_text(source)
        variables = {"PYTHONPATH": f"{ROOT}:{library}"}
        if name in FAULTS:
            fault = f"{name}@rank1:step7:phase={FAULTS[name]}"
            variables |= {"ZERO_GRPO_TEST": "1", "ZERO_GRPO_FAULT": fault}
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started[name] = folder, subprocess.Popen([sys.executable, "ranks.py"], cwd=folder, env=variables, **output)
    found = {}
    for name, (folder, process) in started.items():
        said, _ = process.communicate(timeout=15)
        stacks = [file.read_text() for file in sorted(folder.glob("stacks-rank*"))]
        status = json.loads((folder / "run_status.json").read_text())
        took = (folder / "run_status.json").stat().st_mtime - (folder / "begun").stat().st_mtime
        found[name] = Ended(said, status, stacks, took)
        assert process.returncode == (0 if name == "slow" else 4), said
    yield found


@pytest.mark.parametrize(
    ("name", "state"), [("stop", "stopped by a signal"), ("gil", "computing"), ("spin", "computing")]
)
def test_f16_f17_the_rank_that_hangs_is_named_with_its_phase(ended: dict[str, Ended], name: str, state: str) -> None:
    """Stopped; in C with the GIL held; in a loop of Python. Rank 0 waits for it and is as silent."""
    run = ended[name]
    assert f"lost: rank 1 of host {run.status['host']} hangs in phase {FAULTS[name]} of step 7: no sign" in run.said
    assert f"is {state}. Stacks of all: " in run.said and "rank 0" not in run.said
    assert HANG_TIMEOUT < run.seconds < HANG_TIMEOUT + 5
    assert (run.status["state"], run.status["exit_code"], run.status["rank"]) == ("lost", 4, 1)
    assert f"\n{run.status['reason']}\n" in run.said
    assert "in all_reduce" in run.stacks[0]
    assert ("no answer" if name == "stop" else "in _" if name == "spin" else "faults.py") in run.stacks[1]


def test_the_others_do_not_wait_for_ever_for_one_that_was_killed(ended: dict[str, Ended]) -> None:
    """Where no launcher answers it. DeepSpeed's groups have torch's own limit of half an hour."""
    assert "lost: rank 1 of host" in ended["kill"].said and "rank 0" not in ended["kill"].said
    assert " ended in phase save of step 7 (process " in ended["kill"].said
    # A step that it had looked at, or none.
    assert "lost: rank 1 of host" in ended["kill at once"].said and "step 0" not in ended["kill at once"].said
    assert ended["kill"].status["state"] == "lost" and "in all_reduce" in ended["kill"].stacks[0]


def test_one_that_waited_for_longer_is_not_blamed(ended: dict[str, Ended]) -> None:
    assert "lost: rank 1 of host" in ended["late"].said and "in phase save of step 7" in ended["late"].said
    assert "rank 0" not in ended["late"].said


def test_where_stacks_do_not_tell_the_one_behind_is_named(ended: dict[str, Ended]) -> None:
    assert "lost: rank 1 of host" in ended["on a card"].said and "rank 0" not in ended["on a card"].said


def test_where_all_wait_all_are_named_later(ended: dict[str, Ended]) -> None:
    """For a rank of another host, say, whose own watchdog ends the job before this."""
    said = ended["all wait"].said
    assert (
        "rank 0 of host" in said
        and "rank 1 of host" in said
        and f"no sign of life for {2 * HANG_TIMEOUT:.0f} s" in said
    )


def test_a_slow_run_is_left_alone(ended: dict[str, Ended]) -> None:
    """Four seconds of beats half a second apart, while the other waits for longer than the limit."""
    assert ended["slow"].said == "" and ended["slow"].status["state"] == "running" and ended["slow"].stacks == []


def test_the_one_who_started_the_ranks_believes_the_watchdog() -> None:
    outcome = Outcome([Host("a", 2)])
    outcome.take(Report(0, "a", 1, 4, "a collective that failed"))
    outcome.take(Report(1, "a", 2, 4, "hangs in phase reward", hung=True))
    outcome.take(Report(1, "a", 2, 4, "a collective that failed"))
    outcome.killed_by["a"] = 9
    assert (outcome.code(), outcome.message()) == (4, "lost: rank 1 of host a hangs in phase reward.")


@pytest.mark.parametrize(
    ("fault", "test", "said"),
    [
        ("kill@rank1:step4:phase=save", "", "ZERO_GRPO_TEST=1"),
        ("kill@rank1", "1", "expected KIND@rankN:stepN:phase=NAME"),
        ("melt@rank1:step4:phase=save", "1", "KIND one of kill, stop"),
    ],
)
def test_a_fault_outside_a_test_is_refused(fault: str, test: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZERO_GRPO_FAULT", fault)
    monkeypatch.setenv("ZERO_GRPO_TEST", test)
    with pytest.raises(Refused, match=said):
        faults.read_environment()
    assert heartbeat.at_phase is None
