"""What comes from outside: JSON by one reader, so that whatever a file or a service holds is a value or one error, in
words; and paths that no file system takes."""

import json
import math
from pathlib import Path
from typing import Any

DEEPEST = 100
"""Lists and objects inside each other. Python's own writers give up near 1000, and pickle below 500."""
HOLDERS = (dict, list, tuple)
MOST_DIGITS = 308
"""Of an integer that a float can hold."""


LONGEST_NAME, LONGEST_PATH = 255, 4096
"""Bytes, of Linux's file systems."""


class NotJson(ValueError):
    """Why a text is no JSON that can be used. ``line`` and ``column`` from 1, where its grammar breaks."""

    def __init__(self, reason: str, line: int = 0, column: int = 0) -> None:
        self.reason, self.line, self.column = reason, line, column
        self.place = f", line {line}, column {column}" if line else ""
        self.place_in_line = f" at column {column}" if line else ""
        super().__init__(reason + self.place)


def parsed(text: str | bytes, *, strict: bool = False, any_number: bool = False) -> Any:
    """The value. ``strict``: without NaN, Infinity, and keys that stand twice in an object. ``any_number``: also one
    that no float holds, 1e999 or an integer of thousands of digits. Raises NotJson."""
    hooks: dict[str, Any] = {} if any_number else {"parse_int": _integer}
    if strict:
        hooks |= {"object_pairs_hook": _one_of_each, "parse_constant": _no_number}
        hooks |= {} if any_number else {"parse_float": _finite}
    try:
        text = text if isinstance(text, str) else text.decode("utf-8-sig")
        value = json.loads(text, **hooks)
    except NotJson:
        raise
    except json.JSONDecodeError as error:
        raise NotJson(error.msg, error.lineno, error.colno) from None
    except UnicodeDecodeError:
        raise NotJson("it is not UTF-8") from None
    except ValueError as error:  # Python's own limit of 4300 digits
        raise NotJson(str(error)) from None
    except RecursionError:
        raise NotJson("nested too deeply") from None
    if text.count("[") + text.count("{") > DEEPEST and too_deep(value):
        raise NotJson("nested too deeply")
    return value


def read(file: Path) -> Any:
    """The value in a file. Raises NotJson or OSError."""
    return parsed(file.read_bytes())


def too_deep(value: Any) -> bool:
    """Whether lists and objects lie deeper inside each other than DEEPEST."""
    level = [value]
    for _ in range(DEEPEST):
        holders = [one for one in level if isinstance(one, HOLDERS)]
        level = [inner for one in holders for inner in (one.values() if isinstance(one, dict) else one)]
    return any(isinstance(one, HOLDERS) for one in level)


def path_problem(text: str) -> str:
    """Why no file can have this path; "" where one may."""
    try:
        parts = text.encode().split(b"/")
    except UnicodeEncodeError:
        return "it is not UTF-8"
    if "\0" in text:
        return "it holds a NUL character"
    if max(map(len, parts)) > LONGEST_NAME:
        return f"a name in it is longer than {LONGEST_NAME} bytes"
    return "" if len(text.encode()) < LONGEST_PATH else f"it is longer than {LONGEST_PATH} bytes"


def _integer(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise NotJson(f"an integer of {len(digits)} digits, more than {MOST_DIGITS}: write it as text")
    return int(digits)


def _finite(digits: str) -> float:
    value = float(digits)
    return value if math.isfinite(value) else _no_number(digits)


def _no_number(name: str) -> Any:
    raise NotJson(f"{name} is no number")


def _one_of_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise NotJson(f'the key "{name:.60}" is given twice in one object; keep one')
        found[name] = value
    return found
