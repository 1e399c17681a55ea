"""What an optimizer needs is asked before the model is loaded; AdamW in 8 bits is AdamW, on every stage."""

import os
import shutil
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiny_run import run_config, start, step, weights, write_run
from trainer.errors import Refused
from trainer.preflight import optimizer
from trainer.preflight.prepare import check
from trainer.state import PROGRESS, State
from trainer.world import World


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"))


@pytest.fixture
def nothing_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    return tmp_path


def refusal(folder: Path, world: World, settings: dict[str, Any]) -> str:
    """By ``check``, which reads no weights."""
    with pytest.raises(Refused) as refused:
        check(
            run_config(folder, {"optim.name": "adamw", "engine.deepspeed": "zero2-offload"} | settings), folder, world
        )
    return str(refused.value)


def without(*tools: str) -> Any:
    found = shutil.which
    return lambda name: None if name in tools else found(name)


@pytest.mark.parametrize(
    ("tool", "said"),
    [("ninja", "lacks ninja on its PATH"), ("c++", "lacks a C++ compiler (c++; apt install g++)")],
)
def test_b77_a_missing_tool_is_named_before_the_model_is_loaded(
    folder: Path, world: World, nothing_built: Path, monkeypatch: pytest.MonkeyPatch, tool: str, said: str
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", without(tool))
    message = refusal(folder, world, {})
    for part in (said, 'engine.deepspeed = "zero2-offload"', 'engine.deepspeed = "zero2", which keeps'):
        assert part in message


def test_b77_all_that_is_missing_is_one_message(
    folder: Path, world: World, nothing_built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "ccache clang-99")
    monkeypatch.setattr(shutil, "which", without("ninja", "ccache"))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(nothing_built / name))
    asked = folder / "mine.json"
    asked.write_text('{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}')
    message = refusal(folder, world, {"engine.deepspeed": str(asked)})
    for part in (
        "ninja",
        "compiler (ccache",
        "include/Python.h",
        f"zero_optimization.offload_optimizer out of {asked}",
    ):
        assert part in message


def test_b77_a_build_from_before_needs_no_compiler(
    folder: Path, world: World, nothing_built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (nothing_built / "py_cpu/cpu_adam").mkdir(parents=True)
    (nothing_built / "py_cpu/cpu_adam/cpu_adam.so").touch()
    monkeypatch.setattr(shutil, "which", without("c++", os.environ.get("CXX", "c++")))
    settings = {"optim.name": "adamw", "engine.deepspeed": "zero2-offload"}
    check(run_config(folder, settings), folder, world)
    monkeypatch.setattr(shutil, "which", without("ninja"))
    assert "lacks ninja" in refusal(folder, world, {})
    check(run_config(folder, settings | {"engine.deepspeed": "zero2"}), folder, world)


def test_bitsandbytes_that_is_missing_is_named_before_the_model_is_loaded(
    folder: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer, "find_spec", lambda name: None)
    message = refusal(folder, world, {"optim.name": "adamw8bit", "engine.deepspeed": "zero2"})
    assert 'optim.name = "adamw8bit"' in message and "pip install bitsandbytes" in message


def test_adamw8bit_is_never_offloaded(folder: Path, world: World) -> None:
    asked = folder / "offload.json"
    asked.write_text('{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}')
    message = refusal(folder, world, {"optim.name": "adamw8bit", "engine.deepspeed": str(asked)})
    assert "zero_optimization.offload_optimizer" in message and 'optim.name = "adamw8bit"' in message


FULL = {"lora.r": 0, "optim.lr": 1e-3, "run.steps": 4}


def trained(folder: Path, world: World, settings: dict[str, Any], steps: int) -> tuple[State, dict[str, Tensor]]:
    """The state after so many steps, and by how much each weight has moved."""
    state = start(folder, world, FULL | settings)
    before = weights(state)
    for _ in range(steps):
        step(state)
    return state, {name: weight - before[name] for name, weight in weights(state).items()}


@pytest.mark.parametrize("stage", ["zero0", "zero2", "zero3"])
def test_adamw8bit_moves_weights_as_adamw_does(folder: Path, world: World, stage: str) -> None:
    (_, expected), (state, found) = (
        trained(folder, world, {"optim.name": name, "engine.deepspeed": stage}, 2) for name in ("adamw", "adamw8bit")
    )
    ours, theirs = (torch.cat([one.flatten() for one in moves.values()]) for moves in (found, expected))
    assert torch.nn.functional.cosine_similarity(ours, theirs, dim=0) > 0.99
    assert 0.98 < ours.norm() / theirs.norm() < 1.02
    engine = state.engine._engine.optimizer
    states = (engine if stage == "zero0" else engine.optimizer).state.values()
    assert {"state1", "state2"} <= set().union(*states)
    if stage != "zero0":  # which has a tensor a parameter, and leaves those of less than 4096 numbers in 32 bits
        moments = sum(one[name].nbytes for one in states for name in ("state1", "state2", "absmax1", "absmax2"))
        assert moments < 2.05 * ours.numel()


@pytest.mark.parametrize(("stage", "dtype"), [("zero2", "fp32"), ("zero3", "bf16")])
def test_adamw8bit_resumes_bit_for_bit(folder: Path, world: World, stage: str, dtype: str) -> None:
    settings = {"optim.name": "adamw8bit", "engine.deepspeed": stage, "model.dtype": dtype}
    state, _ = trained(folder, world, settings, 2)
    saved = folder / f"{stage}-{dtype}" / "deepspeed"
    saved.parent.mkdir()
    state.engine.save(saved)
    progress = {name: getattr(state, name) for name in PROGRESS}
    resumed = start(folder, world, FULL | settings)
    assert resumed.engine.load(saved)
    resumed.restore(progress)
    for _ in range(2):
        assert step(state)[0]["kl"] == step(resumed)[0]["kl"]
    expected = weights(state)
    assert all(torch.equal(weight, expected[name]) for name, weight in weights(resumed).items())


def test_every_stage_has_master_weights_in_fp32(folder: Path, world: World) -> None:
    """Stage 0 too: what DeepSpeed makes of it in bf16 is no pure bf16 training."""
    for stage, dtype in (("zero0", "bf16"), ("zero1", "bf16"), ("zero1", "fp32"), ("zero2", "bf16"), ("zero3", "bf16")):
        settings = {"optim.name": "adamw", "engine.deepspeed": stage, "model.dtype": dtype}
        engine = start(folder, world, FULL | settings).engine
        optimizer = engine._engine.optimizer
        masters = [one for group in optimizer.optimizer.param_groups for one in group["params"]]
        if stage == "zero3":
            masters = optimizer.fp32_partitioned_groups_flat
        assert masters and all(one.dtype == torch.float32 for one in masters)
        assert not any(float(one["step"]) for one in optimizer.optimizer.state.values()), "no step before the first"


def test_a_bf16_weight_stands_still_under_small_steps() -> None:
    """The numbers of the message that refuses bf16 master weights."""
    weight = torch.tensor(0.01, dtype=torch.bfloat16)
    assert weight - 3.0e-5 == weight and weight - 3.2e-5 != weight
    assert torch.tensor(0.1, dtype=torch.bfloat16) - 3.2e-5 == torch.tensor(0.1, dtype=torch.bfloat16)
