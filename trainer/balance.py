"""Which rank trains which groups: whole groups, spread so that the passes of all ranks are as long as each other.

How long completions are is known after the rollout only, so a group may be trained by another rank than sampled it.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from trainer.batch import Completion
from trainer.world import World


def longest_first(costs: Sequence[float], owners: Sequence[int], ranks: int) -> list[int]:
    """The rank of each group: the most expensive group first, each to the rank that has least to do so far.

    LPT (Graham 1969): the fullest rank has at most 4/3 of what it would have in the best assignment. A tie goes to the
    owner, then to the lowest rank, so that every rank finds the same answer.
    """
    loads = [0.0] * ranks
    chosen = [0] * len(costs)
    for group in sorted(range(len(costs)), key=lambda group: (-costs[group], group)):
        rank = min(range(ranks), key=lambda rank: (loads[rank], rank != owners[group], rank))
        loads[rank] += costs[group]
        chosen[group] = rank
    return chosen


def balanced(
    completions: Sequence[Completion], cost: Callable[[Sequence[Completion]], float], world: World
) -> list[Completion]:
    """This rank's part of the completions that all ranks bring, by ``cost`` of a group; groups in global order.

    On several ranks these are copies that hold what a pass reads: the records stay with the rank that sampled.
    """
    if world.size == 1:
        return list(completions)
    groups: dict[int, list[Completion]] = {}
    owner: dict[int, int] = {}
    for rank, part in enumerate(world.gather_objects([_without_text(completion) for completion in completions])):
        for completion in part:
            groups.setdefault(completion.group, []).append(completion)
            owner[completion.group] = rank
    places = sorted(groups)
    ranks = longest_first([cost(groups[place]) for place in places], [owner[place] for place in places], world.size)
    return [one for place, rank in zip(places, ranks, strict=True) if rank == world.rank for one in groups[place]]


def _without_text(completion: Completion) -> Completion:
    """Without texts and columns, which may be large and anything."""
    prompt = replace(completion.prompt, text="", messages=None, columns={})
    return replace(completion, prompt=prompt, text="", extra={})
