"""What ranks say through the launcher's pipe: lines for the user, and reports for the one who started them.

Both carry the id of the launch, so that nothing that a reward function prints, a completion say, is taken for either.
"""

import contextlib
import json
import os
import socket
import sys
from dataclasses import asdict, dataclass
from typing import Any

from trainer.errors import printable, redacted

WRAPPED = "ZERO_GRPO_WRAPPED"
"""The variable that holds the id of the launch, where ``zero-grpo train --gpus`` or ``--hostfile`` started the rank."""


@dataclass(frozen=True)
class Report:
    """Of one rank. ``code``: None when it begins, its exit code when it ends, and ``why`` in the user's words."""

    rank: int
    host: str
    pid: int
    code: int | None = None
    why: str = ""
    hung: bool = False
    """Said by the watchdog of its host."""


def mark(launch_id: str) -> str:
    """What a line for the user begins with; a report begins with two."""
    return f"\x1e{launch_id}\x1e"


def say(text: str) -> None:
    """Prints for the user, from rank 0, also through the launcher's pipe. All that is printed goes through here: files
    that were given choose what it holds, which must not steer the terminal."""
    launch_id = os.environ.get(WRAPPED)
    # A write for each line: one of up to 4 KiB goes through a pipe in one piece, whatever the other ranks print.
    for line in printable(redacted(text)).split("\n"):
        with contextlib.suppress(OSError):  # a terminal that was closed; what is left to do is worth more than the word
            sys.stdout.write(f"{mark(launch_id)}{line}\n" if launch_id else f"{line}\n")
            sys.stdout.flush()


def report(code: int | None = None, why: str = "") -> None:
    """Tells the one who started the ranks that this one begins or ends; nothing where nobody did."""
    if os.environ.get(WRAPPED):
        report_of(int(os.environ["RANK"]), os.getpid(), code, why)


def report_of(rank: int, pid: int, code: int | None, why: str, *, hung: bool = False) -> None:
    """The same of a rank on this host."""
    told = Report(rank, socket.gethostname(), pid, code, redacted(why)[:600], hung)
    # Short of 4 KiB, also when each character takes six: a pipe takes that in one piece.
    sys.stdout.write(f"{mark(os.environ[WRAPPED]) * 2}{json.dumps(asdict(told))}\n")
    sys.stdout.flush()


def heard(line: str, launch_id: str) -> str | Report | None:
    """A line for the user, a report, or None: neither. What stands before the mark is pdsh's or a library's."""
    _, found, rest = line.rstrip("\n").partition(mark(launch_id))
    if not found:
        return None
    if not rest.startswith(mark(launch_id)):
        return rest
    try:
        told: dict[str, Any] = json.loads(rest.removeprefix(mark(launch_id)))
        return Report(**told)
    except (ValueError, TypeError):  # two ranks' lines in one
        return None
