"""Files that are written where others may have put links: nothing is ever written through one."""

import os
from pathlib import Path
from typing import TextIO


def open_new(path: Path) -> TextIO:
    """A new file for writing and reading, in place of what lies there; what a link points to stays as it is."""
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    # A lone surrogate in the data is no UTF-8; backslashreplace writes it as \\udXXX, which is JSON's own escape.
    return open(handle, "w+", encoding="utf-8", errors="backslashreplace", newline="\n")


def open_to_append(path: Path) -> TextIO:
    """OSError where it is a link."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    return open(handle, "a", encoding="utf-8")
