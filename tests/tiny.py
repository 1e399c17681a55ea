"""The smallest real parts: a byte-level BPE tokenizer with a chat template, and a random Qwen2 model."""

import json

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer, set_seed
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

CORPUS = ["system user assistant", "the answer is 42", "What is 2 + 3? Think first.", "You are a helpful assistant."]

TINY = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
"""The sizes of a config."""

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
"""Llama 3.1's scaling, trained into a model."""


def tiny_tokenizer() -> Qwen2Tokenizer:
    """300 tokens: 256 bytes, 41 merges, then <|endoftext|> (pad) 297, <|im_start|> 298, <|im_end|> (eos) 299; no bos.

    Qwen2's own class, since AutoTokenizer takes that class for a folder with a Qwen2 config whatever was saved there.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=297, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(CORPUS, trainer)
    trained = json.loads(bpe.to_str())["model"]
    special = {"<|endoftext|>": 297, "<|im_start|>": 298, "<|im_end|>": 299}
    return Qwen2Tokenizer(
        vocab=trained["vocab"] | special,
        merges=[tuple(pair) for pair in trained["merges"]],
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHATML,
    )


def tiny_qwen2(vocab: int = 300, seed: int = 0, *, tied: bool = True, **sizes: float) -> Qwen2ForCausalLM:
    """A random fp32 Qwen2: 2 layers, hidden 32, 4 heads over 2 kv heads, tied embeddings or not, 64 positions.

    ``sizes``: of its config, where they differ.
    """
    set_seed(seed)
    return Qwen2ForCausalLM(Qwen2Config(**TINY | {"vocab_size": vocab} | sizes, tie_word_embeddings=tied)).eval()
