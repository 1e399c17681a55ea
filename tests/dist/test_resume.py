"""A resumed run is the run that was not stopped, bit for bit, in another process; and so is one that has gone back."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.dist.launch import run_ranks
from tests.dist.resume import REWARDS
from tests.tiny_run import write_run
from tests.unit.test_checkpoints import flip_a_bit, truncate

CELLS = [{"stage": stage, "r": r} for stage in range(4) for r in (4, 0)]
CELLS += [{"stage": stage, "r": 0, "dtype": "bf16"} for stage in (1, 2, 3)]
CELLS += [{"stage": 3, "r": 4, "bits": 4}]
CONTROLS = [{"stage": 2, "r": 4, "without": what} for what in ("random states", "updates")]


def phase(name: str, folder: Path, ranks: int, port: int) -> list[dict[str, Any]]:
    worker = str(Path(__file__).with_name("resume.py"))
    for rank in run_ranks([worker, name, str(folder)], ranks, port):
        assert rank.code == 0, rank.output[-3000:]
    return json.loads((folder / f"{name}.json").read_text())


@pytest.mark.parametrize(("ranks", "port"), [(1, 29711), (2, 29713)])
def test_i3_b67_b72_six_steps_are_three_and_three_more(ranks: int, port: int, tmp_path: Path) -> None:
    """Weights, metrics, prompts, completions and rewards, for ZeRO 0 to 3, full and LoRA, in a fresh process; bf16 and
    4-bit base weights too.

    The adaptive KL coefficient, a linear learning rate, rewards that draw random numbers and epochs that end inside of
    steps would each show what was not restored. F14 and F15: of the newest checkpoint a bit is flipped, and the one
    before it is cut off, so that all go on from the third.
    """
    write_run(tmp_path)
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "cells.json").write_text(json.dumps(CELLS + CONTROLS))
    straight = phase("straight", tmp_path, ranks, port)
    for checkpoints in tmp_path.glob("zero*/checkpoints"):
        _, cut, flipped = sorted(checkpoints.glob("step-*"))
        flip_a_bit(next(flipped.glob("deepspeed/*optim_states.pt"), flipped / "deepspeed/mp_rank_00_model_states.pt"))
        truncate(next(cut.glob("deepspeed/*.pt")))
    resumed = phase("resumed", tmp_path, ranks, port + 1)
    assert (len(straight), len(resumed)) == (len(CELLS), len(CELLS + CONTROLS))
    for cell, one, other in zip(CELLS, straight, resumed, strict=False):
        assert one.pop("rolled_back") == {name: one[name] for name in other}, cell
        assert one == other, cell
        prompts = [[row[0] for row in mine] for record in one["records"] for mine in record["completions"]]
        assert len({tuple(row) for row in prompts}) > 1, "every step held the same prompts"
    reference = straight[CELLS.index({"stage": 2, "r": 4})]
    for control, other in zip(CONTROLS, resumed[len(CELLS) :], strict=True):
        assert other["weights"] != reference["weights"], f"the comparison does not see a resume without {control}"
