"""Where this rank is, in memory that the watchdog of its host shares. A beat is a store, without a system call.

It belongs to the process, as its signals do.
"""

import faulthandler
import mmap
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

PHASES = ("start", "evaluate", "rollout", "reward", "reference", "backward", "update", "save", "export")
"""Of a run."""
POINTS = ("save.after_shard",)
"""Of a phase."""
BEATS, MET, PHASE, STEP, END, CELLS = range(6)
"""Places in the shared memory: beats; collectives and phases that this rank has come to, which all ranks do alike;
phase; the step under way; whether the watchdog asks to end."""
HUNG = 4
"""Exit code of a rank that the watchdog asks to end."""

at_phase: Callable[[str, int], None] | None = None
"""Called at every phase and point, with the step; a test's fault comes about in it (faults.py)."""
_cells = memoryview(bytearray(8 * CELLS)).cast("q")


@dataclass(frozen=True)
class Shared:
    """What the watchdog finds of a rank below /proc/PID/fd."""

    pid: int
    cells: int
    stacks: int
    """A file that gets the stacks of all threads at every SIGUSR1, also while a thread holds the GIL."""


def share() -> Shared:
    """From now on others can look. Files without a name: nothing is left of them, however this process ends."""
    global _cells
    cells, stacks = os.memfd_create("heartbeat"), os.memfd_create("stacks")
    os.ftruncate(cells, 8 * CELLS)
    _cells = memoryview(mmap.mmap(cells, 8 * CELLS)).cast("q")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    threading.Thread(target=_end_when_asked, args=(_cells,), daemon=True).start()
    return Shared(os.getpid(), cells, stacks)


def enter(phase: str, *, step: int | None = None) -> None:
    """This rank begins a phase, or passes a point of one. ``step``: the one under way, counted from 1."""
    name = phase.partition(".")[0]
    if step is not None:
        _cells[STEP] = step
    _cells[PHASE] = PHASES.index(name)
    _cells[MET] += 1
    beat()
    if at_phase is not None:
        at_phase(phase, _cells[STEP])


def beat() -> None:
    """This rank gets on with its phase."""
    _cells[BEATS] += 1


def met() -> None:
    """This rank has come to a collective, in which it waits for every rank that has come to fewer."""
    _cells[MET] += 1
    _cells[BEATS] += 1


def _end_when_asked(cells: memoryview) -> None:
    """While others wait for a rank that hangs, their main threads sit in a collective."""
    while not cells[END]:
        time.sleep(0.2)
    os._exit(HUNG)
