"""The watchdog of a host: a process beside its ranks that looks whether their heartbeats go on.

A process, since a rank that holds the GIL silences its own threads. A rank that hangs is told from those that wait for
it, the stacks of all are kept, and all of this host are ended. A collective's time-out does none of this, and not every
group of DeepSpeed's has the one that is asked for.
"""

import contextlib
import json
import mmap
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from trainer import run_status
from trainer.heartbeat import BEATS, CELLS, END, HUNG, MET, PHASE, PHASES, STEP, Shared
from trainer.launcher import lease
from trainer.launcher.speech import WRAPPED, report_of, say

POLL_SECONDS = 0.5
SECONDS_FOR_STACKS = 2.0
SECONDS_AFTER_A_LOSS = 30.0
"""In which a launcher answers that a rank has ended. Without one, the others can wait for it in a collective that no
time-out reaches."""
SECONDS_TO_END = 2.0
"""For ranks that end themselves, before SIGKILL ends them."""
IN_A_COLLECTIVE = re.compile(r"(?m)/(torch/distributed|deepspeed/comm)/|/deepspeed/.* in wait$")
STATES = {"T": "stopped by a signal", "D": "waiting for the kernel, a disk say", "R": "computing", "S": "sleeping"}


@dataclass(frozen=True)
class Rank:
    """One that the watchdog of its host looks after."""

    rank: int
    host: str
    shared: Shared

    @staticmethod
    def here(rank: int, shared: Shared) -> "Rank":
        """Two containers may have one name, and see each other's processes as little as two hosts do."""
        return Rank(rank, f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}", shared)


@dataclass(frozen=True)
class Order:
    """``seconds``: watch.hang_timeout."""

    ranks: list[tuple[int, int, int, int]]
    """Rank, and its ``Shared``."""
    seconds: float
    run_dir: str
    lease: tuple[str, bool] | None
    """Path and ``same_host``, where the ranks are under one."""


def start(own: Rank, everyone: Sequence[Rank], seconds: float, run_dir: Path) -> subprocess.Popen[bytes] | None:
    """The watchdog, from the first rank of each host; None from the others."""
    beside = [one for one in everyone if one.host == own.host]
    if own != beside[0]:
        return None
    ranks = [(one.rank, one.shared.pid, one.shared.cells, one.shared.stacks) for one in beside]
    order = Order(ranks, seconds, str(run_dir.absolute()), lease.kept)
    # Without site, which takes longer than all that the watchdog needs.
    command = [sys.executable, "-S", "-m", "trainer.launcher.watchdog", json.dumps(asdict(order))]
    package = str(Path(__file__).parents[2])
    return subprocess.Popen(command, env=os.environ | {"PYTHONPATH": package}, stdin=subprocess.DEVNULL)


def stop(watchdog: subprocess.Popen[bytes] | None) -> None:
    if watchdog is not None:
        watchdog.kill()
        watchdog.wait()


class Ward:
    """A rank, as the watchdog sees it."""

    def __init__(self, rank: int, pid: int, cells: int, stacks: int) -> None:
        self.rank, self.pid = rank, pid
        self.cells = memoryview(bytearray(8 * CELLS)).cast("q")
        self.beats, self.silent, self.stack = -1, 0.0, ""
        try:
            self.stacks = os.open(f"/proc/{pid}/fd/{stacks}", os.O_RDONLY)
            with open(f"/proc/{pid}/fd/{cells}", "r+b") as file:
                self.cells = memoryview(mmap.mmap(file.fileno(), 8 * CELLS)).cast("q")
        except OSError:  # it has ended already
            self.stacks = os.open(os.devnull, os.O_RDONLY)

    def look(self, passed: float) -> None:
        """``passed``: seconds since the last look."""
        beats = self.cells[BEATS]
        self.silent = self.silent + passed if beats == self.beats else 0.0
        self.beats = beats

    @property
    def state(self) -> str:
        """The kernel's letter for its main thread; "X" of one that has ended, which the launcher answers."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2][0].replace("Z", "X")
        except OSError:
            return "X"

    @property
    def waits(self) -> bool:
        """Whether its main thread, the last in a dump, was in a collective: there it waits for others."""
        # In the whole of it: what counts the tensors of a pass, say, lies further in.
        return bool(IN_A_COLLECTIVE.search(re.split(r"(?m)^(?:Current t|T)hread ", self.stack)[-1]))

    def words(self, seconds: float) -> str:
        where = f"in phase {PHASES[self.cells[PHASE]]} of step {self.cells[STEP]}"
        if not self.cells[MET]:
            where = "at its start"
        if self.state == "X":
            return f"ended {where} (process {self.pid}), and the others of this host wait for it"
        return (
            f"hangs {where}: no sign of life for {self.silent:.0f} s (watch.hang_timeout = {seconds:g}), process "
            f"{self.pid} is {STATES.get(self.state, self.state)}"
        )


class Watchdog:
    def __init__(self, order: Order) -> None:
        self.seconds, self.run_dir = order.seconds, Path(order.run_dir)
        self.wards = [Ward(*rank) for rank in order.ranks]
        self.looked_at: set[int] = set()
        self.lease = lease.View(Path(order.lease[0]), same_host=order.lease[1]) if order.lease else None

    def watch(self) -> None:
        """Until all ranks have gone, or one hangs."""
        last = time.monotonic()
        while any(ward.state != "X" for ward in self.wards):
            time.sleep(POLL_SECONDS)
            if self.lease and self.lease.over():  # which ranks that are frozen do not see
                lease.end_host(self.lease)
            now = time.monotonic()
            # Time in which this process was stopped as well, by Ctrl-Z or with its machine, is no silence.
            passed, last = min(now - last, 4 * POLL_SECONDS), now
            for ward in self.wards:
                ward.look(passed)
            if found := self.gone() or self.hung():
                self.end(found)
                return

    def gone(self) -> list[Ward]:
        """Those that have ended while the others only wait, and nobody has ended these."""
        ended = [one for one in self.wards if one.state == "X"]
        longest = min(SECONDS_AFTER_A_LOSS, self.seconds)
        if len(ended) == len(self.wards) or any(one.silent < longest for one in self.wards):
            return []
        if ended:
            self.dump()
        return ended

    def hung(self) -> list[Ward]:
        """Those that are silent and wait for nobody here, the first that stopped. Where all wait, for a rank of another
        host perhaps, whose own watchdog will say it: all of them, but later."""
        silent = [one for one in self.wards if one.silent >= self.seconds and one.state != "X"]
        all_wait = len(silent) == len(self.wards)
        late = [one for one in silent if all_wait and one.silent >= 2 * self.seconds]
        ranks = {one.rank for one in silent}
        if not silent or (ranks == self.looked_at and not late):
            return []
        self.looked_at = ranks
        self.dump()
        answering = [one for one in silent if one.stack]
        # One that is stopped answers nothing.
        found = [one for one in silent if not one.stack] or [one for one in answering if not one.waits] or late
        behind = min((one.cells[MET] for one in found), default=0)
        return [one for one in found if one.cells[MET] == behind]

    def dump(self) -> None:
        """The stacks of all ranks, as they are now."""
        for ward in self.wards:
            ward.stack = ""
            os.lseek(ward.stacks, 0, os.SEEK_END)
            with contextlib.suppress(ProcessLookupError):
                os.kill(ward.pid, signal.SIGUSR1)
        until = time.monotonic() + SECONDS_FOR_STACKS
        all_came = False
        while time.monotonic() < until and not all_came:
            all_came = all(ward.stack for ward in self.wards)
            time.sleep(0.2)  # after the first word of the last one, too
            for ward in self.wards:
                ward.stack += os.read(ward.stacks, 2**20).decode(errors="replace")

    def end(self, found: Sequence[Ward]) -> None:
        """Says it, and ends all ranks of this host."""
        where = self.keep_stacks()
        if os.environ.get(WRAPPED):
            for ward in found:
                report_of(ward.rank, ward.pid, HUNG, f"{ward.words(self.seconds)}. Stacks of all: {where}", hung=True)
        else:
            self.tell(found, where)
        able = [ward for ward in self.wards if ward.stack]
        for ward in able:
            ward.cells[END] = 1
        until = time.monotonic() + SECONDS_TO_END
        while time.monotonic() < until and any(ward.state != "X" for ward in able):
            time.sleep(0.1)
        for ward in self.wards:
            with contextlib.suppress(ProcessLookupError):
                os.kill(ward.pid, signal.SIGKILL)

    def keep_stacks(self) -> str:
        """Where they lie: in the run directory, once there is one."""
        for ward in self.wards if (self.run_dir / "run_status.json").exists() else ():
            path = self.run_dir / f"stacks-rank{ward.rank}.txt"
            with contextlib.suppress(OSError):
                path.write_text(ward.stack or "no answer: this process was stopped, or in the kernel\n")
        return f"{self.run_dir}/stacks-rank*.txt"

    def tell(self, found: Sequence[Ward], where: str) -> None:
        """Where nobody above the ranks does."""
        host = socket.gethostname()
        first = found[0]
        who = "; ".join(f"rank {ward.rank} of host {host} {ward.words(self.seconds)}" for ward in found)
        reason = f"lost: {who}. Stacks of all: {where}."
        if any((self.run_dir / "checkpoints").glob("step-*")):
            reason += " Fix: --resume auto goes on from the newest checkpoint."
        if run_status.read(self.run_dir).get("state") == "running":
            ended = {"state": "lost", "exit_code": HUNG, "reason": reason}
            run_status.amend(self.run_dir, **ended, host=host, rank=first.rank, pid=first.pid)
        say(f"\n{reason}")


if __name__ == "__main__":
    Watchdog(Order(**json.loads(sys.argv[1]))).watch()
