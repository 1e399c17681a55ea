"""What a run leaves behind: weights that are compared after writing, and files that every reader takes alike."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from huggingface_hub import ModelCard
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests.tiny import CHATML, tiny_qwen2, tiny_tokenizer
from tests.tiny_gguf import write_gguf
from tests.tiny_run import run_config, start, step, write_run
from trainer.checkpoint import weights
from trainer.checkpoint.card import Records, card, lm_eval_line
from trainer.checkpoint.export import export
from trainer.errors import Refused, Stopped
from trainer.evaluate import Evaluation, measured
from trainer.models.files import write_config, write_generation_config
from trainer.models.reload import Verified
from trainer.models.rope import RopeRequest, apply
from trainer.models.rope_built import expected_inv_freq
from trainer.state import State
from trainer.world import World

YARN = {"model.rope.type": "yarn", "model.rope.factor": 4.0}
IDS = torch.arange(3, 43)[None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"))


def trained(folder: Path, world: World, settings: dict[str, Any] | None = None) -> State:
    """A policy that has visibly moved."""
    rate = 0.5 if (settings or {}).get("lora.r") == 0 else 5.0
    state = start(folder, world, {"optim.lr": rate} | (settings or {}))
    step(state)
    return state


def exported(state: State, world: World, target: Path) -> Path:
    return export(state.policy, state.engine, world, target, state.config)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(input_ids=IDS).logits


def gap(model: Any, state: State) -> float:
    expected = logits(state.policy.causal)
    return float((logits(model) - expected).abs().max() / expected.abs().max())


# What the comparison after writing sees. Each spoils the weights' file, as a fault of a save would.


def renamed(tensors: dict[str, torch.Tensor]) -> None:
    name = next(iter(tensors))
    tensors[f"module.{name}"] = tensors.pop(name)


def dropped(tensors: dict[str, torch.Tensor]) -> None:
    tensors.pop(next(iter(tensors)))


def emptied(tensors: dict[str, torch.Tensor]) -> None:
    tensors[next(iter(tensors))] = torch.zeros(0)


def moved(tensors: dict[str, torch.Tensor]) -> None:
    last = list(tensors)[-1]
    tensors[last].view(-1)[0] += 1e-6


def with_adapter_name(tensors: dict[str, torch.Tensor]) -> None:
    for name in list(tensors):
        tensors[name.replace(".weight", ".default.weight")] = tensors.pop(name)


SPOILT: dict[str, tuple[Callable[[dict[str, torch.Tensor]], None], str]] = {
    "b62 prefix": (renamed, "names"),
    "b62 adapter name": (with_adapter_name, "names"),
    "b73 missing": (dropped, "names"),
    "b63 b66 empty": (emptied, "cannot be loaded"),
    "i4 another value": (moved, "is not the policy's"),
}


@pytest.mark.parametrize("rank", [4, 0], ids=["lora", "full"])
@pytest.mark.parametrize("fault", SPOILT)
def test_b62_b63_b66_b73_a_file_that_is_not_the_policy_stops_the_export(
    folder: Path, world: World, tmp_path: Path, fault: str, rank: int
) -> None:
    spoil, said = SPOILT[fault]
    real = weights.save

    def save(policy: Any, target: Path) -> None:
        real(policy, target)
        file = next(target.glob("*.safetensors"))
        tensors = load_file(file)
        spoil(tensors)
        save_file(tensors, file, metadata={"format": "pt"})

    state = trained(folder, world, {"lora.r": rank})
    with patch.object(weights, "save", save), pytest.raises(Stopped, match=said) as stopped:
        exported(state, world, tmp_path)
    (left,) = tmp_path.iterdir()
    assert left.name.endswith(".unverified") and str(left) in str(stopped.value)
    # The next export of the same run is not hindered.
    assert exported(state, world, tmp_path).name == left.name.removesuffix(".unverified")
    assert not left.exists()


def test_b62_a_config_of_another_adapter_stops_the_export(folder: Path, world: World, tmp_path: Path) -> None:
    """PEFT passes over tensors that its own model has no place for."""
    state = trained(folder, world)
    real = weights.save

    def save(policy: Any, target: Path) -> None:
        real(policy, target)
        file = target / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"target_modules": ["q_proj"]}))

    with patch.object(weights, "save", save), pytest.raises(Stopped, match=r"24 names of a model of that config"):
        exported(state, world, tmp_path)


def test_b86_a_config_that_lost_its_base_stops_the_export(folder: Path, world: World, tmp_path: Path) -> None:
    state = trained(folder, world, {"lora.r": 0})
    real = weights.save

    def save(policy: Any, target: Path) -> None:
        real(policy, target)
        file = target / "config.json"
        content = json.loads(file.read_text())
        content["rope_parameters"]["rope_theta"] = content["rope_theta"] = 500.0
        file.write_text(json.dumps(content))

    with patch.object(weights, "save", save), pytest.raises(Stopped, match=r"RoPE settings are .*500"):
        exported(state, world, tmp_path)


def test_i4_an_adapter_whose_base_is_gone_is_kept_and_said_not_to_be_compared(world: World, tmp_path: Path) -> None:
    own = write_run(tmp_path / "own")
    state = trained(own, world)
    (own / "model").rename(own / "elsewhere")
    with pytest.raises(
        Stopped, match=r"adapter\.unverified was not compared: its base model .*/model cannot be loaded"
    ):
        exported(state, world, tmp_path)
    assert len(load_file(tmp_path / "adapter.unverified/adapter_model.safetensors")) == 28


def test_i4_another_export_takes_the_place_of_the_first(folder: Path, world: World, tmp_path: Path) -> None:
    state = trained(folder, world)
    first = load_file(exported(state, world, tmp_path) / "adapter_model.safetensors")
    (tmp_path / "adapter" / "stray").touch()
    step(state)
    target = exported(state, world, tmp_path)
    second = load_file(target / "adapter_model.safetensors")
    assert any(not torch.equal(first[name], second[name]) for name in first)
    assert not (target / "stray").exists() and [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_i4_a_bf16_policy_is_exported_bit_for_bit(folder: Path, world: World, tmp_path: Path) -> None:
    for rank in (4, 0):
        state = trained(folder, world, {"model.dtype": "bf16", "lora.r": rank})
        target = exported(state, world, tmp_path)
        assert {tensor.dtype for tensor in load_file(next(target.glob("*.safetensors"))).values()} == {torch.bfloat16}


# Readers of all versions.


def reader_of_445(config: dict[str, Any]) -> tuple[int, float]:
    """The window and factor that transformers 4.45 to 4.51 compute yarn with."""
    return config["max_position_embeddings"], config["rope_scaling"]["factor"]


def reader_of_452(config: dict[str, Any]) -> tuple[int, float]:
    """And 4.52."""
    scaling, longest = config["rope_scaling"], config["max_position_embeddings"]
    if "original_max_position_embeddings" in scaling:
        original = scaling["original_max_position_embeddings"]
        return original, longest / original
    return longest, scaling["factor"]


def reader_of_457(config: dict[str, Any]) -> tuple[int, float]:
    """And 4.53 to 4.57."""
    scaling = config["rope_scaling"]
    return scaling.get("original_max_position_embeddings") or config["max_position_embeddings"], scaling["factor"]


def test_b85_b86_yarn_is_the_same_for_every_reader(tmp_path: Path) -> None:
    config = tiny_qwen2().config
    config.rope_parameters["rope_theta"] = 1e6
    apply(config, RopeRequest("yarn", 4.0, None))
    write_config(config, tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    for reader in (reader_of_445, reader_of_452, reader_of_457):
        assert reader(content) == (64, 4.0), reader.__doc__
    assert content["rope_theta"] == 1e6 and content["rope_scaling"]["rope_type"] == "yarn"


@pytest.mark.parametrize("kind", ["default", "linear", "dynamic", "yarn"])
@pytest.mark.parametrize("lacking", [(), ("rope_parameters",), ("rope_theta", "rope_scaling")])
def test_b86_each_form_of_the_rope_settings_is_enough(tmp_path: Path, kind: str, lacking: tuple[str, ...]) -> None:
    """transformers 5 reads both; without the one it is a file for earlier readers, without the other one of its own."""
    config = tiny_qwen2().config
    config.rope_parameters["rope_theta"] = 1e6
    if kind != "default":
        apply(config, RopeRequest(kind, 4.0, None))
    write_config(config, tmp_path)
    file = tmp_path / "config.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps({key: value for key, value in content.items() if key not in lacking}))
    read = AutoConfig.from_pretrained(tmp_path)
    assert read.rope_parameters == config.rope_parameters
    (found, scaling), (expected, as_asked) = (expected_inv_freq(one) or ((), 0) for one in (read, config))
    assert torch.equal(torch.as_tensor(found), torch.as_tensor(expected)) and scaling == as_asked


def test_the_tokenizer_has_its_template_and_its_special_tokens_where_all_look(
    folder: Path, world: World, tmp_path: Path
) -> None:
    target = exported(trained(folder, world), world, tmp_path)
    written = json.loads((target / "tokenizer_config.json").read_text())
    assert written["chat_template"] == CHATML and not (target / "chat_template.jinja").exists()
    assert written["additional_special_tokens"] == ["<|im_start|>"] and "extra_special_tokens" not in written
    loaded, original = AutoTokenizer.from_pretrained(target), tiny_tokenizer()
    text = "<|im_start|>user\nWhat is 2 + 3?<|im_end|>"
    assert loaded(text)["input_ids"] == original(text)["input_ids"]
    assert (loaded.chat_template, loaded.eos_token_id) == (CHATML, 299)
    assert set(loaded.all_special_tokens) == set(original.all_special_tokens)


def test_b19_the_generation_config_has_every_stop_id_and_keeps_the_rest(tmp_path: Path) -> None:
    own = GenerationConfig(temperature=0.7, top_k=20, do_sample=False, eos_token_id=7)  # save_pretrained refuses it
    own._from_model_config = True
    write_generation_config(own, (7, 9), tmp_path)
    read = GenerationConfig.from_pretrained(tmp_path)
    assert (read.eos_token_id, read.temperature, read.top_k) == ([7, 9], 0.7, 20)
    assert "_from_model_config" not in json.loads((tmp_path / "generation_config.json").read_text())


# The base of an adapter.


def test_b62_the_adapter_names_its_base_from_everywhere(
    folder: Path, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    state = trained(folder, world, {"model.name_or_path": "model"})
    target = exported(state, world, tmp_path)
    named = json.loads((target / "adapter_config.json").read_text())
    assert named["base_model_name_or_path"] == str(folder / "model")
    assert (named["r"], named["lora_alpha"], named["task_type"]) == (4, 32, "CAUSAL_LM")
    assert sorted({name.rpartition(".")[2] for name in named["target_modules"]}) == [
        "down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj",
    ]  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert gap(AutoPeftModelForCausalLM.from_pretrained(target), state) < 1e-5


def gguf_run(folder: Path) -> dict[str, Any]:
    (folder / "gguf").mkdir(exist_ok=True)
    write_gguf(tiny_qwen2(), folder / "gguf" / "tiny.gguf")
    return {"model.name_or_path": str(folder / "gguf"), "model.gguf_file": "tiny.gguf"}


def shown(target: Path) -> Any:
    """The model that the lines of the card load, from beside the folder."""
    block = re.search(r"```python\n(.*?)```", (target / "README.md").read_text(), re.DOTALL)
    assert block
    names: dict[str, Any] = {}
    exec(block[1], names)
    return names["model"]


@pytest.mark.parametrize("rope", [{}, YARN], ids=["plain", "yarn"])
def test_i4_the_base_of_a_gguf_file_goes_along(
    folder: Path, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rope: dict[str, Any]
) -> None:
    state = trained(folder, world, gguf_run(folder) | rope)
    target = exported(state, world, tmp_path)
    assert gap(AutoPeftModelForCausalLM.from_pretrained(target), state) < 1e-5
    moved = target.rename(tmp_path / "moved")
    (tmp_path / "adapter").symlink_to(moved)  # under the name that the card shows
    monkeypatch.chdir(tmp_path)
    assert gap(shown(target), state) < 1e-5


def test_b86_an_adapter_of_a_scaled_run_says_how_its_base_is_scaled(
    folder: Path, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = trained(folder, world, YARN)
    target = exported(state, world, tmp_path)
    monkeypatch.chdir(tmp_path)
    assert gap(shown(target), state) < 1e-5
    unscaled = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder / "model"), target)
    assert gap(unscaled, state) > 1e-3


@pytest.mark.parametrize(
    ("more", "held"),
    [
        ({"modules_to_save": ["lm_head"]}, "lm_head"),
        ({"modules_to_save": ["norm"]}, "norm"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "embed_tokens"),
        ({"target_modules": ["q_proj", "lm_head"]}, "lm_head"),
        ({"target_modules": ".*lm_head"}, "lm_head"),
        ({"bias": "all"}, "bias"),
    ],
    ids=str,
)
def test_b60_a_start_adapter_that_holds_more_than_inner_layers_is_refused(
    folder: Path, world: World, tmp_path: Path, more: dict[str, Any], held: str
) -> None:
    config = LoraConfig(**{"r": 4, "lora_alpha": 32, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"} | more)
    get_peft_model(tiny_qwen2(), config).save_pretrained(tmp_path, save_embedding_layers=False)
    with pytest.raises(Refused, match=rf"lora\.start_adapter = .*{held}.*no low-rank updates of inner"):
        start(folder, world, {"lora.start_adapter": str(tmp_path)})


# The card.


def cards(folder: Path, settings: dict[str, Any]) -> tuple[str, ModelCard]:
    evaluation = {"mean": 0.5, "stderr": 0.01, "per_prompt": [0.5], "unscored": 0}
    records = Records(3, {"step": 3, "reward_mean": 0.25}, [{"step": 0, "sampled": evaluation, "greedy": evaluation}])
    text = card("adapter", "adapter", run_config(folder, settings), records, Verified(28, 1e-7, 1e-5, torch.float32))
    return text, ModelCard(text)


def test_the_card_has_the_facts_of_the_run(folder: Path) -> None:
    text, read = cards(folder, {"model.name_or_path": "Qwen/Qwen2.5-1.5B", "model.revision": "8faed76"})
    header = read.data.to_dict()
    assert header == {
        "base_model": "Qwen/Qwen2.5-1.5B",
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["grpo", "reinforcement-learning", "zero-grpo", "lora"],
    }
    for fact in (
        'from_pretrained("Qwen/Qwen2.5-1.5B", revision="8faed76")',
        "3 steps of 4 prompts x 4 completions",
        "reward_mean 0.25",
        "held-out reward at step 0: 0.5 ± 0.01 sampled",
        "coefficient 0.04, estimator `k3`",
        "LoRA r 4, alpha 32, on all-linear",
        f"torch {torch.__version__}",
        "28 tensors equal to the trained ones bit for bit",
        "Not stated here: add `license:`",
    ):
        assert fact in text


def test_an_evaluation_without_numbers_is_told_in_words(folder: Path) -> None:
    """A single held-out prompt has no standard error, and rewards may score none."""
    total = measured([[0.5]], [[None]], generations=1, correct_at=1.0)
    records = Records(3, {"step": 3}, [Evaluation(0, 1.0, total, {}).record()])
    text = card("adapter", "adapter", run_config(folder), records, Verified(28, 1e-7, 1e-5, torch.float32))
    assert "held-out reward at step 0: 0.5 sampled, none scored greedy" in text


def test_a_base_in_a_folder_is_no_name_on_the_hub(folder: Path) -> None:
    text, read = cards(folder, {})
    assert "base_model" not in read.data.to_dict() and str(folder / "model") in text


def test_the_benchmark_command_loads_what_was_exported(folder: Path) -> None:
    named = {"model.name_or_path": "Qwen/Qwen2.5-1.5B", "model.revision": "8faed76"}
    lines = [
        lm_eval_line("out", run_config(folder, settings).model, what)
        for settings, what in ((named, "model"), (named, "adapter"), ({"model.gguf_file": "a.gguf"}, "adapter"))
    ]
    assert [line.split()[4] for line in lines] == [
        "pretrained=out",
        "pretrained=Qwen/Qwen2.5-1.5B,revision=8faed76,peft=out,tokenizer=out",
        "pretrained=out/base,peft=out,tokenizer=out",
    ]
    # lm-eval takes no configuration for the base, and unscaled it would be another model.
    scaled = run_config(folder, {"model.rope.type": "yarn", "model.rope.factor": 4.0}).model
    assert lm_eval_line("out", scaled, "adapter") == "" and lm_eval_line("out", scaled, "model")
