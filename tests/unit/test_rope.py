"""RoPE scaling written into a config without losing the base, and the window that follows from it."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BloomConfig,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    Phi3Config,
    Qwen2Config,
)

from tests.tiny import LLAMA3, TINY
from trainer.errors import Refused
from trainer.models.rope import RopeRequest, apply, theta, window
from trainer.models.rope_built import check_built, inspect_built
from trainer.models.rope_fields import check_config_json

# head_dim 8 and theta 1e6: 1, 1e6^-0.25, 1e6^-0.5, 1e6^-0.75
PLAIN = [1.0, 0.0316227766, 0.001, 0.0000316227766]


def config_json(folder: Path, style: str, rope: dict[str, Any] | None = None) -> Path:
    """A model folder's config as transformers 4 or 5 writes it."""
    raw: dict[str, Any] = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], **TINY}
    if style == "v4":
        raw |= {"rope_theta": 1000000.0, "rope_scaling": rope}
    else:
        raw |= {"rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default", **(rope or {})}}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


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
