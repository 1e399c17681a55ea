"""Signals of this process: at once while it starts, later at a safe point, and at once again for who presses twice."""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from trainer import heartbeat, interrupts
from trainer.errors import Interrupted, Preempted
from trainer.launcher.speech import say
from trainer.limit import call_within


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    before = {number: signal.getsignal(number) for number in interrupts.KINDS}
    monkeypatch.setattr(interrupts, "_received", [])
    monkeypatch.setattr(interrupts, "_deferred", False)
    monkeypatch.setattr(interrupts, "_first_at", 0.0)
    interrupts.install()
    yield interrupts
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_ends_a_starting_run_at_once(fresh: ModuleType) -> None:
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    assert fresh.asked()[0] is Preempted


@pytest.mark.parametrize(
    ("number", "kind"), [(signal.SIGTERM, Preempted), (signal.SIGHUP, Preempted), (signal.SIGINT, Interrupted)]
)
def test_a_training_run_is_asked_and_ends_where_it_looks(fresh: ModuleType, number: int, kind: type) -> None:
    fresh.defer()
    fresh.check()
    signal.raise_signal(number)
    with pytest.raises(kind):
        fresh.check()


def test_f11_a_second_ctrl_c_does_not_wait(fresh: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(interrupts.time, "monotonic", lambda: now)
    fresh.defer()
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)  # the same press, passed on by a launcher
    now += 2
    signal.raise_signal(signal.SIGTERM)  # the launcher's own, after the press
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert fresh.asked()[0] is Interrupted


def test_a_terminal_that_is_closed_asks_no_run_under_nohup(fresh: ModuleType) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    fresh.install()
    signal.raise_signal(signal.SIGHUP)
    fresh.check()


def test_a_word_that_nobody_can_read_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed:
        def write(self, text: str) -> None:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(sys, "stdout", Closed())
    say("step 1")


def test_f8_sigterm_breaks_into_a_reward_of_the_main_thread(fresh: ModuleType) -> None:
    """Also into one that catches what it can, and that calls another with a limit of its own."""

    def reward() -> None:
        with contextlib.suppress(Exception):
            call_within(30, lambda: None)
            signal.raise_signal(signal.SIGTERM)
        pytest.fail("it went on")

    fresh.defer()
    alarm = signal.getsignal(signal.SIGALRM)
    with pytest.raises(Preempted):
        fresh.broken_into(lambda: call_within(30, reward))
    assert signal.getsignal(signal.SIGALRM) == alarm and not fresh._broken_into
    with pytest.raises(Preempted):
        fresh.broken_into(lambda: pytest.fail("it began"))


def test_nothing_breaks_into_the_closing_words(fresh: ModuleType) -> None:
    fresh.ignore()
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)
    fresh.check()


def test_a_signal_during_an_exec_of_text_keeps_the_exit_code(tmp_path: Path) -> None:
    """As dataclasses and namedtuples are made: Python would end by SIGINT, whatever the code (Py_RunMain)."""
    (tmp_path / "rank.py").write_text(
        "import os, signal, sys\nfrom trainer import interrupts\ninterrupts.install()\n"
        "try:\n    exec('os.kill(os.getpid(), signal.SIGTERM)')\n"
        "except KeyboardInterrupt:\n    sys.exit(interrupts.asked()[0].exit_code)\n"
    )
    root = Path(__file__).parents[2]
    ended = subprocess.run([sys.executable, "-m", "rank"], cwd=tmp_path, env={"PYTHONPATH": str(root)}, check=False)
    assert ended.returncode == 75


def test_a_process_leaves_with_its_code_and_no_finalizer_of_the_interpreter() -> None:
    """What is buffered and what asked to be done at exit is; a thread that still runs cannot change the code."""
    program = """if True:
        import atexit, threading, time
        from trainer.interrupts import leave

        class Finalized:
            def __del__(self):
                print("torn down")

        kept = Finalized()
        atexit.register(print, "at exit")
        threading.Thread(target=time.sleep, args=(60,)).start()
        print("buffered")
        leave(3)
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (3, "buffered\nat exit\n", "")


def test_a_look_for_signals_is_a_sign_of_life() -> None:
    """Rollouts look at every token, so that a long one is not taken for a rank that hangs."""
    before = heartbeat._cells[heartbeat.BEATS]
    interrupts.check()
    assert heartbeat._cells[heartbeat.BEATS] == before + 1
