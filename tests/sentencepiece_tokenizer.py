"""A tokenizer of SentencePiece's kind: U+2581 for a space, `<0x..>` for the bytes of what it has no token for."""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, normalizers, trainers
from transformers import PreTrainedTokenizerFast

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SIZE = 8000


def sentencepiece_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Llama 2's construction, with the merges of ``texts``."""
    bpe = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    bpe.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE,
        special_tokens=[*special, *BYTES],
        limit_alphabet=2000,
        max_token_length=12,
        show_progress=False,
    )
    bpe.train_from_iterator((word for text in texts for word in text.split(" ")), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
