"""The lease: a file by which the ranks know that the one who started them lives, and what it asks of them.

It reaches ranks that no signal reaches: on other hosts, and after a launcher in between was killed. When it ends, they
end with everything of the run on their host: by a thread of theirs, and by their host's watchdog where they are frozen.
"""

import contextlib
import fcntl
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

FOLDER = ".launch"
"""In run.dir, while a run over a hostfile goes on: its lease, hostfile and secrets, ``ID.KIND`` each."""
POLL_SECONDS = 0.5
RENEW_SECONDS = 2.0
STALE_POLLS = 60
"""Polls, not seconds: a stalled file system counts as one."""
UNSEEN_POLLS = 600
"""Ranks that never see it are on a host that does not share the folder, which is for the run to say, or late."""

kept: tuple[str, bool] | None = None
"""Path and ``same_host`` of the lease that this process is under, for the watchdog that it starts."""


class Lease:
    """Held by the process that starts the ranks. Counts up while that process lives, and passes its signals on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # DSYNC: a client of a network file system would keep what is written to itself, for longer than ranks wait.
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_DSYNC
        self._file = os.open(path, flags, 0o600)
        with contextlib.suppress(OSError):  # a file system without locks: there the counter alone says it
            fcntl.flock(self._file, fcntl.LOCK_EX)
        self._count = self._signals = self._number = 0
        self._ended = threading.Event()
        self._writing = threading.Lock()
        self._write()
        threading.Thread(target=self._renew, daemon=True).start()

    def signal(self, number: int) -> None:
        """Every rank sends itself this signal, once."""
        self._signals += 1
        self._number = number
        self._write()

    def end(self) -> None:
        """Every rank that still runs ends itself with SIGKILL."""
        with self._writing:
            if not self._ended.is_set():
                self._ended.set()
                os.close(self._file)  # first: what is open when it is removed, NFS keeps under another name
        with contextlib.suppress(OSError):
            self.path.unlink()

    def _renew(self) -> None:
        while not self._ended.wait(RENEW_SECONDS):
            self._count += 1
            self._write()

    def _write(self) -> None:
        # In place and of one length: a file replaced by another may be seen late on other hosts.
        text = f"{self._count:>12} {self._signals:>3} {self._number:>3}\n".encode()
        with self._writing, contextlib.suppress(OSError):  # the next one comes soon
            if not self._ended.is_set():
                os.pwrite(self._file, text, 0)


class View:
    """A lease, as those under it see it. ``same_host``: the holder's lock tells at once, where the counter would need
    to be stale first."""

    def __init__(self, path: Path, *, same_host: bool) -> None:
        self.path, self.same_host = path, same_host
        self.signals = self.number = 0
        """How many the holder has passed on, and the last."""
        self._text, self._polls, self._missing = "", 0, 0
        self._locked = self._unlocked = False

    def over(self) -> bool:
        """Whether it has ended. To be asked every POLL_SECONDS."""
        self._polls += 1
        try:
            self._look()
        except FileNotFoundError:
            self._missing += bool(self._text)
        except (OSError, ValueError):  # unreadable for a moment, or read while it was written
            pass
        limit = STALE_POLLS if self._text else UNSEEN_POLLS
        return self._unlocked or self._missing > 1 or self._polls >= limit

    def _look(self) -> None:
        with self.path.open() as file:
            text = file.read()
            locked = _locked(file.fileno()) if self.same_host else None
        _, self.signals, self.number = map(int, text.split())
        self._missing = 0
        if locked or text != self._text:
            self._polls = 0
        self._text = text
        # That nobody holds a lock says something where somebody could.
        self._unlocked = locked is False and self._locked
        self._locked |= locked is True


def keep_watch(path: Path, *, same_host: bool, at_end: Callable[[], None]) -> None:
    """On a rank: a thread that ends it when the lease or the launcher above it is gone, after ``at_end``."""
    global kept
    kept = (str(path), same_host)
    view = View(path, same_host=same_host)
    threading.Thread(target=_watch, args=(view, os.getppid(), at_end), daemon=True).start()


def end_host(view: View) -> None:
    """Ends everything of the run on this host, this process too, and removes what a holder that was killed has left."""
    for path in view.path.parent.glob(f"{view.path.stem}.*"):
        with contextlib.suppress(OSError):
            path.unlink()
    if view.path.parent.name == FOLDER:
        with contextlib.suppress(OSError):
            view.path.parent.rmdir()
    _end_group()


def _watch(view: View, parent: int, at_end: Callable[[], None]) -> None:
    signals = 0
    while os.getppid() == parent:
        if view.over():
            at_end()
            end_host(view)
        if view.signals > signals:
            signals = view.signals
            # To the main thread, so that a call it waits in ends.
            signal.pthread_kill(threading.main_thread().ident or 0, view.number)
        time.sleep(POLL_SECONDS)
    at_end()
    _end_group()


def _end_group() -> None:
    # It is this run's on this host: a session of its own here, sshd's for this command on another.
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _locked(file: int) -> bool | None:
    """Whether another process holds a lock; None where there are none."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False
