"""Files that are written where others may have put links: nothing is ever written through one."""

import os
from pathlib import Path
from typing import TextIO


def open_new(path: Path) -> TextIO:
    """A new file for writing and reading, in place of what lies there; what a link points to stays as it is."""
    path.unlink(missing_ok=True)
    # "x" makes the file or fails, also where a link has come meanwhile.
    # A lone surrogate in the data is no UTF-8; backslashreplace writes it as \udXXX, which is JSON's own escape.
    return path.open("x+", encoding="utf-8", errors="backslashreplace", newline="\n")


def open_to_append(path: Path) -> TextIO:
    """OSError where it is a link."""
    return open(path, "a", encoding="utf-8", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666))
