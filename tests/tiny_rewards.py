"""Reward models in miniature: a sentence encoder in the layout of bge-m3's folder, and sequence classifiers."""

import json
import string
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import (
    Qwen2Config,
    Qwen2ForSequenceClassification,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
    XLMRobertaModel,
    XLMRobertaTokenizer,
    set_seed,
)

from tests.tiny import TINY, tiny_tokenizer
from trainer.batch import Completion, Prompt

WORDS = ("▁the", "▁answer", "▁is", "▁what", "▁noodles", "▁physics", "ing", "tion", "面", "条")
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")


def xlmr_tokenizer(window: int = 8192) -> XLMRobertaTokenizer:
    """110 pieces with XLM-R's ids of special tokens: <s> 0, <pad> 1, </s> 2, <unk> 3; <mask> last."""
    pieces = ["▁", *WORDS, *string.ascii_letters, *string.digits, *string.punctuation]
    vocab = [(token, 0.0) for token in SPECIAL] + [(piece, -float(len(pieces) - n)) for n, piece in enumerate(pieces)]
    return XLMRobertaTokenizer(vocab=[*vocab, ("<mask>", 0.0)], model_max_length=window)


def xlmr_config(tokenizer: XLMRobertaTokenizer, **sizes: Any) -> XLMRobertaConfig:
    """``max_position_embeddings``: the window and 2, as positions begin behind the pad's."""
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    fixed = {
        "vocab_size": len(tokenizer),
        "type_vocab_size": 1,
        "pad_token_id": 1,
        "bos_token_id": 0,
        "eos_token_id": 2,
    }
    return XLMRobertaConfig(**small | fixed | {"max_position_embeddings": 130, "layer_norm_eps": 1e-5} | sizes)


def write_encoder(
    folder: Path, *, pooling: str = "cls", window: int = 128, dense: int = 0, seed: int = 0, **sizes: Any
) -> Path:
    """config.json, model.safetensors, tokenizer, modules.json, sentence_bert_config.json, 1_Pooling/, 2_Normalize in
    modules.json alone, as in bge-m3's folder. ``dense``: numbers of a projection between the two."""
    set_seed(seed)
    tokenizer = xlmr_tokenizer(window)
    model = XLMRobertaModel(xlmr_config(tokenizer, max_position_embeddings=window + 2, **sizes)).eval()
    louder(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    hidden = model.config.hidden_size
    types = ["Transformer", "Pooling", *(["Dense"] if dense else []), "Normalize"]
    paths = ["" if number == 0 else f"{number}_{name}" for number, name in enumerate(types)]
    listed = [
        {"idx": n, "name": str(n), "path": paths[n], "type": f"sentence_transformers.models.{name}"}
        for n, name in enumerate(types)
    ]
    write_json(folder / "modules.json", listed)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": window, "do_lower_case": False})
    flags = {f"pooling_mode_{name}": name == {"cls": "cls_token", "mean": "mean_tokens"}[pooling] for name in POOLINGS}
    write_json(folder / "1_Pooling/config.json", {"word_embedding_dimension": hidden} | flags)
    if dense:
        activation = "torch.nn.modules.activation.Tanh"
        sizes_of = {"in_features": hidden, "out_features": dense, "bias": True, "activation_function": activation}
        write_json(folder / "2_Dense/config.json", sizes_of)
        weights = {"linear.weight": torch.randn(dense, hidden), "linear.bias": torch.randn(dense)}
        save_file(weights, folder / "2_Dense/model.safetensors")
    return folder


@torch.no_grad()
def louder(model: nn.Module) -> None:
    """Fresh weights are so small that the first token's state is the same whatever follows it."""
    for name, weight in model.named_parameters():
        if weight.dim() == 2 and "embed" not in name:
            weight *= 10


POOLINGS = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens")


def write_decoder_judge(folder: Path, *, seed: int = 0, **settings: Any) -> Path:
    """A Qwen2 with one output, with the tiny tokenizer and its ChatML template."""
    set_seed(seed)
    config = Qwen2Config(**TINY | {"vocab_size": 300, "num_labels": 1, "pad_token_id": 297} | settings)
    model = Qwen2ForSequenceClassification(config).eval()
    louder(model)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def write_encoder_judge(folder: Path, *, seed: int = 0, **settings: Any) -> Path:
    """An XLM-R with one output and no template: question and answer are a pair of texts."""
    set_seed(seed)
    tokenizer = xlmr_tokenizer(128)
    model = XLMRobertaForSequenceClassification(xlmr_config(tokenizer, **{"num_labels": 1} | settings)).eval()
    louder(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_json(file: Path, content: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content), "utf-8")


def answered(text: str, *, question: str = "what is noodles", index: int = 0, **columns: Any) -> Completion:
    prompt = Prompt(index=index, text=question, ids=(1, 2), messages=None, columns=columns)
    return Completion(
        group=index, generation=0, prompt=prompt, ids=(7, 8), sampling_logps=(-1.0, -1.0), finish="stop", text=text
    )
