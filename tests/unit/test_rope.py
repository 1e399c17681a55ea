"""The RoPE window, what may be asked of it, and the rotary module that is really built."""

import copy
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BloomConfig,
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

from trainer.config.sections import Rope
from trainer.errors import Refused
from trainer.models.rope import RopeRequest, apply, requested, theta, window
from trainer.models.rope_built import check_built, expected_inv_freq, inspect_built, same_rope
from trainer.models.rope_fields import check_config_json

TINY = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
# head_dim 8 and theta 1e6: 1, 1e6^-0.25, 1e6^-0.5, 1e6^-0.75
PLAIN = [1.0, 0.0316227766, 0.001, 0.0000316227766]
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def qwen2(rope: dict[str, Any] | None = None, **changes: Any) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**TINY | changes, rope_parameters={"rope_theta": 1e6} | (rope or {}))).eval()


def config_json(folder: Path, style: str, rope: dict[str, Any] | None = None) -> Path:
    """A model folder's config as transformers 4 or 5 writes it."""
    raw: dict[str, Any] = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], **TINY}
    if style == "v4":
        raw |= {"rope_theta": 1000000.0, "rope_scaling": rope}
    else:
        raw |= {"rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default", **(rope or {})}}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


@torch.no_grad()
def logits(model: PreTrainedModel, length: int) -> torch.Tensor:
    ids = torch.arange(length)[None] * 7 % 128
    return model(input_ids=ids, use_cache=False).logits


# What may be asked


def test_nothing_asked_is_none() -> None:
    assert requested(Rope()) is None


def test_b85_an_int_factor_is_a_float() -> None:
    request = requested(Rope(type="yarn", factor=4, original_max_position_embeddings=32))
    assert request == RopeRequest("yarn", 4.0, 32)
    assert isinstance(request.factor, float)
    assert requested(Rope(type="linear", factor=1)) == RopeRequest("linear", 1.0, None)


@pytest.mark.parametrize("factor", [0, 0.0, 0.5, -1, -1.0, "4", True, math.nan, math.inf, None, [4.0]], ids=str)
def test_b85_an_odd_factor_in_the_run_file_is_refused(factor: Any) -> None:
    section = SimpleNamespace(type="yarn", factor=factor, original_max_position_embeddings=0)
    with pytest.raises(Refused, match=r"model\.rope\.factor: got .*expected a number >= 1"):
        requested(section)


@pytest.mark.parametrize("original", [-1, 32.0, True, "32"], ids=str)
def test_b85_an_odd_original_in_the_run_file_is_refused(original: Any) -> None:
    section = SimpleNamespace(type="yarn", factor=2.0, original_max_position_embeddings=original)
    with pytest.raises(Refused, match=r"model\.rope\.original_max_position_embeddings: got"):
        requested(section)


def test_b85_a_factor_without_a_type_is_refused_and_all_problems_come_at_once() -> None:
    with pytest.raises(Refused, match=r"model\.rope\.type: missing"):
        requested(Rope(factor=2.0))
    with pytest.raises(Refused) as refused:
        requested(SimpleNamespace(type="ntk", factor=0.5, original_max_position_embeddings=-3))
    for part in ("model.rope.type: got 'ntk'", "linear, dynamic, yarn", "model.rope.factor: got 0.5", "got -3"):
        assert part in str(refused.value)


def test_b85_original_belongs_to_yarn_alone() -> None:
    with pytest.raises(Refused, match="dynamic starts from max_position_embeddings; remove it"):
        requested(Rope(type="dynamic", factor=2.0, original_max_position_embeddings=32))


def test_b85_original_beyond_the_model_s_window_is_refused() -> None:
    with pytest.raises(Refused, match=r"got 65, expected at most max_position_embeddings 64"):
        apply(Qwen2Config(**TINY), RopeRequest("yarn", 2.0, 65))


def test_b85_a_factor_that_is_not_the_ratio_is_told_with_both_numbers() -> None:
    (note,) = apply(Qwen2Config(**TINY), RopeRequest("yarn", 2.0, 16))
    assert "factor 2 " in note and "64 / original_max_position_embeddings 16 = 4" in note and "32 tokens" in note
    assert apply(Qwen2Config(**TINY), RopeRequest("yarn", 4.0, 16)) == []
    assert apply(Qwen2Config(**TINY), RopeRequest("yarn", 4.0, None)) == []


ODD_IN_CONFIG_JSON = [
    ({"type": "yarn"}, r"rope_scaling\.factor: missing"),
    ({"type": "yarn", "factor": None}, r"rope_scaling\.factor: missing"),
    *[({"type": "yarn", "factor": odd}, r"rope_scaling\.factor: got") for odd in (0.5, 0, -1, "4", math.nan, True)],
    *[
        (
            {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": odd},
            r"original_max_position_embeddings: got",
        )
        for odd in (0, 65, 32.0, None, "32", True)
    ],
    ({"type": "yarn", "factor": 2.0, "attn_factor": 1.0}, r"attn_factor: unknown.*did you mean 'attention_factor'"),
    ({"type": "linear", "factor": 2.0, "beta_fast": 32}, r"beta_fast: unknown for rope_type 'linear'"),
    ({"factor": 2}, r"rope_type: missing beside factor, which would be ignored"),
    ({"type": "yarnn", "factor": 2}, r"rope_type: got 'yarnn'; expected one of .*yarn"),
    (["yarn", 2.0], r"rope_scaling: got \['yarn', 2.0\] \(list\), expected an object"),
    ("yarn", r"rope_scaling: got 'yarn' \(str\)"),
    ({**LLAMA3, "high_freq_factor": "4"}, r"high_freq_factor: got '4'"),
    ({"type": "longrope", "short_factor": 1.0, "long_factor": [1.0] * 4}, r"short_factor: got 1.0, expected a list"),
    ({"type": "yarn", "factor": 2.0, "rope_theta": None}, r"rope_theta: got None"),
]


@pytest.mark.parametrize(("rope", "message"), ODD_IN_CONFIG_JSON, ids=lambda value: str(value)[:40])
def test_b85_odd_fields_of_a_config_json_are_refused(rope: Any, message: str) -> None:
    with pytest.raises(Refused, match=message) as refused:
        check_config_json({**TINY, "rope_theta": 1e6, "rope_scaling": rope}, "m/config.json")
    assert str(refused.value).startswith("m/config.json: ")


def test_b85_the_config_jsons_that_models_really_have_pass() -> None:
    def notes(rope: Any, **raw: Any) -> list[str]:
        return check_config_json({**TINY, "rope_theta": 1e6, "rope_scaling": rope, **raw}, "config.json")

    qwen = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 64}
    deepseek = {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
    assert notes(None) == notes({}) == notes(qwen) == notes({"type": "dynamic", "factor": 2.0}) == []
    assert notes({**deepseek, "original_max_position_embeddings": 64}) == []
    assert notes({**LLAMA3, "original_max_position_embeddings": 16}) == []
    assert notes({"type": "mrope", "mrope_section": [1, 1, 2]}) == []
    assert notes(None, rope_parameters={"rope_theta": 1e6, "rope_type": "default"}) == []
    per_layer = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}, "sliding_attention": None}
    assert notes(None, rope_parameters=per_layer) == []
    assert "max_position_embeddings 64 is taken" in notes({"type": "yarn", "factor": 2})[0]
    assert "64 / original_max_position_embeddings 32 = 2" in notes({**qwen, "original_max_position_embeddings": 32})[0]


# rope_theta


@pytest.mark.parametrize("style", ["v4", "v5"])
@pytest.mark.parametrize("before", [None, {"rope_type": "dynamic", "factor": 3.0}], ids=["plain", "dynamic"])
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("linear", [frequency / 2 for frequency in PLAIN]),
        ("dynamic", PLAIN),
        # 64 tokens turn the first frequency ten times and the others less than once: all but the first are divided.
        ("yarn", [PLAIN[0], *[frequency / 2 for frequency in PLAIN[1:]]]),
    ],
)
def test_b86_theta_survives_an_override(
    tmp_path: Path, style: str, before: dict[str, Any] | None, kind: str, expected: list[float]
) -> None:
    config = AutoConfig.from_pretrained(config_json(tmp_path, style, before))
    apply(config, RopeRequest(kind, 2.0, None))
    model = AutoModelForCausalLM.from_config(config)
    check_built(model, "policy")
    assert inspect_built(model)[0].inv_freq.tolist() == pytest.approx(expected, rel=1e-5)

    model.save_pretrained(tmp_path / "saved")
    reloaded = AutoConfig.from_pretrained(tmp_path / "saved")
    assert theta(reloaded) == 1e6 and window(reloaded) == window(config)


def test_b86_every_other_key_survives_and_yarn_states_its_window() -> None:
    config = Qwen2Config(**TINY, rope_parameters={"rope_theta": 1e6, "partial_rotary_factor": 1.0, "type": "default"})
    apply(config, RopeRequest("yarn", 2.0, None))
    assert config.rope_parameters == {
        "rope_theta": 1e6,
        "partial_rotary_factor": 1.0,
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 64,
    }
    assert config.max_position_embeddings == 128
    apply(config, RopeRequest("yarn", 2.0, None))
    assert config.max_position_embeddings == 128, "applied twice, the window grows once"


def test_b86_another_scaling_starts_again_from_the_unscaled_window() -> None:
    config = Qwen2Config(**TINY, rope_parameters={"rope_theta": 1e6})
    apply(config, RopeRequest("yarn", 4.0, None))
    config.rope_parameters["beta_fast"] = 16
    (note,) = apply(config, RopeRequest("linear", 2.0, None))
    assert note == "[model.rope] linear x2 replaces the yarn x4 of the model's config"
    assert config.rope_parameters == {"rope_theta": 1e6, "rope_type": "linear", "factor": 2.0}
    assert window(config).limit == 128


def test_b86_a_lost_theta_is_refused() -> None:
    config = Qwen2Config(**TINY, rope_parameters={"rope_theta": 1e6})
    config.rope_parameters = {"rope_type": "yarn", "factor": 2.0, "rope_theta": None}
    with pytest.raises(Refused, match="rope_theta is None"):
        apply(config, RopeRequest("yarn", 2.0, None))


def test_b86_rope_scaling_added_beside_rope_parameters_is_refused() -> None:
    raw = {**TINY, "rope_parameters": {"rope_theta": 1e6}, "rope_scaling": {"type": "yarn", "factor": 2.0}}
    assert theta(Qwen2Config(**copy.deepcopy(raw))) == 10000.0, "this is what transformers makes of it"
    with pytest.raises(Refused, match=r"rope_scaling: replaces rope_parameters.*1000000\.0 is lost"):
        check_config_json(raw, "config.json")
    (_, note) = check_config_json({**TINY, "rope_scaling": {"type": "yarn", "factor": 2.0}}, "config.json")
    assert "no rope_theta" in note


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (GPT2Config(), "no RoPE settings to scale"),
        (Gemma3TextConfig(), "sets RoPE by layer type"),
        (LlamaConfig(**TINY, rope_parameters={**LLAMA3, "rope_theta": 1e4}), "trained with rope_type 'llama3'"),
    ],
    ids=["gpt2", "gemma3", "llama3"],
)
def test_scaling_that_a_model_cannot_take_is_refused(config: Any, reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        apply(config, RopeRequest("yarn", 2.0, None))


# The window


@pytest.mark.parametrize(
    ("rope", "limit", "unscaled", "rule"),
    [
        (None, 64, 64, "max_position_embeddings 64 (no RoPE scaling)"),
        (
            {"rope_type": "linear", "factor": 2.5},
            160,
            64,
            "linear scaling: max_position_embeddings 64 x factor 2.5 = 160",
        ),
        (
            {"rope_type": "dynamic", "factor": 2},
            128,
            64,
            "dynamic scaling: max_position_embeddings 64 x factor 2 = 128",
        ),
        (
            {"rope_type": "yarn", "factor": 2.0},
            128,
            64,
            "yarn scaling: original_max_position_embeddings 64 x factor 2 = 128",
        ),
        (
            {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 16},
            *(48, 16, "yarn scaling: original_max_position_embeddings 16 x factor 3 = 48"),
        ),
        (
            {**LLAMA3, "original_max_position_embeddings": 16},
            *(64, 64, "max_position_embeddings 64 (llama3 scaling is part of it)"),
        ),
    ],
    ids=["default", "linear", "dynamic", "yarn", "yarn16", "llama3"],
)
def test_b87_the_limit_follows_the_scaling(rope: dict[str, Any], limit: int, unscaled: int, rule: str) -> None:
    config = Qwen2Config(**TINY, rope_parameters={"rope_theta": 1e6} | (rope or {}))
    found = window(config)
    assert (found.limit, found.unscaled, found.rule) == (limit, unscaled, rule)
    assert found.rope_type == (rope or {"rope_type": "default"})["rope_type"]


def test_b87_limits_without_rope_and_by_layer() -> None:
    learned = window(GPT2Config(n_positions=96))
    assert (learned.limit, learned.rope_type) == (96, "none") and "n_positions 96" in learned.rule
    by_layer = window(Gemma3TextConfig(max_position_embeddings=512))
    assert (by_layer.limit, by_layer.rope_type) == (512, "per layer")
    longrope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    phi3 = window(Phi3Config(**TINY, pad_token_id=0, original_max_position_embeddings=16, rope_parameters=longrope))
    assert (phi3.limit, phi3.unscaled) == (64, 16)
    with pytest.raises(Refused, match="bloom model states no context window"):
        window(BloomConfig())


# What is built


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
