"""A resumed engine has the checkpoint's state and the run file's settings."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiny_run import start, step, write_run
from trainer.world import World


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield write_run(tmp_path_factory.mktemp("run"))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_allowed_optimizer_settings_are_those_of_the_run_file(stage: int, folder: Path, world: World) -> None:
    """DeepSpeed brings back the saved ones, clipping included, and says nothing."""
    settings = {"engine.deepspeed": f"zero{stage}", "optim.name": "adamw", "optim.max_grad_norm": 1.0}
    saved = start(folder, world, settings)
    step(saved)
    saved.engine.save(folder / f"stage{stage}" / "deepspeed")
    saved.engine.close()
    asked = {"optim.betas": (0.8, 0.95), "optim.weight_decay": 0.1, "optim.max_grad_norm": 0.25}
    state = start(folder, world, settings | asked)
    assert state.engine.load(folder / f"stage{stage}" / "deepspeed")
    optimizer = state.engine._engine.optimizer
    (group,) = optimizer.param_groups
    assert (group["betas"], group["weight_decay"]) == ((0.8, 0.95), 0.1)
    if stage:
        assert optimizer.clip_grad == 0.25
    inner = optimizer if stage == 0 else optimizer.optimizer
    assert any(float(one["step"]) == 1 for one in inner.state.values()), "the state itself was not loaded"
    step(state)
    state.engine.close()
