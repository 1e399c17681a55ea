"""On recorded rollouts, loss and gradient equal those of TRL 1.16's GRPOTrainer. Run by tools/peer.sh."""

import json
import math
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.launch import run_ranks
from tests.peer.cells import cells, same_normaliser, write_recordings
from trainer.record.rollout_rows import read_rollouts

RELATIVE = 1e-5
"""Largest relative difference of the loss, of the whole gradient, and of the gradient of every single tensor."""
SMALLEST_LOSS = 0.1
"""What a smaller loss is related to: on-policy it is the rest of advantages that cancel, down to the rounding."""


def compare(cell: dict[str, Any], ours: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The differences of one cell, all relative but that of ``advantages``, which are of size 1 and may be 0."""
    from tests.peer.trl_step import trl_step  # here: TRL is not installed where the other tests are collected

    rows = read_rollouts(folder / cell["rollouts"], 1)
    theirs = trl_step(cell, rows, folder, ours["start"])
    scale = same_normaliser(cell, rows)
    expected = {name: gradient.double() for name, gradient in theirs.gradient.items()}
    differences = {name: float((ours["gradient"][name] * scale - expected[name]).norm()) for name in expected}
    norms = {name: float(gradient.norm()) for name, gradient in expected.items()}
    tensors = {name: differences[name] / norms[name] for name in norms}
    return {
        "loss_type": cell["loss_type"],
        "switch": cell["switch"],
        "loss": abs(ours["loss"] * scale - theirs.loss) / max(abs(theirs.loss), SMALLEST_LOSS),
        "gradient": math.hypot(*differences.values()) / math.hypot(*norms.values()),
        "tensor": max(tensors.values()),
        "advantages": max(abs(a - b) for a, b in zip(ours["advantages"], theirs.advantages, strict=True)),
    }


def moved(cell: dict[str, Any], base: dict[str, Any]) -> float:
    """How far a switch moves our gradient, relative to that of the base cell."""
    differences = (gradient - base["gradient"][name] for name, gradient in cell["gradient"].items())
    norm = math.hypot(*(float(gradient.norm()) for gradient in base["gradient"].values()))
    return math.hypot(*(float(difference.norm()) for difference in differences)) / norm


@pytest.mark.peer
def test_loss_and_every_gradient_equal_trl(tmp_path: Path, results: Any) -> None:
    write_recordings(tmp_path)
    (tmp_path / "cells.json").write_text(json.dumps(cells()))
    files = (Path(__file__).with_name("ours.py"), tmp_path, tmp_path / "cells.json", tmp_path / "ours.pt")
    (rank,) = run_ranks([str(file) for file in files], 1, 29721)
    assert rank.code == 0, rank.output[-3000:]
    ours = torch.load(tmp_path / "ours.pt")
    found = [compare(cell, one, tmp_path) for cell, one in zip(cells(), ours, strict=True)]

    measures = ("loss", "gradient", "tensor", "advantages")
    worst = {
        loss_type: {key: max(one[key] for one in found if one["loss_type"] == loss_type) for key in measures}
        for loss_type in dict.fromkeys(one["loss_type"] for one in found)
    }
    versions = {name: version(name) for name in ("trl", "torch", "transformers", "deepspeed", "peft", "accelerate")}
    results("peer-trl", {"versions": versions, "cells": len(found), "limit": RELATIVE, "worst": worst})
    assert [one for one in found if max(one[key] for key in measures) > RELATIVE] == []

    # Every switch has to matter on these rollouts, or its cell compares nothing.
    base = {cell["loss_type"]: one for cell, one in zip(cells(), ours, strict=True) if cell["switch"] == "base"}
    for cell, one in zip(cells(), ours, strict=True):
        if cell["switch"] not in ("base", "LoRA"):
            assert moved(one, base[cell["loss_type"]]) > 100 * RELATIVE, cell
