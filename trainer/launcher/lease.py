"""The lease: a file by which the ranks know that the one who started them lives, and what it asks of them.

It reaches ranks that no signal reaches: on other hosts, and after a launcher in between was killed. Ranks whose lease
ends, end themselves with everything of the run on their host.
"""

import contextlib
import fcntl
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

POLL_SECONDS = 0.5
RENEW_SECONDS = 2.0
STALE_POLLS = 60
"""Polls, not seconds: a stalled file system counts as one."""
UNSEEN_POLLS = 600
"""Ranks that never see it are on a host that does not share the folder, which is for the run to say, or late."""


class Lease:
    """Held by the process that starts the ranks. Counts up while that process lives, and passes its signals on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):  # a shared file system without locks: there the counter alone says it
            fcntl.flock(self._file, fcntl.LOCK_EX)
        self._count = self._signals = self._number = 0
        self._ended = threading.Event()
        self._write()
        threading.Thread(target=self._renew, daemon=True).start()

    def signal(self, number: int) -> None:
        """Every rank sends itself this signal, once."""
        self._signals += 1
        self._number = number
        self._write()

    def end(self) -> None:
        """Every rank that still runs ends itself with SIGKILL."""
        self._ended.set()
        self.path.unlink(missing_ok=True)

    def _renew(self) -> None:
        while not self._ended.wait(RENEW_SECONDS):
            with contextlib.suppress(OSError):
                self._count += 1
                self._write()

    def _write(self) -> None:
        # In place and of one length: a file replaced by another may be seen late on other hosts.
        os.pwrite(self._file, f"{self._count:>12} {self._signals:>3} {self._number:>3}\n".encode(), 0)


def keep_watch(path: Path, *, same_host: bool, at_end: Callable[[], None]) -> None:
    """On a rank: a thread that ends it when the lease or the launcher above it is gone, after ``at_end``.

    ``same_host``: the holder's lock tells at once, where the counter would need to be stale first.
    """
    threading.Thread(target=_watch, args=(path, os.getppid(), same_host, at_end), daemon=True).start()


def _watch(path: Path, parent: int, same_host: bool, at_end: Callable[[], None]) -> None:
    last, signals, polls, missing = "", 0, 0, 0
    while os.getppid() == parent and polls < (STALE_POLLS if last else UNSEEN_POLLS) and missing < 2:
        time.sleep(POLL_SECONDS)
        polls += 1
        try:
            with path.open() as file:
                text = file.read()
                if same_host and _unlocked(file.fileno()):
                    break
            _, asked, number = (int(word) for word in text.split())
        except FileNotFoundError:
            missing += bool(last)
            continue
        except (OSError, ValueError):  # unreadable for a moment, or read while it was written
            continue
        missing = 0
        if text != last:
            last, polls = text, 0
            if asked > signals:
                signals = asked
                # To the main thread, so that a call it waits in ends.
                signal.pthread_kill(threading.main_thread().ident or 0, number)
        elif same_host:
            polls = 0
    at_end()
    # The group is this run's on this host: a session of its own here, sshd's for this command on another.
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _unlocked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
