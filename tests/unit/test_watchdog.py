"""The watchdog beside processes that beat as ranks do: who hangs is named, who waits for it is not, and slow is not
hung."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from trainer import faults, heartbeat
from trainer.config.watch import PhaseTimeout, Watch
from trainer.errors import Refused
from trainer.launcher import watchdog
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
        Path("trainer.py").write_text("raise SystemExit('a file of the user')")
        limits = [(9.0 if phase == "save" else HANG_TIMEOUT, "watch.hang_timeout") for phase in heartbeat.PHASES]
        guard = watchdog.start(own, ranks, limits, Path.cwd())
        if os.environ.get("GUARD") == "killed":
            guard.process.kill()
        else:
            state = Path(f"/proc/{guard.process.pid}/status")
            while not int(state.read_text().split("SigIgn:")[1].split()[0], 16) & 1 << 14:
                time.sleep(0.05)  # it has not begun
            for meant_for_the_rank in (2, 15, 1):
                guard.process.send_signal(meant_for_the_rank)
    heartbeat.enter("rollout", step=7)
    Path("begun").touch()
    run(number)
    if number == 0:
        guard.stop()

read, write = os.pipe()
pid = os.fork()
rank(0 if pid else 1, read, write, None)
if pid:
    os.waitpid(pid, 0)
"""
"""Two processes, the first of which starts the watchdog; ``run`` is what each does in step 7."""

COLLECTIVE = "import time\n\ndef all_reduce(seconds=60):\n    time.sleep(seconds)\n"
"""Lies where torch's lie, as far as a stack shows it."""
WAITS = "    if number == 0:\n        heartbeat.met()\n        collective.all_reduce()\n"
RUNS = {
    "stop": WAITS + "    heartbeat.enter('backward')",
    "gil": WAITS + "    heartbeat.enter('reward')",
    "spin": WAITS + "    heartbeat.enter('reference')",
    "kill": WAITS
    + "    for _ in range(40):\n        time.sleep(0.1)\n        heartbeat.beat()\n    heartbeat.enter('update')",
    "kill at once": WAITS + "    os.kill(os.getpid(), 9)",
    # The one that waits has been silent for longer.
    "late": WAITS
    + """
    for _ in range(12):
        time.sleep(0.1)
        heartbeat.beat()
    heartbeat.enter("update")
    time.sleep(60)""",
    "all wait": "    heartbeat.met()\n    collective.all_reduce()",
    # One of DeepSpeed's, which nobody counts.
    "not counted": "    if number == 0:\n        collective.all_reduce()\n    time.sleep(60)",
    # On a card a collective returns at once, and the wait is where a number is read.
    "on a card": "    if number == 0:\n        heartbeat.met()\n    time.sleep(60)",
    "slow on a card": """
    if number == 0:
        heartbeat.met()
        time.sleep(4.5)
    for _ in range(8 * number):
        time.sleep(0.5)
        heartbeat.beat()""",
    "slow": """
    if number == 0:
        heartbeat.met()
        collective.all_reduce(4.5)
    for _ in range(8 * number):
        time.sleep(0.5)
        heartbeat.beat()""",
    # Waits for longer than the limit, gets on, and hangs by itself while the other is busy.
    "waited before": """
    for _ in range(25 * number):
        time.sleep(0.1)
        heartbeat.beat()
    heartbeat.met()
    if number == 0:
        collective.all_reduce(2.5)
    heartbeat.enter("reference")
    time.sleep(60 * (1 - number))
    for _ in range(80):
        time.sleep(0.1)
        heartbeat.beat()""",
    "slow save": "    heartbeat.enter('save')\n    time.sleep(3.5)",
    "no records": WAITS + "    time.sleep(60)",
    "unwatched": "    time.sleep(0.5)",
}
QUIET = ("slow", "slow on a card", "slow save")
FAULTS = {"kill": "update", "stop": "backward", "gil": "reward", "spin": "reference"}


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
        if name != "no records":
            (folder / "run_status.json").write_text('{"state": "running", "step": 6}')
        source = RANKS.replace("HANG_TIMEOUT", str(HANG_TIMEOUT)).replace(
            "\nread,", f"\ndef run(number):\n{run}\nread,"
        )
        (folder / "ranks.py").write_text(source)
        variables = {"PYTHONPATH": f"{ROOT}:{library}"}
        if name == "unwatched":
            variables["GUARD"] = "killed"
        if name in FAULTS:
            fault = f"{name}@rank1:step7:phase={FAULTS[name]}"
            variables |= {"ZERO_GRPO_TEST": "1", "ZERO_GRPO_FAULT": fault}
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started[name] = folder, subprocess.Popen([sys.executable, "ranks.py"], cwd=folder, env=variables, **output)
    found = {}
    for name, (folder, process) in started.items():
        said, _ = process.communicate(timeout=15)
        stacks = [file.read_text() for file in sorted(folder.glob("stacks-rank*"))]
        assert process.returncode == (0 if name in (*QUIET, "unwatched") else 4), said
        record = folder / "run_status.json"
        if name == "no records":
            found[name] = Ended(said, {}, stacks, 0)
            continue
        took = record.stat().st_mtime - (folder / "begun").stat().st_mtime
        found[name] = Ended(said, json.loads(record.read_text()), stacks, took)
    yield found


@pytest.mark.parametrize(
    ("name", "state"), [("stop", "stopped by a signal"), ("gil", "computing"), ("spin", "computing")]
)
def test_f16_f17_the_rank_that_hangs_is_named_with_its_phase(ended: dict[str, Ended], name: str, state: str) -> None:
    """Stopped; in C with the GIL held; in a loop of Python. Rank 0 waits for it and is as silent."""
    run = ended[name]
    assert f"lost: rank 1 of host {run.status['host']} hangs in phase {FAULTS[name]} of step 7: no sign" in run.said
    assert f"is {state}. Stacks of all ranks of this host: " in run.said and "rank 0" not in run.said
    assert HANG_TIMEOUT < run.seconds < HANG_TIMEOUT + 5
    assert (run.status["state"], run.status["exit_code"], run.status["rank"]) == ("lost", 4, 1)
    assert f"\n{run.status['reason']}\n" in run.said
    assert "in all_reduce" in run.stacks[0]
    assert ("no answer" if name == "stop" else "in _" if name == "spin" else "faults.py") in run.stacks[1]


def test_the_others_do_not_wait_for_ever_for_one_that_was_killed(ended: dict[str, Ended]) -> None:
    """Where no launcher answers it. DeepSpeed's groups have torch's own limit of half an hour."""
    assert "lost: rank 1 of host" in ended["kill"].said and "rank 0" not in ended["kill"].said
    assert " ended in phase update of step 7 (process " in ended["kill"].said
    # A step that it had looked at, or none.
    assert "lost: rank 1 of host" in ended["kill at once"].said and "step 0" not in ended["kill at once"].said
    assert ended["kill"].status["state"] == "lost" and "in all_reduce" in ended["kill"].stacks[0]


def test_one_that_waited_for_longer_is_not_blamed(ended: dict[str, Ended]) -> None:
    assert "lost: rank 1 of host" in ended["late"].said and "in phase update of step 7" in ended["late"].said
    assert "rank 0" not in ended["late"].said


@pytest.mark.parametrize("name", ["on a card", "not counted"])
def test_the_one_that_others_wait_for_is_named(ended: dict[str, Ended], name: str) -> None:
    """By the collectives that each has come to, where stacks do not tell, and by the stacks, where those are equal."""
    assert "lost: rank 1 of host" in ended[name].said and "rank 0" not in ended[name].said


def test_a_long_wait_excuses_no_later_hang(ended: dict[str, Ended]) -> None:
    run = ended["waited before"]
    assert "lost: rank 0 of host" in run.said and "hangs in phase reference" in run.said and "rank 1" not in run.said
    assert run.seconds < 2.5 + HANG_TIMEOUT + 3


def test_where_all_wait_all_are_named_later(ended: dict[str, Ended]) -> None:
    """For a rank of another host, say, whose own watchdog ends the job before this."""
    said = ended["all wait"].said
    assert (
        "waits for another host in phase rollout" in said
        and "rank 0 of host" in said
        and "rank 1 of host" in said
        and f"no sign of life for {2 * HANG_TIMEOUT:.0f} s" in said
    )


@pytest.mark.parametrize("name", QUIET)
def test_a_slow_run_is_left_alone(ended: dict[str, Ended], name: str) -> None:
    """Four seconds of beats half a second apart, while the other waits for longer than the limit, in a collective or
    where it reads a number; three and a half of a save, whose limit is longer."""
    assert ended[name].said == "" and ended[name].status["state"] == "running" and ended[name].stacks == []


def test_before_there_are_records_the_stacks_lie_where_the_message_says(ended: dict[str, Ended]) -> None:
    (named,) = re.findall(r"Stacks of all ranks of this host: (\S+)/stacks-rank\*\.txt\.", ended["no records"].said)
    assert "in all_reduce" in (Path(named) / "stacks-rank0.txt").read_text() and ended["no records"].stacks == []
    for file in Path(named).iterdir():
        file.unlink()
    Path(named).rmdir()


def test_a_watchdog_that_was_killed_is_missed(ended: dict[str, Ended]) -> None:
    (line,) = ended["unwatched"].said.splitlines()
    assert line.startswith("The watchdog of host ") and line.endswith(
        "has ended (-9): from here on no rank's hang is seen."
    )


def order(pid: int) -> watchdog.Order:
    return watchdog.Order([(3, pid, 10**6, 10**6)], [(1.0, "watch.hang_timeout")], "")


def test_a_process_that_has_ended_gets_no_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor has another that has got its number since."""
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    (ward,) = watchdog.Watchdog(order(process.pid)).wards
    killed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(pid))
    ward.signal(9)
    process.wait()
    ward.pid = os.getpid()
    ward.signal(9)
    assert ward.state == "X" and killed == []
    ward.born = ward._stat()[1]
    ward.signal(9)
    assert killed == [os.getpid()]


def test_a_rank_that_cannot_be_looked_at_is_not_taken_for_silent(capsys: pytest.CaptureFixture[str]) -> None:
    """As where another user's. Here it has no such files."""
    assert watchdog.Watchdog(order(os.getpid())).wards == []
    assert re.fullmatch(r"Rank 3 of host \S+ is not watched: .*/fd/1000000'. Its hang .*\n", capsys.readouterr().out)


def test_each_phase_may_have_a_limit_of_its_own() -> None:
    assert set(PhaseTimeout.model_fields) == set(heartbeat.PHASES)
    watch = Watch(hang_timeout=5.0, phase_timeout=PhaseTimeout(save=60.0))
    assert watch.seconds_of("save") == (60.0, "watch.phase_timeout.save")
    assert watch.seconds_of("reward") == (5.0, "watch.hang_timeout")


def test_the_one_who_started_the_ranks_believes_the_watchdog() -> None:
    outcome = Outcome([Host("a", 2)])
    outcome.take(Report(0, "a", 1, 4, "a collective that failed"))
    outcome.take(Report(1, "a", 2, 4, "hangs in phase reward", hung=True))
    outcome.take(Report(1, "a", 2, 4, "a collective that failed"))
    outcome.killed_by["a"] = 9
    assert (outcome.code(), outcome.message()) == (4, "lost: rank 1 of host a hangs in phase reward.")


@pytest.mark.parametrize(("code", "word"), [(75, "preempted"), (130, "interrupted")])
def test_a_rank_that_was_asked_to_end_is_not_what_the_others_wait_for(code: int, word: str) -> None:
    """While a run starts, at once and alone. The others lose it in their next collective."""
    outcome = Outcome([Host("a", 1), Host("b", 1)])
    for report in (Report(0, "a", 1), Report(1, "b", 2), Report(1, "b", 2, code), Report(0, "a", 1, 4, "a collective")):
        outcome.take(report)
    assert outcome.code() == code and outcome.message().startswith(f"{word}: rank 1 (host b) alone")
    outcome.killed_by["a"] = 9
    assert outcome.code() == 4 and "rank 0 of host a was killed" in outcome.message()


def test_a_rank_that_never_began_is_named() -> None:
    outcome = Outcome([Host("a", 1), Host("b", 2)])
    for report in (Report(0, "a", 1), Report(2, "b", 2), Report(0, "a", 1, 4, "a meeting that did not come about.")):
        outcome.take(report)
    assert outcome.message().endswith("ended with a meeting that did not come about. Not begun: rank 1 (host b).")


@pytest.mark.parametrize(
    ("fault", "test", "said"),
    [
        ("kill@rank1:step4:phase=save", "", "ZERO_GRPO_TEST=1"),
        ("kill@rank1", "1", "expected KIND@rankN:stepN:phase=NAME"),
        ("melt@rank1:step4:phase=save", "1", "KIND one of kill, stop"),
        ("kill@rank1:step4:phase=safe", "1", "no phase 'safe'; there are start, .*, save.after_shard"),
        ("kill@rank1:step4:phase=save.before", "1", "no phase 'save.before'"),
    ],
)
def test_a_fault_outside_a_test_is_refused(fault: str, test: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZERO_GRPO_FAULT", fault)
    monkeypatch.setenv("ZERO_GRPO_TEST", test)
    with pytest.raises(Refused, match=said):
        faults.read_environment()
    assert heartbeat.at_phase is None
