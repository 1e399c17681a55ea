"""The tiny model as a GGUF file, as llama.cpp's converter lays it out."""

import re
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from transformers import Qwen2ForCausalLM

from tests.tiny import tiny_tokenizer

NAMES = {
    r"model\.embed_tokens": "token_embd",
    r"model\.norm": "output_norm",
    r"lm_head": "output",
    r"model\.layers\.(\d+)\.input_layernorm": r"blk.\1.attn_norm",
    r"model\.layers\.(\d+)\.post_attention_layernorm": r"blk.\1.ffn_norm",
    r"model\.layers\.(\d+)\.self_attn\.([qkv])_proj": r"blk.\1.attn_\2",
    r"model\.layers\.(\d+)\.self_attn\.o_proj": r"blk.\1.attn_output",
    r"model\.layers\.(\d+)\.mlp\.(gate|up|down)_proj": r"blk.\1.ffn_\2",
}


def write_gguf(model: Qwen2ForCausalLM, file: Path, kind: str = "") -> None:
    """With the tiny tokenizer; in fp32, or as "q4_1" or "q4_k_m", whose matrices are random blocks of their kinds."""
    config, tokenizer = model.config, tiny_tokenizer()
    writer = gguf.GGUFWriter(str(file), "qwen2")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if config.rope_parameters["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])
        writer.add_rope_scaling_orig_ctx_len(config.rope_parameters["original_max_position_embeddings"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    vocabulary = tokenizer.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    special = set(tokenizer.all_special_tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer._merges])
    writer.add_eos_token_id(vocabulary["<|im_end|>"])
    writer.add_pad_token_id(vocabulary["<|endoftext|>"])
    writer.add_chat_template(str(tokenizer.chat_template))
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, _, last = name.rpartition(".")
        (here,) = (re.sub(f"^{ours}$", theirs, stem) for ours, theirs in NAMES.items() if re.fullmatch(ours, stem))
        blocks, stored = _blocks(here, weight.detach().numpy(), kind)
        writer.add_tensor(f"{here}.{last}", blocks, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _blocks(name: str, weight: "np.ndarray", kind: str) -> tuple["np.ndarray", Kind | None]:
    """As q4_k_m mixes them: some matrices in 6 bits."""
    if not kind or weight.ndim == 1:
        return weight, None
    if kind == "q4_1":
        return gguf.quants.quantize(weight, Kind.Q4_1), Kind.Q4_1
    stored = Kind.Q6_K if name.endswith(("token_embd", "output", "attn_v", "ffn_down")) else Kind.Q4_K
    values, size = gguf.GGML_QUANT_SIZES[stored]
    raw = np.random.default_rng(0).integers(0, 256, (weight.size // values, size), dtype=np.uint8)
    if stored is Kind.Q4_K:  # a scale of scales and one of minima lead each block
        raw[:, :4] = np.array([1e-4, 7.5e-4], dtype=np.float16).view(np.uint8)
    else:  # a scale of scales ends it
        raw[:, -2:] = np.array([3e-5], dtype=np.float16).view(np.uint8)
    return raw.reshape(weight.shape[0], -1), stored
