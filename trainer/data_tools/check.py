"""``zero-grpo data check``: what a source holds, how training would read it, and every row that it would refuse."""

import hashlib
import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from trainer.config.sections import Data, Model
from trainer.data.prompts import render_rows
from trainer.data.rendering import Renderer, choose_renderer
from trainer.data.row_checks import check_rows
from trainer.data.shapes import Columns, map_columns
from trainer.data.sources import Source
from trainer.data.stops import declared_eos
from trainer.data.table import RowProblem, Table, listed, shown
from trainer.data_tools.forms import NAMES, form_of
from trainer.data_tools.survey import FLAGS, Survey, second_reading, survey
from trainer.errors import Refused
from trainer.launcher import say
from trainer.models.policy import load_config, load_generation_config, load_tokenizer
from trainer.models.rope import window

ROWS_NAMED = 10
BAR = 40
"""Characters of the longest bar of a histogram."""


@dataclass
class Findings:
    """What the second reading found."""

    problems: list[RowProblem] = field(default_factory=list)
    characters: "array[int]" = field(default_factory=lambda: array("L"))
    tokens: "array[int]" = field(default_factory=lambda: array("L"))
    numbers: "array[int]" = field(default_factory=lambda: array("L"))
    """Row number of each length."""
    first_seen: dict[bytes, tuple[int, bytes]] = field(default_factory=dict)
    """Hash of a prompt -> its first row, and the hash of that row's answer."""
    repeats: list[tuple[int, int, bool]] = field(default_factory=list)
    """Row, the earlier row with its prompt, and whether their answers differ."""
    no_answer: list[int] = field(default_factory=list)
    damaged: list[int] = field(default_factory=list)
    example: str = ""
    """The first usable prompt."""


def check_data(source: Source, data: Data, tokenizer_path: str) -> None:
    """Says what is there. Raises Refused, naming them, where rows are bad."""
    found = survey(source, convert=False)
    columns = _columns(found, data, source)
    renderer, context = _renderer(tokenizer_path, data) if tokenizer_path else (None, 0)
    findings = Findings()
    for block in second_reading(source, found):
        _look_at(block, columns, found.mostly_strings(columns.prompt), renderer, findings)
    lines = _report(found, columns, findings, renderer)
    if findings.tokens:
        lines += _histogram(findings, data.max_prompt_tokens, context)
    say("\n".join(lines))
    if findings.problems:
        raise Refused(_refusal(source, found, findings))
    say("every row can be used")


def _columns(found: Survey, data: Data, source: Source) -> Columns:
    if not found.columns:
        assert found.first is not None
        raise Refused(f"{source.setting}: not one row can be read.\n  {found.first}")
    form = form_of(found.columns)
    try:
        return map_columns(found.table, data.prompt_column, data.answer_column, FLAGS)
    except Refused as refusal:
        if form not in ("sharegpt", "openclaw"):
            raise
        raise Refused(
            f"{refusal}\nIt looks like {NAMES[form]}. Fix: zero-grpo data convert {source.name} OUT.jsonl"
        ) from None


def _renderer(path: str, data: Data) -> tuple[Renderer, int]:
    """With the window of the model that lies beside the tokenizer; 0 where none does."""
    model = Model(name_or_path=path)
    tokenizer: PreTrainedTokenizerBase = load_tokenizer(model)
    eos = declared_eos(tokenizer, load_generation_config(model))
    context = 0
    if (Path(path) / "config.json").is_file():
        context = window(load_config(model)[0]).unscaled
    return choose_renderer(data, tokenizer, eos), context


def _look_at(
    block: Table, columns: Columns, mostly_strings: bool, renderer: Renderer | None, findings: Findings
) -> None:
    good, bad = check_rows(block, columns.prompt, mostly_strings)
    ids: dict[int, tuple[int, ...]] = {}
    if renderer is not None:
        texts, ids = render_rows(block, columns.prompt, good, bad, renderer)
        good = list(texts)
    findings.problems += bad
    for place in good:
        row, number = block.rows[place], block.numbers[place]
        prompt = row[columns.prompt]
        text = prompt if isinstance(prompt, str) else "".join(message["content"] for message in prompt)
        findings.example = findings.example or shown(prompt, 200)
        findings.characters.append(len(text))
        findings.numbers.append(number)
        if renderer is not None:
            findings.tokens.append(len(ids[place]))
        if "\ufffd" in text:
            findings.damaged.append(number)
        answer = row.get(columns.answer) if columns.answer else None
        if columns.answer and answer in (None, ""):
            findings.no_answer.append(number)
        key, answer_key = _digest(prompt), _digest(answer)
        first = findings.first_seen.setdefault(key, (number, answer_key))
        if first[0] != number:
            findings.repeats.append((number, first[0], first[1] != answer_key))


def _digest(value: Any) -> bytes:
    return hashlib.blake2b(json.dumps(value, sort_keys=True, default=repr).encode(), digest_size=16).digest()


def _report(found: Survey, columns: Columns, findings: Findings, renderer: Renderer | None) -> list[str]:
    kind = "text" if found.mostly_strings(columns.prompt) else "chat messages"
    others = [name for name in found.columns if name not in (columns.prompt, columns.answer)]
    answer = f'answers from "{columns.answer}"' if columns.answer else "no answers"
    lines = [
        f"{found.label}: {found.rows} rows, {len(findings.characters)} usable prompts",
        f'prompts from "{columns.prompt}" ({kind}), {answer}; rewards also get: {", ".join(others) or "nothing else"}',
    ]
    if findings.example:
        lines.append(f"first prompt: {findings.example}")
    if findings.characters:
        lines.append(_spread("characters a prompt", findings.characters, findings.numbers))
    if renderer is not None and findings.tokens:
        verb = "are rendered with the chat template" if renderer.strings else "stay as they are"
        why = f"string prompts {verb}: {renderer.why}" if kind == "text" else "messages are rendered"
        lines.append(f"{_spread('tokens a prompt', findings.tokens, findings.numbers)} ({why})")
    if findings.no_answer:
        empty = f'{len(findings.no_answer)} rows without an answer in "{columns.answer}"'
        lines.append(f"{empty}: {_named(findings.no_answer)}")
    if findings.repeats:
        pairs = ", ".join(f"{row} = {first}" for row, first, _ in findings.repeats[:ROWS_NAMED])
        more = ", ..." if len(findings.repeats) > ROWS_NAMED else ""
        differing = sum(differs for *_, differs in findings.repeats)
        lines.append(
            f"{len(findings.repeats)} prompts repeat an earlier one, {differing} of them with another answer: "
            f"rows {pairs}{more}"
        )
    if findings.damaged:
        lines.append(
            f"{len(findings.damaged)} prompts hold U+FFFD, the mark of text lost in an earlier conversion: "
            f"{_named(findings.damaged)}"
        )
    return lines


def _spread(name: str, lengths: Sequence[int], numbers: Sequence[int]) -> str:
    ordered = sorted(lengths)
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    median, most = ordered[len(ordered) // 2], ordered[int(0.95 * (len(ordered) - 1))]
    return f"{name}: {ordered[0]} to {ordered[-1]} (row {numbers[longest]}), median {median}, 95 % have {most} or fewer"


def _histogram(findings: Findings, limit: int, context: int) -> list[str]:
    """Prompts by tokens, in powers of two, against data.max_prompt_tokens and the window."""
    tokens = findings.tokens
    tops = [2**power for power in range((max(tokens) - 1).bit_length() + 1)]
    counts = [sum(top // 2 < length <= top or (top == 1 and length <= 1) for length in tokens) for top in tops]
    while len(counts) > 1 and counts[0] == 0:
        counts, tops = counts[1:], tops[1:]
    lines = ["tokens    prompts"]
    for top, count in zip(tops, counts, strict=True):
        lines.append(f"<= {top:<6} {count:>7} {'█' * round(BAR * count / max(counts))}".rstrip())
    over = [number for length, number in zip(tokens, findings.numbers, strict=True) if length > limit]
    if over:
        lines.append(
            f"{len(over)} prompts are longer than data.max_prompt_tokens = {limit}: {_named(over)}. "
            f"{max(tokens)} would hold them all."
        )
    else:
        lines.append(f"all prompts are within data.max_prompt_tokens = {limit}")
    if context:
        left = context - max(tokens)
        lines.append(f"the model's window is {context} tokens: {left} are left for a completion of the longest prompt")
    return lines


def _refusal(source: Source, found: Survey, findings: Findings) -> str:
    fix = 'Correct the rows, or leave them out: data.bad_rows = "skip".'
    if any(problem.kind == "last turn is assistant" for problem in findings.problems):
        fix += f"\nAnswers at the end of conversations are split off by: zero-grpo data convert {source.name} OUT.jsonl"
    return (
        f"{found.label}: {len(findings.problems)} of {found.rows} rows cannot be used.\n{listed(findings.problems)}\n"
        f"  columns: {', '.join(found.columns)}\n{fix}"
    )


def _named(rows: Sequence[int]) -> str:
    named = ", ".join(map(str, rows[:ROWS_NAMED]))
    return f"row{'s' if len(rows) > 1 else ''} {named}{', ...' if len(rows) > ROWS_NAMED else ''}"
