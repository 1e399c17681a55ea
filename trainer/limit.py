"""A time limit on a plain Python call."""

import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

T = TypeVar("T")

INTERRUPT_EVERY_S = 1.0


class Overdue(BaseException):
    """The call ran past its limit. No Exception, so that a function's own ``except Exception`` lets it through."""


def call_within(seconds: float, call: Callable[[], T]) -> T:
    """``call()``, or Overdue once it has run for ``seconds``. Main thread only; calls may nest.

    A timer signal and not a second thread: the call keeps the main thread, which libraries with time limits of their
    own need (math-verify's default fails elsewhere), and it is really interrupted, inside ``re`` too, which holds the
    GIL and would keep a waiting thread from waking up. What cannot be interrupted (C code that neither returns nor
    checks for signals, a bare ``except`` in a loop) is left to ``watch.hang_timeout``.
    """

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise Overdue

    handler = signal.signal(signal.SIGALRM, interrupt)
    start = time.monotonic()
    # Again and again, because leaving `with ThreadPoolExecutor()` waits for its threads after the first interruption.
    outer_seconds, outer_interval = signal.setitimer(signal.ITIMER_REAL, seconds, INTERRUPT_EVERY_S)
    try:
        try:
            return call()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except Overdue:
        signal.setitimer(signal.ITIMER_REAL, 0)  # once more: the first one may be what was interrupted
        raise
    finally:
        signal.signal(signal.SIGALRM, handler)
        if outer_seconds:
            left = outer_seconds - (time.monotonic() - start)
            signal.setitimer(signal.ITIMER_REAL, max(left, 1e-3), outer_interval)
