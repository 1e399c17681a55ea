"""What a 4-bit run leaves: an adapter for plain PEFT, and merged models that say which base they have."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from tests.tiny import tiny_qwen2
from tests.tiny_run import start, step, write_run
from trainer.__main__ import main
from trainer.checkpoint.export import export
from trainer.checkpoint.save import Checkpoints
from trainer.config import dump
from trainer.world import World

SIZES: dict[str, float] = {"hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.1}
IDS = torch.arange(3, 43)[None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, world: World) -> Path:
    """A finished run with a checkpoint, ``run``, and the logits of its policy."""
    folder = write_run(tmp_path_factory.mktemp("run"), tiny_qwen2(**SIZES))
    settings = {"quant.bits": 4, "optim.name": "adamw", "optim.lr": 1e-2, "run.dir": str(folder / "run")}
    (folder / "run").mkdir()
    state = start(folder, world, settings | {"engine.deepspeed": "zero3"})
    for _ in range(3):
        step(state)
    Checkpoints(state.config, state.policy, state.engine, world, state.facts, "a-run").save(3, {}, {})
    export(state.policy, state.engine, world, folder / "run", state.config)
    with state.engine.gathered(), torch.no_grad():
        torch.save(state.policy.causal(input_ids=IDS).logits, folder / "logits.pt")
    (folder / "run/config.toml").write_text(dump(state.config))
    state.engine.close()
    return folder


@torch.no_grad()
def gap(model: Any, folder: Path) -> float:
    """Of the largest logit. In train mode, where bitsandbytes computes on this CPU as it does on every other."""
    expected = torch.load(folder / "logits.pt")
    return float((model.train()(input_ids=IDS).logits - expected).abs().max() / expected.abs().max())


def packed(where: Path) -> Any:
    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    load: Any = AutoModelForCausalLM.from_pretrained
    return load(where, quantization_config=how, device_map={"": "cpu"})


def test_i4_the_adapter_loads_on_a_packed_and_on_a_plain_base(folder: Path) -> None:
    """On the packed one it is the policy; on the plain one it is what 4 bits lose away from it."""
    bare = packed(folder / "model")
    assert gap(bare, folder) > 1e-2, "an adapter without effect proves nothing"
    assert gap(PeftModel.from_pretrained(bare, folder / "run/adapter"), folder) < 1e-5
    for dtype in (torch.float32, torch.bfloat16):
        plain = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=dtype)
        assert 1e-3 < gap(PeftModel.from_pretrained(plain, folder / "run/adapter"), folder) < 0.8


def test_the_card_loads_the_base_as_it_was_trained_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lines, run."""
    monkeypatch.chdir(folder / "run")
    text = (folder / "run/adapter/README.md").read_text()
    assert "its weights in 4 bits" in text and "other weights than it was trained on" in text
    names: dict[str, Any] = {}
    exec(text.partition("```python\n")[2].partition("```")[0], names)
    assert gap(names["model"], folder) < 1e-5


def test_b59_a_merge_unpacks_the_base_and_says_so(folder: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "merged"
    assert main(["export", str(folder / "run"), str(out), "--merge"]) == 0
    said = capsys.readouterr().out
    assert "merged in fp32: logits within" in said and "into dequantised weights" in said
    assert "dequantised from 4 bits" in (out / "README.md").read_text()
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    stored = load_file(out / "model.safetensors")
    assert len(stored) == 26 and {tensor.dtype for tensor in stored.values()} == {torch.float32}
    assert gap(AutoModelForCausalLM.from_pretrained(out), folder) < 1e-4
    # PEFT's own merge rounds to 4 bits again: this comparison sees it.
    again = PeftModel.from_pretrained(packed(folder / "model"), folder / "run/adapter")
    assert gap(again.merge_and_unload(), folder) > 1e-2


def test_b59_a_merge_into_the_weights_of_before_is_asked_for_and_measured(
    folder: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "merged"
    assert main(["export", str(folder / "run"), str(out), "--merge", "--quant.bits", "0"]) == 0
    said = capsys.readouterr().out
    assert "as they were before they were quantised, as asked: another model than was trained" in said
    adapter = load_file(folder / "run/adapter/adapter_model.safetensors")
    stem = "base_model.model.model.layers.1.mlp.up_proj"
    update = adapter[f"{stem}.lora_B.weight"] @ adapter[f"{stem}.lora_A.weight"] * (32 / 4)
    up = tiny_qwen2(**SIZES).model.layers[1].mlp.up_proj.weight
    torch.testing.assert_close(load_file(out / "model.safetensors")["model.layers.1.mlp.up_proj.weight"], up + update)


@pytest.mark.parametrize("arguments", [["--quant.bits", "0"], ["--merge", "--quant.double_quant", "false"]])
def test_another_base_than_was_trained_on_is_refused(
    folder: Path, tmp_path: Path, capsys: Any, arguments: list[str]
) -> None:
    assert main(["export", str(folder / "run"), str(tmp_path / "out"), *arguments]) == 2
    assert "the run had quant.bits = 4, quant.double_quant = true" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()
