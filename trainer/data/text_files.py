"""The text formats: JSON lines, one JSON array, CSV. UTF-8, a byte order mark is accepted."""

import codecs
import csv
import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

from trainer.data.table import RowProblem, Table, shown
from trainer.errors import Refused

UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def read_json_lines(path: Path, label: str) -> Table:
    """One JSON object a line; blank lines are passed over, and lines that are no object are listed as unreadable."""
    table = Table(label, rows=[], numbers=[], lines=[], unreadable=[])
    assert table.lines is not None
    row = 0
    # Only "\n" ends a line: str.splitlines would also cut at U+2028, which JSON allows inside strings.
    for line, text in enumerate(_text(path).split("\n"), start=1):
        if not text.strip():
            continue
        row += 1
        value = _object(text, row, line)
        if isinstance(value, RowProblem):
            table.unreadable.append(value)
            continue
        table.rows.append(value)
        table.numbers.append(row)
        table.lines.append(line)
    return table


def read_json(path: Path, label: str) -> Table:
    """A JSON array of objects. JSON lines under the name .json are read as such.

    Raises:
        Refused: the file is neither.
    """
    text = _text(path)
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        if text.lstrip().startswith("{") and _is_json(text.lstrip().split("\n", 1)[0]):
            return read_json_lines(path, label)
        raise Refused(
            f"{label}: not valid JSON at line {error.lineno}, column {error.colno}: {error.msg}.\n"
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
            table.unreadable.append(RowProblem(row, None, "row", shown(value), "an object", "not an object"))
    return table


def read_csv(path: Path, label: str) -> Table:
    """Comma-separated values with a header line; every value stays a string.

    Raises:
        Refused: no usable header, or quoting that the csv module cannot read.
    """
    table = Table(label, rows=[], numbers=[], lines=[], unreadable=[])
    assert table.lines is not None
    reader = csv.reader(io.StringIO(_text(path), newline=""), strict=True)
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
            if len(cells) != len(header):
                got, expected = f"{len(cells)} values", f"{len(header)}, one for each column"
                table.unreadable.append(RowProblem(row, line, "row", got, expected, "wrong number of values"))
                continue
            table.rows.append(dict(zip(header, cells, strict=True)))
            table.numbers.append(row)
            table.lines.append(line)
    except csv.Error as error:
        raise Refused(
            f"{label}: the row that starts at line {start} is not valid CSV: {error}.\n"
            'Expected values separated by commas, quoted with " where they hold commas, quotes or line breaks.'
        ) from error
    return table


def _header(cells: list[str], label: str) -> list[str]:
    twice = [name for name, count in Counter(cells).items() if count > 1]
    if twice:
        raise Refused(f"{label}: the header names {', '.join(map(shown, twice))} twice; give each column its own name.")
    return cells


def _object(text: str, row: int, line: int) -> dict[str, Any] | RowProblem:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        got = f"invalid JSON at column {error.colno} ({error.msg}): {shown(text[max(0, error.colno - 20) :], 40)}"
        return RowProblem(row, line, "row", got, "one JSON object a line", "invalid JSON")
    if not isinstance(value, dict):
        return RowProblem(row, line, "row", shown(value), "a JSON object", "not an object")
    return value


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except json.JSONDecodeError:
        return False
    return True


def _text(path: Path) -> str:
    """The file decoded, with its line ends as they are."""
    content = path.read_bytes()
    if content.startswith(UTF16):
        raise Refused(f"{path}: the file is UTF-16. Save it as UTF-8: iconv -f utf-16 -t utf-8 IN > OUT")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise Refused(
            f"{path}: line {line} is not UTF-8 (byte 0x{error.object[error.start]:02x}).\n"
            "Expected UTF-8. For Chinese text from Windows try: iconv -f gb18030 -t utf-8 IN > OUT"
        ) from error
