"""One reward function over the completions of a step: called, timed, retried, and its answer read."""

import asyncio
import inspect
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Any

from trainer import interrupts
from trainer.batch import Completion
from trainer.errors import RunEnd
from trainer.limit import Overdue, call_within
from trainer.rewards.answers import Scores, read
from trainer.rewards.arguments import Signature, arguments
from trainer.rewards.event_loop import EventLoop
from trainer.rewards.failed import Failed as Failed  # where those who write rewards look for it
from trainer.rewards.failed import may_heal
from trainer.rewards.functions import TrainerState, describe
from trainer.rewards.ledger import Ledger
from trainer.rewards.processes import START_S, InProcesses

BETWEEN_TRIES_S = 30.0
"""What a call may wait before each try: for a service to be less busy, for a process to start."""


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
    concurrency: int | None = None
    """It is async, and asked for one completion at a time, in so many calls at once; None: for all in one call."""
    keeps_time: bool = False
    """It holds ``timeout`` and ``retries`` itself, and answers Failed."""
    paid: str = ""
    """Of what costs money: the settings that its scores depend on."""

    @property
    def is_async(self) -> bool:
        return is_async(self.function)

    def longest(self, n: int) -> float:
        """Seconds after which n completions that are asked for one by one are given up."""
        assert self.concurrency is not None
        starts = START_S if isinstance(self.function, InProcesses) else 0.0
        return starts + math.ceil(n / self.concurrency) * (1 + self.retries) * (self.timeout + BETWEEN_TRIES_S)


@dataclass(frozen=True)
class Occasion:
    """What all calls of a step share."""

    state: TrainerState
    loop: EventLoop | None = None
    """None where no reward is async."""
    ledger: Ledger | None = None
    until: float = math.inf
    """The moment (time.monotonic) at which the step stops waiting for its rewards."""

    def at_most(self, seconds: float) -> float:
        """``seconds``, or what is left of the step's time."""
        return max(min(seconds, self.until - time.monotonic()), 1e-3)  # a timer of 0 s never rings


def is_async(function: Callable[..., Any]) -> bool:
    # An instance with `async def __call__` counts, as in TRL.
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def score_rows(reward: RewardFunction, completions: Sequence[Completion], occasion: Occasion) -> Scores:
    """Call with all rows; after ``retries`` further failures row by row, so that only the rows that raise go unscored.

    A call that takes too long is not repeated. Stopped when the answer is not one number or None per completion.
    """
    if reward.concurrency is not None:
        return _score_at_once(reward, completions, occasion)
    error = ""
    for _ in range(1 + reward.retries):
        seconds = occasion.at_most(reward.timeout)
        try:
            return _call(reward, completions, occasion, seconds)
        except Overdue:
            scores = Scores(values=[None] * len(completions))
            for i in range(len(completions)):
                scores.fail(i, _late(reward, seconds), may_heal=reward.is_async)
            return scores
        except (RunEnd, CancelledError):
            raise
        except (Exception, SystemExit) as raised:
            error = describe(raised)
    return _score_each(reward, completions, occasion, error)


def _score_each(reward: RewardFunction, completions: Sequence[Completion], occasion: Occasion, error: str) -> Scores:
    scores = Scores(values=[None] * len(completions))
    for i, completion in enumerate(completions):
        seconds = occasion.at_most(reward.timeout)
        try:
            scores.put([i], _call(reward, [completion], occasion, seconds))
        except Overdue:
            # Stuck once is stuck for the others too; waiting for each would take a limit per row.
            for late in range(i, len(completions)):
                scores.fail(late, f"{_late(reward, seconds)}, called row by row", may_heal=reward.is_async)
            break
        except (RunEnd, CancelledError):
            raise
        except (Exception, SystemExit) as raised:
            scores.fail(i, describe(raised), may_heal=may_heal(raised))
    if not scores.failures:
        scores.notes.append(f"{reward.label} failed with {error}, but scored every row when called row by row")
    return scores


def _late(reward: RewardFunction, seconds: float) -> str:
    left = "" if seconds == reward.timeout else ", all that was left of the step's share of watch.hang_timeout"
    return f"no answer within {seconds:.3g} s{left}"


def _call(reward: RewardFunction, completions: Sequence[Completion], occasion: Occasion, seconds: float) -> Scores:
    scores, keywords = _prepared(reward, completions, occasion)
    if reward.is_async:
        assert occasion.loop is not None
        returned = occasion.loop.run(_awaited(reward.function, keywords), seconds)
    else:
        returned = interrupts.broken_into(lambda: call_within(seconds, lambda: reward.function(**keywords)))
    return read(returned, scores, completions, reward.label)


def _score_at_once(reward: RewardFunction, completions: Sequence[Completion], occasion: Occasion) -> Scores:
    """Each completion in a call of its own, ``concurrency`` of them at a time; what was paid for is not asked again."""
    ledger = occasion.ledger if reward.paid else None
    answered: dict[int, Scores] = {}
    if ledger is not None:
        step = occasion.state.global_step
        keys = [ledger.key(reward.name, reward.paid, step, completion) for completion in completions]
        answered = {i: known for i, key in enumerate(keys) if (known := ledger.known(key)) is not None}
    asked = [i for i in range(len(completions)) if i not in answered]
    seconds = occasion.at_most(reward.longest(len(asked)))

    async def ask(i: int, turn: asyncio.Semaphore) -> None:
        async with turn:
            found = await _ask(reward, completions[i], occasion)
        answered[i] = found
        if ledger is not None and not found.failures:
            ledger.keep(keys[i], occasion.state.global_step, found)

    async def ask_all() -> None:
        turn = asyncio.Semaphore(reward.concurrency or 1)
        tasks = [asyncio.ensure_future(ask(i, turn)) for i in asked]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    scores = Scores(values=[None] * len(completions))
    if ledger is not None and answered:
        taken = f"{len(answered)} scores of step {occasion.state.global_step + 1} taken from {ledger.file}"
        scores.notes.append(f"{reward.label}: {taken}; delete it to ask again")
    late = ""
    try:
        if asked:
            assert occasion.loop is not None
            occasion.loop.run(ask_all(), seconds)
    except Overdue:
        late = f"not answered when the {seconds:.3g} s for {len(asked)} completions were over"
    finally:
        if ledger is not None:
            ledger.flush()
    came = dict(answered)  # a call that is being cancelled may still answer
    for i in range(len(completions)):
        if i in came:
            scores.put([i], came[i])
        else:
            scores.fail(i, late, may_heal=True)
    return scores


async def _ask(reward: RewardFunction, completion: Completion, occasion: Occasion) -> Scores:
    why, heals = "", False
    for _ in range(1 if reward.keeps_time else 1 + reward.retries):
        scores, keywords = _prepared(reward, [completion], occasion)
        try:
            async with asyncio.timeout(None if reward.keeps_time else reward.timeout) as limit:
                returned = await _awaited(reward.function, keywords)
            return read(returned, scores, [completion], reward.label)
        except RunEnd:
            raise
        except Exception as raised:
            if limit.expired():
                why, heals = f"no answer within {reward.timeout:g} s", True
                break
            why, heals = describe(raised), may_heal(raised)
    failed = Scores(values=[None])
    failed.fail(0, why, may_heal=heals)
    return failed


def _prepared(
    reward: RewardFunction, completions: Sequence[Completion], occasion: Occasion
) -> tuple[Scores, dict[str, Any]]:
    """The keywords of one call, and where it logs: a failed call leaves no metrics behind."""
    scores = Scores(values=[])

    def log_metric(name: str, value: float) -> None:
        scores.metrics.append((name, value))

    def log_extra(column: str, values: Sequence[Any]) -> None:
        scores.columns[column] = list(values)

    handed = {"log_metric": log_metric, "log_extra": log_extra, "trainer_state": occasion.state}
    return scores, arguments(reward.signature, completions, **handed)


async def _awaited(function: Callable[..., Any], keywords: dict[str, Any]) -> Any:
    try:
        return await function(**keywords)
    except SystemExit as error:  # it would end the event loop, and with it every later call
        raise RuntimeError(f"SystemExit: {error}").with_traceback(error.__traceback__) from None
