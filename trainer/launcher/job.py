"""A started launcher, until it and all ranks have ended: what they say, what they are asked, and the code at the end.

The launcher's own lines and every rank's stray output go to a log; the terminal shows what rank 0 says.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from trainer import run_status
from trainer.errors import redacted
from trainer.launcher.lease import Lease
from trainer.launcher.outcome import LOST, Outcome
from trainer.launcher.speech import heard, say

ASKED_TO_END = {signal.SIGINT: 130, signal.SIGTERM: 75, signal.SIGHUP: 75}
SECONDS_TO_END = 30.0
"""For the others, once one has ended; as long as launch.py gives those beside it."""
SECONDS_TO_UPLOAD = 300.0
"""For a rank 0 that is done: a tracker sends its last points when the process exits."""


class Signals:
    """Those that ask the command to end: each is noted, and the first raises KeyboardInterrupt until ranks start."""

    def __init__(self) -> None:
        self.asked: list[signal.Signals] = []
        self.starting = False
        # nohup means it. A shell without job control ignores SIGINT for everything in the background, unasked.
        meant = [one for one in ASKED_TO_END if one != signal.SIGHUP or signal.getsignal(one) != signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._note) for number in meant}

    def restore(self) -> None:
        """What they did before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked.append(signal.Signals(number))
        if not self.starting and len(self.asked) == 1:
            raise KeyboardInterrupt

    @property
    def code(self) -> int:
        """Of a run that had nothing to save when the first came."""
        return ASKED_TO_END[self.asked[0]]


class Job:
    """``keys``: the file of secrets. ``grace_seconds``: run.grace_seconds."""

    def __init__(
        self,
        launch_id: str,
        outcome: Outcome,
        lease: Lease,
        run_dir: Path,
        signals: Signals,
        grace_seconds: float,
        keys: Path | None = None,
    ) -> None:
        self.launch_id, self.outcome, self.lease, self.run_dir, self.keys = launch_id, outcome, lease, run_dir, keys
        self.signals, self.grace_seconds = signals, grace_seconds
        self.waited = 0.0
        """Seconds from the first signal on, for ranks that did not end in them."""
        # Without a name: nothing is left of it, however this process ends.
        self.log = tempfile.TemporaryFile("w", encoding="utf-8")  # noqa: SIM115

    def run(self, command: Sequence[str], environment: dict[str, str], folder: Path) -> int:
        """Starts and waits; the exit code."""
        self.signals.starting = True
        # A session of its own: a Ctrl-C reaches the ranks by the lease alone, and once. The launcher would answer it
        # with a `pkill -f` on every host that ends other people's runs of the same user, too.
        process = subprocess.Popen(
            command,
            env=environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        if self.keys:
            # Ctrl-Z would stop the renewing of the lease, and so end the run on the other hosts. After the start, since
            # what is ignored is inherited.
            signal.signal(signal.SIGTSTP, signal.SIG_IGN)
        reader = threading.Thread(target=self._sort, args=(process,), daemon=True)
        reader.start()
        self._wait(process)
        self._end_group(process, reader)
        return self._close()

    def _sort(self, process: subprocess.Popen[str]) -> None:
        """What rank 0 says to the terminal, the rest to the log, until nobody writes any more."""
        assert process.stdout is not None
        for line in process.stdout:
            told = heard(line, self.launch_id)
            if isinstance(told, str):
                with contextlib.suppress(OSError):  # a terminal that was closed
                    say(told)
            elif told:
                self.outcome.take(told)
            else:
                self.outcome.note(line)
                with contextlib.suppress(OSError):  # a full disk must not stop the reading: ranks would block
                    self.log.write(redacted(line))
                    self.log.flush()

    def _wait(self, process: subprocess.Popen[str]) -> None:
        """Until the launcher has ended, or time is over for those asked to end."""
        asked, deadline, passed_on, first = self.signals.asked, float("inf"), 0, 0.0
        while process.poll() is None and (now := time.monotonic()) < deadline:
            if passed_on < len(asked):
                number = asked[passed_on]
                passed_on += 1
                first = first or now
                self.lease.signal(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
                # Asked once they save; who asks again is in a hurry, and who presses Ctrl-C can do so.
                to_save = float("inf") if number == signal.SIGINT else self.grace_seconds
                deadline = min(deadline, now + (to_save, SECONDS_TO_END, 0.0)[min(passed_on, 3) - 1])
            if self.outcome.failing:
                deadline = min(deadline, now + SECONDS_TO_END)
            elif self.outcome.done:
                deadline = min(deadline, now + SECONDS_TO_UPLOAD)
            if self.keys and len(self.outcome.begun) == self.outcome.ranks:
                self.keys.unlink(missing_ok=True)  # every rank has read it
            time.sleep(0.1)
        if passed_on and process.poll() is None and not self.outcome.ended:
            self.waited = time.monotonic() - first

    def _end_group(self, process: subprocess.Popen[str], reader: threading.Thread) -> None:
        """The lease ends what is left on every host, then SIGKILL what is left of the session here."""
        if process.poll() is not None:
            # Whatever still holds the pipe may be a rank whose launcher was killed, or about to end by itself.
            reader.join(timeout=1)
        self.lease.end()
        reader.join(timeout=5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        reader.join(timeout=5)

    def _close(self) -> int:
        code, message = self.outcome.code(), self.outcome.message()
        record, asked = self._record(), self.signals.asked
        if code == LOST and asked and (asked[0] == signal.SIGINT or not record):
            # At once, or before there was anything to lose.
            code, message = self.signals.code, "ended as asked; nothing was saved."
        elif code == LOST and self.waited:
            message = f"lost: {asked[0].name}, and {self.waited:.0f} s later the ranks had not saved."
            if len(asked) == 1:
                message += " Fix: a larger run.grace_seconds, and as much time from what sends the signal."
        if code == LOST and any((self.run_dir / "checkpoints").glob("step-*")):
            message += " Fix: the same command with --resume auto goes on from the newest checkpoint."
        log = self._keep_log(code) or "could not be kept, for want of room or of a folder that can be written"
        if record.get("state") in ("running", "lost"):
            self._amend(code, message)
        if code == LOST:
            message += f"\nWhat all ranks and the launcher printed: {log}"
        if message:
            with contextlib.suppress(OSError):
                say(f"\n{message}")
        return code

    def _record(self) -> dict[str, Any]:
        """run_status.json, if a rank of this launch has written it: a run that was killed has left a "running", too."""
        found = run_status.read(self.run_dir)
        writer = (found.get("host"), found.get("pid"))
        return found if any(writer == (rank.host, rank.pid) for rank in self.outcome.begun.values()) else {}

    def _amend(self, code: int, reason: str) -> None:
        """For ranks that could not record their end; one that did knows less, that its neighbour was gone."""
        if code not in (LOST, 130):
            return
        state = {"state": "lost", **self.outcome.who()} if code == LOST else {"state": "interrupted"}
        try:
            run_status.amend(self.run_dir, exit_code=code, reason=reason, **state)
        except OSError as error:
            say(f"{run_status.NAME} cannot be written: {error}")

    def _keep_log(self, code: int) -> Path | None:
        """Beside the run's records, since it holds what reward functions printed; a refused run has none."""
        kept = None
        if code != 2 and (self.run_dir / run_status.NAME).exists():
            kept = self._copy_log(self.run_dir / "launcher.log")
        return self._copy_log(None) if kept is None and code == LOST else kept

    def _copy_log(self, target: Path | None) -> Path | None:
        """To a new file of the user's own without a ``target``; None where the disk refuses."""
        try:
            if target is None:
                handle, name = tempfile.mkstemp(prefix="zero-grpo-", suffix=".log")
                os.close(handle)
                target = Path(name)
            with target.open("ab") as kept, open(f"/proc/self/fd/{self.log.fileno()}", "rb") as log:
                shutil.copyfileobj(log, kept)
        except OSError:
            return None
        return target
