"""Which column is the prompt and which the answer."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainer.data.table import Table
from trainer.errors import Refused

PROMPT_NAMES = ("prompt", "query", "question", "problem", "messages", "input", "instruction")
ANSWER_NAMES = ("answer", "reference_answer", "chosen", "label", "solution", "target", "output")


@dataclass(frozen=True)
class Columns:
    """The two columns that have a meaning here; all others belong to the rewards."""

    prompt: str
    answer: str | None
    """None where the rows carry no answer."""


def map_columns(
    table: Table,
    prompt_column: str = "",
    answer_column: str = "",
    keys: tuple[str, str] = ("data.prompt_column", "data.answer_column"),
) -> Columns:
    """The columns that are named, else those with a usual name. ``keys``: where the user names them.

    Raises:
        Refused: a named column is not there, several columns have a usual name, or no prompt column is found.
    """
    prompt = _named(table, keys[0], prompt_column) or _usual(table, keys[0], PROMPT_NAMES)
    if prompt is None:
        raise Refused(
            f"{table.label}: no prompt column. Expected one of {', '.join(PROMPT_NAMES)}; "
            f"another name goes into {keys[0]}.\nColumns: {', '.join(table.columns)}"
        )
    answer = _named(table, keys[1], answer_column) or _usual(table, keys[1], ANSWER_NAMES)
    if answer == prompt:
        raise Refused(f'{table.label}: the column "{prompt}" cannot be both prompt and answer; set {keys[1]}.')
    return Columns(prompt, answer)


def reward_columns(row: dict[str, Any], columns: Columns) -> dict[str, Any]:
    """What the rewards see of a row: all but the prompt under the user's names, the answer also under "answer".

    An answer that is missing stays missing (None): only a reward that reads it can tell whether that is a fault.
    """
    kept = {name: value for name, value in row.items() if name != columns.prompt}
    if columns.answer is not None:
        kept[columns.answer] = kept["answer"] = row.get(columns.answer)
    return kept


def _named(table: Table, key: str, name: str) -> str | None:
    if not name or name in table.columns:
        return name or None
    near = difflib.get_close_matches(name, table.columns, n=1)
    hint = f' Did you mean "{near[0]}"?' if near else ""
    raise Refused(f'{key} = "{name}": {table.label} has no such column.{hint}\nColumns: {", ".join(table.columns)}')


def _usual(table: Table, key: str, names: Sequence[str]) -> str | None:
    found = [name for name in table.columns if name in names]
    if len(found) > 1:
        raise Refused(
            f'{table.label}: the columns {" and ".join(found)} could each be meant. Name one: {key} = "{found[0]}"\n'
            f"Columns: {', '.join(table.columns)}"
        )
    return found[0] if found else None
