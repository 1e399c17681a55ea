"""A run file as text: read, parsed, and asked for the line of a key."""

import difflib
import re
import tomllib
from pathlib import Path as FilePath
from typing import Any

from trainer.config.fields import Path
from trainer.errors import Refused
from trainer.outside import too_deep

MAX_BYTES = 1 << 20
# Lines are found by parsing ever longer beginnings of the file: exact, and quick at the length of a run file.
MAX_LINES = 2000


def read(path: str) -> str:
    """The text of a run file. Raises `Refused` with the reason for anything that is not one."""
    file = FilePath(path)
    try:
        if file.is_dir():
            raise Refused(f"{path}: this is a directory, expected a run file (TOML). {_run_files_in(file)}")
        if not file.exists():
            raise Refused(f"{path}: there is no such file. {_like(file)}")
        if not file.is_file():
            raise Refused(f"{path}: not a regular file, expected a run file (TOML).")
        with file.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise Refused(f"{path}: cannot be read: {error}.") from None
    if len(data) > MAX_BYTES:
        raise Refused(
            f"{path}: larger than {MAX_BYTES >> 20} MiB, expected a run file (TOML). Is this a data set or a"
            " checkpoint?"
        )
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise Refused(f"{path}: saved as UTF-16, expected UTF-8. Save it again as UTF-8.")
    if b"\0" in data:
        raise Refused(f"{path}: a binary file, expected a run file (TOML text).")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise Refused(
            f"{path}:{line}: byte 0x{data[error.start]:02x} is not UTF-8. Save the file again as UTF-8."
        ) from None
    if not any(line.strip() and not line.lstrip().startswith("#") for line in text.splitlines()):
        raise Refused(f"{path}: the file is empty. `zero-grpo init first-run > run.toml` writes one to start from.")
    return text


def parse(path: str, text: str) -> dict[str, Any]:
    """The file as nested tables. Raises `Refused` with the line and what usually mends it."""
    try:
        tree = tomllib.loads(text)
        if too_deep(tree):
            raise RecursionError
        return tree
    except RecursionError:
        raise Refused(f"{path}: lists or tables nested too deeply.") from None
    except ValueError as error:  # TOMLDecodeError, and Python's own refusal of absurd numbers and dates
        found = re.search(r"\(at line (\d+), column \d+\)", str(error))
        lines = text.splitlines()
        number = int(found.group(1)) if found else len(lines)
        line = lines[min(number, len(lines)) - 1]
        reason = re.sub(r" \(at .*\)$", "", str(error))
        raise Refused(f"{path}:{number}: not valid TOML: {reason}.{_shown(line)}{_mend(line)}") from None


def key_lines(text: str) -> dict[Path, int]:
    """The line (from 1) on which each table and key is set; empty for a text that is too long."""
    lines = text.split("\n")
    found: dict[Path, int] = {}
    if len(lines) > MAX_LINES:
        return found
    start = 1  # of the statement that is being read; it may go over several lines
    for end in range(1, len(lines) + 1):
        try:
            tree = tomllib.loads("\n".join(lines[:end]) + "\n")
        except ValueError:
            continue
        for path in paths(tree):
            found.setdefault(path, start)
        start = end + 1
    return found


def paths(tree: Any, prefix: Path = ()) -> list[Path]:
    """Every table, list item and key of parsed TOML."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [path for name, value in items for path in [(*prefix, name), *paths(value, (*prefix, name))]]


def _like(file: FilePath) -> str:
    folder = file.parent
    if not folder.is_dir():
        return f"The folder {folder} does not exist either."
    names = [other.name for other in folder.iterdir() if other.suffix == ".toml"]
    close = difflib.get_close_matches(file.name, names, n=1)
    return (
        f"Did you mean {folder / close[0]}?"
        if close
        else "`zero-grpo init first-run > run.toml` writes one to start from."
    )


def _run_files_in(folder: FilePath) -> str:
    names = sorted(other.name for other in folder.iterdir() if other.suffix == ".toml")
    return f"Run files in it: {', '.join(names[:5])}." if names else "It holds no run file."


def _shown(line: str) -> str:
    # An unquoted value may be a key of somebody's account: only the part before it is repeated.
    name = line.split("=")[0].strip()
    return f" The line begins: {name[:60]}" if name else ""


def _mend(line: str) -> str:
    name, equals, value = line.partition("=")
    value = value.split("#")[0].strip()
    if value in ("True", "False"):
        return f"\n  Write {value.lower()}, in small letters."
    if value in ("None", "null"):
        return "\n  TOML has no null: leave the key out."
    if equals and re.fullmatch(r"[A-Za-z_./~][^\"'\[\]{}]*", value):
        return f'\n  Text stands in quotes: {name.strip()} = "..."'
    if not equals and re.match(r"\s*[A-Za-z_.]+\s*:", line):
        return "\n  TOML writes key = value, not key: value."
    if any(mark in line for mark in "\u201c\u201d\u2018\u2019"):
        return '\n  Use straight quotes: "..."'
    return ""
