"""Held-out scores: errors clustered by prompt, rises paired by prompt, and what JSON can hold."""

import itertools
import json
import math

import pytest

from trainer.evaluate import Evaluation, clustered, measured, pass_at, rise


def test_completions_of_one_prompt_count_once() -> None:
    score = clustered([[0.0, 1.0, None], [1.0, 1.0], [0.25]])
    means = [0.5, 1.0, 0.25]
    average = sum(means) / 3
    assert score.mean == pytest.approx(average)
    assert score.stderr == pytest.approx(math.sqrt(sum((one - average) ** 2 for one in means) / 2 / 3))
    assert (score.per_prompt, score.unscored) == ((0.5, 1.0, 0.25), 1)


def test_a_prompt_that_one_evaluation_could_not_score_leaves_the_pairs_aligned() -> None:
    before, after = clustered([[0.0], [None], [0.5]]), clustered([[1.0], [1.0], [None]])
    assert rise(before, after)[0] == 1.0
    assert math.isnan(rise(clustered([[None]]), after=clustered([[1.0]]))[0])


def test_a_number_that_does_not_exist_is_null_and_comes_back() -> None:
    total = measured([[None], [None]], [[1.0], [None]], generations=1, correct_at=1.0)
    result = Evaluation(3, 1.0, total, {"a": total})
    text = json.dumps(result.record(), allow_nan=False)
    assert (
        json.loads(text)["sampled"]["mean"] is None and json.loads(text)["parts"]["a"]["pass_at"]["1"]["mean"] is None
    )
    again = Evaluation.of(json.loads(text))
    assert math.isnan(again.sampled.mean) and math.isnan(again.greedy.stderr)
    assert again.greedy.per_prompt == result.greedy.per_prompt and again.greedy.mean == 1.0
    assert again.parts["a"].pass_at.keys() == {1}


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_is_the_share_of_all_draws_of_k_with_a_correct_one(k: int) -> None:
    rewards = [0.0, 1.0, 0.5, 1.5, 0.0]
    draws = list(itertools.combinations(rewards, k))
    expected = sum(max(draw) >= 1.0 for draw in draws) / len(draws)
    found = pass_at(k, [rewards, [0.0] * 5, [1.0] * 4 + [None]], correct_at=1.0)
    # The third prompt has four scored samples: of five it cannot tell.
    assert found.per_prompt == (pytest.approx(expected), 0.0, 1.0 if k < 5 else None)
    assert found.mean == pytest.approx((expected + (k < 5)) / (3 if k < 5 else 2)) and found.unscored == 1


def test_a_weighted_sum_of_all_that_can_be_earned_is_correct() -> None:
    assert 0.7 + 0.2 + 0.1 < 1 and pass_at(1, [[0.7 + 0.2 + 0.1, 0.999]], correct_at=1.0).mean == 0.5


def test_pass_at_k_goes_up_to_all_samples() -> None:
    def ks(generations: int) -> list[int]:
        rewards = [[0.0] * generations]
        return list(measured(rewards, [[0.0]], generations=generations, correct_at=1.0).pass_at)

    assert (ks(1), ks(4), ks(6)) == ([1], [1, 2, 4], [1, 2, 4, 6])
