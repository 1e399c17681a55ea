"""The bytes of a checkpoint by formula, beside those of real ones; and whether there is room for them."""

from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.tiny import TINY
from tests.tiny_run import run_config, start, step, write_run
from trainer.checkpoint.export import write_weights
from trainer.errors import Refused
from trainer.plan.on_disk import Parameters, checkpoint_bytes
from trainer.preflight.disk import room_for_checkpoints
from trainer.world import World


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 1.2 million parameters, beside which a tokenizer and pickled names are little."""
    sizes = {"vocab_size": 8000, "hidden_size": 64, "intermediate_size": 512}
    return write_run(tmp_path_factory.mktemp("run"), Qwen2ForCausalLM(Qwen2Config(**TINY | sizes)))


@pytest.mark.parametrize(
    ("stage", "rank", "optimizer", "dtype"),
    [
        (0, 0, "adamw", "fp32"),
        (1, 0, "adamw", "bf16"),
        (2, 0, "sgd", "bf16"),
        (2, 128, "adamw", "bf16"),
        (3, 128, "adamw", "fp32"),
    ],
)
def test_a_checkpoint_has_the_bytes_of_the_formula(
    stage: int, rank: int, optimizer: str, dtype: str, folder: Path, tmp_path: Path, world: World
) -> None:
    settings: dict[str, Any] = {"engine.deepspeed": f"zero{stage}", "lora.r": rank, "optim.name": optimizer}
    state = start(folder, world, settings | {"model.dtype": dtype, "optim.lr": 1e-4})
    try:
        step(state)
        state.engine.save(tmp_path / "deepspeed")
        write_weights(state.policy, state.engine, world, tmp_path)
        with state.engine.whole(list(state.policy.causal.parameters())):
            sizes = [(one.numel(), one.requires_grad) for one in state.policy.causal.parameters()]
    finally:
        state.engine.close()
    trained = sum(size for size, is_trained in sizes if is_trained)
    parameters = Parameters(sum(size for size, _ in sizes), trained, 2 if dtype == "bf16" else 4)
    said = checkpoint_bytes(parameters, stage=stage, optimizer=optimizer)
    found = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    assert said == pytest.approx(found, rel=0.04)


@pytest.mark.parametrize(("free", "outcome"), [(99, "refused"), (399, "warned"), (400, "enough")])
def test_room_for_one_is_needed_and_for_one_more_than_are_kept_wanted(
    free: int, outcome: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("trainer.preflight.disk.shutil.disk_usage", lambda path: usage(0, 0, free * 10**9))
    config = run_config(tmp_path, {"run.dir": str(tmp_path / "a/b"), "checkpoint.keep": 3})
    if outcome == "refused":
        with pytest.raises(Refused, match=f"a checkpoint takes 100.0 GB, and 99.0 GB are free in {tmp_path}"):
            room_for_checkpoints(config, 100 * 10**9)
        return
    disk, warning = room_for_checkpoints(config, 100 * 10**9)
    assert (disk.path, disk.needed) == (tmp_path, 400 * 10**9)
    assert bool(warning) == (outcome == "warned")
    assert not warning or "4 checkpoints of 100.0 GB are 400.0 GB, and 399.0 GB are free" in warning
