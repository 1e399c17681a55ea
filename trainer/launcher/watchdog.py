"""The watchdog of a host: a process beside its ranks that looks whether their heartbeats go on.

A process, since a rank that holds the GIL silences its own threads. A rank that hangs is told from those that wait for
it, the stacks of all of this host are kept, and they are ended. A collective's time-out does none of this, and not
every group of DeepSpeed's has the one that is asked for.
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
import tempfile
import threading
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
    """What the watchdog is told."""

    ranks: list[tuple[int, int, int, int]]
    """Rank, and its ``Shared``."""
    limits: list[tuple[float, str]]
    """Of each phase, the seconds without a sign of life and the key that says so."""
    run_dir: str
    lease: tuple[str, bool] | None = None
    """Path and ``same_host``, where the ranks are under one."""


class Guard:
    """The watchdog's process, as its parent sees it."""

    def __init__(self, order: Order) -> None:
        # Without site, which takes longer than all that the watchdog needs; nor a trainer.py that lies where the run
        # was started.
        command = [sys.executable, "-S", "-P", "-m", "trainer.launcher.watchdog", json.dumps(asdict(order))]
        package = str(Path(__file__).parents[2])
        self.process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": package}, stdin=subprocess.DEVNULL)
        self.stopped = False
        threading.Thread(target=self._miss, daemon=True).start()

    def stop(self) -> None:
        self.stopped = True
        self.process.kill()
        self.process.wait()

    def _miss(self) -> None:
        code = self.process.wait()
        if not self.stopped:
            say(f"The watchdog of host {socket.gethostname()} has ended ({code}): from here on no rank's hang is seen.")


def start(own: Rank, everyone: Sequence[Rank], limits: Sequence[tuple[float, str]], run_dir: Path) -> Guard | None:
    """The watchdog, from the first rank of each host; None from the others."""
    beside = [one for one in everyone if one.host == own.host]
    if own != beside[0]:
        return None
    ranks = [(one.rank, one.shared.pid, one.shared.cells, one.shared.stacks) for one in beside]
    return Guard(Order(ranks, list(limits), str(run_dir.absolute()), lease.kept))


class Ward:
    """A rank, as the watchdog sees it."""

    def __init__(self, limits: Sequence[tuple[float, str]], rank: int, pid: int, cells: int, stacks: int) -> None:
        """OSError where this process may not look."""
        self.rank, self.pid, self.limits = rank, pid, limits
        self.cells = memoryview(bytearray(8 * CELLS)).cast("q")
        self.beats, self.silent, self.stack = -1, 0.0, ""
        self.waits = False
        """Since its last beat, in a collective, as its stack has shown."""
        self.born = self._stat()[1]
        try:
            self.stacks = os.open(f"/proc/{pid}/fd/{stacks}", os.O_RDONLY)
            with open(f"/proc/{pid}/fd/{cells}", "r+b") as file:
                self.cells = memoryview(mmap.mmap(file.fileno(), 8 * CELLS)).cast("q")
        except OSError:
            if self.state != "X":
                raise
            self.stacks = os.open(os.devnull, os.O_RDONLY)

    def look(self, passed: float) -> None:
        """``passed``: seconds since the last look."""
        beats = self.cells[BEATS]
        self.silent += passed
        if beats != self.beats:
            self.beats, self.silent, self.waits = beats, 0.0, False

    @property
    def limit(self) -> float:
        return self.limits[self.cells[PHASE]][0]

    @property
    def state(self) -> str:
        """The kernel's letter for its main thread; "X" of one that has ended, which the launcher answers, also where
        its number has gone to another process."""
        letter, born = self._stat()
        return letter if born == self.born else "X"

    def _stat(self) -> tuple[str, str]:
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2].split()
        except OSError:
            return "X", ""
        return fields[0].replace("Z", "X"), fields[19]

    def signal(self, number: int) -> None:
        if self.state != "X":
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    @property
    def in_a_collective(self) -> bool:
        """Whether its main thread, the last in a dump, was. DeepSpeed's are not counted."""
        # In the whole of it: what counts the tensors of a pass, say, lies further in.
        return bool(IN_A_COLLECTIVE.search(re.split(r"(?m)^(?:Current t|T)hread ", self.stack)[-1]))

    def words(self) -> str:
        seconds, key = self.limits[self.cells[PHASE]]
        where = f"in phase {PHASES[self.cells[PHASE]]} of step {self.cells[STEP]}"
        if not self.cells[STEP]:
            where = f"in phase {PHASES[self.cells[PHASE]]}, before the first step"
        if self.state == "X":
            return f"ended {where} (process {self.pid}), and the others of this host wait for it"
        what = "waits for another host" if self.waits else "hangs"
        return (
            f"{what} {where}: no sign of life for {self.silent:.0f} s ({key} = {seconds:g}), process "
            f"{self.pid} is {STATES.get(self.state, self.state)}"
        )


class Watchdog:
    def __init__(self, order: Order) -> None:
        self.run_dir = Path(order.run_dir)
        self.lease = lease.View(Path(order.lease[0]), same_host=order.lease[1]) if order.lease else None
        self.wards: list[Ward] = []
        for rank in order.ranks:
            try:
                self.wards.append(Ward(order.limits, *rank))
            except OSError as error:
                say(f"Rank {rank[0]} of host {socket.gethostname()} is not watched: {error}. Its hang would go unseen.")

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
        if len(ended) == len(self.wards) or any(
            one.silent < min(SECONDS_AFTER_A_LOSS, one.limit) for one in self.wards
        ):
            return []
        if ended:
            self.dump()
        return ended

    def hung(self) -> list[Ward]:
        """Those that are silent for too long and wait for nobody here: no other has come to fewer collectives, and
        their stacks show none. Where all wait, for a rank of another host perhaps, whose own watchdog will say it: all
        of them, but after twice that time."""
        behind = min(one.cells[MET] for one in self.wards)
        silent = [
            one for one in self.wards if one.silent >= one.limit and one.cells[MET] == behind and one.state != "X"
        ]
        late = all(one.silent >= 2 * one.limit for one in self.wards)
        if not late and all(one.waits for one in silent):
            return []
        self.dump()
        for one in silent:
            one.waits = one.in_a_collective
        # One that is stopped answers nothing.
        found = [one for one in silent if not one.stack] or [one for one in silent if not one.waits]
        return found or (silent if late else [])

    def dump(self) -> None:
        """The stacks of all ranks of this host, as they are now."""
        for ward in self.wards:
            ward.stack = ""
            os.lseek(ward.stacks, 0, os.SEEK_END)
            ward.signal(signal.SIGUSR1)
        until = time.monotonic() + SECONDS_FOR_STACKS
        all_came = False
        while time.monotonic() < until and not all_came:
            all_came = all(ward.stack for ward in self.wards if ward.state != "X")
            time.sleep(0.2)  # after the first word of the last one, too
            for ward in self.wards:
                ward.stack += os.read(ward.stacks, 2**20).decode(errors="replace")

    def end(self, found: Sequence[Ward]) -> None:
        """Says it, and ends all ranks of this host."""
        kept = self.keep_stacks()
        if os.environ.get(WRAPPED):
            for ward in found:
                report_of(ward.rank, ward.pid, HUNG, f"{ward.words()}.{kept}".removesuffix("."), hung=True)
        else:
            self.tell(found, kept)
        able = [ward for ward in self.wards if ward.stack]
        for ward in able:
            ward.cells[END] = 1
        until = time.monotonic() + SECONDS_TO_END
        while time.monotonic() < until and any(ward.state != "X" for ward in able):
            time.sleep(0.1)
        for ward in self.wards:
            ward.signal(signal.SIGKILL)

    def keep_stacks(self) -> str:
        """Where they lie, in words: in the run directory, once there is one."""
        folder = self.run_dir
        try:
            if not (folder / "run_status.json").exists():
                folder = Path(tempfile.mkdtemp(prefix="zero-grpo-stacks-"))
            for ward in self.wards:
                said = ward.stack or "no answer: this process was stopped, or in the kernel\n"
                (folder / f"stacks-rank{ward.rank}.txt").write_text(said)
        except OSError as error:
            return f" Their stacks cannot be written: {error}."
        return f" Stacks of all ranks of this host: {folder}/stacks-rank*.txt."

    def tell(self, found: Sequence[Ward], kept: str) -> None:
        """Where nobody above the ranks does."""
        host = socket.gethostname()
        first = found[0]
        who = "; ".join(f"rank {ward.rank} of host {host} {ward.words()}" for ward in found)
        reason = f"lost: {who}.{kept}"
        if any((self.run_dir / "checkpoints").glob("step-*")):
            reason += " Fix: --resume auto goes on from the newest checkpoint."
        if run_status.read(self.run_dir).get("state") == "running":
            ended = {"state": "lost", "exit_code": HUNG, "reason": reason}
            run_status.amend(self.run_dir, **ended, host=host, rank=first.rank, pid=first.pid)
        say(f"\n{reason}")


if __name__ == "__main__":
    for asked_to_end in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(asked_to_end, signal.SIG_IGN)  # meant for its rank, whose end is its own
    Watchdog(Order(**json.loads(sys.argv[1]))).watch()
