"""Rollouts in the terminal, which nothing that a model wrote reaches raw: control characters are shown as escapes."""

from pathlib import Path

from trainer.errors import Refused, printable
from trainer.record.console import shortened
from trainer.record.rollout_rows import is_whole
from trainer.record.samples import facts
from trainer.report.read import Row, read_run
from trainer.report.rollouts import recorded_rows


def show(run_dir: Path, step: int | None, count: int, *, worst: bool) -> str:
    """The first ``count`` completions of a step, the last one by default; with ``worst`` those of the lowest reward."""
    if count < 1:
        raise Refused(f"--count {count}: expected how many completions to show, 1 or more.")
    run = read_run(run_dir)
    if not run.rollouts:
        raise Refused(
            f"{run_dir} has no rollouts (rollouts/step-*.jsonl). They are written every log.rollouts_every steps."
        )
    chosen = max(run.rollouts) if step is None else step
    if chosen not in run.rollouts:
        there = sorted(run.rollouts)
        raise Refused(
            f"--step {chosen}: {run_dir} has no rollouts of that step; it has {len(there)} "
            f"steps, {there[0]} to {there[-1]}."
        )
    rows = [row for row in recorded_rows(run.rollouts[chosen]) if row and is_whole(row)]
    wanted = sorted(rows, key=badness) if worst else rows
    what = "lowest reward first" if worst else "in order"
    head = f"step {chosen} of {printable(str(run_dir))}: {min(count, len(rows))} of {len(rows)} completions, {what}"
    return "\n\n".join([head, *map(block, wanted[:count])])


def badness(row: Row) -> tuple[bool, float]:
    """The unscored at the end."""
    return row["reward"] is None, row["reward"] or 0.0


def block(row: Row) -> str:
    lines = [facts(row)]
    for name in ("prompt", "completion"):
        text = printable(shortened(str(row.get(name, ""))))
        lines += [f"  {name:10s} | {line}" for line in text.split("\n")]
    return "\n".join(lines)
