"""Which rollouts a page shows: of a long run the first, the last, the worst and the best, with what was left out."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import printable
from trainer.outside import NotJson, parsed
from trainer.record.rollout_rows import is_number
from trainer.report.marks import marked_share, pieces
from trainer.report.read import Row, Run

MOST_STEPS, MOST_ROWS = 60, 500
"""Of one page: rollout files that are read, and completions that are shown."""
MOST_READ, MOST_SHOWN = 256 * 2**20, 4 * 2**20
"""Bytes."""
WORST, GARBLED, OF_EACH_STEP = 150, 50, 2


@dataclass(frozen=True)
class Chosen:
    rows: list[Row]
    """Worst first, as a page embeds them."""
    notes: list[str]
    """What was left out, in words; empty when nothing was."""


def choose(run: Run, number: int, shares: int) -> Chosen:
    """Rollouts of one run, of ``shares`` runs on a page; ``number`` is the run's place there."""
    steps = steps_to_read(run, MOST_STEPS // shares)
    rows, notes = _read(run, steps, MOST_READ // shares)
    if len(steps) < len(run.rollouts):
        notes.insert(
            0,
            f"rollouts of {len(steps)} of {len(run.rollouts)} recorded steps were read: the first, the last, those of "
            "alarms, the lowest and highest rewards, and others spread evenly",
        )
    kept = list(_within(picked(rows), MOST_ROWS // shares, MOST_SHOWN // shares))
    if len(kept) < len(rows):
        notes.append(
            f"{len(kept):,} of the {len(rows):,} completions in these files are shown: the last and the first step's, "
            f"the most garbled, the worst, and the extremes of each step"
        )
    if len(run.metrics) > len(run.rollouts):
        notes.append(f"{len(run.metrics):,} steps, {len(run.rollouts):,} with rollouts (log.rollouts_every)")
    for row in kept:
        row["run"] = number
    return Chosen(sorted(kept, key=badness), notes)


def steps_to_read(run: Run, most: int) -> list[int]:
    """All recorded steps, or the ones that tell most."""
    steps = list(run.rollouts)
    if len(steps) <= most:
        return steps
    by_reward = [step for step, _ in sorted(run.column("reward_mean"), key=lambda one: one[1]) if step in run.rollouts]
    wanted = [
        steps[0],
        steps[-1],
        *(step for step in dict.fromkeys(alarm["step"] for alarm in run.alarms) if step in run.rollouts),
    ][: most // 3]
    wanted += [*by_reward[: most // 6], *by_reward[::-1][: most // 12]]
    taken = set(wanted)
    rest = [step for step in steps if step not in taken]
    free = most - len(taken)
    return sorted(taken | {rest[at * len(rest) // free] for at in range(free)})


def picked(rows: Sequence[Row]) -> Iterator[Row]:
    """All rows, the ones that tell most first; rows may come twice."""
    first, last = (edge((row["step"] for row in rows), default=0) for edge in (min, max))
    ranked = sorted(rows, key=badness)
    scored = [row for row in ranked if row["reward"] is not None]
    yield from (row for row in rows if row["step"] == last)
    yield from (row for row in rows if row["step"] == first)
    yield from sorted((row for row in rows if row["marked"]), key=lambda row: -row["marked"])[:GARBLED]
    yield from ranked[:WORST]
    by_step: dict[int, list[Row]] = {}
    for row in scored:
        by_step.setdefault(row["step"], []).append(row)
    for step in by_step.values():
        yield from step[:OF_EACH_STEP]
        yield from step[-OF_EACH_STEP:]
    yield from ranked


def badness(row: Row) -> tuple[bool, float, float]:
    """Lowest reward first, of equal ones the most garbled; the unscored at the end."""
    return row["reward"] is None, row["reward"] or 0.0, -row["marked"]


def _within(rows: Iterable[Row], most: int, most_bytes: int) -> Iterator[Row]:
    """Each row once, until the page is full. A row that is too large is left out, not what comes after it."""
    seen: set[int] = set()
    for row in rows:
        if id(row) in seen or len(seen) >= most:
            continue
        size = len(json.dumps(row))
        if size <= most_bytes:
            most_bytes -= size
            seen.add(id(row))
            yield row


def _read(run: Run, steps: Iterable[int], most_bytes: int) -> tuple[list[Row], list[str]]:
    rows: list[Row] = []
    notes: list[str] = []
    too_large, bad = 0, 0
    for step in steps:
        size = _size(run.rollouts[step])
        if size > most_bytes:
            too_large += 1
            continue
        most_bytes -= size
        for recorded in recorded_rows(run.rollouts[step]):
            if recorded is None:
                bad += 1
            else:
                rows.append(shown(recorded, step))
    if too_large:
        notes.append(f"{too_large} rollout files were too large to read")
    if bad:
        notes.append(f"{bad} lines of rollout files are no rows and were passed over")
    return rows, notes


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # a rollback has just taken it away
        return 0


def recorded_rows(path: Path) -> Iterator[Row | None]:
    """The rows of a file as they were recorded; None for a line that is no row."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    # Not splitlines(): a completion may hold U+2028 or U+0085, which JSON does not escape.
    for line in text.split("\n"):
        if line:
            try:
                row = parsed(line)
            except NotJson:
                row = None
            yield row if isinstance(row, dict) and isinstance(row.get("completion"), str) else None


def shown(row: Row, step: int) -> Row:
    """What a page needs of a row."""
    completion = pieces(row["completion"])
    rewards = row.get("rewards")
    columns = row.get("columns")
    return {
        "step": step,
        "group": row.get("group"),
        "index": row.get("index"),
        "row": row.get("row"),
        "reward": number(row.get("reward")),
        "rewards": {name: number(value) for name, value in (rewards if isinstance(rewards, dict) else {}).items()},
        "advantage": number(row.get("advantage")),
        "finish": str(row.get("finish", "")),
        "tokens": len(row["completion_ids"]) if isinstance(row.get("completion_ids"), list) else None,
        "marked": round(marked_share(completion), 4),
        "prompt": pieces(str(row.get("prompt", ""))),
        "completion": completion,
        "columns": printable(json.dumps(columns, ensure_ascii=False, default=str))[:2000] if columns else "",
    }


def number(value: Any) -> float | None:
    return value if is_number(value) else None
