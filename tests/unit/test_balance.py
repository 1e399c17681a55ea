"""Groups over ranks: whole groups, longest first, the same answer on every rank."""

import itertools
import random
from collections.abc import Sequence
from typing import Any, cast

import pytest

from trainer.balance import balanced, longest_first
from trainer.batch import Completion, Prompt
from trainer.models.packing import tokens_of

RANKS, GROUPS, GENERATIONS = 8, 32, 8


def loads(costs: Sequence[float], ranks: Sequence[int], size: int) -> list[float]:
    return [sum(cost for cost, rank in zip(costs, ranks, strict=True) if rank == one) for one in range(size)]


def unevenness(costs: Sequence[float], ranks: Sequence[int], size: int) -> float:
    """Load of the fullest rank over the mean: 1 is perfect, and the others wait for the rest."""
    found = loads(costs, ranks, size)
    return max(found) / (sum(found) / size)


def round_robin(groups: int, ranks: int) -> list[int]:
    return [group % ranks for group in range(groups)]


def test_the_longest_goes_first_to_the_rank_that_has_least() -> None:
    costs = [3, 7, 3, 5, 4]
    chosen = longest_first(costs, round_robin(5, 2), 2)
    # 7 to its owner, 5 and 4 to the other, 3 (group 0) to the first at 7 < 9, 3 (group 2) to the other at 9 < 10.
    assert chosen == [1, 1, 0, 0, 0]
    assert loads(costs, chosen, 2) == [12, 10]


def test_groups_of_one_cost_stay_where_they_are() -> None:
    owners = round_robin(GROUPS, RANKS)
    assert longest_first([5] * GROUPS, owners, RANKS) == owners
    assert longest_first([9, 2], [1, 0], 2) == [1, 0]


@pytest.mark.parametrize("sigma", [0.4, 0.7, 1.0])
def test_loads_of_lognormal_lengths_are_within_five_percent(sigma: float) -> None:
    """The fullest rank, on average over 50 steps: completions of median 128 with a cap of 1024, prompts of 128 to
    512."""
    draw = random.Random(1)
    ours, dealt = [], []
    for _ in range(50):
        costs = [
            draw.randint(128, 512)
            + sum(min(1024, round(128 * draw.lognormvariate(0, sigma))) for _ in range(GENERATIONS))
            for _ in range(GROUPS)
        ]
        owners = round_robin(GROUPS, RANKS)
        ours.append(unevenness(costs, longest_first(costs, owners, RANKS), RANKS))
        dealt.append(unevenness(costs, owners, RANKS))
    assert sum(ours) / 50 <= 1.05
    assert sum(dealt) / 50 > 1.09, "dealing the groups out would do as well"
    assert all(one <= other for one, other in zip(ours, dealt, strict=True))


def test_no_rank_has_more_than_graham_allows() -> None:
    """4/3 - 1/(3 R) of the best that any assignment reaches."""
    draw = random.Random(2)
    for _ in range(100):
        size = draw.randint(2, 4)
        costs = [draw.choice([1, 2, 3, 50, 51, 200]) for _ in range(draw.randint(1, 6))]
        best = min(max(loads(costs, ranks, size)) for ranks in itertools.product(range(size), repeat=len(costs)))
        most = max(loads(costs, longest_first(costs, round_robin(len(costs), size), size), size))
        assert best <= most <= (4 / 3 - 1 / (3 * size)) * best


class Ranks:
    """A world of which every rank's value is known beforehand."""

    def __init__(self, rank: int, values: list[list[Completion]]) -> None:
        self.rank, self.size, self.values, self.brought = rank, len(values), values, None

    def gather_objects(self, value: Any) -> list[Any]:
        self.brought = value
        return [value if rank == self.rank else part for rank, part in enumerate(self.values)]


def group(place: int, prompt: int, *lengths: int) -> list[Completion]:
    shared = Prompt(place, "text", tuple(range(prompt)), ({"role": "user"},), {"answer": object()})
    return [
        Completion(place, i, shared, (7,) * n, (-1.5,) * n, "stop", "text", {"r": 1.0}, 1.0, advantage=place + i / 10)
        for i, n in enumerate(lengths)
    ]


def test_every_completion_is_trained_once_in_global_order_with_what_a_pass_reads() -> None:
    sampled = [group(0, 9, 3, 4) + group(2, 90, 30, 50), group(1, 50, 20, 20) + group(3, 2, 1)]
    everything = {(one.group, one.generation): one for part in sampled for one in part}
    seen = []
    for rank in range(2):
        mine = balanced(sampled[rank], lambda members: tokens_of(members, True), cast(Any, Ranks(rank, sampled)))
        keys = [(one.group, one.generation) for one in mine]
        assert keys == sorted(keys)
        seen += keys
        for one in mine:
            origin = everything[one.group, one.generation]
            assert (one.ids, one.sampling_logps, one.advantage) == (origin.ids, origin.sampling_logps, origin.advantage)
            assert one.prompt.ids == origin.prompt.ids
    assert sorted(seen) == sorted(everything)
    # 168 tokens for rank 0, 88 + 14 + 2 for rank 1, of which it had sampled 88 + 2.
    assert [place for place, _ in seen] == [2, 2, 0, 0, 1, 1, 3]


def test_what_a_user_put_beside_a_prompt_is_not_sent() -> None:
    ranks = Ranks(0, [[], []])
    own = group(0, 3, 2)
    own[0].extra["plot"] = object()
    balanced(own, lambda members: tokens_of(members, True), cast(Any, ranks))
    (sent,) = cast(Any, ranks.brought)
    assert (sent.text, sent.extra, sent.prompt.text, sent.prompt.messages, sent.prompt.columns) == (
        "",
        {},
        "",
        None,
        {},
    )
    assert own[0].extra and own[0].text == "text", "the record is what it was"


def test_one_rank_trains_what_it_sampled() -> None:
    own = group(1, 3, 2) + group(0, 3, 2)
    assert balanced(own, lambda members: 0.0, cast(Any, Ranks(0, [[]]))) == own
