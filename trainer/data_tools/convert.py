"""``zero-grpo data convert``: any source as a JSONL file that training reads, or as other tools' forms.

Rows that cannot be used are set aside with their reason; files appear whole or not at all.
"""

import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import date, datetime, time
from pathlib import Path
from typing import Any, Literal, TextIO

from trainer.data.prompts import held_out_places
from trainer.data.row_checks import row_fault
from trainer.data.shapes import ANSWER_NAMES, PROMPT_NAMES, Columns, map_columns
from trainer.data.sources import Source
from trainer.data.table import RowProblem, Table, listed
from trainer.data_tools.forms import CONVERSATIONS, NAMES, as_messages
from trainer.data_tools.survey import FLAGS, Survey, messages_of, second_reading, survey
from trainer.errors import Refused
from trainer.launcher import say
from trainer.record.own_files import open_new

Target = Literal["prompt", "seed", "slime", "openai", "sharegpt"]
Row = dict[str, Any]

WRITTEN: dict[Target, tuple[str, str]] = {
    "prompt": ("prompt", "answer"),
    "seed": ("query", "chosen"),
    "slime": ("input", "label"),
    "openai": ("messages", "answer"),
    "sharegpt": (CONVERSATIONS, "answer"),
}
"""Columns of prompt and answer. Of the last two, an answer that is text is the conversation's last turn."""
SHAREGPT_FROM = {"user": "human", "assistant": "gpt"}


@dataclass(frozen=True)
class Wanted:
    """The flags of the command."""

    target: Target = "prompt"
    prompt_column: str = ""
    answer_column: str = ""
    eval_fraction: float = 0.0
    seed: int = 0
    force: bool = False


@dataclass
class Counts:
    """What was written."""

    rows: int = 0
    nulls: int = 0
    """NaN and infinity, which JSON does not have."""


def convert_data(source: Source, out: Path, wanted: Wanted) -> None:
    """Writes ``out``, and beside it ``.eval.jsonl`` and ``.rejected.jsonl`` where there are such rows; says so."""
    files = [out, out.with_suffix(".eval.jsonl"), out.with_suffix(".rejected.jsonl")]
    _check_places(source, files, wanted)
    found = survey(source, convert=True)
    columns = _columns(found, source, wanted)
    needed = _check_names(found, columns, wanted.target)
    counts, rejected = Counts(), []
    try:
        with ExitStack() as stack:
            whole, held_out, aside = (stack.enter_context(_beside(file)) for file in files)
            for block in second_reading(source, found):
                bad = _write_block(block, found, columns, wanted.target, whole, counts)
                for problem in bad:
                    aside.write(_rejection(problem))
                rejected += bad
            if not counts.rows:
                raise Refused(f"{found.label}: no row can be used; nothing was written.\n{listed(rejected)}")
            evaluated = _split(whole, held_out, counts.rows, wanted)
            keep = [True, evaluated > 0, bool(rejected)]
            for stream in (whole, held_out, aside):
                stream.flush()
                os.fsync(stream.fileno())
            for file, kept in zip(files, keep, strict=True):
                if kept:
                    os.replace(_temporary(file), file)
                elif wanted.force:
                    file.unlink(missing_ok=True)
    except OSError as error:
        raise Refused(f"{out}: cannot be written: {error.strerror or error}.") from error
    say("\n".join(_report(found, columns, files, counts, evaluated, rejected, needed)))


def _check_places(source: Source, files: Sequence[Path], wanted: Wanted) -> None:
    out = files[0]
    if out.suffix != ".jsonl":
        raise Refused(f"data convert: OUT is {out}, expected a name that ends in .jsonl.")
    if not out.parent.is_dir():
        raise Refused(f"data convert: OUT is {out}: there is no folder {out.parent}. Fix: make it, or another OUT.")
    for file in files:
        if file.exists() and source.path.exists() and file.samefile(source.path):
            raise Refused(
                f"data convert: IN is {file}, which is written or removed with OUT = {out}. Fix: another OUT."
            )
    there = [str(file) for file in files if file.exists()]
    if there and not wanted.force:
        raise Refused(
            f"data convert: {' and '.join(there)} would be overwritten or left beside. Fix: another OUT, or --force."
        )


def _columns(found: Survey, source: Source, wanted: Wanted) -> Columns:
    if not found.columns:
        reason = found.first or "it holds no query."
        raise Refused(f"{source.setting}: not one row can be read.\n  {reason}")
    return map_columns(found.table, wanted.prompt_column, wanted.answer_column, FLAGS)


def _check_names(found: Survey, columns: Columns, target: Target) -> dict[str, str] | None:
    """Settings that training needs to read the file, since other columns have usual names too; None for a form that it
    does not read. Refused where a column that stays has the name of one that is written."""
    prompt, answer = WRITTEN[target]
    rest = [name for name in found.columns if name not in (columns.prompt, columns.answer)]
    taken = [name for name in (prompt, *([answer] if columns.answer else [])) if name in rest]
    if taken:
        raise Refused(
            f'{found.label}: the column "{taken[0]}" would be written twice: as it is, and from "'
            f'{columns.prompt if taken[0] == prompt else columns.answer}". Fix: '
            f"--{'prompt' if taken[0] == prompt else 'answer'}-column {taken[0]}, or rename one."
        )
    if target in ("openai", "sharegpt"):
        return None
    needed = {}
    if any(name in PROMPT_NAMES for name in rest):
        needed["data.prompt_column"] = prompt
    if columns.answer and any(name in ANSWER_NAMES for name in rest):
        needed["data.answer_column"] = answer
    return needed


def _write_block(
    block: Table, found: Survey, columns: Columns, target: Target, file: TextIO, counts: Counts
) -> list[RowProblem]:
    """Returns the rows that were not written."""
    bad = list(block.unreadable)
    mixed = bool(found.strings[columns.prompt] and found.lists[columns.prompt])
    for place, row in enumerate(block.rows):
        row = _from_text(row, columns.prompt)
        if fault := row_fault(row, columns.prompt):
            bad.append(block.problem(place, *fault))
            continue
        prompt = row[columns.prompt]
        rest = {name: value for name, value in row.items() if name not in (columns.prompt, columns.answer)}
        answer = _text_of(row.get(columns.answer)) if columns.answer else None
        made = _shaped(as_messages(prompt) if mixed else prompt, answer, rest, target, block.numbers[place] - 1)
        try:
            file.write(json.dumps(_without_nan(made, counts), ensure_ascii=False, default=_plain) + "\n")
        except TypeError as error:
            bad.append(block.problem(place, "row", str(error), "values that JSON can hold", "not JSON"))
            continue
        counts.rows += 1
    return bad


def _shaped(prompt: str | list[Row], answer: Any, rest: Row, target: Target, place: int) -> Row:
    """``place``: of the row, from 0."""
    prompt_name, answer_name = WRITTEN[target]
    if target == "seed":
        return {prompt_name: prompt, answer_name: "" if answer is None else answer, "rejected": "", "id": place} | rest
    own = {} if answer is None else {answer_name: answer}
    if target in ("prompt", "slime"):
        return {prompt_name: prompt, **own, **rest}
    messages = as_messages(prompt)
    if isinstance(answer, str) and answer.strip():
        messages, own = [*messages, {"role": "assistant", "content": answer}], {}
    if target == "sharegpt":
        messages = [{"from": SHAREGPT_FROM.get(one["role"], one["role"]), "value": one["content"]} for one in messages]
    return {prompt_name: messages, **own, **rest}


def _from_text(row: Row, column: str) -> Row:
    """With the list of messages that a CSV cell holds as JSON."""
    return row | {column: messages_of(row[column])} if column in row else row


def _text_of(answer: Any) -> Any:
    """The text of an answer that is given as messages, as TRL's preference data have it."""
    match answer:
        case [*_, {"role": "assistant", "content": str() as text}]:
            return text
        case _:
            return answer


def _without_nan(value: Any, counts: Counts) -> Any:
    match value:
        case float() if not math.isfinite(value):
            counts.nulls += 1
            return None
        case dict():
            return {name: _without_nan(item, counts) for name, item in value.items()}
        case list() | tuple():
            return [_without_nan(item, counts) for item in value]
        case _:
            return value


def _plain(value: Any) -> str:
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    raise TypeError(f"a value of type {type(value).__name__}")


def _split(whole: TextIO, held_out: TextIO, rows: int, wanted: Wanted) -> int:
    """Moves the share that data.eval_fraction and data.seed would hold out; returns how many."""
    if not wanted.eval_fraction:
        return 0
    chosen = held_out_places(rows, wanted.eval_fraction, wanted.seed, "--eval-fraction")
    whole.seek(0)
    with _beside(Path(whole.name)) as kept:
        for place, line in enumerate(whole):
            (held_out if place in chosen else kept).write(line)
        kept.seek(0)
        whole.seek(0)
        whole.truncate()
        for line in kept:
            whole.write(line)
    return len(chosen)


def _temporary(file: Path) -> Path:
    return file.with_name(f".{file.name}.tmp")


@contextmanager
def _beside(file: Path) -> Iterator[TextIO]:
    """What becomes ``file`` by a rename; gone afterwards when it was not renamed."""
    temporary = _temporary(file)
    try:
        with open_new(temporary) as stream:
            yield stream
    finally:
        temporary.unlink(missing_ok=True)


def _rejection(problem: RowProblem) -> str:
    record = {
        "row": problem.row,
        "line": problem.line,
        "field": problem.field,
        "got": problem.got,
        "expected": problem.expected,
        "content": problem.content,
    }
    # ASCII: what is wrong with a row may be that UTF-8 cannot hold it.
    return json.dumps(record, default=repr) + "\n"


def _report(
    found: Survey,
    columns: Columns,
    files: Sequence[Path],
    counts: Counts,
    evaluated: int,
    rejected: Sequence[RowProblem],
    needed: dict[str, str] | None,
) -> list[str]:
    out, held_out, aside = files
    answer = f'answers from "{columns.answer}"' if columns.answer else "no answers"
    read = f"{found.rows} rows, read as {NAMES[found.form]}"
    lines = [
        f"{found.label}: {read}" + (f'; prompts from "{columns.prompt}", {answer}' if found.form == "plain" else "")
    ]
    if found.passed_over:
        lines.append(f"{found.passed_over} entries are no message of the user and were passed over")
    if found.strings[columns.prompt] and found.lists[columns.prompt]:
        lines.append(f"strings and messages mixed: {found.strings[columns.prompt]} strings became a user's message")
    if counts.nulls:
        lines.append(f"{counts.nulls} values that are NaN or infinite became null: JSON has neither")
    lines.append(f"{out}: {counts.rows - evaluated} rows")
    if evaluated:
        lines.append(f"{held_out}: {evaluated} rows, held out")
    if rejected:
        lines += [f"{aside}: {len(rejected)} rows that cannot be used, each with its reason", listed(rejected)]
    if needed is not None:
        flags = {"data.source": str(out), **({"data.eval_source": str(held_out)} if evaluated else {}), **needed}
        lines.append("train on it: " + " ".join(f"--{key} {value}" for key, value in flags.items()))
    return lines
