"""What a row's prompt may be: a string, or chat messages that wait for the model's turn."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from trainer.data.table import RowProblem, Table, encodable, shown
from trainer.outside import DEEPEST, too_deep

ROLES = ("system", "user", "assistant", "tool")
PROMPT_TYPE = 'a string or a list of messages {"role", "content"}'
MESSAGES_AS_TEXT = re.compile(r"\s*\[\s*\{\s*['\"](role|content)['\"]\s*:")
"""What becomes of a list of messages in a CSV cell."""


class Fault(NamedTuple):
    field: str
    got: str
    expected: str
    kind: str


def check_rows(table: Table, column: str, mostly_strings: bool | None = None) -> tuple[list[int], list[RowProblem]]:
    """The places of the rows whose prompt can be used, and what is wrong with the others (one problem a row).

    ``mostly_strings``: which prompts are the usual ones, where the table is a block of a larger source.
    """
    good: list[int] = []
    problems = list(table.unreadable)
    for place, row in enumerate(table.rows):
        fault = row_fault(row, column)
        if fault is None:
            good.append(place)
        else:
            problems.append(table.problem(place, *fault))
    strings = {place for place in good if isinstance(table.rows[place][column], str)}
    if mostly_strings is None:
        mostly_strings = 2 * len(strings) >= len(good)
    if len(strings) != (len(good) if mostly_strings else 0):
        usual = "a string" if mostly_strings else "messages"
        for place in good:
            if (place in strings) is not mostly_strings:
                got, expected = shown(table.rows[place][column]), f"{usual}, as in most rows"
                problems.append(table.problem(place, column, got, expected, "strings and messages mixed"))
        good = [place for place in good if (place in strings) is mostly_strings]
    return good, problems


def row_fault(row: dict[str, Any], column: str) -> Fault | None:
    """The first thing that is wrong with a row."""
    if column not in row:
        return Fault(column, "no such column", PROMPT_TYPE, f"{column} missing")
    return depth_fault(row) or prompt_fault(row[column], column) or surrogate_fault(row)


def depth_fault(row: dict[str, Any]) -> Fault | None:
    """What is nested without end can neither be told to other ranks nor recorded."""
    for name, value in row.items():
        if too_deep(value):
            return Fault(name, "lists in lists without end", f"{DEEPEST} levels at most", "nested too deeply")
    return None


def prompt_fault(prompt: Any, field: str) -> Fault | None:
    match prompt:
        case str() as text:
            return _string_fault(text, field)
        case list() as messages:
            return _messages_fault(messages, field)
        case None:
            return Fault(field, "null", PROMPT_TYPE, f"{field} null")
        case value:
            return Fault(field, shown(value), PROMPT_TYPE, f"{field} neither string nor messages")


def surrogate_fault(row: dict[str, Any]) -> Fault | None:
    """Half a surrogate pair cannot be tokenised, nor written to the record of the run hours later."""
    for name, value in row.items():
        if not encodable(name):
            return Fault("name of a column", shown(name), "text without lone surrogates", "lone surrogate")
        if not all(map(encodable, _strings(value))):
            return Fault(name, shown(value), "text without lone surrogates", "lone surrogate")
    return None


def _string_fault(text: str, field: str) -> Fault | None:
    if not text.strip():
        return Fault(field, shown(text), "a prompt that is not blank", "blank prompt")
    if "\0" in text:
        return Fault(field, shown(text), "text without NUL characters", "NUL character")
    if MESSAGES_AS_TEXT.match(text):
        expected = "a real list of messages (.jsonl, .json and .parquet can hold one)"
        return Fault(field, f"messages written as text: {shown(text)}", expected, "messages written as text")
    return None


def _messages_fault(messages: list[Any], field: str) -> Fault | None:
    if not messages:
        return Fault(field, "an empty list", PROMPT_TYPE, "no messages")
    for place, message in enumerate(messages):
        fault = _message_fault(message, f"{field}[{place}]")
        if fault is not None:
            return fault
    if messages[-1]["role"] not in ("user", "tool"):
        got = f'"{messages[-1]["role"]}"'
        expected = '"user" or "tool": the answer is the model\'s to give'
        return Fault(f"{field}[{len(messages) - 1}].role", got, expected, f"last turn is {messages[-1]['role']}")
    return None


def _message_fault(message: Any, field: str) -> Fault | None:
    if not isinstance(message, dict):
        kind = "list of strings" if isinstance(message, str) else "list of something else"
        return Fault(field, shown(message), 'a message {"role", "content"}', kind)
    for name in ("role", "content"):
        if message.get(name) is None:
            return Fault(f"{field}.{name}", f"none in {shown(message)}", "a string", f"message without {name}")
    if message["role"] not in ROLES:
        return Fault(f"{field}.role", shown(message["role"]), f"one of {', '.join(ROLES)}", "unknown role")
    content = message["content"]
    if not isinstance(content, str):
        return Fault(f"{field}.content", shown(content), "a string", "content not a string")
    if message["role"] == "user" and not content.strip():
        return Fault(f"{field}.content", shown(content), "a question that is not blank", "blank prompt")
    if "\0" in content:
        return Fault(f"{field}.content", shown(content), "text without NUL characters", "NUL character")
    return None


def _strings(value: Any) -> Iterator[str]:
    """Every string inside a value of a row."""
    match value:
        case str():
            yield value
        case dict():
            for name, item in value.items():
                yield from _strings(name)
                yield from _strings(item)
        case list() | tuple():
            for item in value:
                yield from _strings(item)
