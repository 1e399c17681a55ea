"""How a run ends early. Each class carries the exit code of its kind; the message is all that the user sees, and holds
no key of an account."""

import errno
import os
import re
import shutil
import unicodedata
from pathlib import Path

# OpenAI and DashScope, Hugging Face, GitHub, AWS, Google, Slack; an HTTP header; a URL with a password.
KEYS = re.compile(
    r"\b(sk-[\w-]{8,}|hf_[A-Za-z0-9]{10,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|AKIA[A-Z0-9]{16}|AIza[\w-]{30,}|xox[abp]-[\w-]{10,})"
    r"|\bBearer\s+\S{8,}|://[^/\s:@]+:[^/\s:@]+@"
)
NAMES_OF_KEYS = re.compile(r"TOKEN(?!IZ)|KEY|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
"""Of variables, anywhere in the name: JUDGE_KEY_2."""
KEYS_OF_RUN: set[str] = set()
"""Variables that hold a key whatever they are called: every key_env of the run file."""
SHORTEST_KEY = 8


def redacted(text: str) -> str:
    """``text`` without what looks like a key, and without every key that the environment holds: what fails may quote
    one, a service its header or a reward function its arguments."""
    for name, value in os.environ.items():
        named = name in KEYS_OF_RUN or NAMES_OF_KEYS.search(name)
        if named and len(value) >= SHORTEST_KEY and not value.startswith(("/", ".", "~")):
            text = text.replace(value, "[secret]")
    return KEYS.sub("[secret]", text)


def printable(text: str) -> str:
    """Text that cannot steer a terminal: newlines stay, every other control or format character is shown as its escape.

    Cc: escape sequences. Cf: bidirectional overrides. Cs: lone surrogates, which cannot be printed. Zl, Zp: new lines.
    """
    return "".join(
        char if char == "\n" or unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Zl", "Zp") else escape(char)
        for char in text
    )


def escape(char: str) -> str:
    return {"\t": "\\t", "\r": "\\r"}.get(char) or char.encode("unicode_escape", "backslashreplace").decode("ascii")


class RunEnd(Exception):
    """A run that ends for a reason the user must read: one message, no traceback."""

    exit_code: int = 1

    def __init__(self, message: str = "") -> None:
        super().__init__(redacted(message))


class Refused(RunEnd):
    """Something the user gave cannot work: config, data, model, hosts or memory. Raised before the first step;
    nothing was written."""

    exit_code = 2

    def __init__(self, *problems: str, of: str = "") -> None:
        """Several problems (``of`` a file, say) are one message, each indented below their number."""
        message = "\n".join(problems)
        if len(problems) > 1:
            listed = "\n".join("  " + problem.replace("\n", "\n    ") for problem in problems)
            message = f"{of}{': ' if of else ''}{len(problems)} problems.\n{listed}"
        super().__init__(message)
        self.problems = tuple(map(redacted, problems))


class Stopped(RunEnd):
    """A guard ended a running job (non-finite values, a reward that fails too often); the last good state is kept."""

    exit_code = 3


def refused_by_disk(folder: Path, error: OSError, what: str = "cannot be written") -> Stopped:
    """What a run ends with where a disk refuses."""
    fixes = dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "make room")
    fixes |= dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "make it writable")
    try:
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        free = f"{shutil.disk_usage(there).free / 1e6:.2f} MB are free"
    except OSError as gone:
        free = f"how much is free it does not say: {gone.strerror}"
    fix = fixes.get(error.errno or 0, "see to the disk, its room and its mount")
    return Stopped(f"{folder}: {what}: {error} ({free}). Fix: {fix}.")


class OutOfMemory(Stopped):
    """A rank ran out of memory, perhaps alone: the others cannot agree with it on anything any more."""

    def __init__(self, message: str, *, rank: int, begun: bool, whole: bool) -> None:
        """``begun``: the first step had; before it the run is refused. ``whole``: the state between two steps can
        still be saved where there is no other rank."""
        super().__init__(message)
        self.rank, self.whole = rank, whole
        self.exit_code = self.exit_code if begun else Refused.exit_code


class NoCheckpoint(RunEnd):
    """A checkpoint was asked for, and none can be used. Never a fresh start instead."""

    exit_code = 5


class Lost(RunEnd):
    """A rank that this one waited for has gone, or hangs; nothing can be agreed any more."""

    exit_code = 4


class Preempted(RunEnd):
    """SIGTERM, from a scheduler or a launcher; the ranks have agreed where they stop."""

    exit_code = 75


class Interrupted(RunEnd):
    """Ctrl-C; the ranks have agreed where they stop."""

    exit_code = 130


KINDS = {kind.__name__: kind for kind in (Refused, Stopped, NoCheckpoint, Lost, Preempted, Interrupted)}
"""Those that ranks agree on, by name."""
