"""What is exported is the policy in earlier releases of transformers, which tools/transformers.sh installs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_run import write_run
from tests.unit.test_export import IDS, exported, logits, trained
from trainer.world import World

SCALINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "linear": {"model.rope.type": "linear", "model.rope.factor": 2.0},
    "dynamic": {"model.rope.type": "dynamic", "model.rope.factor": 2.0},
    "yarn": {"model.rope.type": "yarn", "model.rope.factor": 4.0},
}
ALLOWED = 1e-5
"""Largest difference of two logits, relative to the largest."""


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.peer
@pytest.mark.timeout(900)
def test_i4_b86_earlier_transformers_compute_the_policy(tmp_path: Path, world: World, results: Any) -> None:
    """Logits, the rotary frequencies behind them included, and the stop ids, with every scaling."""
    folder = write_run(tmp_path)
    expected = {}
    for name, scaling in SCALINGS.items():
        state = trained(folder, world, {"lora.r": 0} | scaling)
        exported(state, world, tmp_path / name)
        expected[name] = logits(state.policy.causal)
        state.engine.close()
    assert apart(expected["yarn"], expected["none"]) > 10 * ALLOWED, "the comparison does not see a lost scaling"
    worker = str(Path(__file__).with_name("transformers_logits.py"))
    gaps: dict[str, float] = {}
    for release in map(Path, os.environ["ZERO_GRPO_TRANSFORMERS"].split()):
        found_file = tmp_path / f"{release.name}.json"
        command = [sys.executable, worker, str(found_file), json.dumps(IDS.tolist()), *SCALINGS]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(release)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        found = json.loads(found_file.read_text())
        assert found.pop("version") == release.name
        for name, one in found.items():
            theirs = torch.tensor(one["logits"])
            gaps[f"{release.name} {name}"] = apart(theirs, expected[name])
            assert one["eos"] == [299] and one["prompt"].startswith("<|im_start|>user")
    results("peer-transformers", {"largest_gap": max(gaps.values()), "gaps": gaps})
    assert max(gaps.values()) < ALLOWED, gaps
