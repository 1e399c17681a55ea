"""The rotary module that is really built, and what dynamic scaling does to it."""

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from tests.tiny import LLAMA3, TINY
from trainer.errors import Refused
from trainer.models.rope import RopeRequest, apply
from trainer.models.rope_built import check_built, expected_inv_freq, inspect_built, same_rope


def qwen2(rope: dict[str, Any] | None = None, **changes: Any) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**TINY | changes, rope_parameters={"rope_theta": 1e6} | (rope or {}))).eval()


@torch.no_grad()
def logits(model: PreTrainedModel, length: int) -> torch.Tensor:
    ids = torch.arange(length)[None] * 7 % 128
    return model(input_ids=ids, use_cache=False).logits


def test_v5_yarn_attention_factor_and_dynamic_base() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    model = qwen2(yarn, head_dim=128, max_position_embeddings=32768)
    assert inspect_built(model)[0].attention_scaling == pytest.approx(1.1386, abs=5e-5)
    assert expected_inv_freq(model.config)[1] == pytest.approx(1.1386, abs=5e-5)

    dynamic = qwen2({"rope_type": "dynamic", "factor": 2.0}, head_dim=128, max_position_embeddings=32768)
    rotary, hidden = dynamic.model.rotary_emb, torch.zeros(1, 1, 32)
    rotary(hidden, torch.tensor([[32767]]))
    assert inspect_built(dynamic)[0].theta == pytest.approx(1e6, rel=1e-4)
    check_built(dynamic, "policy")
    rotary(hidden, torch.tensor([[65535]]))
    assert inspect_built(dynamic)[0].theta == pytest.approx(3.0528e6, rel=1e-4)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0},
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "attention_factor": 1.5,
            "beta_fast": 8,
            "beta_slow": 2,
            "truncate": False,
        },
        {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.0},
        {**LLAMA3, "original_max_position_embeddings": 256},
    ],
    ids=lambda rope: f"{rope['rope_type']}{len(rope)}",
)
def test_b88_our_own_calculation_equals_the_built_module(rope: dict[str, Any]) -> None:
    config = LlamaConfig(
        **TINY | {"max_position_embeddings": 512}, head_dim=64, rope_parameters={"rope_theta": 1e4, **rope}
    )
    model = LlamaForCausalLM(config)
    check_built(model, "policy")
    # and it can tell: a base 1 % off, or an attention factor, is another model
    config.rope_parameters["rope_theta"] = 10100.0
    with pytest.raises(Refused, match="RoPE is not what its config says"):
        check_built(model, "policy")


def test_b88_longrope_and_layer_types_are_checked_too() -> None:
    longrope = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [4.0] * 4}
    phi3 = Phi3ForCausalLM(
        Phi3Config(**TINY, pad_token_id=0, original_max_position_embeddings=16, rope_parameters=longrope)
    )
    check_built(phi3, "policy")
    gemma = AutoModelForCausalLM.from_config(
        Gemma3TextConfig(**TINY, head_dim=8, layer_types=["full_attention", "sliding_attention"])
    )
    assert {rope.layer_type for rope in inspect_built(gemma)} == {"full_attention", "sliding_attention"}
    check_built(gemma, "policy")
    gemma.config.rope_parameters["sliding_attention"]["rope_theta"] = 1e6
    with pytest.raises(Refused, match="RoPE is not what its config says"):
        check_built(gemma, "policy")


def test_b88_scaling_that_the_built_model_ignores_is_refused() -> None:
    model = qwen2()
    apply(model.config, RopeRequest("yarn", 2.0, None))
    with pytest.raises(Refused, match="class ignores what the config asks") as refused:
        check_built(model, "reference")
    for part in (
        "The reference's RoPE",
        "config: yarn, rope_theta 1e+06",
        "built: rotary_emb default",
        "factor 1.06931",
    ):
        assert part in str(refused.value)

    learned = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=128, n_positions=64))
    check_built(learned, "policy")
    learned.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(Refused, match="GPT2LMHeadModel has no rotary module"):
        check_built(learned, "policy")


def test_b88_a_lost_attention_factor_is_refused() -> None:
    model = qwen2({"rope_type": "yarn", "factor": 4.0})
    check_built(model, "policy")
    model.model.rotary_emb.attention_scaling = 1.0
    with pytest.raises(Refused, match=r"config: .* attention factor 1\.13863\n  built: .* attention factor 1\n"):
        check_built(model, "policy")


def test_b88_frequencies_rounded_by_a_cast_are_refused() -> None:
    check_built(qwen2(), "policy")
    with pytest.raises(Refused, match=r"rounded to torch\.bfloat16"):
        check_built(qwen2().to(torch.bfloat16), "policy")


def test_b86_policy_and_reference_with_another_theta_are_refused() -> None:
    same_rope(qwen2(), qwen2())
    reference = qwen2({"rope_theta": 1e4})
    check_built(reference, "reference")
    with pytest.raises(Refused, match="rotate positions differently") as refused:
        same_rope(qwen2(), reference)
    assert "rope_theta about 1e+06" in str(refused.value) and "rope_theta about 10000" in str(refused.value)
    with pytest.raises(Refused, match="attention factor"):
        same_rope(qwen2({"rope_type": "yarn", "factor": 2.0}), qwen2())


# Dynamic scaling


@pytest.mark.parametrize("length", [1, 5, 63, 64])
def test_i6_dynamic_rope_is_no_scaling_up_to_the_window(length: int) -> None:
    dynamic = qwen2({"rope_type": "dynamic", "factor": 2.0})
    assert torch.equal(logits(dynamic, length), logits(qwen2(), length))


def test_k7_dynamic_rope_differs_beyond_the_window() -> None:
    plain, dynamic = qwen2(), qwen2({"rope_type": "dynamic", "factor": 2.0})
    assert not torch.equal(logits(dynamic, 80), logits(plain, 80))


def test_b83_dynamic_rope_depends_on_what_it_has_seen() -> None:
    model = qwen2({"rope_type": "dynamic", "factor": 2.0})
    before = logits(model, 80)
    logits(model, 120)
    assert not torch.equal(logits(model, 80), before), (
        "the same prompt, another score: why it is refused beyond the window"
    )
    with pytest.raises(Refused, match="beyond the unscaled window changed the base"):
        check_built(model, "policy")
