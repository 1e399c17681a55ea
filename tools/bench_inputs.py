"""What both sides of tools/bench.py read: settings, a model of a real architecture, prompts, lengths, rewards."""

import json
import math
import random
import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, set_seed

LLAMA = {"model_type": "llama", "hidden_act": "silu", "tie_word_embeddings": True}
QWEN2 = {"model_type": "qwen2", "hidden_act": "silu", "tie_word_embeddings": True, "max_position_embeddings": 32768}
SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": LLAMA
    | {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    },
    "qwen2.5-0.5b": QWEN2
    | {
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    "qwen2.5-1.5b": QWEN2
    | {
        "vocab_size": 151936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
}
"""The config.json of each, as published. Weights are random: no time depends on them."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

SIGMA, CAP, SEED = 0.7, 256, 0
"""Of the lengths of ``--ragged``: lognormal, mean ``--completion`` before the cap."""


@dataclass(frozen=True)
class Settings:
    """One benchmark. Both sides get the same one."""

    shape: str
    prompt: int
    completion: int
    group: int
    prompts: int
    ragged: bool
    dtype: str
    engine: str
    lora: int
    device: str
    threads: int
    memory_gib: float
    beta: float = 0.04
    lr: float = 1e-6

    @property
    def limit(self) -> int:
        """max_new_tokens of both sides."""
        return CAP if self.ragged else self.completion

    @property
    def lengths(self) -> list[list[int]]:
        """Tokens of each completion of each prompt; a shorter one than ``limit`` ends with the stop token."""
        if not self.ragged:
            return [[self.completion] * self.group for _ in range(self.prompts)]
        draw = random.Random(SEED)
        mu = math.log(self.completion) - SIGMA**2 / 2
        return [
            [min(CAP, max(1, round(draw.lognormvariate(mu, SIGMA)))) for _ in range(self.group)]
            for _ in range(self.prompts)
        ]


def token_ratio(prompt: int, lengths: Sequence[Sequence[int]]) -> float:
    """Tokens of a pass with a prompt before each completion, over those with each prompt once. ``lengths`` by prompt.

    For equal lengths it is G (P + C) / (P + G C).
    """
    completions = sum(map(sum, lengths))
    return (prompt * sum(map(len, lengths)) + completions) / (prompt * len(lengths) + completions)


def spread(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """The reward of both sides: another number for nearly every completion, so that no group is without gradient."""
    return [sum(ids) % 997 / 997 for ids in completion_ids]


def write_inputs(settings: Settings, folder: Path) -> None:
    """``folder/model``, ``prompts.jsonl``, and ``fixed.json`` with the completions that log-probs are compared on."""
    config = AutoConfig.for_model(**SHAPES[settings.shape])
    vocab = config.vocab_size
    config.bos_token_id, config.pad_token_id, config.eos_token_id = None, vocab - 2, vocab - 1
    set_seed(SEED)
    model = AutoModelForCausalLM.from_config(config).to(DTYPES[settings.dtype])
    model.save_pretrained(folder / "model")
    tokenizer(vocab).save_pretrained(folder / "model")
    draw = random.Random(SEED)
    letters = string.ascii_letters + string.digits
    prompts = ["".join(draw.choices(letters, k=settings.prompt)) for _ in range(settings.prompts)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    prompt, completion = min(settings.prompt, 128), min(settings.completion, 64)
    fixed = [
        {
            "prompt": [draw.randrange(256) for _ in range(prompt)],
            "completions": [
                [draw.randrange(vocab - 2) for _ in range(length)] for length in (completion, max(1, completion // 3))
            ],
            "advantages": [draw.gauss(0, 1), draw.gauss(0, 1)],
        }
        for _ in range(2)
    ]
    (folder / "fixed.json").write_text(json.dumps(fixed))


def tokenizer(size: int) -> PreTrainedTokenizerFast:
    """``size`` tokens, so that every row of the head can be sampled; a text of N letters is N tokens. The last token
    ends a completion."""
    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    words += [f"w{number}" for number in range(size - len(words) - 2)] + ["<|endoftext|>", "<|im_end|>"]
    bytes_only = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_only.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bytes_only, eos_token="<|im_end|>", pad_token="<|endoftext|>")
