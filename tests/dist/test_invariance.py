"""The update does not depend on ranks, micro-batches, ZeRO stage or layout: it is that of plain torch in float64.

4-bit base weights are the numbers that they stand for. Under SGD with lr 1 the update is the gradient. (AdamW would
hide a gradient divided by the world size: I2, B06-B09.)
"""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.dist.launch import run_ranks
from tests.dist.recorded import write_inputs

UPDATE, SCALARS = 2e-6, 1e-5
"""Largest relative distance of the update vector, and of loss, KL and gradient norm."""

FORMULAS = [
    {"loss_type": loss_type, "estimator": estimator, "placement": placement}
    for loss_type in ("grpo", "dapo", "dr_grpo", "gspo", "cispo")
    for estimator in ("k1", "k2", "k3", "exact")
    for placement in ("loss", "reward")
    if (estimator, placement) != ("k1", "loss")  # refused: its expected gradient is zero
]
MICRO = (1, 2, 64)
"""Completions a pass; 64 is all of them."""
CONTROLS = ("mean of rank means", "gradient / world size", "KL summed over ranks")
BASE: dict[str, Any] = {
    "lora": True,
    "loss_type": "dapo",
    "estimator": "k3",
    "placement": "loss",
    "stage": 2,
    "micro": 2,
}


def covering(ranks: int) -> list[dict[str, Any]]:
    """Every formula once on so many ranks; stages, micro-batches and LoRA/full in rotation, shifted between ranks."""
    cells = [
        formula
        | {
            "stage": (number + ranks) % 4,
            "micro": MICRO[(number // 4 + ranks) % 3],
            "lora": (number // 2 + ranks) % 2 == 0,
        }
        for number, formula in enumerate(FORMULAS)
    ]
    cells += [BASE | {"mask_truncated": True}, BASE | {"mask_truncated": True, "placement": "reward"}]
    cells += [BASE | {"ratio_weighted": False, "stage": 3, "lora": False}]
    cells += [
        BASE | {"bits": 4, "stage": 3, "partitioned": True},
        BASE | {"bits": 4, "estimator": "exact", "micro": 64},
    ]
    if ranks > 1:
        cells += [BASE | {"control": control} for control in CONTROLS]
    return cells


def everything(ranks: int) -> list[dict[str, Any]]:
    product = itertools.product(FORMULAS, range(4), MICRO, (False, True))
    return [formula | {"stage": stage, "micro": micro, "lora": lora} for formula, stage, micro, lora in product]


def run(cells: list[dict[str, Any]], ranks: int, folder: Path, port: int, timeout: float = 600) -> list[dict[str, Any]]:
    write_inputs(folder)
    (folder / "cells.json").write_text(json.dumps(cells))
    worker = str(Path(__file__).with_name("invariance.py"))
    arguments = [worker, str(folder), str(folder / "cells.json"), str(folder / "results.json")]
    # Values are compared, so that the comparison of shapes before each collective, half of the time, can go.
    for rank in run_ranks(arguments, ranks, port, timeout=timeout, TORCH_DISTRIBUTED_DEBUG="OFF"):
        assert rank.code == 0, rank.output[-3000:]
    return json.loads((folder / "results.json").read_text())


def too_far(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [one for one in results if one["update"] > UPDATE or max(one["loss"], one["kl"], one["grad_norm"]) > SCALARS]


@pytest.mark.parametrize(("ranks", "port"), [(1, 29701), (2, 29702)])
def test_i2_the_update_is_that_of_plain_torch(ranks: int, port: int, tmp_path: Path) -> None:
    results = run(covering(ranks), ranks, tmp_path, port)
    assert too_far([one for one in results if "control" not in one]) == []
    for one in results:
        if "control" in one:
            assert one["update"] > 100 * UPDATE, f"the matrix does not see: {one}"


def test_b01_the_coefficient_changes_the_update_for_every_estimator(tmp_path: Path) -> None:
    cells = [
        BASE | formula | {"coef": coef} for formula in FORMULAS if formula["loss_type"] == "dapo" for coef in (0.1, 0.2)
    ]
    results = run(cells, 1, tmp_path, 29703)
    assert too_far(results) == []
    for low, high in zip(results[::2], results[1::2], strict=True):
        assert max(abs(a - b) for a, b in zip(low["fingerprint"], high["fingerprint"], strict=True)) > 1e-5, low


@pytest.mark.full
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("ranks", "port"), [(1, 29704), (2, 29705)])
def test_i2_the_whole_matrix(ranks: int, port: int, tmp_path: Path, results: Any) -> None:
    cells = everything(ranks)
    found: list[dict[str, Any]] = []
    # A process for each part: what hundreds of engines leave behind in one makes the later ones slower and slower.
    for start in range(0, len(cells), 84):
        part = tmp_path / str(start)
        part.mkdir()
        found += run(cells[start : start + 84], ranks, part, port, timeout=900)
    results(
        f"invariance-{ranks}-ranks",
        {
            "cells": len(found),
            "worst": {key: max(one[key] for one in found) for key in ("update", "loss", "kl", "grad_norm")},
        },
    )
    assert too_far(found) == []
