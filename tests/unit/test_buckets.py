"""The reduce bucket of stages 1 and 2: a buffer that every run pays for, and that a large tensor does not fit into."""

import json
from pathlib import Path

import pytest
import torch

from tests.tiny_run import start, step, weights, write_run
from trainer.config.shipped import ds_configs
from trainer.world import World


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("buckets"))


@pytest.mark.parametrize("name", ["zero1", "zero2"])
def test_a_tiny_run_fits_in_a_quarter_of_a_gib(name: str, folder: Path, world: World) -> None:
    """DeepSpeed allocates the bucket whole."""
    state = start(folder, world, {"engine.deepspeed": name})
    with state.memory:
        metrics, _ = step(state)
    assert metrics["peak_memory_gib"] < 0.25


@pytest.mark.parametrize("name", ["zero1", "zero2"])
def test_tensors_larger_than_the_bucket_are_updated_alike(
    name: str, folder: Path, world: World, tmp_path: Path
) -> None:
    config = json.loads((ds_configs() / f"{name}.json").read_text("utf-8"))
    config["zero_optimization"]["reduce_bucket_size"] = 1000  # the embedding has 9600 elements
    (tmp_path / "small.json").write_text(json.dumps(config))
    updated = []
    for engine in (name, str(tmp_path / "small.json")):
        state = start(folder, world, {"engine.deepspeed": engine, "lora.r": 0})
        before = weights(state)["model.embed_tokens.weight"]
        step(state)
        updated.append(weights(state))
        assert not torch.equal(updated[-1]["model.embed_tokens.weight"], before)
    for key, weight in updated[0].items():
        torch.testing.assert_close(updated[1][key], weight, rtol=0, atol=1e-7)
