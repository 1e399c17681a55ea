"""How a process ends. By SIGTERM, SIGHUP and Ctrl-C: at once while a run starts, while it trains at a safe point of
all ranks.

Signals belong to the process, and so does this state.
"""

import atexit
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import NoReturn, TypeVar

from trainer import heartbeat
from trainer.errors import Interrupted, Preempted, RunEnd

T = TypeVar("T")

KINDS: dict[int, tuple[type[RunEnd], str]] = {
    signal.SIGINT: (Interrupted, "Ctrl-C"),
    signal.SIGTERM: (Preempted, "SIGTERM, by a scheduler or a launcher"),
    signal.SIGHUP: (Preempted, "SIGHUP, as its terminal was closed"),
}
SECONDS_OF_ONE_PRESS = 1.0
"""A terminal, a shell and a launcher may each pass on the same Ctrl-C; a second press comes later than that."""


class _Asked(KeyboardInterrupt):
    """Not a plain KeyboardInterrupt: of one that has passed an ``exec`` of text, as dataclasses do it, Python remembers
    that, and ends by SIGINT instead of the exit code, however it was handled (``Py_RunMain``)."""


_received: list[int] = []
_first_at = 0.0
_deferred = False
_broken_into = False


def install() -> None:
    """From now on each of these signals raises KeyboardInterrupt, which no ``except Exception`` swallows."""
    for number in KINDS:
        # nohup means it. A shell without job control ignores SIGINT for everything in the background, unasked.
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _note)


def defer() -> None:
    """From now on a signal waits for ``check``, so that the ranks stop together; a second Ctrl-C does not wait."""
    global _deferred
    _deferred = True


def ignore() -> None:
    """From now on nothing breaks into the closing words."""
    for number in KINDS:
        signal.signal(number, signal.SIG_IGN)


def check() -> None:
    """Raises Interrupted or Preempted when this process was asked to end. Long loops call it: a sign of life."""
    heartbeat.beat()
    if _received:
        kind, who = KINDS[_received[0]]
        raise kind(who)


def broken_into(call: Callable[[], T]) -> T:
    """``call()``, in the main thread, which a signal ends as ``check`` does."""
    global _broken_into
    check()
    before = _broken_into
    try:
        try:
            _broken_into = True
            return call()
        finally:
            _broken_into = before
    except _Asked:
        if _deferred:
            check()
        raise


def asked() -> tuple[type[RunEnd], str]:
    """What a KeyboardInterrupt was: the kind of end, and who asked for it."""
    return KINDS[_received[0] if _received else signal.SIGINT]


def leave(code: int) -> NoReturn:
    """Ends the process with ``code``, without taking the interpreter down.

    A thread of gloo lets go of the tensors of the last collective some time after it, for which it needs the GIL. One
    that asks a finalizing interpreter for it is ended by it, in the middle of a destructor, and the process with it:
    "terminate called without an active exception", code -6, of a run that was done.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # `zero-grpo keys | head`, a terminal that was closed
            stream.flush()
    os._exit(code)


def _note(number: int, frame: FrameType | None) -> None:
    global _first_at
    now = time.monotonic()
    first = not _received
    _received.append(number)
    if first:
        _first_at = now
        if _broken_into or not _deferred:
            raise _Asked
    elif number == signal.SIGINT and now - _first_at > SECONDS_OF_ONE_PRESS:
        raise _Asked
