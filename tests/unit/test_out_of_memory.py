"""Memory that runs out in each part of a run: the part, the amount and one change are named; the last state stands."""

import json
import shutil
import signal
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_run import RUN_FILE, run_config, write_run
from trainer import interrupts
from trainer.__main__ import main
from trainer.out_of_memory import heard_of, ran_out
from trainer.record.memory import asked_of_memory
from trainer.record.run_dir import RunDirectory, read_status
from trainer.world import World

CUDA = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 22.06 GiB of which 1.1 GiB is free."
)
CPU = "[enforce fail at alloc_cpu.cpp:128] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 3221225472 bytes. Error code 12 (Cannot allocate memory)"


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (torch.OutOfMemoryError(CUDA), "2.00 GiB"),
        (RuntimeError(CPU), "3.00 GiB"),
        (RuntimeError("not enough memory: you tried to allocate 1073741824 bytes."), "1.00 GiB"),
        (MemoryError("Unable to allocate 7.45 GiB for an array with shape (1000000000,)"), "7.45 GiB"),
        (MemoryError(), "an amount that the library does not name"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"), "an amount that the library does not name"),
        (RuntimeError("shape mismatch"), ""),
        (ValueError("out of memory"), ""),
    ],
)
def test_what_was_asked_for_is_read_from_the_library(error: Exception, asked: str) -> None:
    assert asked_of_memory(error) == asked


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("right"))


@pytest.fixture
def folder(right: Path, tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run that is right, in a folder of its own, as a job of this one process."""
    target = tmp_path / "run"
    shutil.copytree(right, target)
    (target / "run.toml").write_text(RUN_FILE)
    monkeypatch.chdir(target)
    monkeypatch.setattr("trainer.run.connect", lambda *_, **__: world)
    monkeypatch.setattr("trainer.run.disconnect", lambda: None)
    monkeypatch.setattr(interrupts, "_deferred", False)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield target
    for number, handler in handlers.items():
        signal.signal(number, handler)


def run_out(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError(CUDA)


PHASES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    # where it is raised -> the step, words of the message, whether the state between two steps is saved
    "trainer.rollout.shared.SharedDecoder.complete": ("step 2", "saved", ("in the rollout", "prompts_per_step = 2")),
    "trainer.rewards.runtime.RewardRuntime.score": (
        "step 2",
        "saved",
        ("in the rewards", "reward functions on the CPU"),
    ),
    "trainer.models.reference.Reference.score": (
        "step 2",
        "saved",
        ("in the reference pass", "engine.token_budget = "),
    ),
    "trainer.update.forward": ("step 2", "saved", ("in the training pass", 'engine.gradient_checkpointing = "on"')),
    "deepspeed.runtime.engine.DeepSpeedEngine.backward": ("step 2", "saved", ("in the training pass", "gradient_checkpointing")),
    "deepspeed.runtime.engine.DeepSpeedEngine.step": (
        "step 2",
        "newest checkpoint is that of step 1",
        ("in the optimizer step", "quant.bits = 4"),
    ),
}


def from_the_second_call(name: str, monkeypatch: pytest.MonkeyPatch, calls_a_step: int = 1) -> None:
    """Memory runs out in ``name`` at its second step."""
    path, _, attribute = name.rpartition(".")
    owner: Any = __import__(path.split(".")[0])
    for part in path.split(".")[1:]:
        owner = getattr(owner, part)
    real, calls = getattr(owner, attribute), []

    def fake(*arguments: Any, **keywords: Any) -> Any:
        calls.append(1)
        return real(*arguments, **keywords) if len(calls) <= calls_a_step else run_out()

    monkeypatch.setattr(owner, attribute, fake)


@pytest.mark.parametrize(("name", "expected"), PHASES.items(), ids=[name.rpartition(".")[2] for name in PHASES])
def test_a_run_out_of_memory_is_stopped_and_says_where_and_what_to_change(
    name: str,
    expected: tuple[str, str, tuple[str, ...]],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    step, kept, words = expected
    from_the_second_call(name, monkeypatch)
    code = main(["train", "run.toml", "--checkpoint.every", "1", "--engine.gradient_checkpointing", "off"])
    out, err = capfd.readouterr()
    assert code == 3 and "Traceback" not in out + err
    assert out.count("stopped: out of memory") == 1 and f", {step}, on rank 0 (cpu, host " in out
    for word in ("2.00 GiB asked for", "Measured: ", "of tensors at the step's peak", kept, *words):
        assert word in out
    status = json.loads((folder / "out/run_status.json").read_text())
    assert (status["state"], status["exit_code"], status["step"]) == ("stopped", 3, 1)
    assert status["reason"].startswith("out of memory ")
    assert (folder / "out/checkpoints/step-000001/MANIFEST.json").is_file()


def test_before_the_first_step_it_is_a_refusal(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("trainer.models.policy.AutoModelForCausalLM.from_pretrained", run_out)
    assert main(["train", "run.toml"]) == 2
    out, err = capfd.readouterr()
    assert "refused: out of memory while the model was loaded, on rank 0" in out and "quant.bits = 4" in out
    assert "Traceback" not in out + err and not (folder / "out").exists()


def test_what_another_rank_has_recorded_is_what_a_failed_collective_means(tmp_path: Path, world: World) -> None:
    directory = RunDirectory(tmp_path)
    directory.status("running", None, 4, "", host="a", rank=0, pid=1, run_id="r")
    assert heard_of(tmp_path, world) is None
    directory.amend_status(state="stopped", exit_code=3, reason="out of memory in the rollout", rank=1)
    heard = heard_of(tmp_path, world)
    assert heard is not None and (str(heard), heard.rank, heard.exit_code) == ("out of memory in the rollout", 1, 3)
    assert heard_of(tmp_path, replace(world, rank=1)) is None
    status = read_status(tmp_path)
    assert (status["step"], status["run_id"], status["host"]) == (4, "r", "a")


def test_what_a_step_holds_is_let_go(world: World) -> None:
    """Also where the exception is kept: its frames would hold the tensors."""
    gone: list[weakref.ref[torch.Tensor]] = []

    def work() -> None:
        tensor = torch.zeros(8)
        gone.append(weakref.ref(tensor))
        run_out()

    try:
        work()
    except RuntimeError as error:
        kept = error
    assert gone[0]() is not None
    ran_out(kept, "2.00 GiB", run_config(Path(".")), world, None)
    assert gone[0]() is None


@pytest.mark.parametrize(
    ("settings", "ranks", "fix"),
    [
        ({"engine.deepspeed": "zero1"}, 2, 'engine.deepspeed = "zero2"'),
        ({"lora.r": 0}, 1, "lora.r = 16"),
        ({}, 1, "quant.bits = 4"),
    ],
)
def test_the_change_for_a_state_that_does_not_fit(
    settings: dict[str, Any], ranks: int, fix: str, world: World
) -> None:
    error = ran_out(MemoryError(), "1 GiB", run_config(Path("."), settings), replace(world, size=ranks), None)
    assert f"Fix: {fix}" in str(error)
