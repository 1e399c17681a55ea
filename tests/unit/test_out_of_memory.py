"""Memory that runs out in each part of a run: the part, the amount and one change are named; the last state stands."""

import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.tiny_run import run_config
from trainer import run_status
from trainer.__main__ import main
from trainer.out_of_memory import _smaller_rollout, _smaller_state, heard_of, ran_out
from trainer.record.memory import asked_of_memory
from trainer.record.run_dir import RunDirectory
from trainer.train import train as run_steps
from trainer.world import World

CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 22.06 GiB of which 1.1 is free."
CPU = "err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 3221225472 bytes. Error code 12"


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


@pytest.fixture
def folder(run_here: Path) -> Path:
    return run_here


def run_out(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError(CUDA)


SAVED, STANDS = "saved out/checkpoints/step-000001", "the newest checkpoint is that of step 1"
BACKWARD, STEP = (f"deepspeed.runtime.engine.DeepSpeedEngine.{name}" for name in ("backward", "step"))
PHASES: dict[str, tuple[str, ...]] = {
    "trainer.rollout.shared.SharedDecoder.complete": ("in the rollout", "rollout.prompts_per_step = 2", SAVED),
    "trainer.rewards.runtime.RewardRuntime.score": ("in the rewards", "reward functions on the CPU", SAVED),
    "trainer.models.reference.Reference.score": ("in the reference pass", "engine.token_budget = ", SAVED),
    "trainer.update.forward": ("in the training pass", 'engine.gradient_checkpointing = "on"', SAVED),
    BACKWARD: ("in the training pass", "takes --allow engine.gradient_checkpointing", SAVED),
    STEP: ("in the optimizer step", "quant.bits = 4", STANDS),
}
"""Where it is raised, and words of the message. A step of the optimizer may have moved a part of the weights."""


def from_the_second_call(name: str, monkeypatch: pytest.MonkeyPatch, *, calls: int = 1) -> None:
    """Memory runs out in ``name`` after so many calls, its first step's or more."""
    path, _, attribute = name.rpartition(".")
    owner: Any = __import__(path.split(".")[0])
    for part in path.split(".")[1:]:
        owner = getattr(owner, part)
    real, made = getattr(owner, attribute), []

    def fake(*arguments: Any, **keywords: Any) -> Any:
        made.append(1)
        return real(*arguments, **keywords) if len(made) <= calls else run_out()

    monkeypatch.setattr(owner, attribute, fake)


@pytest.mark.parametrize(("name", "words"), PHASES.items(), ids=[name.rpartition(".")[2] for name in PHASES])
def test_a_run_out_of_memory_is_stopped_and_says_where_and_what_to_change(
    name: str,
    words: tuple[str, ...],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    from_the_second_call(name, monkeypatch)
    code = main(["train", "run.toml", "--checkpoint.every", "1", "--engine.gradient_checkpointing", "off"])
    out, err = capfd.readouterr()
    assert code == 3 and "Traceback" not in out + err
    assert out.count("stopped: out of memory") == 1 and ", step 2, on rank 0 (cpu, host " in out
    for word in ("2.00 GiB asked for", "Measured: ", "of tensors at the step's peak", *words):
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
    run_status.amend(tmp_path, state="stopped", exit_code=3, reason="out of memory in the rollout", rank=1)
    heard = heard_of(tmp_path, world)
    assert heard is not None and (str(heard), heard.rank, heard.exit_code) == ("out of memory in the rollout", 1, 3)
    assert heard_of(tmp_path, replace(world, rank=1)) is None
    status = run_status.read(tmp_path)
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
def test_the_change_for_a_state_that_does_not_fit(settings: dict[str, Any], ranks: int, fix: str, world: World) -> None:
    error = ran_out(MemoryError(), "1 GiB", run_config(Path("."), settings), replace(world, size=ranks), None)
    assert f"Fix: {fix}" in str(error)


@pytest.mark.parametrize(
    ("phase", "prompts", "fix"),
    [
        ("in the rollout", 8, "rollout.prompts_per_step = 4"),
        ("in the rollout", 64, "rollout.max_new_tokens = "),  # 128 rows decode, the others wait
        ("in the evaluation", 8, "rollout.max_new_tokens = "),
    ],
)
def test_fewer_prompts_help_only_a_rollout_that_decodes_all_of_them(
    phase: str, prompts: int, fix: str, world: World
) -> None:
    config = run_config(Path("."), {"rollout.prompts_per_step": prompts, "rollout.num_generations": 4})
    assert _smaller_rollout(phase, config, world).startswith(fix)


def test_no_offload_for_an_optimizer_that_has_none(world: World) -> None:
    card = replace(world, device=torch.device("cuda"))
    for name, fix in (("adamw", 'engine.deepspeed = "zero2-offload"'), ("adamw8bit", "lora.r = 16")):
        config = run_config(Path("."), {"optim.name": name, "engine.deepspeed": "zero2", "lora.r": 0})
        assert _smaller_state(config, card).startswith(fix)


def test_a_run_that_goes_on_after_it_is_the_run_without_it(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """In the middle of a backward pass, what is saved is the state between two steps."""
    train = ["train", "run.toml", "--checkpoint.every", "0", "--engine.micro_batch", "4"]
    assert main([*train, "--run.dir", "whole"]) == 0
    with pytest.MonkeyPatch.context() as patched:
        from_the_second_call(BACKWARD, patched, calls=6)
        assert main(train) == 3
    assert "saved out/checkpoints/step-000001; go on with --resume auto" in capfd.readouterr().out
    (folder / "out/.lock").unlink()  # which goes with the process, elsewhere
    good: list[Path | None] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("trainer.run.train", lambda *parts: (good.append(parts[2].good), run_steps(*parts)))
        assert main([*train, "--resume", "auto"]) == 0
    assert good == [Path("out/checkpoints/step-000001")], "the newest from before any alarm, which pruning spares"
    whole, resumed = (load_file(folder / name / "adapter/adapter_model.safetensors") for name in ("whole", "out"))
    assert whole.keys() == resumed.keys() and all(torch.equal(whole[name], resumed[name]) for name in whole)
