"""Reward models and encoders in the plan: counted from config.json as transformers builds them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, PreTrainedModel

from tests.unit.test_plan import SMALL, run
from trainer.config.grpo import Reward
from trainer.plan import state
from trainer.plan.networks import ENCODERS, PASS_TOKENS, Network, network_of
from trainer.plan.parts import plan
from trainer.plan.shape import KNOWN
from trainer.preflight.networks import networks_of
from trainer.record.memory import PeakMemory

ENCODER = {"max_position_embeddings": 514, "type_vocab_size": 1, "pad_token_id": 1}


def built(kind: str, auto: Any, **others: Any) -> PreTrainedModel:
    own = ENCODER if kind in ENCODERS else {}
    return auto.from_config(AutoConfig.for_model(kind, **SMALL | own | others))


def config_json(model: PreTrainedModel) -> dict[str, Any]:
    """As save_pretrained writes it."""
    return model.config.to_dict() | {"architectures": [type(model).__name__]}


@pytest.mark.parametrize("labels", [0, 1, 3])
@pytest.mark.parametrize("kind", [*ENCODERS, *KNOWN])
def test_parameters_are_those_of_the_network(kind: str, labels: int) -> None:
    with torch.device("meta"):
        model = built(kind, AutoModelForSequenceClassification if labels else AutoModel, num_labels=labels or 2)
    found = network_of(config_json(model))
    assert found is not None and found.parameters == sum(one.numel() for one in model.parameters())


def test_bge_m3_and_the_types_of_weights() -> None:
    sizes = {"vocab_size": 250002, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24}
    config = {"model_type": "xlm-roberta", "max_position_embeddings": 8194, "type_vocab_size": 1} | sizes
    found = network_of(config | {"torch_dtype": "float32", "architectures": ["XLMRobertaModel"]})
    assert found is not None and found.parameters == 567_754_752 and found.weights == 4 * 567_754_752
    half = network_of(config | {"dtype": "bfloat16"})
    assert half is not None and half.weights == 2 * 567_754_752
    assert network_of({"model_type": "deberta-v2"}) is None


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta", "qwen2", "llama"])
def test_a_pass_holds_what_is_planned(kind: str) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4, "num_hidden_layers": 3}
    model = built(kind, AutoModelForSequenceClassification, pad_token_id=1, use_cache=False, **sizes).eval()
    ids = torch.full((32, 64), 5)
    with torch.no_grad(), PeakMemory(torch.device("cpu")) as memory:
        model(input_ids=ids, attention_mask=torch.ones_like(ids))
        base = memory.held()
        memory.take_peak()
        model(input_ids=ids, attention_mask=torch.ones_like(ids))
        counted = memory.take_peak() - base
    found = network_of(config_json(model))
    assert found is not None and counted == pytest.approx(found.activations(ids.numel()), rel=0.1)


def test_they_visit_a_card_while_they_score_and_stay_on_a_cpu() -> None:
    judge, encoder = Network(10**9, 2, 1000), Network(10**8, 4, 500)
    for cuda in (True, False):
        alone = plan(run(cuda=cuda))
        found = plan(replace(alone.settings, networks=(judge, encoder)))
        weights = judge.weights + encoder.weights
        assert found.phases["reward"]["reward models"] == weights == 2.4e9
        tokens = 8 * 8 * (512 + 512)
        assert tokens > PASS_TOKENS
        assert found.phases["reward"]["activations"] == PASS_TOKENS * (2 * 1000 + 4 * 500)
        assert found.phases["training"]["reward models"] == (0 if cuda else weights)
        assert state.host(found.settings) - state.host(alone.settings) == (weights if cuda else 0)
        assert found.totals["reward"] > alone.totals["reward"] + weights
    assert plan(replace(run(prompts=1), networks=(judge,))).phases["reward"]["activations"] == 2 * 1000 * 8 * 1024


def test_only_config_json_is_read_and_what_is_unknown_is_told(tmp_path: Path) -> None:
    with torch.device("meta"):
        known = config_json(built("qwen2", AutoModelForSequenceClassification))
    for name, text in (("good", json.dumps(known)), ("other", '{"model_type": "deberta-v2"}'), ("broken", "{")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
    (tmp_path / "empty").mkdir()
    names = ("good", "other", "broken", "empty")
    rewards = [Reward(name=name, kind="model", path=str(tmp_path / name)) for name in names]
    rewards += [Reward(name="far", kind="embedding", path="somebody/not-here")]
    rewards += [Reward(name="plain", kind="python", function="rewards.py:one")]
    found, told = networks_of(rewards)
    assert found == (network_of(known),)
    assert [one.partition(" = ")[0] for one in told] == [f"reward.{name}.path" for name in (*names[1:], "far")]
    assert "know llama, mistral, qwen2, qwen3, bert, camembert, roberta, xlm-roberta, not deberta-v2" in told[0]
    assert "cannot be read" in told[1] and "cannot be read" in told[2] and "not on this machine yet" in told[3]
