"""What "auto" becomes: gradient checkpointing, the token budget of a pass; and where the optimizer is in rollouts."""

from collections.abc import Iterator
from dataclasses import replace

from trainer.plan.parts import plan
from trainer.plan.settings import Settings

MOST_TOKENS = {"cuda": 16384, "cpu": 4096}
"""More bring no speed. Beyond its tokens a pass costs one read of the weights, which lasts as long as about 210 tokens
on an A10 (``A_PASS``): 1 % at 16384. A CPU, some fifty times slower, has no such cost; smaller passes stay in reach of
its caches."""

A_PASS = 210
"""Tokens that are computed in the time of one read of the weights: 125 TFLOP/s over 600 GB/s, in bf16."""


STEP = 256
"""Tokens by which budgets differ."""


def reads(settings: Settings) -> int:
    """How often a training pass goes through the weights: forward, backward, and forward again with checkpointing."""
    return 3 if settings.checkpointing else 2


def cost(settings: Settings) -> float:
    """Of a step's training passes, in tokens of a forward pass. The gradients of the weights take one more, where those
    are trained."""
    passes, tokens = settings.passes()
    return (reads(settings) + (0 if settings.rank else 1)) * (tokens + passes * A_PASS)


def budgets(settings: Settings) -> Iterator[int]:
    """From the largest that can matter down to a pass of one completion."""
    most = max(settings.least_budget, MOST_TOKENS["cuda" if settings.cuda else "cpu"])
    yield from range(most // STEP * STEP, settings.least_budget, -STEP)
    yield settings.least_budget


def fitting(settings: Settings, room: float) -> Settings | None:
    """With the largest token budget whose step stays within ``room`` bytes, all phases together."""
    candidates = (replace(settings, token_budget=budget) for budget in budgets(settings))
    return next((one for one in candidates if plan(one).peak <= room), None)


def choose(settings: Settings, room: float, *, budget: bool, checkpointing: bool) -> Settings | None:
    """Settings that fit into ``room`` bytes, the quickest by ``cost``; None where none do.

    ``budget``, ``checkpointing``: which of the two are free; the others stay as they are. The optimizer goes to the
    host during rollouts where they alone are what does not fit.
    """
    variants = [replace(settings, checkpointing=on) for on in (False, True)] if checkpointing else [settings]
    if budget and not settings.micro_batch:
        found = [one for variant in variants if (one := fitting(variant, room))]
    else:
        found = [variant for variant in variants if plan(variant).peak <= room]
    if not found and settings.may_rest and not settings.rests:
        return choose(replace(settings, rests=True), room, budget=budget, checkpointing=checkpointing)
    return min(found, key=cost, default=None)
