"""Group advantages against hand-computed values. Rows of the fault list: B31, B44, B48, V1."""

import math

import pytest
import torch

from trainer.algorithm.advantages import group_advantages, group_statistics

NAN = float("nan")


def advantages(rewards: list[float], groups: list[int] | None = None, **options: object) -> list[float]:
    return group_advantages(
        torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups or [0] * len(rewards)), **options
    ).tolist()


def test_v1_two_of_four_and_one_of_four() -> None:
    assert advantages([0, 0, 1, 1]) == pytest.approx([-0.8659, -0.8659, 0.8659, 0.8659], abs=1e-4)
    assert advantages([0, 0, 0, 1])[3] == pytest.approx(1.4997, abs=1e-4)


def test_b31_each_group_has_its_own_statistics() -> None:
    a = 0.7071067811865476 / (1 + 1e-4 / 0.7071067811865476)
    assert advantages([0, 1, 10, 11], [0, 0, 1, 1]) == pytest.approx([-a, a, -a, a], rel=1e-6)
    # The layout P1G1, P2G1, P1G2, P2G2: what counts is the label of a row, not its place.
    assert advantages([0, 10, 1, 11], [0, 1, 0, 1]) == pytest.approx([-a, -a, a, a], rel=1e-6)


@pytest.mark.parametrize("rewards", [[0.3] * 8, [0.35] * 7, [0.1] * 3, [1e6 + 0.1] * 5, [7.0]])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("scale", ["group", "none"])
def test_b48_equal_rewards_give_exactly_zero(rewards: list[float], baseline: str, scale: str) -> None:
    assert advantages(rewards, baseline=baseline, scale=scale) == [0.0] * len(rewards)


def test_b48_bound_holds_for_every_spread() -> None:
    for spread in (1e-12, 1e-6, 1e-3, 1.0, 1e6):
        found = advantages([0.35] * 7 + [0.35 + spread])
        assert max(map(abs, found)) <= 7 / math.sqrt(8) + 1e-6
    assert advantages([0.0] * 7 + [1.0], eps=0.0)[7] == pytest.approx(2.4749, abs=1e-4)


def test_b44_unscored_rows_leave_the_statistics() -> None:
    with_gap = advantages([1, NAN, 0, 0.5])
    assert with_gap[1] == 0.0
    assert [with_gap[0], *with_gap[2:]] == pytest.approx(advantages([1, 0, 0.5]))
    assert advantages([1, NAN, NAN, NAN]) == [0.0] * 4
    assert advantages([NAN] * 4) == [0.0] * 4


def test_leave_one_out_is_the_reward_minus_the_mean_of_the_others() -> None:
    rewards = [0.2, 0.9, 0.4, 1.5]
    expected = [r - (sum(rewards) - r) / 3 for r in rewards]
    assert advantages(rewards, baseline="leave_one_out", scale="none") == pytest.approx(expected, rel=1e-6)


def test_scale_batch_divides_by_the_given_std_and_needs_it() -> None:
    assert advantages([0, 1], scale="batch", batch_std=2.0, eps=0.0) == pytest.approx([-0.25, 0.25])
    with pytest.raises(ValueError, match="batch_std"):
        advantages([0, 1], scale="batch")


def test_statistics_use_ddof_1() -> None:
    mean, std, count = group_statistics(
        torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64), torch.zeros(3, dtype=torch.long)
    )
    assert mean[0].item() == pytest.approx(7 / 3)
    assert std[0].item() == pytest.approx(math.sqrt(7 / 3))
    assert count[0].item() == 3


def test_no_rows_at_all() -> None:
    assert group_advantages(torch.tensor([], dtype=torch.float64), torch.tensor([], dtype=torch.long)).shape == (0,)
