"""The shape of a dense decoder, read from its config, and how many parameters each part of it has."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

KNOWN = ("llama", "mistral", "qwen2", "qwen3")
"""model_type of the architectures whose blocks are laid out as below. SmolLM and SmolLM2 are "llama"."""

ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Shape:
    """Sizes, in the config's own terms."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    """Embedding and head are one matrix."""
    biased: tuple[str, ...]
    """Linear layers with a bias."""
    qk_norm: bool
    """Queries and keys are normalised head by head (Qwen3)."""

    @property
    def queries(self) -> int:
        """Elements of a token's queries."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Elements of a token's keys, and of its values."""
        return self.kv_heads * self.head_dim

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of the linear layers of a block."""
        hidden, wide = self.hidden, self.intermediate
        return {
            "q_proj": (hidden, self.queries),
            "k_proj": (hidden, self.keys),
            "v_proj": (hidden, self.keys),
            "o_proj": (self.queries, hidden),
            "gate_proj": (hidden, wide),
            "up_proj": (hidden, wide),
            "down_proj": (wide, hidden),
        }

    @property
    def block_weights(self) -> int:
        """Of all linear layers of all blocks: what 4-bit quantises, and what a token is multiplied with."""
        return self.layers * sum(inputs * outputs for inputs, outputs in self.linears.values())

    @property
    def matrix(self) -> int:
        """Of the embedding; the head has as many."""
        return self.vocab * self.hidden

    @property
    def small(self) -> int:
        """Biases and norms."""
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        return self.layers * (norms + sum(self.linears[name][1] for name in self.biased)) + self.hidden

    @property
    def total(self) -> int:
        return self.block_weights + self.small + self.matrix * (1 if self.tied else 2)

    @property
    def largest(self) -> int:
        """Of the largest single tensor."""
        return max(self.matrix, self.hidden * self.intermediate)

    def adapter(self, rank: int, targets: Collection[str]) -> int:
        """LoRA: A is (r, inputs), B is (outputs, r)."""
        return self.layers * sum(rank * sum(self.linears[name]) for name in targets)


def shape_of(config: Mapping[str, Any]) -> Shape | None:
    """``config``: what a config.json holds. None: an architecture that the formulas do not know."""
    kind = config.get("model_type")
    if kind not in KNOWN:
        return None
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    attention = {"qwen2": ATTENTION[:3], "mistral": ()}.get(kind, ATTENTION if config.get("attention_bias") else ())
    return Shape(
        layers=config["num_hidden_layers"],
        hidden=hidden,
        intermediate=config["intermediate_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        vocab=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings")),
        biased=attention + (MLP if config.get("mlp_bias") else ()),
        qk_norm=kind == "qwen3",
    )
