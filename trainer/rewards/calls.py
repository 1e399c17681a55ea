"""One reward function over the completions of a step: called, timed, retried, and its answer read."""

import asyncio
import concurrent.futures
import inspect
import math
import numbers
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from trainer.batch import Completion
from trainer.errors import RunEnd, Stopped
from trainer.rewards.arguments import Signature, TrainerState, arguments
from trainer.rewards.functions import describe
from trainer.rewards.limit import Overdue, call_within

EventLoop = asyncio.AbstractEventLoop


@dataclass(frozen=True)
class RewardFunction:
    """A resolved reward of the run file."""

    name: str
    label: str
    """How messages call it: reward 'accuracy' (rewards.py:accuracy)."""
    function: Callable[..., Any]
    signature: Signature
    timeout: float
    """Seconds that one call may take."""
    retries: int

    @property
    def is_async(self) -> bool:
        # An instance with `async def __call__` counts, as in TRL.
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(type(self.function).__call__)


@dataclass(frozen=True)
class Failed:
    """In place of a row's number: it should have had one, and why it has none. (None: the reward does not apply.)"""

    why: str


@dataclass
class Scores:
    """What one reward says of n completions."""

    values: list[float | None]
    """(n,) None where it did not score the row, on purpose or because it failed there."""
    failures: dict[int, str] = field(default_factory=dict)
    """Position -> why the function gave no answer for it."""
    metrics: list[tuple[str, float]] = field(default_factory=list)
    columns: dict[str, list[Any]] = field(default_factory=dict)
    """(n,) each, as logged with log_extra."""
    notes: list[str] = field(default_factory=list)


def start_event_loop() -> EventLoop:
    """One loop for the whole run, in a daemon thread: clients that a module opens stay bound to a loop that lives."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="async rewards", daemon=True).start()
    return loop


def score_rows(
    reward: RewardFunction, completions: Sequence[Completion], state: TrainerState, loop: EventLoop | None
) -> Scores:
    """Call with all rows; after ``retries`` further failures row by row, so that only the rows that raise go unscored.

    A call that takes too long is not repeated. Stopped when the answer is not one number or None per completion.
    """
    error = ""
    for _ in range(1 + reward.retries):
        try:
            return _call(reward, completions, state, loop)
        except Overdue:
            return _all_failed(completions, f"no answer within {reward.timeout:g} s")
        except RunEnd:
            raise
        except (Exception, SystemExit) as raised:
            error = describe(raised)
    return _score_each(reward, completions, state, loop, error)


def _score_each(
    reward: RewardFunction, completions: Sequence[Completion], state: TrainerState, loop: EventLoop | None, error: str
) -> Scores:
    scores = Scores(values=[None] * len(completions))
    for i, completion in enumerate(completions):
        try:
            one = _call(reward, [completion], state, loop)
        except Overdue:
            # Stuck once is stuck for the others too; waiting for each would take a limit per row.
            late = f"no answer within {reward.timeout:g} s, called row by row"
            scores.failures |= dict.fromkeys(range(i, len(completions)), late)
            break
        except RunEnd:
            raise
        except (Exception, SystemExit) as raised:
            scores.failures[i] = describe(raised)
            continue
        scores.values[i] = one.values[0]
        if one.failures:
            scores.failures[i] = one.failures[0]
        scores.metrics += one.metrics
        scores.notes += one.notes
        for column, values in one.columns.items():
            scores.columns.setdefault(column, [None] * len(completions))[i] = values[0]
    if not scores.failures:
        scores.notes.append(f"{reward.label} failed with {error}, but scored every row when called row by row")
    return scores


def _call(
    reward: RewardFunction, completions: Sequence[Completion], state: TrainerState, loop: EventLoop | None
) -> Scores:
    scores = Scores(values=[])  # of this call alone: a failed call leaves no metrics behind

    def log_metric(name: str, value: float) -> None:
        scores.metrics.append((name, value))

    def log_extra(column: str, values: Sequence[Any]) -> None:
        scores.columns[column] = list(values)

    keywords = arguments(reward.signature, completions, log_metric=log_metric, log_extra=log_extra, trainer_state=state)
    if loop is not None and reward.is_async:
        returned = _await_within(reward.timeout, reward.function, keywords, loop)
    else:
        returned = call_within(reward.timeout, lambda: reward.function(**keywords))
    scores.values = read_returned(returned, completions, reward.label)
    scores.failures = {i: value.why for i, value in enumerate(returned) if isinstance(value, Failed)}
    _check_logged(scores, reward.label)
    return scores


def _await_within(seconds: float, function: Callable[..., Any], keywords: dict[str, Any], loop: EventLoop) -> Any:
    future = asyncio.run_coroutine_threadsafe(function(**keywords), loop)
    # Not `future.result(seconds)`: its TimeoutError looks like one that the function raised.
    if not concurrent.futures.wait([future], timeout=seconds).done:
        future.cancel()
        raise Overdue
    return future.result()


def _all_failed(completions: Sequence[Completion], why: str) -> Scores:
    return Scores(values=[None] * len(completions), failures=dict.fromkeys(range(len(completions)), why))


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
