"""All rewards of a step: asked at the same time, and asked again where a service was away."""

import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

from trainer import interrupts
from trainer.batch import Completion
from trainer.config.grpo import Reward
from trainer.launcher import say
from trainer.rewards.answers import Scores
from trainer.rewards.calls import Occasion, RewardFunction, score_rows

PAUSES_S = (5.0, 10.0, 20.0, 40.0, 80.0)
"""Before each further try of what has no score because a service or the network was away."""
INTERRUPTED_WITHIN_S = 0.2


def ask_until_scored(
    sections: Sequence[Reward],
    functions: Sequence[RewardFunction],
    completions: Sequence[Completion],
    occasion: Occasion,
) -> list[Scores]:
    """What each reward says. Where one fails on more rows than it may, and few enough of them for good, the run pauses,
    and the others are asked again; it says so."""
    n = len(completions)
    first = ask(functions, dict.fromkeys(range(len(functions)), range(n)), completions, occasion)
    every = [first[i] for i in range(len(functions))]
    for seconds in PAUSES_S:
        wanted = enumerate(map(worth_another_try, sections, every))
        again = {i: rows for i, rows in wanted if rows}
        if not again or occasion.at_most(seconds) < seconds:
            break
        for i, rows in again.items():
            reasons = "; ".join(dict.fromkeys(every[i].failures[row] for row in rows))
            say(  # while it waits, of every rank: each has rows of its own
                f"{_of_rank()}{functions[i].label}, step {occasion.state.global_step + 1}: {len(rows)} of {n} "
                f"completions have no score ({reasons:.300}); they are asked for again in {seconds:g} s"
            )
        _pause(seconds)
        for i, part in ask(functions, again, completions, occasion).items():
            every[i].put(again[i], part)
    return every


def ask(
    functions: Sequence[RewardFunction],
    rows: Mapping[int, Sequence[int]],
    completions: Sequence[Completion],
    occasion: Occasion,
) -> dict[int, Scores]:
    """Of each reward (by its number) what it says of its ``rows``. Async ones all at the same time, in threads that
    wait for them; plain ones meanwhile, one after another in the main thread."""

    def ask_one(i: int) -> Scores:
        return score_rows(functions[i], [completions[row] for row in rows[i]], occasion)

    waiting = [i for i in rows if functions[i].is_async]
    if occasion.loop is None or not waiting:
        return {i: ask_one(i) for i in rows}
    occasion.loop.open()
    with ThreadPoolExecutor(len(waiting)) as pool:
        asked = {i: pool.submit(ask_one, i) for i in waiting}
        try:
            scores = {i: ask_one(i) for i in rows if i not in asked}
            pending = set(asked.values())
            while pending:
                interrupts.check()
                done, pending = wait(pending, INTERRUPTED_WITHIN_S, FIRST_COMPLETED)
                for one in done:
                    one.result()  # one that ends the run ends it now
        except BaseException:
            occasion.loop.cancel()  # or leaving the pool would wait for them
            raise
    return scores | {i: one.result() for i, one in asked.items()}


def worth_another_try(section: Reward, scores: Scores) -> list[int]:
    """The rows that may heal, where too many have failed, and those that cannot heal are few enough."""
    allowed = section.max_unscored * len(scores.values)
    lasting = len(scores.failures) - len(scores.may_heal)
    return sorted(scores.may_heal) if len(scores.failures) > allowed >= lasting else []


def _of_rank() -> str:
    return f"rank {os.environ['RANK']}: " if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""


def _pause(seconds: float) -> None:
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        interrupts.check()
        time.sleep(min(left, INTERRUPTED_WITHIN_S))
