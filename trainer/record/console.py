"""What the terminal shows of a run: a line a step, two samples now and then, a table at the end."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any

from rich.console import Console
from rich.table import Table

from trainer.errors import printable

SHOWN_CHARACTERS = 600


def progress_line(metrics: Mapping[str, float], step: int, steps: int, seconds_left: float) -> str:
    """One line a step, each field of a fixed width; a metric that does not exist shows as a dash.

    `step  12/500 | reward  0.312 ±0.210 | kl  0.0041 nats/tok | loss -0.0012 | grad  0.840 | len   214 tok (  3% cut) |
    1.9k tok/s | 11.2+6.4 s | 12 min left` (one line; seconds are rollout + everything after it)
    """
    width = len(str(steps))
    spread = f"±{metrics['reward_std']:<6.3f}" if "reward_std" in metrics else " " * 7
    cut = f"({100 * metrics['truncated_fraction']:3.0f}% cut)" if "truncated_fraction" in metrics else " " * 10
    after = [metrics[key] for key in ("seconds_reward", "seconds_reference", "seconds_update") if key in metrics]
    return " | ".join(
        (
            f"step {step:{width}d}/{steps}",
            f"reward {number(metrics, 'reward_mean', '6.3f')} {spread}",
            f"kl {number(metrics, 'kl', '7.4f')} nats/tok",
            f"loss {number(metrics, 'loss', '8.4f')}",
            f"grad {number(metrics, 'grad_norm', '7.3f')}",
            f"len {number(metrics, 'completion_tokens_mean', '5.0f')} tok {cut}",
            f"{rate(metrics.get('tokens_per_second')):>5} tok/s",
            f"{number(metrics, 'seconds_rollout', '5.1f')}+{sum(after):<5.1f} s",
            f"{duration(seconds_left)} left",
        )
    )


def kl_line(metrics: Mapping[str, float], step: int) -> str:
    """The KL over the step's response tokens, of all ranks, in the words of the user's document."""
    return (
        f"Step {step} | KL mean: {metrics['kl']:.4g} | std: {metrics['kl_std']:.4g} | max: {metrics['kl_max']:.4g} "
        "nats/tok"
    )


def number(metrics: Mapping[str, float], key: str, form: str) -> str:
    width = int(form.split(".")[0])
    return f"{metrics[key]:{form}}" if key in metrics else f"{'-':>{width}}"


def rate(per_second: float | None) -> str:
    if per_second is None:
        return "-"
    return f"{per_second / 1000:.1f}k" if per_second >= 1000 else f"{per_second:.0f}"


def duration(seconds: float) -> str:
    """Seven characters: `  45 s`, ` 12 min`, `3.5 h`, right-aligned."""
    if seconds < 90:
        text = f"{seconds:.0f} s"
    elif seconds < 90 * 60:
        text = f"{seconds / 60:.0f} min"
    else:
        text = f"{seconds / 3600:.1f} h"
    return f"{text:>7}"


def shortened(text: str) -> str:
    """Beginning and end of a long text, with the number of characters left out between them."""
    if len(text) <= SHOWN_CHARACTERS:
        return text
    half = SHOWN_CHARACTERS // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"


def sample_block(best: Mapping[str, Any], worst: Mapping[str, Any]) -> str:
    """One best and one worst completion (rows of the rollout file) as text that is safe to print."""
    return "\n".join(["-- best and worst completion --", *_sample("best", best), *_sample("worst", worst)])


def _sample(label: str, row: Mapping[str, Any]) -> list[str]:
    reward = "unscored" if row["reward"] is None else f"{row['reward']:.3f}"
    tokens = len(row["completion_ids"])
    head = f"{label}: reward {reward}, row {row['row']}, {tokens} tok, finish {row['finish']}"
    indented = [
        f"  {name:10s} | {line}"
        for name in ("prompt", "completion")
        for line in printable(shortened(row[name])).split("\n")
    ]
    return [head, *indented]


@dataclass(frozen=True)
class BeforeAfter:
    """One measure on the held-out prompts, before and after training."""

    name: str
    """For example "mean reward, sampled at T=1, 4 a prompt"."""
    before: float
    before_error: float
    """Standard error, clustered by prompt."""
    after: float
    after_error: float
    difference_error: float
    """Standard error of after - before on the same prompts (paired)."""


def before_after_table(rows: Sequence[BeforeAfter], prompts: int) -> str:
    """The table at the end of a run. Errors are one standard error over prompts."""
    cells = [
        (
            row.name,
            with_error(row.before, row.before_error),
            with_error(row.after, row.after_error),
            with_error(row.after - row.before, row.difference_error, sign="+"),
        )
        for row in rows
    ]
    title = f"Held-out reward, {prompts} prompts (± one standard error)"
    return plain_table(title, ("measure", "before", "after", "difference"), cells)


def plain_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Names in the first column, numbers in the others."""
    table = Table()
    table.add_column(header[0])
    for name in header[1:]:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    out = StringIO()
    Console(file=out, width=110, force_terminal=False).print(table)
    return "\n".join([title, *(line.rstrip() for line in out.getvalue().splitlines())])


def with_error(value: float, error: float, sign: str = "-") -> str:
    """An error that does not exist (a single prompt) is left out."""
    return f"{value:{sign}.3f}" + ("" if math.isnan(error) else f" ± {error:.3f}")


def preflight_block(notes: Sequence[str]) -> str:
    """What was decided before the first step, one note a line, continued lines indented."""
    return "\n".join("  " + printable(note).replace("\n", "\n    ") for note in notes)
