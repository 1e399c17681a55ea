"""The text formats: JSON lines, one JSON array, CSV. UTF-8, a byte order mark is accepted."""

import codecs
import csv
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from trainer.data.table import RowProblem, Table, shown
from trainer.errors import Refused
from trainer.outside import NotJson, parsed

UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
BLOCK = 4096
"""Rows that are in memory together where a source is read in blocks."""

Read = tuple[int, int, dict[str, Any] | RowProblem]
"""Row and line, each from 1, and what is there."""


def read_json_lines(path: Path, label: str) -> Iterator[Table]:
    """One JSON object a line; blank lines are passed over, and lines that are no object are listed as unreadable.

    In blocks, as all text that is larger than memory has to be read.
    """

    def rows() -> Iterator[Read]:
        row = 0
        # Only "\n" ends a line: universal line ends would also cut at "\r", which JSON allows between values.
        for line, text in enumerate(_lines(path, newline="\n"), start=1):
            if text.strip():
                row += 1
                yield row, line, _object(text.rstrip("\n"), row, line)

    return _blocks(label, rows())


def read_json(path: Path, label: str) -> Iterator[Table]:
    """A JSON array of objects. JSON lines under the name .json are read as such.

    Raises:
        Refused: the file is neither.
    """
    text = "".join(_lines(path, newline=""))
    try:
        content = parsed(text)
    except NotJson as error:
        if text.lstrip().startswith("{") and _is_json(text.lstrip().split("\n", 1)[0]):
            return read_json_lines(path, label)
        raise Refused(
            f"{label}{error.place}: not valid JSON: {error.reason}.\n"
            "Expected an array of objects, or one object a line (JSON lines). Correct the file at that place."
        ) from error
    if not isinstance(content, list):
        hint = ""
        if isinstance(content, dict):
            arrays = [name for name, value in content.items() if isinstance(value, list)]
            hint = f' The rows seem to lie under "{arrays[0]}".' if arrays else " A single row needs the array, too."
        raise Refused(f"{label}: got {shown(content)}, expected a JSON array of objects.{hint}")
    table = Table(label, rows=[], numbers=[], lines=None, unreadable=[])
    for row, value in enumerate(content, start=1):
        if isinstance(value, dict):
            table.rows.append(value)
            table.numbers.append(row)
        else:
            problem = RowProblem(row, None, "row", shown(value), "an object", "not an object", value)
            table.unreadable.append(problem)
    return iter([table])


def read_csv(path: Path, label: str) -> Iterator[Table]:
    """Comma-separated values with a header line; every value stays a string. In blocks.

    Raises:
        Refused: no usable header, or quoting that the csv module cannot read.
    """
    return _blocks(label, _csv_rows(path, label))


def _csv_rows(path: Path, label: str) -> Iterator[Read]:
    reader = csv.reader(_lines(path, newline=""), strict=True)
    header: list[str] = []
    row, start = 0, 1
    try:
        for cells in reader:
            line, start = start, reader.line_num + 1
            if not cells:
                continue
            if not header:
                header = _header(cells, label)
                continue
            row += 1
            if len(cells) == len(header):
                yield row, line, dict(zip(header, cells, strict=True))
            else:
                got, expected = f"{len(cells)} values", f"{len(header)}, one for each column"
                yield row, line, RowProblem(row, line, "row", got, expected, "wrong number of values", cells)
    except csv.Error as error:
        raise Refused(
            f"{label}: the row that starts at line {start} is not valid CSV: {error}.\n"
            'Expected values separated by commas, quoted with " where they hold commas, quotes or line breaks.'
        ) from error


def _blocks(label: str, rows: Iterator[Read]) -> Iterator[Table]:
    """At least one, which may be empty."""
    while True:
        table = Table(label, rows=[], numbers=[], lines=[], unreadable=[])
        assert table.lines is not None
        read = 0
        for row, line, value in islice(rows, BLOCK):
            read += 1
            if isinstance(value, RowProblem):
                table.unreadable.append(value)
            else:
                table.rows.append(value)
                table.numbers.append(row)
                table.lines.append(line)
        yield table
        if read < BLOCK:
            return


def _header(cells: list[str], label: str) -> list[str]:
    twice = [name for name, count in Counter(cells).items() if count > 1]
    if twice:
        raise Refused(f"{label}: the header names {', '.join(map(shown, twice))} twice; give each column its own name.")
    return cells


def _object(text: str, row: int, line: int) -> dict[str, Any] | RowProblem:
    try:
        value = parsed(text)
    except NotJson as error:
        got = f"invalid JSON{error.place_in_line} ({error.reason}): {shown(text[max(0, error.column - 20) :], 40)}"
        return RowProblem(row, line, "row", got, "one JSON object a line", "invalid JSON", text)
    if not isinstance(value, dict):
        return RowProblem(row, line, "row", shown(value), "a JSON object", "not an object", value)
    return value


def _is_json(text: str) -> bool:
    try:
        parsed(text)
    except NotJson:
        return False
    return True


def _lines(path: Path, newline: str) -> Iterator[str]:
    """The lines decoded, with their ends as they are. ``newline`` as ``open`` takes it."""
    with path.open("rb") as file:
        if file.read(2) in UTF16:
            raise Refused(f"{path}: the file is UTF-16. Save it as UTF-8: iconv -f utf-16 -t utf-8 IN > OUT")
    try:
        with path.open(encoding="utf-8-sig", newline=newline) as file:
            yield from file
    except UnicodeDecodeError as error:
        line = _first_undecodable(path)
        raise Refused(
            f"{path}: line {line} is not UTF-8 (byte 0x{error.object[error.start]:02x}).\n"
            "Expected UTF-8. For Chinese text from Windows try: iconv -f gb18030 -t utf-8 IN > OUT"
        ) from error


def _first_undecodable(path: Path) -> int:
    with path.open("rb") as file:
        for line, content in enumerate(file, start=1):
            try:
                content.decode("utf-8")
            except UnicodeDecodeError:
                return line
    raise AssertionError("every line decodes")
