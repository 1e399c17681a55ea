"""``zero-grpo export``: what a checkpoint or a finished run becomes for other tools."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.bad_input import own_code
from tests.tiny import tiny_qwen2, tiny_tokenizer
from tests.tiny_run import start, step, write_run
from trainer.__main__ import main
from trainer.checkpoint.command import Options, export_checkpoint
from trainer.checkpoint.export import export
from trainer.checkpoint.save import Checkpoints
from trainer.config import dump
from trainer.errors import NoCheckpoint, Refused, Stopped
from trainer.models import merge
from trainer.world import World

IDS = torch.arange(3, 43)[None]
RUNS: dict[str, dict[str, Any]] = {
    "lora": {"optim.lr": 5.0},
    "untied": {"optim.lr": 5.0, "model.name_or_path": "model-untied"},
    "bf16": {"optim.lr": 5.0, "model.dtype": "bf16"},
    "full": {"optim.lr": 0.5, "lora.r": 0},
    "scaled": {"optim.lr": 5.0, "model.rope.type": "yarn", "model.rope.factor": 4.0},
    "scaled full": {"optim.lr": 0.5, "lora.r": 0, "model.rope.type": "yarn", "model.rope.factor": 4.0},
    "continued": {"optim.lr": 5.0, "lora.start_adapter": "lora/adapter"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, world: World) -> Path:
    """A finished run of each kind, with a checkpoint of its first step and another of its second."""
    folder = write_run(tmp_path_factory.mktemp("run"))
    tiny_qwen2(tied=False).save_pretrained(folder / "model-untied")
    tiny_tokenizer().save_pretrained(folder / "model-untied")
    for name, settings in RUNS.items():
        run_dir = folder / name
        run_dir.mkdir()
        for key in {"model.name_or_path", "lora.start_adapter"} & set(settings):
            settings = settings | {key: str(folder / settings[key])}
        state = start(folder, world, settings | {"run.dir": str(run_dir)})
        saved = Checkpoints(state.config, state.policy, state.engine, world, state.facts, "a-run")
        for number in (1, 2):
            step(state)
            saved.save(number, {}, {})
            torch.save(logits(state.policy.causal), run_dir / f"logits-{number}.pt")
        export(state.policy, state.engine, world, run_dir, state.config)
        (run_dir / "config.toml").write_text(dump(state.config))
        (run_dir / "run_status.json").write_text(json.dumps({"state": "done", "step": 1}))
        (run_dir / "metrics.jsonl").write_text('{"step": 1, "reward_mean": 0.1}\n{"step": 2, "reward_mean": 0.2}\n')
        state.engine.close()
    return folder


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(input_ids=IDS).logits.float()


def gap(model: Any, expected: Path) -> float:
    wanted = torch.load(expected)
    return float((logits(model.eval()) - wanted).abs().max() / wanted.abs().max())


def loaded(out: Path, base: Path) -> Any:
    if (out / "adapter_config.json").exists():
        return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), out)
    return AutoModelForCausalLM.from_pretrained(out)


@pytest.mark.parametrize("run", ["lora", "full", "continued", "scaled full"])
def test_i4_a_checkpoint_is_exported_as_it_was_at_its_step(folder: Path, tmp_path: Path, run: str) -> None:
    for number in (1, 2):
        out = tmp_path / str(number)
        assert main(["export", str(folder / run / f"checkpoints/step-{number:06d}"), str(out)]) == 0
        # The start adapter is not laid over twice: the base is the plain one.
        model = loaded(out, folder / "model")
        assert gap(model, folder / run / f"logits-{number}.pt") < 1e-5
        assert gap(model, folder / run / f"logits-{3 - number}.pt") > 1e-3
        assert f"step {number}: reward_mean 0.{number}" in (out / "README.md").read_text()
        assert (out / "tokenizer.json").exists() and (out / "generation_config.json").exists()


@pytest.mark.parametrize("run", ["lora", "untied", "continued", "scaled"])
def test_b60_a_merged_model_is_the_policy_and_keeps_its_tie(folder: Path, tmp_path: Path, run: str) -> None:
    out = tmp_path / "merged"
    assert main(["export", str(folder / run), str(out), "--merge"]) == 0
    model = AutoModelForCausalLM.from_pretrained(out)
    assert gap(model, folder / run / "logits-2.pt") < 1e-4
    tied = run != "untied"
    stored = load_file(out / "model.safetensors")
    assert not any("lora" in name for name in stored) and len(stored) == (26 if tied else 27)
    assert ("lm_head.weight" in stored) != tied and model.config.tie_word_embeddings == tied
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert torch.equal(stored["model.embed_tokens.weight"], tiny_qwen2(tied=tied).model.embed_tokens.weight)


def test_b59_a_merge_is_rounded_once(folder: Path, tmp_path: Path) -> None:
    """In fp32, not in the 16 bits of base and adapter."""
    out = tmp_path / "merged"
    assert main(["export", str(folder / "bf16"), str(out), "--merge"]) == 0
    adapter = load_file(folder / "bf16/adapter/adapter_model.safetensors")
    stem = "base_model.model.model.layers.1.mlp.up_proj"
    up = tiny_qwen2().model.layers[1].mlp.up_proj.weight.bfloat16().float()
    update = adapter[f"{stem}.lora_B.weight"].float() @ adapter[f"{stem}.lora_A.weight"].float() * (32 / 4)
    merged = load_file(out / "model.safetensors")["model.layers.1.mlp.up_proj.weight"]
    assert merged.dtype == torch.bfloat16 and torch.equal(merged, (up + update).bfloat16())
    assert update.abs().max() > 1e-3


def test_b59_a_merge_that_changes_the_model_stops(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge, "ALLOWED", 0.0)
    with pytest.raises(Stopped, match=r"merging changed the model: logits differ by [0-9.e-]+ of the largest"):
        export_checkpoint(folder / "lora", tmp_path / "out", options=Options(merge=True))
    assert not (tmp_path / "out").exists()


def copied(folder: Path, tmp_path: Path) -> Path:
    """A run of one's own to harm, still on its base model."""
    return Path(shutil.copytree(folder / "lora", tmp_path / "copy"))


def test_a_run_that_is_not_done_gives_its_newest_valid_checkpoint(folder: Path, tmp_path: Path, capsys: Any) -> None:
    run = copied(folder, tmp_path)
    (run / "run_status.json").write_text(json.dumps({"state": "preempted"}))
    with (run / "checkpoints/step-000002/adapter/adapter_model.safetensors").open("r+b") as file:
        file.write(b"\xff")
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "passed over: " in said and "step-000002/adapter/adapter_model.safetensors: sha256" in said
    assert gap(loaded(tmp_path / "out", folder / "model"), run / "logits-1.pt") < 1e-5


def test_a_damaged_checkpoint_is_exit_5(folder: Path, tmp_path: Path, capsys: Any) -> None:
    run = copied(folder, tmp_path)
    (run / "checkpoints/step-000001/adapter/adapter_model.safetensors").write_bytes(b"")
    assert main(["export", str(run / "checkpoints/step-000001"), str(tmp_path / "out")]) == 5
    assert "0 bytes, saved were" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("asked", "said"), [("lora/adapter", r"Did you mean .*/lora\?"), ("model", "neither")])
def test_what_is_no_checkpoint_is_named(folder: Path, tmp_path: Path, asked: str, said: str) -> None:
    with pytest.raises(NoCheckpoint, match=said):
        export_checkpoint(folder / asked, tmp_path / "out")


def test_nothing_is_overwritten(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "kept").touch()
    for out in (tmp_path, tmp_path / "kept"):
        with pytest.raises(Refused, match=r"nothing is overwritten\. Fix"):
            export_checkpoint(folder / "lora", out)


def test_a_whole_model_has_nothing_to_merge(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(Refused, match="no adapter to merge"):
        export_checkpoint(folder / "full", tmp_path / "out", options=Options(merge=True))


def test_b62_another_base_than_the_run_began_from_is_refused(folder: Path, tmp_path: Path) -> None:
    """Its shapes fit, so that PEFT would load the adapter onto it without a word."""
    other = tmp_path / "other"
    tiny_qwen2(seed=5).save_pretrained(other)
    tiny_tokenizer().save_pretrained(other)
    overrides = ["--model.name_or_path", str(other)]
    with pytest.raises(Refused, match=r"not those that the run began from[\s\S]*Fix"):
        export_checkpoint(folder / "lora/checkpoints/step-000001", tmp_path / "out", overrides)


def test_a_base_that_has_moved_can_be_named(folder: Path, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(folder / "model", tmp_path / "moved"))
    source, overrides = folder / "lora/checkpoints/step-000001", ["--model.name_or_path", str(moved)]
    out = tmp_path / "out"
    export_checkpoint(source, out, overrides)
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == str(moved)


def test_s3_a_run_from_elsewhere_does_not_say_that_its_code_may_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    foreign = Path(shutil.copytree(folder / "full", tmp_path / "foreign"))
    shutil.rmtree(foreign / "checkpoints")
    own_code(foreign / "model")
    config = (foreign / "config.toml").read_text()
    (foreign / "config.toml").write_text(config.replace("trust_remote_code = false", "trust_remote_code = true"))
    monkeypatch.chdir(tmp_path)
    assert main(["export", str(foreign), "out"]) == 2
    said = capsys.readouterr().out
    assert "Fix: another model; or, of code that you have read, --model.trust_remote_code true" in said
    assert not (tmp_path / "canary").exists()
    assert main(["export", str(foreign), "out", "--model.trust_remote_code", "true"]) == 2  # it has no model class
    assert (tmp_path / "canary").is_dir()
