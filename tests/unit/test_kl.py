"""KL estimators against float64, their gradients against the formulas. Rows B02, B03, B04, V2."""

import math

import pytest
import torch

from trainer.algorithm.kl import sampled_kl, weigh_by_ratio

DELTAS = [-100.0, -3.0, -0.1, 0.0, 0.1, 1.0, 5.0, 20.0]


def value_and_gradient(estimator: str, delta: float, dtype: torch.dtype = torch.float32) -> tuple[float, float]:
    """k and dk/dlogp at logp = 0, logp_ref = delta."""
    logps = torch.zeros(1, dtype=dtype, requires_grad=True)
    kl = sampled_kl(logps, torch.tensor([delta], dtype=dtype), estimator)
    kl.backward()
    return kl.item(), logps.grad.item()


def over_the_vocabulary(logps: torch.Tensor, reference_logps: torch.Tensor) -> torch.Tensor:
    """KL(pi || ref) as it is defined."""
    return (logps.exp() * (logps - reference_logps)).sum(-1)


def test_v2_vectors() -> None:
    assert value_and_gradient("k3", 0.1)[0] == pytest.approx(0.005170919, rel=1e-4)
    assert value_and_gradient("k3", -0.1)[0] == pytest.approx(0.004837416, rel=1e-4)
    assert value_and_gradient("k3", 1.0)[0] == pytest.approx(0.71828187, rel=1e-6)
    assert value_and_gradient("k3", -100.0)[0] == pytest.approx(99.0)


@pytest.mark.parametrize("delta", DELTAS)
def test_gradients_are_those_of_the_formulas(delta: float) -> None:
    assert value_and_gradient("k1", delta)[1] == 1.0
    assert value_and_gradient("k2", delta)[1] == pytest.approx(-delta)
    assert value_and_gradient("k3", delta)[1] == pytest.approx(-math.expm1(delta), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("delta", [100.0, 1e4, -100.0, -1e4])
def test_b03_no_delta_overflows_value_or_gradient(delta: float, dtype: torch.dtype) -> None:
    value, gradient = value_and_gradient("k3", delta, dtype)
    assert math.isfinite(value) and math.isfinite(gradient)
    # Descent must raise the log-prob of a token that the reference likes better, and lower it otherwise.
    assert (gradient < 0) == (delta > 0)


@pytest.mark.parametrize("delta", [1e-6, -1e-6, 1e-5, 1e-4, -1e-4, 1e-3])
def test_b04_tiny_kl_is_exact_and_never_negative(delta: float) -> None:
    exact = math.expm1(delta) - delta
    value = value_and_gradient("k3", delta)[0]
    assert value >= 0
    assert value == pytest.approx(exact, abs=abs(delta) * 2e-7)


def test_b02_penalties_are_not_negative_and_grow_away_from_the_reference() -> None:
    logps = torch.linspace(-3, 3, 61)
    for estimator in ("k2", "k3"):
        kl = sampled_kl(logps, torch.zeros(61), estimator)
        assert (kl >= 0).all()
        assert (kl[31:].diff() > 0).all() and (kl[:30].diff() < 0).all()


def test_b02_expectations_are_the_kl() -> None:
    """E_pi[k1] = E_pi[k3] = KL exactly, summed over a whole vocabulary in float64."""
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    reference = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64).log()
    exact = over_the_vocabulary(policy, reference).item()
    assert exact == pytest.approx(0.3 * math.log(2.5), rel=1e-12)
    for estimator in ("k1", "k3"):
        assert (policy.exp() * sampled_kl(policy, reference, estimator)).sum().item() == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_weighted_estimators_have_the_gradient_of_the_kl(estimator: str) -> None:
    """Expected over the old policy, the gradient of ratio * k is that of KL(pi || ref): by full enumeration,
    float64."""
    torch.manual_seed(0)
    logits = torch.randn(5, dtype=torch.float64, requires_grad=True)
    old, reference = torch.randn(2, 5, dtype=torch.float64).log_softmax(-1)
    logps = logits.log_softmax(-1)
    weighted = weigh_by_ratio(sampled_kl(logps, reference, estimator), (logps - old).exp(), estimator)
    (found,) = torch.autograd.grad((old.exp() * weighted).sum(), logits, retain_graph=True)
    (expected,) = torch.autograd.grad(over_the_vocabulary(logps, reference), logits)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_exact_is_never_weighted() -> None:
    kl = torch.tensor([0.3])
    assert weigh_by_ratio(kl, torch.tensor([7.0]), "exact").item() == pytest.approx(0.3)


def test_unknown_estimator() -> None:
    with pytest.raises(ValueError, match="exact"):
        sampled_kl(torch.zeros(1), torch.zeros(1), "exact")
