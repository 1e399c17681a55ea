"""Rows as the user wrote them, what is wrong with some of them, and the one message that says so."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

SHOWN = 20
"""Bad rows listed one by one in a message; the rest is counted by kind."""


@dataclass(frozen=True)
class RowProblem:
    """One row that cannot be used."""

    row: int
    """From 1, in file order."""
    line: int | None
    """Line of the file where the row starts, for text formats."""
    field: str
    got: str
    expected: str
    kind: str
    """What the rows that share this problem are counted under."""
    content: Any = None
    """The row as it was read, or the text that is no row."""

    def __str__(self) -> str:
        return f"{row_name(self.row, self.line)}, {self.field}: got {self.got}, expected {self.expected}"


@dataclass(frozen=True)
class Table:
    """All readable rows of one source, with the rows that could not even be read."""

    label: str
    """The source as messages name it: `train.jsonl`, `openai/gsm8k (split "train")`."""
    rows: list[dict[str, Any]]
    numbers: list[int]
    """Row number of each row, from 1; unreadable rows count."""
    lines: list[int] | None
    """Line of each row where the file is text."""
    unreadable: list[RowProblem]

    @property
    def columns(self) -> list[str]:
        """Every column that some row has, in order of appearance."""
        return list(dict.fromkeys(name for row in self.rows for name in row))

    def problem(self, place: int, field: str, got: str, expected: str, kind: str) -> RowProblem:
        """A problem of `rows[place]`."""
        line = self.lines[place] if self.lines else None
        return RowProblem(self.numbers[place], line, field, got, expected, kind, self.rows[place])


def numbered(rows: list[dict[str, Any]], label: str, first: int = 1) -> Table:
    """A table of which every row was read, from a source without lines. ``first``: the number of its first row."""
    return Table(label, rows, numbers=list(range(first, first + len(rows))), lines=None, unreadable=[])


def joined(blocks: Iterable[Table]) -> Table:
    """One table of blocks of a source, of which there is at least one."""
    first, *others = blocks
    for block in others:
        first.rows.extend(block.rows)
        first.numbers.extend(block.numbers)
        first.unreadable.extend(block.unreadable)
        if first.lines is not None and block.lines is not None:
            first.lines.extend(block.lines)
    return first


def row_name(row: int, line: int | None) -> str:
    return f"row {row}" if line is None or line == row else f"row {row} (line {line})"


def listed(problems: Sequence[RowProblem]) -> str:
    """The first problems one a line, then all of them counted by kind."""
    ordered = sorted(problems, key=lambda problem: problem.row)
    lines = [f"  {problem}" for problem in ordered[:SHOWN]]
    if len(ordered) > SHOWN:
        lines.append(f"  ... and {len(ordered) - SHOWN} more rows")
    lines.append(f"  by kind: {counted(problem.kind for problem in ordered)}")
    return "\n".join(lines)


def counted(kinds: Iterable[str]) -> str:
    """`3 x null, 1 x blank`, most frequent first."""
    return ", ".join(f"{count} x {kind}" for kind, count in Counter(kinds).most_common())


def shown(value: Any, limit: int = 60) -> str:
    """A value in an error message: its JSON on one line, cut to `limit` characters, with its kind where that helps."""
    text = json.dumps(value, ensure_ascii=False, default=repr, skipkeys=True)
    if not encodable(text) or not text.isprintable():
        text = json.dumps(value, ensure_ascii=True, default=repr, skipkeys=True)
    if len(text) > limit:
        text = f"{text[: limit - 4]} ..."
    match value:
        case bool() | None | str():
            return text
        case int() | float():
            return f"the number {text}"
        case dict():
            return f"the object {text}"
        case list() | tuple():
            return f"the list {text}"
        case _:
            return f"{type(value).__name__} {text}"


def encodable(text: str) -> bool:
    """False for text with half a surrogate pair, which UTF-8 cannot hold."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
