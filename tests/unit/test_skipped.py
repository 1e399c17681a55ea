"""Completions whose advantage is 0 are not computed where the loss has no KL term; the update is the same."""

from pathlib import Path
from typing import Any

import pytest
import torch

import trainer.train
from tests.dist.spread import BASE, CELLS, LOSSES, LR, apart, trajectory, write_steps
from tests.tiny_run import distance, start, step, write_run
from trainer.algorithm.advantages import group_advantages
from trainer.world import World

FLAT, MIXED, FLAT_AGAIN, LAST_STEP = range(4)
"""Of the recorded steps: all groups flat; three of six; all; all but one."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_run(tmp_path_factory.mktemp("run"))
    write_steps(folder)
    return folder


@pytest.mark.parametrize("cell", [*LOSSES, "stage 0, cut masked", "two updates"])
def test_the_update_is_that_of_computing_them(folder: Path, world: World, cell: str) -> None:
    usual, everything = (trajectory(folder, world, CELLS[cell], skip=skip) for skip in (True, False))
    differences = apart(usual, everything)
    assert differences[: FLAT + 2] == [0, 0], "a gradient of zeros is the same to the last bit"
    assert max(differences) < 1e-3 * LR
    moved = [distance(one, other) for one, other in zip(usual["weights"], usual["weights"][1:], strict=False)]
    assert min(moved) > 1e-4, "weight decay and momentum act in a step without a gradient"
    for mine, theirs in zip(usual["metrics"], everything["metrics"], strict=True):
        for name in ("loss", "grad_norm", "zero_std_fraction", "reward_mean", "lr"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-7), name


def test_they_are_not_computed_and_stay_in_n(folder: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    count = trainer.train.global_count
    monkeypatch.setattr(trainer.train, "global_count", lambda *args: counts.append(count(*args)) or counts[-1])
    found = trajectory(folder, world, {"grpo.loss_type": "dapo"})
    everything = trajectory(folder, world, {"grpo.loss_type": "dapo"}, skip=False)
    assert counts[:4] == counts[4:] == [tokens_scored(rows) for rows in found["rows"]]
    assert [found["tokens"][number] for number in (FLAT, FLAT_AGAIN)] == [[1], [1]], "one filler"
    ratio = sum(found["tokens"][MIXED]) / sum(everything["tokens"][MIXED])
    assert 0.4 < ratio < 0.85
    assert len(found["tokens"][LAST_STEP]) == 1 < len(everything["tokens"][LAST_STEP])
    assert {"entropy", "sampling_logp_gap", "clip_fraction"} & set(found["metrics"][FLAT]) == set()
    assert found["metrics"][FLAT]["loss"] == found["metrics"][FLAT]["grad_norm"] == 0


def tokens_scored(rows: list[dict[str, Any]]) -> int:
    return sum(len(row["completion_ids"]) for row in rows if row["reward"] is not None)


def test_a_kl_term_in_the_loss_skips_nothing(folder: Path, world: World) -> None:
    found, everything = (trajectory(folder, world, CELLS["KL in the loss"], skip=skip) for skip in (True, False))
    assert found["tokens"] == everything["tokens"]
    assert found["metrics"][FLAT]["grad_norm"] > 0
    assert found["metrics"][FLAT]["kl"] > 0


def test_with_the_kl_in_the_reward_it_is_measured_on_all_of_them(folder: Path, world: World) -> None:
    """The adaptive controller steers by it, so what is skipped would change the coefficient, and with it the update."""
    cell = CELLS["KL in the reward, adaptive"]
    found, everything = (trajectory(folder, world, cell, skip=skip) for skip in (True, False))
    for number, (mine, theirs) in enumerate(zip(found["metrics"], everything["metrics"], strict=True)):
        assert sum(found["tokens"][number]) < sum(everything["tokens"][number])
        for name in ("kl", "kl_std", "kl_max", "kl_coef", "entropy", "sampling_logp_gap", "reward_mean"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-5), name
    assert found["coefficient"] == pytest.approx(everything["coefficient"], rel=1e-6)
    assert found["metrics"][1]["kl_coef"] != found["metrics"][0]["kl_coef"]
    assert max(apart(found, everything)) < 1e-3 * LR / 10


def test_a_coefficient_of_zero_for_a_while_still_measures_the_kl(folder: Path, world: World) -> None:
    schedule = {"grpo.kl.coef": 0.3, "grpo.kl.schedule": "warmup_constant", "grpo.kl.warmup_steps": 2}
    replayed = {"rollout.replay": str(folder / "steps")}
    for placement, trained in (("loss", True), ("reward", False)):
        settings = BASE | replayed | schedule | {"grpo.kl.placement": placement, "grpo.kl.estimator": "k2"}
        state = start(folder, world, settings, away=0.05)
        metrics, _ = step(state)
        state.engine.close()
        assert metrics["kl_coef"] == 0 and metrics["kl"] > 0
        assert ("clip_fraction" in metrics) == trained, "flat groups: no gradient, and a pass only for the KL"


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_rewards_give_an_advantage_of_exactly_zero(scale: Any, baseline: Any) -> None:
    """Sums of 0.1 are not multiples of it, so a mean taken of them is off; and only 0 itself is skipped."""
    for value in (0.1, 0.3, 0.7, 1 / 3, -2.2, 1e6 + 0.1):
        rewards = torch.tensor([value] * 8 + [0.0, 1.0, 0.5, 0.25], dtype=torch.float64)
        groups = torch.tensor([0] * 8 + [1] * 4)
        found = group_advantages(rewards, groups, scale=scale, baseline=baseline, batch_std=0.5)
        assert found[:8].tolist() == [0.0] * 8 and (found[8:] != 0).all()
