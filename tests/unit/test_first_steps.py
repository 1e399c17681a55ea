"""What a run is told once of its first steps; when completions end by being cut, see test_faults_training.py."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_run import start, step, write_run
from trainer.output import Output
from trainer.record.first_steps import STEPS, FirstSteps
from trainer.world import World

SAME = "every completion of a prompt got the same reward"
FLAT: dict[str, float] = {"truncated_fraction": 0.0, "zero_std_fraction": 1.0}


def told(first: FirstSteps, *steps: dict[str, float]) -> list[list[str]]:
    """The notes of each step."""
    return [first.notes(metrics, max_new_tokens=8, ends="299") for metrics in steps]


def test_groups_of_equal_rewards_from_the_start_are_told_once_with_the_fix() -> None:
    said = told(FirstSteps(steps=100), *[FLAT] * 30)
    assert [len(notes) for notes in said] == [0] * (STEPS - 1) + [1] + [0] * (30 - STEPS)
    (note,) = said[STEPS - 1]
    for part in (SAME, f"first {STEPS} steps", "zero_std_fraction", "Fix: ", "partial credit", "harder prompts"):
        assert part in note


def test_one_step_with_a_difference_is_enough_to_say_nothing() -> None:
    one = FLAT | {"zero_std_fraction": 0.875}
    unscored = {"truncated_fraction": 0.0}  # said elsewhere, and no equal rewards
    for other in (one, unscored):
        assert told(FirstSteps(steps=100), *[FLAT] * 4, other, *[FLAT] * 30) == [[]] * 35


def test_a_shorter_run_is_told_at_its_end() -> None:
    assert [len(notes) for notes in told(FirstSteps(steps=3), *[FLAT] * 3)] == [0, 0, 1]


def test_a_run_shows_it_and_hands_it_on(tmp_path: Path, world: World, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"run.dir": str(tmp_path / "run"), "run.steps": 2, "rollout.prompts_per_step": 2}
    state = start(write_run(tmp_path), world, settings, reward="constant")
    before, after = Output(state), Output(state)
    before.begin(goes_on=False)
    before.step(*step(state))
    assert SAME not in capsys.readouterr().out
    after.restore(json.loads(json.dumps(before.progress())), goes_on=True)
    after.step(*step(state))
    assert SAME in capsys.readouterr().out


def test_a_resumed_run_goes_on_counting() -> None:
    first = FirstSteps(steps=100)
    told(first, *[FLAT | {"truncated_fraction": 0.5}] * 4)
    kept: dict[str, Any] = json.loads(json.dumps({"cut": first.cut, "flat": first.flat}))
    said = told(FirstSteps(100, **kept), *[FLAT] * 8)
    assert [len(notes) for notes in said] == [0] * 5 + [1, 0, 0]  # four halves of ten: too few cuts for their note
    assert SAME in said[5][0]
