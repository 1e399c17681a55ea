"""Held-out scores: errors clustered by prompt, rises paired by prompt, and what JSON can hold."""

import json
import math

import pytest

from trainer.evaluate import Evaluation, clustered, rise


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
    result = Evaluation(3, clustered([[None], [None]]), clustered([[1.0], [None]]))
    text = json.dumps(result.record(), allow_nan=False)
    assert json.loads(text)["sampled"]["mean"] is None
    again = Evaluation.of(json.loads(text))
    assert math.isnan(again.sampled.mean) and math.isnan(again.greedy.stderr)
    assert again.greedy.per_prompt == result.greedy.per_prompt and again.greedy.mean == 1.0
