"""A started launcher, which a stand-in for it and its ranks takes the place of: code, record and last words."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiny_run import RUN_FILE
from trainer.__main__ import main
from trainer.launcher import job, reach, start
from trainer.launcher.hosts import Host
from trainer.launcher.job import ASKED_TO_END, Job, Signals
from trainer.launcher.lease import FOLDER, Lease
from trainer.launcher.outcome import Outcome
from trainer.launcher.start import Wanted

ROOT = Path(__file__).parents[2]
RANK = """
import json, os, signal, socket, sys, time
from pathlib import Path

def report(code, rank=0, why=""):
    told = {"rank": rank, "host": socket.gethostname(), "pid": os.getpid() + rank, "code": code, "why": why}
    print("\\x1eid\\x1e\\x1eid\\x1e" + json.dumps(told), flush=True)

def record(state):
    told = {"state": state, "step": 3, "host": socket.gethostname(), "rank": 0, "pid": os.getpid()}
    Path("run_status.json").write_text(json.dumps(told))

report(None)
report(None, rank=1)
"""
KILLED = "print('[2026-01-01 00:00:00,000] [ERROR] [launch.py:325:sigkill_handler] [] exits with return code = -9')\n"


@pytest.fixture
def signals() -> Iterator[Signals]:
    before = {number: signal.getsignal(number) for number in ASKED_TO_END}
    yield Signals()
    for number, handler in before.items():
        signal.signal(number, handler)


def run(folder: Path, signals: Signals, code: str, *, asked: signal.Signals | None = None, grace: float = 20.0) -> int:
    """Two ranks, the first of which does ``code``; ``asked`` comes as soon as they are started."""
    signals.asked += [asked] if asked else []
    held = Lease(folder / "lease")
    started = Job("id", Outcome([Host("here", 2)]), held, folder, signals, grace)
    return started.run([sys.executable, "-c", RANK + code], dict(os.environ), folder)


def status(folder: Path) -> dict[str, object]:
    return json.loads((folder / "run_status.json").read_text())


def test_what_was_lost_is_recorded(tmp_path: Path, signals: Signals, capsys: pytest.CaptureFixture[str]) -> None:
    """Host, rank and process of the one that was, not of the one that wrote the record before."""
    assert run(tmp_path, signals, "record('running')\n" + KILLED + "report(4, why='a neighbour')") == 4
    found = status(tmp_path)
    assert (found["state"], found["exit_code"], found["step"], found["rank"]) == ("lost", 4, 3, 1)
    assert found["host"] == socket.gethostname() and "rank 1 of host here was killed" in str(found["reason"])
    assert capsys.readouterr().out.endswith(f"What all ranks and the launcher printed: {tmp_path}/launcher.log\n")
    assert "launch.py:325" in (tmp_path / "launcher.log").read_text()


@pytest.mark.parametrize(("code", "said"), [(3, ""), (4, "could not be kept|/zero-grpo-\\w+\\.log$")])
def test_a_disk_that_refuses_changes_no_code(
    code: int,
    said: str,
    tmp_path: Path,
    signals: Signals,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("launcher.log", ".run_status.json.tmp"):  # folders where files would be written
        (tmp_path / name).mkdir()
    assert run(tmp_path, signals, f"record('running')\nprint('noise')\nreport({code}, why='a full disk')") == code
    out = capsys.readouterr().out
    kept = list(tmp_path.glob("zero-grpo-*.log"))
    if code == 4:
        assert "\nlost: rank 0 of host " in out and "run_status.json cannot be written: " in out
        assert out.endswith(f"What all ranks and the launcher printed: {kept[0]}\n") and "noise" in kept[0].read_text()
    else:
        assert (out, kept) == ("", [])


def test_no_disk_at_all(tmp_path: Path, signals: Signals, capsys: pytest.CaptureFixture[str]) -> None:
    """Not even for temporary files, once the run is under way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job.tempfile, "mkstemp", lambda **_: os.open(tmp_path / "absent/x", os.O_WRONLY))
        assert run(tmp_path, signals, "report(4, why='x')") == 4
    assert capsys.readouterr().out.endswith(
        "printed: could not be kept, for want of room or of a folder that can be written\n"
    )


def test_a_status_of_an_earlier_launch_says_nothing_of_this_one(tmp_path: Path, signals: Signals) -> None:
    """It was killed, and has left a "running"; the resumed run is preempted while it imports."""
    (tmp_path / "run_status.json").write_text('{"state": "running", "step": 7, "host": "h", "pid": 1, "rank": 0}')
    before = status(tmp_path)
    assert run(tmp_path, signals, "os.kill(os.getpid(), 15)", asked=signal.SIGTERM) == 75
    assert status(tmp_path) == before


@pytest.mark.parametrize(("asked", "code"), [(signal.SIGTERM, 4), (signal.SIGINT, 130)])
def test_a_run_that_was_asked_to_end_and_did_not_save(
    asked: signal.Signals, code: int, tmp_path: Path, signals: Signals
) -> None:
    assert run(tmp_path, signals, "record('running')\nos.kill(os.getpid(), 9)", asked=asked) == code
    assert (status(tmp_path)["state"], status(tmp_path)["exit_code"]) == ("lost" if code == 4 else "interrupted", code)


def test_ranks_that_do_not_save_in_time_are_ended(
    tmp_path: Path, signals: Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    begin = time.monotonic()
    assert run(tmp_path, signals, "record('running')\ntime.sleep(60)", asked=signal.SIGTERM, grace=0.5) == 4
    assert time.monotonic() - begin < 15
    assert (
        "\nlost: SIGTERM, and 1 s later the ranks had not saved. Fix: a larger run.grace_seconds"
        in capsys.readouterr().out
    )
    assert status(tmp_path)["state"] == "lost"


def test_ranks_that_save_in_time_are_not(tmp_path: Path, signals: Signals) -> None:
    saves = "record('running')\ntime.sleep(0.5)\nrecord('preempted')\nreport(75)"
    assert run(tmp_path, signals, saves, asked=signal.SIGTERM, grace=20) == 75
    assert status(tmp_path)["state"] == "preempted"


def test_a_signal_before_any_rank_leaves_nothing(
    tmp_path: Path, signals: Signals, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """While the hosts are asked: lease, folder and run.dir go, and the second signal does not come in between."""
    seen: list[list[str]] = []

    def ask(host: Host, question: object) -> str:
        seen.append([path.name for path in (tmp_path / "runs/out" / FOLDER).iterdir()])
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
        return "not reachable"

    monkeypatch.setattr(reach, "ask", ask)
    monkeypatch.setattr(start, "check_tools", lambda: None)
    wanted = Wanted(["train"], tmp_path / "runs/out", 20.0)
    assert start.launch_on_hosts(wanted, [Host("a", 1)], "run.toml", []) == 75
    assert capsys.readouterr().out == "\nended as asked, before any rank was started.\n"
    assert len(seen[0]) == 1 and seen[0][0].endswith(".lease") and list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) == signals._note  # as it was before the command


def test_a_launch_leaves_no_file_behind(tmp_path: Path, signals: Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor has it one that a kill would leave, but for the lease, which the ranks remove."""
    seen: list[list[str]] = []

    def looked(self: Job, *_: object) -> int:
        seen.append([path.name for path in tmp_path.iterdir()])
        return 0

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(Job, "run", looked)
    assert start.launch_here(Wanted(["train"], tmp_path / "out", 20.0), 2) == 0
    assert [name.partition(".")[2] for name in seen[0]] == ["lease"] and list(tmp_path.iterdir()) == []


def test_a_folder_for_temporary_files_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signals: Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.toml").write_text(RUN_FILE)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    arguments = ["--run.dir", str(tmp_path / "out"), "--gpus", "2"]
    assert main(["train", str(tmp_path / "run.toml"), *arguments]) == 2
    assert "refused: nothing was started: [Errno 2] No such file or directory: " in capsys.readouterr().out


def test_a_terminal_that_cannot_show_a_character(tmp_path: Path) -> None:
    """Latin-1, GBK: what a rank says holds characters of any script."""
    ended = subprocess.run(
        [sys.executable, "-m", "trainer", "hosts", "\N{ROCKET}中"],
        env=os.environ | {"PYTHONIOENCODING": "gbk", "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
    )
    assert (ended.returncode, ended.stderr) == (2, b"")
    assert ended.stdout.decode("gbk").startswith("\nrefused: hostfile \\U0001f680中: cannot be read")
