"""Faults of reference and adapters, through the real start-up and step. What each row is: tests/FAULTS.md."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from tests.tiny import tiny_qwen2
from tests.tiny_run import distance, move, start, step, weights, write_run
from trainer.checkpoint.export import export
from trainer.errors import Refused
from trainer.models.reference import make_reference
from trainer.models.streaming import Placement
from trainer.state import State
from trainer.update import note_unmoved_adapters
from trainer.world import World


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def dropping(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose config asks for attention dropout."""
    folder = write_run(tmp_path_factory.mktemp("dropping"))
    file = folder / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"attention_dropout": 0.5}))
    return folder


@pytest.fixture(scope="module")
def adapter(folder: Path) -> Path:
    """An adapter that somebody has trained before: B is not 0."""
    peft = get_peft_model(
        tiny_qwen2(), LoraConfig(r=4, lora_alpha=32.0, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    move(peft.get_base_model(), 0.1)
    peft.save_pretrained(folder / "adapter")
    return folder / "adapter"


VARIANTS: dict[str, dict[str, Any]] = {
    "lora": {},
    "full": {"lora.r": 0},
    "temperature": {"rollout.temperature": 0.6},
    "one row a pass": {"engine.micro_batch": 1},
    "another order": {"data.seed": 5, "rollout.prompts_per_step": 7},
    "lora dropout": {"lora.dropout": 0.5},
    "checkpointing": {"engine.gradient_checkpointing": "on", "lora.dropout": 0.5},
    "eager": {"model.attn": "eager", "lora.r": 0},
    "exact": {"grpo.kl.estimator": "exact", "rollout.temperature": 1.5},
    "exact full": {"grpo.kl.estimator": "exact", "lora.r": 0},
    "kl in the reward": {"grpo.kl.placement": "reward", "grpo.kl.estimator": "k1"},
    "two updates": {"grpo.updates_per_rollout": 2, "lora.dropout": 0.5},
    "zero3": {"engine.deepspeed": "zero3", "lora.dropout": 0.5},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_i1_b52_before_any_update_kl_is_zero_and_the_ratio_one(dropping: Path, world: World, variant: str) -> None:
    """With dropout 0.5 in the attention of every one of them."""
    state = start(dropping, world, VARIANTS[variant])
    assert state.engine.module.training, "in eval mode dropout would prove nothing"
    metrics, completions = step(state)
    assert metrics["kl"] == pytest.approx(0, abs=1e-9) and metrics["kl_max"] < 1e-8
    assert metrics["sampling_logp_gap"] < 1e-6
    assert all(abs(one.kl_penalty) < 1e-5 for one in completions)


def test_b52_dropout_is_off_in_every_module(dropping: Path, world: World) -> None:
    state = start(dropping, world, {"lora.dropout": 0.5})
    modules = list(state.engine.module.modules())
    assert any(isinstance(module, nn.Dropout) for module in modules)
    assert all(module.p == 0 for module in modules if isinstance(module, nn.Dropout))
    attention = [module for module in modules if "attention_dropout" in vars(module)]
    assert len(attention) == 2 and all(module.attention_dropout == 0 for module in attention)


def first_kl(state: State) -> float:
    return step(state)[0]["kl"]


def test_b53_the_reference_of_a_continued_adapter_is_that_adapter(folder: Path, adapter: Path, world: World) -> None:
    state = start(folder, world, {"lora.start_adapter": str(adapter), "optim.lr": 2.0})
    assert state.reference is not None and state.reference.kind == "start adapter"
    assert any("reference: start adapter" in note for note in state.notes)
    assert abs(first_kl(state)) < 1e-9
    trained = weights(state)
    frozen = {name: p for name, p in state.policy.causal.named_parameters() if ".reference." in name}
    assert len(frozen) == len(trained) and not any(p.requires_grad for p in frozen.values())
    assert step(state)[0]["kl"] > 1e-4, "the copy has to stay behind"
    again = start(folder, world, {"lora.start_adapter": str(adapter)})
    before = {name.replace(".default.", ".reference."): weight for name, weight in weights(again).items()}
    assert distance(before, frozen) == 0


def test_b53_the_bare_base_would_show_a_kl_from_the_first_step(folder: Path, adapter: Path, world: World) -> None:
    state = start(folder, world, {"lora.start_adapter": str(adapter)})
    state.reference = make_reference(
        state.policy, "auto", temperature=1.0, placement=Placement(world.device), continued=False
    )
    assert state.reference.kind == "adapter off"
    assert first_kl(state) > 1e-3


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("checkpointing", ["on", "off"])
def test_b54_one_step_trains_every_adapter(folder: Path, world: World, checkpointing: str, stage: int) -> None:
    settings = {"engine.gradient_checkpointing": checkpointing, "engine.deepspeed": f"zero{stage}"}
    state = start(folder, world, settings)
    assert all(not weight.any() for name, weight in weights(state).items() if "lora_B" in name)
    step(state)
    after = {name: weight for name, weight in weights(state).items() if "lora_B" in name}
    assert len(after) == 14, "seven linear layers in each of two blocks"
    assert [name for name, weight in after.items() if not weight.any()] == []


def test_b54_the_base_stays_as_it_is(folder: Path, world: World) -> None:
    state = start(folder, world)
    step(state)
    base = tiny_qwen2().state_dict()
    named = {name.replace(".base_layer", ""): weight for name, weight in weights(state, everything=True).items()}
    kept = {name: weight for name, weight in named.items() if "lora_" not in name}
    assert len(kept) == 26 and distance(kept, base) == 0


@pytest.mark.parametrize("forbidden", ["lm_head", "embed_tokens"])
def test_b60_adapters_on_tied_embeddings_are_refused(folder: Path, world: World, forbidden: str) -> None:
    with pytest.raises(Refused, match=rf"lora.targets[\s\S]*{forbidden}"):
        start(folder, world, {"lora.targets": ("q_proj", forbidden)})


def test_b64_a_tokenizer_with_more_tokens_than_rows_is_refused_before_the_engine(world: World, tmp_path: Path) -> None:
    folder = write_run(tmp_path, tiny_qwen2(vocab=298))
    with pytest.raises(Refused, match=r"2 tokens without a row in the model's embedding of 298 rows"):
        start(folder, world)


def test_i4_b62_an_exported_adapter_is_the_policy_for_plain_peft(folder: Path, world: World, tmp_path: Path) -> None:
    state = start(folder, world, {"optim.lr": 5.0})
    step(state)
    target = export(state.policy, state.engine, world, tmp_path, state.config)
    ids = torch.arange(20)[None]
    base = AutoModelForCausalLM.from_pretrained(folder / "model")
    untrained = base(input_ids=ids).logits
    loaded = PeftModel.from_pretrained(base, target).eval()
    with torch.no_grad():
        expected, found = state.policy.causal(input_ids=ids).logits, loaded(input_ids=ids).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert (found - untrained).abs().max() > 1e-3, "an adapter without effect proves nothing"


def test_i4_b61_an_exported_model_with_tied_embeddings_is_the_policy(
    folder: Path, world: World, tmp_path: Path
) -> None:
    state = start(folder, world, {"lora.r": 0, "optim.lr": 1.0})
    step(state)
    target = export(state.policy, state.engine, world, tmp_path, state.config)
    loaded, info = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    ids = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(
            loaded(input_ids=ids).logits, state.policy.causal(input_ids=ids).logits, rtol=0, atol=1e-6
        )


def test_b54_adapters_that_get_no_gradient_are_named(folder: Path, world: World) -> None:
    state = start(folder, world, {"optim.lr": 1e-2})
    step(state)
    note_unmoved_adapters(state)
    assert not [note for note in state.notes if "have not moved" in note]
    name, weight = next((n, w) for n, w in state.policy.causal.named_parameters() if "lora_B.default" in n)
    with torch.no_grad():
        weight.zero_()
    note_unmoved_adapters(state)
    (note,) = [note for note in state.notes if "have not moved" in note]
    assert name in note and note.startswith("1 of ")
