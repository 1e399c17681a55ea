"""tests/INPUT.md holds every row, and names no test and no case that does not exist."""

import re

from tests.bad_input import CASES
from tests.unit.test_fault_table import EXISTING, TESTS

TABLE = (TESTS / "INPUT.md").read_text(encoding="utf-8")
ROWS = {row: cells for row, cells in re.findall(r"^\| ([A-Z]\d+) \|(.*)\|$", TABLE, re.MULTILINE)}
KINDS = {"C": 8, "D": 9, "H": 8, "M": 6, "A": 4, "R": 9, "K": 5, "S": 15}


def test_every_row_is_there() -> None:
    assert list(ROWS) == [f"{kind}{number}" for kind, most in KINDS.items() for number in range(1, most + 1)]


def test_every_row_names_tests_or_cases_that_exist() -> None:
    for row, cells in ROWS.items():
        tests, cases = re.findall(r"`(test_\w+)`", cells), re.findall(r"\*([^*]+)\*", cells)
        assert tests or cases, row
        assert [name for name in tests if name not in EXISTING] == [], row
        assert [name for name in cases if name not in CASES] == [], row
