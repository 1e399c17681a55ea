"""The order of the prompts: a pure function of (seed, step), every row once an epoch, none twice in a step."""

from itertools import chain, pairwise

import pytest

from trainer.data.order import epoch_order, prompts_for_step

SIZES = [(10, 10), (10, 9), (10, 8), (10, 3), (10, 1), (11, 6), (7, 5), (64, 24), (5, 4), (1, 1), (1000, 48)]


def test_epoch_order_is_a_permutation_that_depends_on_seed_and_epoch():
    orders = [epoch_order(50, seed, epoch) for seed in (0, 1) for epoch in (0, 1, 2)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len(set(orders)) == len(orders)


def test_order_never_changes_between_versions():
    # A run that is resumed elsewhere must find the order that it began with.
    assert epoch_order(8, 0, 0) == (0, 3, 7, 4, 1, 5, 2, 6)
    assert prompts_for_step(8, 3, 100, 7) == [2, 5, 6]


@pytest.mark.parametrize(("n", "size"), SIZES)
def test_each_row_comes_once_in_each_epoch(n: int, size: int):
    epochs = 6
    rows = list(chain.from_iterable(prompts_for_step(n, size, step, 3) for step in range(epochs * n // size + 1)))
    for epoch in range(epochs):
        assert sorted(rows[epoch * n : (epoch + 1) * n]) == list(range(n))


@pytest.mark.parametrize(("n", "size"), SIZES)
def test_no_row_comes_twice_in_a_step(n: int, size: int):
    for seed in range(5):
        for step in range(4 * n // size + 2):
            rows = prompts_for_step(n, size, step, seed)
            assert len(rows) == size == len(set(rows)), f"seed {seed} step {step}: {rows}"


def test_a_step_does_not_depend_on_the_steps_before():
    backwards = {step: prompts_for_step(20, 7, step, 0) for step in reversed(range(40))}
    epoch_order.cache_clear()
    assert backwards == {step: prompts_for_step(20, 7, step, 0) for step in range(40)}


def test_steps_of_an_epoch_do_not_repeat_the_last_epochs_order():
    steps = [prompts_for_step(12, 4, step, 0) for step in range(12)]
    epochs = [steps[i : i + 3] for i in range(0, 12, 3)]
    assert all(before != after for before, after in pairwise(epochs))


def test_fewer_rows_than_a_step_takes_are_refused_with_both_numbers():
    with pytest.raises(ValueError, match=r"3 rows .* 4 prompts"):
        prompts_for_step(3, 4, 0, 0)
