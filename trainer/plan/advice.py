"""What to change where a run does not fit: the cheapest sets of changes that make it fit, each with its price."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations

from trainer.plan.cards import Card
from trainer.plan.parts import Plan
from trainer.plan.price import price
from trainer.plan.settings import Settings

CHANGES = (
    ("--engine.micro_batch", "0"),
    ("--engine.token_budget", "auto"),
    ("--engine.gradient_checkpointing", "auto"),
    ("--reference.mode", "auto"),
    ("--optim.name", "adamw8bit"),
    ("--engine.deepspeed", "zero2"),
    ("--engine.deepspeed", "zero3"),
    ("--engine.deepspeed", "zero2-offload"),
    ("--engine.deepspeed", "zero3-offload"),
    ("--quant.bits", "4"),
    ("--lora.r", "16"),
)
"""As they are written on the command line; what the run file has already, or cannot have, is passed over."""

MOST_CHANGES = 3
MOST_SETS = 3

Words = tuple[str, ...]


@dataclass(frozen=True)
class Advice:
    changes: Words
    peak: float
    """Bytes with them."""
    seconds: float
    """More a step."""
    told: str
    """What takes them."""


def advise(
    asked: Settings, card: Card, room: float, fitted: Callable[[Words], tuple[Settings, Plan] | None]
) -> list[Advice]:
    """The smallest sets of changes that fit, cheapest first.

    ``asked``: the run as its file has it. ``fitted``: the run with further words of the command line, at its best in
    ``room`` bytes; None where they are refused or change nothing.
    """
    for size in range(1, MOST_CHANGES + 1):
        found = []
        for changes in combinations(CHANGES, size):
            if len({key for key, _ in changes}) < size:
                continue
            words = tuple(word for change in changes for word in change)
            result = fitted(words)
            if result and result[1].peak <= room:
                found.append(Advice(words, result[1].peak, *price(asked, result[0], card)))
        if found:
            return sorted(found, key=_order)[:MOST_SETS]
    return []


def _order(advice: Advice) -> tuple[bool, float]:
    """Adapters instead of all weights are another experiment, however little they cost."""
    return "--lora.r" in advice.changes, advice.seconds
