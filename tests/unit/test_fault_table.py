"""tests/FAULTS.md holds every row, and names no test that does not exist."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
TABLE = (TESTS / "FAULTS.md").read_text(encoding="utf-8")
ROWS = {row: cells for row, cells in re.findall(r"^\| ([BIF]\d+) \|(.*)\|$", TABLE, re.MULTILINE)}
EXISTING = {
    name for file in TESTS.rglob("test_*.py") for name in re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE)
}


def test_every_row_is_there_once() -> None:
    (unused,) = re.findall(r"^Numbers not in use: (.*)$", TABLE, re.MULTILINE)
    rows = re.findall(r"^\| (B\d+) \|", TABLE, re.MULTILINE) + unused.split()
    assert sorted(rows) == [f"B{number:02d}" for number in range(1, 99)]
    assert [row for row in ROWS if row.startswith("I")] == [f"I{number}" for number in range(1, 8)]
    assert [row for row in ROWS if row.startswith("F")] == [f"F{number}" for number in range(1, 27)]


def test_every_row_names_tests_that_exist_or_its_reason() -> None:
    for row, cells in ROWS.items():
        named = re.findall(r"`(test_\w+)`", cells)
        reasoned = re.search(r"not in this version: |does not apply, because |not tried", cells)
        assert named or reasoned, f"{row} names neither a test nor a reason"
        assert [name for name in named if name not in EXISTING] == [], row


def test_every_test_that_is_named_after_a_row_has_that_row() -> None:
    rows = {row.lower() for row in ROWS}
    for name in EXISTING:
        named = re.match(r"test_([bif]\d+)_", name)
        assert not named or named[1] in rows, name
