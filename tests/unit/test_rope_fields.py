"""What may be asked of RoPE, in a run file and in a model's config.json."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import Qwen2Config

from tests.tiny import LLAMA3, TINY
from trainer.config.sections import Rope
from trainer.errors import Refused
from trainer.models.rope import RopeRequest, apply, requested
from trainer.models.rope_fields import check_config_json


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
