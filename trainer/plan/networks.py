"""Reward models and sentence encoders: frozen networks that score completions, by what their config.json says."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.plan.shape import KNOWN, shape_of

ENCODERS = ("bert", "camembert", "roberta", "xlm-roberta")
"""model_type of those laid out as BERT is; bge-m3 is "xlm-roberta"."""

PASS_TOKENS = 16384
"""Of one pass over rows, padding included."""


@dataclass(frozen=True)
class Network:
    parameters: int
    itemsize: int
    """Bytes of a weight: bf16 where the config says so, else fp32."""
    a_token: int
    """Elements that a pass holds at its widest, for each of its tokens: nothing is kept for a backward pass."""

    @property
    def weights(self) -> float:
        return float(self.itemsize * self.parameters)

    def activations(self, tokens: int) -> float:
        """Of a step with so many tokens to score."""
        return float(self.itemsize * self.a_token * min(tokens, PASS_TOKENS))


def network_of(config: Mapping[str, Any]) -> Network | None:
    """``config``: what a config.json holds. None: an architecture that the formulas do not know."""
    itemsize = 2 if (config.get("dtype") or config.get("torch_dtype")) == "bfloat16" else 4
    labels = len(config.get("id2label") or "01") if _classifies(config) else 0  # 2 without names
    if (shape := shape_of(config)) is not None:  # in place of a head over the vocabulary, one of labels without bias
        parameters = shape.block_weights + shape.small + shape.matrix + labels * shape.hidden
        return Network(parameters, itemsize, 3 * shape.intermediate + 4 * shape.hidden)
    if config.get("model_type") not in ENCODERS:
        return None
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    rows = config["vocab_size"] + config["max_position_embeddings"] + config.get("type_vocab_size", 2)
    block = 4 * hidden * (hidden + 1) + 2 * hidden * wide + wide + hidden + 4 * hidden
    pooled = (hidden + labels) * (hidden + 1)
    parameters = rows * hidden + 2 * hidden + config["num_hidden_layers"] * block + pooled
    return Network(parameters, itemsize, 2 * wide + 3 * hidden)


def known() -> str:
    return ", ".join((*KNOWN, *ENCODERS))


def _classifies(config: Mapping[str, Any]) -> bool:
    return any("SequenceClassification" in name for name in config.get("architectures") or ())
