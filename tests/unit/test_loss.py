"""Policy objectives by hand-computed values: clip on both sides, dual clip, gradients, weights, N. Rows B09, B11,
B21."""

import math

import pytest
import torch

from trainer.algorithm.loss import normaliser, policy_objective, token_weights

OPTIONS = {"loss_type": "dapo", "eps_low": 0.2, "eps_high": 0.3}


def objective(ratios: list[float], advantages: list[float], completion: list[int] | None = None, **options: object):
    """(loss, gradient by logp, clipped) of tokens with the given ratios."""
    logps = torch.tensor(ratios, dtype=torch.float64).log().requires_grad_()
    lines = torch.tensor(completion if completion is not None else list(range(len(ratios))))
    result = policy_objective(
        logps, torch.zeros(len(ratios)).double(), torch.tensor(advantages).double(), lines, **(OPTIONS | options)
    )
    (gradient,) = torch.autograd.grad(result.loss.sum(), logps)
    return result.loss.tolist(), gradient.tolist(), result.clipped.tolist()


def test_clip_cuts_the_gradient_where_the_surrogate_is_past_its_bound() -> None:
    loss, gradient, clipped = objective([1.0, 1.5, 1.5, 0.5, 0.5], [1.0, 1.0, -1.0, 1.0, -1.0])
    assert loss == pytest.approx([-1.0, -1.3, 1.5, -0.5, 0.8])
    assert gradient == pytest.approx([-1.0, 0.0, 1.5, -0.5, 0.0])
    assert clipped == [False, True, False, False, True]


def test_dual_clip_bounds_the_loss_of_a_negative_advantage() -> None:
    loss, gradient, clipped = objective([5.0, 2.0, 5.0], [-1.0, -1.0, 1.0], dual_clip=3.0)
    assert loss == pytest.approx([3.0, 2.0, -1.3])
    assert gradient == pytest.approx([0.0, 2.0, 0.0])
    assert clipped == [True, False, True]


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    loss, gradient, clipped = objective([1.0, 4.0, 0.5], [1.0, 1.0, -2.0], loss_type="cispo")
    assert gradient == pytest.approx([-1.0, -1.3, 1.0])
    assert clipped == [False, True, False]
    assert loss == pytest.approx([0.0, -1.3 * math.log(4), math.log(0.5)])


def test_gspo_has_one_ratio_per_completion() -> None:
    """exp(mean log-ratio): two tokens of ratios 1.21 and 1 make 1.1 at both; the other completion has its own."""
    loss, gradient, _ = objective([1.21, 1.0, 0.5], [1.0, -1.0], completion=[0, 0, 1], loss_type="gspo")
    assert loss == pytest.approx([-1.1, -1.1, 0.8])
    # d exp((a+b)/2) = ratio/2 by each token, summed over the two tokens of the completion.
    assert gradient == pytest.approx([-1.1, -1.1, 0.0])


def test_b11_on_policy_the_loss_is_zero_and_the_gradient_is_not() -> None:
    loss, gradient, _ = objective([1.0, 1.0], [1.0, -1.0])
    assert sum(loss) == 0.0
    assert gradient == [-1.0, 1.0]


def test_b03_a_huge_log_ratio_stays_finite() -> None:
    logps = torch.tensor([500.0, -500.0], requires_grad=True)
    result = policy_objective(logps, torch.zeros(2), torch.tensor([-1.0, -1.0]), torch.tensor([0, 1]), **OPTIONS)
    result.loss.sum().backward()
    assert torch.isfinite(result.loss).all() and torch.isfinite(logps.grad).all()


def test_a_positive_advantage_raises_the_log_prob() -> None:
    """The sign: gradient descent on the loss must raise what was better than its group (the inverted loss lowers
    it)."""
    for loss_type in ("grpo", "dapo", "dr_grpo", "gspo", "cispo"):
        _, gradient, _ = objective([1.0, 1.0], [1.0, -1.0], loss_type=loss_type)
        assert gradient[0] < 0 < gradient[1]


def test_weights_and_normaliser_make_the_documented_means() -> None:
    completion = torch.tensor([0, 1, 1, 1])
    assert token_weights(completion, 2, "dapo").tolist() == [1, 1, 1, 1]
    assert token_weights(completion, 2, "grpo").tolist() == pytest.approx([1, 1 / 3, 1 / 3, 1 / 3])
    assert token_weights(completion, 2, "gspo").tolist() == pytest.approx([1, 1 / 3, 1 / 3, 1 / 3])
    for loss_type, n in {"dapo": 40, "cispo": 40, "grpo": 5, "gspo": 5, "dr_grpo": 5 * 64}.items():
        assert normaliser(40, 5, 64, loss_type) == n
        assert normaliser(0, 0, 64, loss_type) == 0


def test_b09_every_split_gives_one_value() -> None:
    """Lengths 1, 1, 1, 13 in any order and any split: sums first, one division last."""
    lengths, losses = [1, 1, 1, 13], [0.5, -1.0, 2.0, 0.25]
    for loss_type, expected in {"dapo": (1.5 + 13 * 0.25) / 16, "grpo": 1.75 / 4}.items():
        for split in ([[0, 1, 2, 3]], [[3], [0, 1, 2]], [[0, 3], [2], [1]]):
            total = 0.0
            for part in split:
                completion = torch.repeat_interleave(torch.tensor([lengths[i] for i in part]))
                values = torch.tensor([losses[i] for i in part])[completion]
                total += float((token_weights(completion, len(part), loss_type) * values).sum())
            assert total / normaliser(16, 4, 64, loss_type) == pytest.approx(expected)
