"""From a run's data settings to its prompts: read, checked as a whole, rendered, tokenised, split."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from transformers import PreTrainedTokenizerBase

from trainer.batch import Prompt
from trainer.config import RunConfig
from trainer.config.sections import Data
from trainer.data.rendering import Renderer, choose_renderer, has_system
from trainer.data.row_checks import Fault, check_rows
from trainer.data.shapes import Columns, map_columns, reward_columns
from trainer.data.sources import Source, read_rows
from trainer.data.table import RowProblem, Table, counted, listed
from trainer.errors import Refused


@dataclass
class PromptSets:
    train: list[Prompt]
    eval: list[Prompt]
    """Disjoint rows; empty when no evaluation is asked for."""
    notes: list[str]
    """What was decided and left out, to be printed at the start."""
    warnings: list[str] = field(default_factory=list)
    """What is no error, but seldom meant."""
    left_out: int = 0
    """Rows that cannot be used, or are too long."""
    cut: int = 0
    """Prompts that lost their beginning."""


def load_prompts(config: RunConfig, tokenizer: PreTrainedTokenizerBase, *, eos_ids: Collection[int] = ()) -> PromptSets:
    """All prompts of a run. `eos_ids`: the end tokens that the checkpoint declares (`stops.declared_eos`).

    Raises:
        Refused: rows that cannot be used (all listed in one message), or settings that do not fit the rows.
    """
    data = config.data
    renderer = choose_renderer(data, tokenizer, eos_ids)
    sets = PromptSets([], [], [])
    notes = sets.notes
    train = _load(Source(data.source, data.split, data.config), renderer, sets)
    eval_source = _eval_source(data)
    held_out: list[Prompt] = []
    if eval_source is not None:
        held_out = _load(eval_source, renderer, sets)
    elif data.eval_fraction > 0:
        train, held_out = split_off(train, data.eval_fraction, data.seed)
        notes.append(
            f"evaluation: {len(held_out)} of {len(train) + len(held_out)} prompts held out (data.eval_fraction)"
        )
    notes.append(f"first prompt ({len(train[0].ids)} tokens): {train[0].text!r} = {_shortened(train[0].ids)}")
    return replace(sets, train=train, eval=held_out, warnings=_remarks(train, held_out))


def check_sources(config: RunConfig) -> None:
    """Refused where the rows cannot be used whatever the tokenizer is: all that can be said of them without one."""
    data = config.data
    problems: list[str] = []
    for source in (Source(data.source, data.split, data.config), _eval_source(data)):
        try:
            if source is not None:
                table, _, _, bad = _read(source, data)
                _refuse(table, source, data, bad, [])
        except Refused as refusal:
            problems += refusal.problems
    if problems:
        raise Refused(*problems)


def split_off(prompts: Sequence[Prompt], fraction: float, seed: int) -> tuple[list[Prompt], list[Prompt]]:
    """(train, eval), both in file order; each row is in exactly one of them.

    Raises:
        Refused: one of the two would be empty.
    """
    chosen = held_out_places(len(prompts), fraction, seed, "data.eval_fraction")
    train = [prompt for place, prompt in enumerate(prompts) if place not in chosen]
    return train, [prompts[place] for place in sorted(chosen)]


def held_out_places(rows: int, fraction: float, seed: int, key: str) -> set[int]:
    """Which of ``rows`` are evaluated on; ``key`` names the fraction where it leaves one side empty."""
    count = round(rows * fraction)
    if not 0 < count < rows:
        raise Refused(
            f"{key} = {fraction} of {rows} prompts leaves {rows - count} to train on and {count} to evaluate on; "
            "expected at least 1 each."
        )
    return set(Random(seed).sample(range(rows), count))


def _eval_source(data: Data) -> Source | None:
    """Where evaluation prompts are read from; None when there are none, or they are split off the training rows."""
    if data.eval_fraction > 0 and (data.eval_source or data.eval_split):
        other = "data.eval_source" if data.eval_source else "data.eval_split"
        raise Refused(f"data.eval_fraction = {data.eval_fraction} and {other} are both given; keep one.")
    if not data.eval_source and not data.eval_split:
        return None
    name = data.eval_source or data.source
    split = data.eval_split or "train"
    if (name, split) == (data.source, data.split):
        raise Refused(
            f'the evaluation would read the training rows: {name}, split "{split}". '
            "Set data.eval_split to another split, or use data.eval_fraction."
        )
    key = "data.eval_source" if data.eval_source else "data.source"
    return Source(name, split, data.config if name == data.source else "", key, "data.eval_split")


def _read(source: Source, data: Data) -> tuple[Table, Columns, list[int], list[RowProblem]]:
    """The rows, their columns, the places of good rows, and the bad ones."""
    table = read_rows(source)
    if not table.rows:
        raise Refused(f"{source.setting}: not one row can be read.\n{listed(table.unreadable)}")
    columns = map_columns(table, data.prompt_column, data.answer_column)
    return table, columns, *check_rows(table, columns.prompt)


def _load(source: Source, renderer: Renderer, sets: PromptSets) -> list[Prompt]:
    """One source's prompts in file order; what was decided and left out on the way is added to `sets`."""
    data = renderer.data
    table, columns, good, bad = _read(source, data)
    messages = bool(good) and isinstance(table.rows[good[0]][columns.prompt], list)
    texts, ids = render_rows(table, columns.prompt, good, bad, renderer)
    overlong = _overlong(table, columns, ids, data.max_prompt_tokens)
    _refuse(table, source, data, bad, overlong)
    if data.overlong == "drop":
        ids = {place: row_ids for place, row_ids in ids.items() if len(row_ids) <= data.max_prompt_tokens}
    if not ids:
        raise Refused(f"{table.label}: no prompt is left.\n{listed([*bad, *overlong])}")
    prompts = []
    for place, row_ids in ids.items():
        row, text = table.rows[place], texts[place]
        if len(row_ids) > data.max_prompt_tokens:
            row_ids = renderer.cut(row_ids, data.max_prompt_tokens)
            text = str(renderer.tokenizer.decode(list(row_ids)))
        chat = tuple(renderer.messages(row[columns.prompt])) if messages else None
        asked = tuple(renderer.as_asked(row[columns.prompt])) if renderer.strings and not messages else None
        prompts.append(Prompt(table.numbers[place] - 1, text, row_ids, chat, reward_columns(row, columns), asked))
    sets.notes.extend(_account(table, columns, renderer, messages, bad, overlong, prompts))
    dropped = overlong if data.overlong == "drop" else []
    sets.left_out += len(bad) + len(dropped)
    sets.cut += len(overlong) - len(dropped)
    return prompts


def render_rows(
    table: Table, column: str, good: Sequence[int], bad: list[RowProblem], renderer: Renderer
) -> tuple[dict[int, str], dict[int, tuple[int, ...]]]:
    """Text and token ids of the ``good`` places, by place; what the template refuses goes to ``bad``."""
    if not good:
        return {}, {}
    messages = isinstance(table.rows[good[0]][column], list)
    renderer.refuse_unrenderable(messages, table.label)
    texts: dict[int, str] = {}
    for place in good:
        text = renderer.text(table.rows[place][column], column)
        if isinstance(text, Fault):
            bad.append(table.problem(place, *text))
        else:
            texts[place] = text
    encoded = renderer.encode(list(texts.values()), messages or renderer.strings) if texts else []
    return texts, dict(zip(texts, encoded, strict=True))


def _overlong(table: Table, columns: Columns, ids: dict[int, tuple[int, ...]], limit: int) -> list[RowProblem]:
    kind = "longer than data.max_prompt_tokens"
    expected = f"at most {limit} (data.max_prompt_tokens)"
    return [
        table.problem(place, columns.prompt, f"{len(row_ids)} tokens", expected, kind)
        for place, row_ids in ids.items()
        if len(row_ids) > limit
    ]


def _refuse(table: Table, source: Source, data: Data, bad: list[RowProblem], overlong: list[RowProblem]) -> None:
    """One message for all rows that the settings do not allow to leave out or cut."""
    fatal: list[RowProblem] = []
    fixes = []
    if bad and data.bad_rows == "error":
        fatal += bad
        fixes.append('Correct the rows, or leave them out with data.bad_rows = "skip".')
    if overlong and data.overlong == "error":
        fatal += overlong
        longest = max(overlong, key=lambda problem: int(problem.got.split()[0])).got
        fixes.append(
            f"The longest prompt has {longest}. Raise data.max_prompt_tokens, or leave long prompts out "
            '(data.overlong = "drop") or keep their end ("truncate_left").'
        )
    if fatal:
        rows = len(table.rows) + len(table.unreadable)
        raise Refused(
            f"{source.setting}: {len(fatal)} of {rows} rows cannot be used.\n{listed(fatal)}\n"
            f"  columns: {', '.join(table.columns)}\n" + "\n".join(fixes)
        )


def _account(
    table: Table,
    columns: Columns,
    renderer: Renderer,
    messages: bool,
    bad: list[RowProblem],
    overlong: list[RowProblem],
    prompts: list[Prompt],
) -> list[str]:
    """What happened to the rows of one source."""
    data = renderer.data
    lengths = [len(prompt.ids) for prompt in prompts]
    answer = f'answers from "{columns.answer}"' if columns.answer else "no answers"
    notes = [
        f"{table.label}: {len(prompts)} prompts of {min(lengths)} to {max(lengths)} tokens "
        f'from "{columns.prompt}", {answer}'
    ]
    if columns.answer not in (None, "answer") and "answer" in table.columns:
        notes.append(f'{table.label}: rewards get "{columns.answer}" as `answer`, not the column of that name')
    if not messages:
        verb = "are rendered with the chat template" if renderer.strings else "stay as they are"
        notes.append(f"{table.label}: string prompts {verb} ({renderer.why})")
    elif data.system:
        own = sum(has_system(row[columns.prompt]) for row in table.rows if isinstance(row.get(columns.prompt), list))
        if own:
            notes.append(f"{table.label}: {own} rows keep their own system message instead of data.system")
    if bad:
        kinds = counted(problem.kind for problem in bad)
        notes.append(f'{table.label}: {len(bad)} rows left out (data.bad_rows = "skip"): {kinds}')
    if overlong:
        done = "left out" if data.overlong == "drop" else "cut at their beginning"
        rows = ", ".join(str(problem.row) for problem in overlong[:10]) + (", ..." if len(overlong) > 10 else "")
        notes.append(
            f"{table.label}: {len(overlong)} prompts longer than {data.max_prompt_tokens} tokens {done} "
            f'(data.overlong = "{data.overlong}"): rows {rows}'
        )
    return notes


def _shortened(ids: Sequence[int], ends: int = 16) -> str:
    if len(ids) <= 2 * ends:
        return " ".join(map(str, ids))
    return f"{' '.join(map(str, ids[:ends]))} ... {' '.join(map(str, ids[-ends:]))}"


def _remarks(train: Sequence[Prompt], held_out: Sequence[Prompt]) -> list[str]:
    """What is no error, but seldom meant."""
    remarks = []
    texts = Counter(prompt.text for prompt in train)
    repeated = len(train) - len(texts)
    if repeated:
        remarks.append(f"{repeated} training prompts repeat an earlier one")
    seen = sum(prompt.text in texts for prompt in held_out)
    if seen:
        remarks.append(f"{seen} of {len(held_out)} evaluation prompts are also trained on")
    damaged = sum("\ufffd" in prompt.text for prompt in train)
    if damaged:
        remarks.append(f"{damaged} training prompts hold U+FFFD, the mark of text lost in an earlier conversion")
    return remarks
