"""Schedules at the values that the user's document computes, and the controller's direction and bound."""

import pytest

from trainer.algorithm.schedules import adapted_coefficient, kl_coefficient, learning_rate

SEED = {"peak": 0.5, "start": 0.01, "minimum": 0.1, "warmup": 200, "total": 1000}


@pytest.mark.parametrize(
    ("step", "value"), [(0, 0.01), (199, 0.49755), (200, 0.5), (600, 0.25), (840, 0.1), (999, 0.1)]
)
def test_the_documents_schedule(step: int, value: float) -> None:
    assert kl_coefficient(step, schedule="warmup_decay", **SEED) == pytest.approx(value)


@pytest.mark.parametrize("total", [150, 200])
def test_total_within_the_warm_up_holds_the_peak(total: int) -> None:
    assert kl_coefficient(250, schedule="warmup_decay", **(SEED | {"total": total})) == 0.5


def test_warmup_constant_and_constant() -> None:
    assert kl_coefficient(100, schedule="warmup_constant", **SEED) == pytest.approx(0.255)
    assert kl_coefficient(900, schedule="warmup_constant", **SEED) == 0.5
    assert kl_coefficient(0, schedule="constant", **SEED) == 0.5


def test_the_controller_follows_the_error_and_is_bounded() -> None:
    options = {"target": 0.1, "horizon": 1000, "completions": 100}
    assert adapted_coefficient(0.04, 0.1, **options) == 0.04
    assert adapted_coefficient(0.04, 0.11, **options) == pytest.approx(0.04 * 1.01)
    assert adapted_coefficient(0.04, 50.0, **options) == pytest.approx(0.04 * 1.02)
    assert adapted_coefficient(0.04, 0.0, **options) == pytest.approx(0.04 * 0.98)


def test_learning_rates() -> None:
    rates = [learning_rate(step, schedule="linear", peak=1.0, warmup=3, total=11) for step in range(12)]
    assert rates[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert rates[11] == pytest.approx(0.0)
    assert learning_rate(7, schedule="cosine", peak=1.0, warmup=3, total=11) == pytest.approx(0.5)
    assert learning_rate(500, schedule="constant", peak=2.0, warmup=0, total=3) == 2.0
