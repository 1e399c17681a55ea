"""The bytes of a checkpoint by formula, beside those of real ones; and whether there is room for them."""

import os
import re
import shutil
import subprocess
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.tiny import TINY
from tests.tiny_run import run_config, start, step, write_run
from trainer.checkpoint import manifest
from trainer.checkpoint.export import write_weights
from trainer.checkpoint.save import Checkpoints
from trainer.errors import Refused, Stopped
from trainer.output import Output
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


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Of 32 MiB."""
    if os.geteuid():
        pytest.skip("to mount a small disk takes root")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(disk)], check=True)
    yield disk
    while disk.is_mount():
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def read_only(disk: Path) -> None:
    """From now on, for what is opened by its path; files that are open keep a real one from being remounted."""
    subprocess.run(["mount", "--bind", str(disk), str(disk)], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", str(disk)], check=True)


def fill(disk: Path, left: int) -> None:
    """Until ``left`` bytes are free."""
    (disk / "filler").unlink(missing_ok=True)
    (disk / "filler").write_bytes(b"0" * (shutil.disk_usage(disk).free - left))


def test_f12_f13_a_full_or_read_only_disk_stops_the_run_and_leaves_the_checkpoint_before(
    folder: Path, small_disk: Path, world: World
) -> None:
    """Wherever in a save it gets full: nothing of it stays, and with room again the next one is whole."""
    settings = {"engine.deepspeed": "zero2", "lora.r": 128, "optim.name": "adamw", "optim.lr": 1e-4}
    state = start(folder, world, settings | {"run.dir": str(small_disk / "out")})
    try:
        output = Output(state)
        output.begin(goes_on=False)
        checkpoints = Checkpoints(state.config, state.policy, state.engine, world, state.facts, "run")

        def save(step: int) -> Path:
            return checkpoints.save(step, {"step": step}, {})

        fill(small_disk, 1_000_000)
        with pytest.raises(Stopped, match=r"a checkpoint needs \d+\.\d\d MB, and 1\.00 MB are free"):
            save(1)  # the first one, by formula
        (small_disk / "filler").unlink()
        first = save(1)
        size = checkpoints.bytes
        fill(small_disk, size // 2)
        with pytest.raises(Stopped, match=rf"out/checkpoints: a checkpoint needs {size / 1e6:.2f} MB, and .* are free"):
            save(2)
        checkpoints.bytes = 1  # as if the room went while it was written
        for left in (0.02, 0.1, 0.5, 0.8, 0.95, 0.995):
            fill(small_disk, int(size * left))
            with pytest.raises(Stopped, match="cannot be written") as stop:
                save(2)
            message = str(stop.value)
            assert str(small_disk / "out/checkpoints") in message, message
            said = r"MB are free\). Fix: .*room.*\. A checkpoint needs 0\.00 MB; .* MB were free when it began\."
            assert re.search(said, message), message
            assert {path.name for path in (small_disk / "out/checkpoints").iterdir()} == {"latest", first.name}
        assert manifest.verify(first).step == 1
        (small_disk / "metrics-filler").write_bytes(b"0" * shutil.disk_usage(small_disk).free)
        state.step = 1
        with pytest.raises(Stopped, match=r"out: cannot be written: .*No space left"):
            output.step({}, [])
        (small_disk / "filler").unlink()
        second = save(2)
        assert manifest.verify(second).step == 2
        read_only(small_disk)
        with pytest.raises(
            Stopped, match=r"checkpoints: the checkpoint cannot be written: .*Read-only .* Fix: make it writable"
        ):
            save(3)
        assert manifest.verify(second).step == 2
    finally:
        state.engine.close()


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
