"""A plan as text and as JSON."""

from collections.abc import Sequence
from typing import Any

from trainer.plan import state
from trainer.plan.advice import Advice
from trainer.plan.cards import GIB, Card
from trainer.plan.parts import PARTS, Plan


def text(plan: Plan, card: Card, fits: bool, advice: Sequence[Advice]) -> str:
    settings = plan.settings
    phases = list(plan.phases)
    lines = [
        f"{settings.ranks} x {card.name} with {card.gib:.1f} GiB, by formulas; no weight was read. "
        f"{_count(settings.shape.total)} parameters, {_count(settings.trained)} trained.",
        _passes(plan),
        "",
        f"{'GiB of a rank':<26}" + "".join(f"{phase:>11}" for phase in phases),
    ]
    for part in PARTS:
        sizes = [plan.phases[phase][part] for phase in phases]
        if any(sizes):
            lines.append(f"{part:<26}" + "".join(f"{size / GIB:>11.2f}" for size in sizes))
    lines.append(f"{'total':<26}" + "".join(f"{plan.totals[phase] / GIB:>11.2f}" for phase in phases))
    if host := state.host(settings):
        lines.append(f"On the host, a rank: {host / GIB:.1f} GiB.")
    if settings.rests:
        lines.append("A rollout has no room beside optimizer and gradients: they go to the host for as long.")
    lines += ["", _verdict(plan, card, fits), *(_advice(one) for one in advice)]
    return "\n".join(lines)


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} billion" if parameters >= 1e9 else f"{parameters / 1e6:.1f} million"


def _passes(plan: Plan) -> str:
    settings = plan.settings
    passes, tokens = settings.passes()
    return (
        f"A step of a rank: {settings.groups} prompts x {settings.generations} completions, {tokens} tokens in "
        f"{passes} training passes of at most {settings.limit}, gradient checkpointing "
        f"{'on' if settings.checkpointing else 'off'}."
    )


def _verdict(plan: Plan, card: Card, fits: bool) -> str:
    phase = plan.fullest
    peak = plan.peak / GIB
    if fits:
        return f"Fits: the peak is {peak:.2f} of {card.gib:.2f} GiB, in {phase}."
    too_much = [f"{name} by {size / GIB - card.gib:.2f}" for name, size in plan.totals.items() if size / GIB > card.gib]
    largest = max(PARTS, key=lambda part: plan.phases[phase][part])
    return (
        f"Does not fit: beyond {card.gib:.2f} GiB are {', '.join(too_much)} GiB. The largest part of {phase} is "
        f"{largest}, {plan.phases[phase][largest] / GIB:.2f} GiB."
    )


def _advice(one: Advice) -> str:
    return (
        f"  {' '.join(one.changes)}: peak {one.peak / GIB:.2f} GiB, {one.seconds:+.2f} s a step by formula ({one.told})"
    )


def as_json(plan: Plan, card: Card, fits: bool, advice: Sequence[Advice]) -> dict[str, Any]:
    """Sizes in GiB."""
    settings = plan.settings
    return {
        "card": card.name,
        "memory_gib": card.gib,
        "gpus": settings.ranks,
        "fits": fits,
        "peak_gib": plan.peak / GIB,
        "phases_gib": {
            phase: {part: size / GIB for part, size in parts.items()} for phase, parts in plan.phases.items()
        },
        "totals_gib": {phase: size / GIB for phase, size in plan.totals.items()},
        "host_gib": state.host(settings) / GIB,
        "token_budget": settings.token_budget,
        "gradient_checkpointing": settings.checkpointing,
        "optimizer_rests_in_rollouts": settings.rests,
        "advice": [
            {"changes": list(one.changes), "peak_gib": one.peak / GIB, "seconds_a_step": one.seconds, "takes": one.told}
            for one in advice
        ],
    }
