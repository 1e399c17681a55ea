"""The first of two readings of a source, in blocks: which columns it has, and of what kind."""

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.progress import Progress

from trainer.data.row_checks import MESSAGES_AS_TEXT, prompt_fault, surrogate_fault
from trainer.data.sources import Source, read_blocks
from trainer.data.table import RowProblem, Table
from trainer.data_tools.forms import Form, form_of, plain
from trainer.outside import NotJson, parsed

FLAGS = ("--prompt-column", "--answer-column")


@dataclass
class Survey:
    """Of a whole source."""

    label: str = ""
    form: Form = "plain"
    rows: int = 0
    """All that the source holds, unreadable ones included."""
    passed_over: int = 0
    """Entries of a log that are no query."""
    columns: list[str] = field(default_factory=list)
    strings: Counter[str] = field(default_factory=Counter)
    """By column: strings that could be a prompt, as training counts them."""
    lists: Counter[str] = field(default_factory=Counter)
    first: RowProblem | None = None
    """The first row that cannot be read."""

    @property
    def table(self) -> Table:
        """Without rows, with every column: what columns are mapped by."""
        return Table(self.label, [dict.fromkeys(self.columns)], [0], None, [])

    def mostly_strings(self, column: str) -> bool:
        return self.strings[column] >= self.lists[column]


def survey(source: Source, *, convert: bool) -> Survey:
    """``convert``: rows of a chat tool are taken as the prompts and answers that they become."""
    found = Survey()
    for block in _watched(read_blocks(source), f"reading {source.name}", None):
        found.label = block.label
        if not found.columns and convert:
            found.form = form_of(block.columns)
        found.rows += len(block.rows) + len(block.unreadable)
        table, passed_over = plain(block, found.form)
        found.passed_over += passed_over
        found.columns = list(dict.fromkeys([*found.columns, *table.columns]))
        for row in table.rows:
            if surrogate_fault(row) is None:
                _count(found, row, convert)
        if found.first is None and table.unreadable:
            found.first = table.unreadable[0]
    return found


def _count(found: Survey, row: dict[str, Any], convert: bool) -> None:
    for name, value in row.items():
        value = messages_of(value) if convert else value
        if isinstance(value, str | list) and prompt_fault(value, name) is None:
            (found.strings if isinstance(value, str) else found.lists)[name] += 1


def messages_of(value: Any) -> Any:
    """The list of messages that a CSV cell holds as JSON; any other value as it is."""
    if not isinstance(value, str) or not MESSAGES_AS_TEXT.match(value):
        return value
    try:
        return parsed(value)
    except NotJson:
        return value


def second_reading(source: Source, found: Survey) -> Iterator[Table]:
    """The same blocks again."""
    for block in _watched(read_blocks(source), f"checking {source.name}", found.rows):
        yield plain(block, found.form)[0]


def _watched(blocks: Iterator[Table], what: str, total: int | None) -> Iterator[Table]:
    """With a progress bar, where somebody looks on."""
    bar = Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
    with bar:
        task = bar.add_task(what, total=total)
        for block in blocks:
            yield block
            bar.update(task, advance=len(block.rows) + len(block.unreadable))
