"""What a reward function returned and logged, read strictly: one number, None or a failure per completion."""

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from trainer.batch import Completion
from trainer.errors import Stopped
from trainer.rewards.failed import Failed


@dataclass
class Scores:
    """What one reward says of n completions."""

    values: list[float | None]
    """(n,) None where it did not score the row, on purpose or because it failed there."""
    failures: dict[int, str] = field(default_factory=dict)
    """Position -> why the function gave no answer for it."""
    may_heal: set[int] = field(default_factory=set)
    """Those of the failures that another try in a while may mend."""
    metrics: list[tuple[str, float]] = field(default_factory=list)
    columns: dict[str, list[Any]] = field(default_factory=dict)
    """(n,) each, as logged with log_extra."""
    notes: list[str] = field(default_factory=list)

    def fail(self, position: int, why: str, *, may_heal: bool = False) -> None:
        self.values[position] = None
        self.failures[position] = why
        if may_heal:
            self.may_heal.add(position)

    def put(self, positions: Sequence[int], part: "Scores") -> None:
        """Takes over what ``part`` says of the completions at ``positions``, in that order, in place of what stood
        there."""
        for place, position in enumerate(positions):
            self.values[position] = part.values[place]
            self.failures.pop(position, None)
            self.may_heal.discard(position)
            if place in part.failures:
                self.fail(position, part.failures[place], may_heal=place in part.may_heal)
            for column, values in part.columns.items():
                self.columns.setdefault(column, [None] * len(self.values))[position] = values[place]
        self.metrics += part.metrics
        self.notes += part.notes


def read(returned: Any, scores: Scores, completions: Sequence[Completion], label: str) -> Scores:
    """``scores``, which holds what the call has logged, with what it ``returned``. Stopped where it is no answer."""
    scores.values = read_returned(returned, completions, label)
    for position, value in enumerate(returned):
        if isinstance(value, Failed):
            scores.fail(position, value.why, may_heal=value.may_heal)
    _check_logged(scores, label)
    return scores


def read_returned(returned: Any, completions: Sequence[Completion], label: str) -> list[float | None]:
    """The numbers that a reward function returned, (n,). Stopped unless they are exactly one per completion.

    Lists, tuples, arrays and tensors (detached) are read; True and False count as 1 and 0, as TRL's users return them.
    """
    n = len(completions)
    expected = f"expected a list of {n} numbers, one per completion, or None where it does not score one"
    if isinstance(returned, Tensor | np.ndarray):
        if returned.ndim != 1:
            kind = type(returned).__name__
            raise Stopped(f"{label} returned a {kind} of shape {tuple(returned.shape)}; {expected}")
        returned = returned.tolist()
    if not isinstance(returned, list | tuple):
        what = "None" if returned is None else f"a {type(returned).__name__}"
        raise Stopped(f"{label} returned {what}; {expected}")
    if len(returned) != n:
        raise Stopped(f"{label} returned {len(returned)} value{'s' * (len(returned) != 1)}; {expected}")
    return [_number(value, completion, label) for value, completion in zip(returned, completions, strict=True)]


def _number(value: Any, completion: Completion, label: str) -> float | None:
    if value is None or isinstance(value, Failed):
        return None
    where = f"{label} returned {value!r:.80} for {row_name(completion)}"
    if isinstance(value, Tensor | np.ndarray | np.generic) and value.ndim == 0:
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise Stopped(f"{where}; expected a number, or None where it does not score the row")
    if math.isnan(value):
        raise Stopped(f"{where}; return None where the row cannot be scored, NaN hides a fault of the function")
    if math.isinf(value):
        raise Stopped(f"{where}; expected a finite number: an infinite one makes every advantage of its group NaN")
    return float(value)


def _check_logged(scores: Scores, label: str) -> None:
    for column, values in scores.columns.items():
        if len(values) != len(scores.values):
            raise Stopped(
                f"{label} logged {len(values)} values in column {column!r} with log_extra; "
                f"expected {len(scores.values)}, one per completion"
            )
    numbers_only: list[tuple[str, float]] = []
    for name, value in scores.metrics:
        if isinstance(value, Tensor | np.ndarray | np.generic) and value.ndim == 0:
            value = value.item()
        if isinstance(value, numbers.Real) and math.isfinite(value):
            numbers_only.append((name, float(value)))
        else:
            scores.notes.append(f"{label}: log_metric({name!r}, {value!r:.80}) left out, not a finite number")
    scores.metrics = numbers_only


def row_name(completion: Completion) -> str:
    return f"row {completion.prompt.index + 1} generation {completion.generation + 1}"
