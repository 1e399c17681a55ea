"""The garble rate over thousands of pieces of real text, and over the same text broken: tests/results/garble.json."""

import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from tests.qwen_tokenizer import qwen25_tokenizer
from tests.real_texts import Piece, fetch, pieces
from tests.sentencepiece_tokenizer import sentencepiece_tokenizer
from trainer.batch import Completion, Prompt
from trainer.watch.garble import broken_parts
from trainer.watch.signals import garbles

PER_KIND = 300
Case = tuple[str, str, Sequence[int], Sequence[int], str]
"""Kind, prompt, its ids, completion ids, text."""


def measured(cases: Iterable[Case], tokenizer: PreTrainedTokenizerBase) -> dict[str, dict[str, Any]]:
    """Of each kind: pieces, share that is garbled, and by which part."""
    cases = list(cases)
    completions = [
        Completion(i, 0, Prompt(0, prompt, tuple(prompt_ids), None, {}), tuple(ids), (), "length", text)
        for i, (_, prompt, prompt_ids, ids, text) in enumerate(cases)
    ]
    found: dict[str, tuple[Counter[str], Counter[str]]] = {}
    for (kind, *_), parts in zip(cases, garbles(completions, tokenizer), strict=True):
        counts, by_part = found.setdefault(kind, (Counter(), Counter()))
        broken = broken_parts(parts)
        counts.update(pieces=1, garbled=bool(broken))
        by_part.update(broken)
    return {
        kind: {
            "pieces": counts["pieces"],
            "rate": round(counts["garbled"] / counts["pieces"], 4),
            "parts": dict(by_part.most_common()),
        }
        for kind, (counts, by_part) in found.items()
    }


def broken_ids(texts: Sequence[Piece], tokenizer: PreTrainedTokenizerBase, rng: random.Random) -> Iterator[Case]:
    """Ids that no model in its senses samples."""
    size = len(tokenizer) - 30
    bytes_ = [tokenizer.convert_tokens_to_ids(token) for token in byte_tokens(tokenizer)]
    for piece in texts:
        ids = tokenizer.encode(piece.text, add_special_tokens=False)
        prompt_ids = tokenizer.encode(piece.prompt, add_special_tokens=False)
        made = {
            "random ids": [rng.randrange(260, size) for _ in range(100)],
            "random bytes": [rng.choice(bytes_) for _ in range(100)],
            f"shuffled: {piece.kind}": rng.sample(ids, len(ids)),
            "one token for ever": ids[:60] + [ids[-1]] * 240,
            "three tokens for ever": ids[:60] + ids[-3:] * 80,
            "ten tokens for ever": ids[:60] + ids[-10:] * 24,
        }
        yield from ((kind, piece.prompt, prompt_ids, one, str(tokenizer.decode(one))) for kind, one in made.items())
        yield f"tokens as text: {piece.kind}", piece.prompt, prompt_ids, ids, raw(tokenizer, ids)
        latin = piece.text.encode("utf-8", errors="ignore").decode("latin-1")
        if latin != piece.text and sum(ord(c) > 127 for c in latin) > len(latin) / 10:
            yield "UTF-8 read as Latin-1", piece.prompt, prompt_ids, ids, latin


def byte_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    vocabulary = tokenizer.get_vocab()
    if "<0x00>" in vocabulary:
        return [f"<0x{byte:02X}>" for byte in range(128, 256)]
    return [token for token, number in vocabulary.items() if number < 256 and ord(token[0]) > 127]


def raw(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return "".join(tokenizer.convert_ids_to_tokens(list(ids)))


def wrong(texts: Sequence[Piece], of: PreTrainedTokenizerBase, by: PreTrainedTokenizerBase) -> Iterator[Case]:
    """Ids of one tokenizer, decoded by another."""
    for piece in texts:
        ids = [number % len(by) for number in of.encode(piece.text, add_special_tokens=False)]
        yield "decoded by another tokenizer", piece.prompt, (), ids, str(by.decode(ids))


def rate(found: dict[str, dict[str, Any]], wanted: Callable[[str], bool]) -> float:
    """Of all pieces of the kinds wanted."""
    rows = [row for kind, row in found.items() if wanted(kind)]
    return sum(row["rate"] * row["pieces"] for row in rows) / sum(row["pieces"] for row in rows)


def sampled(
    model: Any, tokenizer: PreTrainedTokenizerBase, kind: str, temperature: float, tokens: int
) -> Iterator[Case]:
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 512 + 7?"}], add_generation_prompt=True, tokenize=False
    )
    ids = tokenizer.encode(prompt)
    torch.manual_seed(0)
    out = model.generate(
        torch.tensor([ids] * 200), do_sample=True, temperature=temperature, top_k=0, top_p=1.0, max_new_tokens=tokens
    )
    for row in out[:, len(ids) :].tolist():
        row = row[: row.index(tokenizer.eos_token_id)] if tokenizer.eos_token_id in row else row
        yield kind, prompt, ids, row, tokenizer.decode(row, skip_special_tokens=True)


def taught_model(folder: Path) -> Iterator[Case]:
    """The demo's model: as it is, at high temperature, and with noise on its weights."""
    command = [sys.executable, str(Path(__file__).parents[2] / "tools" / "tiny_model.py"), str(folder)]
    subprocess.run(command, check=True, timeout=400)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).eval()
    yield from sampled(model, tokenizer, "T = 1", 1.0, 8)
    yield from sampled(model, tokenizer, "T = 10", 10.0, 64)
    with torch.no_grad():
        for weight in model.parameters():
            weight += torch.randn_like(weight) * weight.std(correction=0) if weight.dim() == 2 else 0
    yield from sampled(model, tokenizer, "noise on the weights", 1.0, 64)


@pytest.mark.full
def test_healthy_text_stays_below_one_percent_and_broken_text_is_caught(
    tmp_path: Path, results: Callable[[str, dict[str, Any]], None]
) -> None:
    fetch()
    qwen = qwen25_tokenizer(instruct=True)
    texts = list(pieces(qwen, PER_KIND))
    llama = sentencepiece_tokenizer([piece.text for piece in texts])
    healthy, broken = {}, {}
    for name, tokenizer in (("byte-level", qwen), ("SentencePiece", llama)):
        again = ((p, tokenizer.encode(p.text, add_special_tokens=False)) for p in texts)
        cases = ((p.kind, p.prompt, tokenizer.encode(p.prompt), ids, str(tokenizer.decode(ids))) for p, ids in again)
        healthy[name] = measured(cases, tokenizer)
        other = llama if tokenizer is qwen else qwen
        some = texts[::3]
        broken[name] = measured(broken_ids(some, tokenizer, random.Random(0)), tokenizer)
        broken[name] |= measured(wrong(some, other, tokenizer), tokenizer)
    cases = list(taught_model(tmp_path / "demo-model"))
    model = measured(cases, AutoTokenizer.from_pretrained(tmp_path / "demo-model"))
    results("garble", {"healthy": healthy, "broken": broken, "taught model": model})

    for name, found in healthy.items():
        assert sum(row["pieces"] for row in found.values()) > 3000
        for kind, row in found.items():
            assert row["rate"] < 0.01, (name, kind, row)
    for name, found in broken.items():
        for kind in ("random bytes", "one token for ever", "three tokens for ever", "ten tokens for ever"):
            assert found[kind]["rate"] > 0.95, (name, kind, found[kind])
        assert found["UTF-8 read as Latin-1"]["rate"] > 0.9, name
        assert rate(found, lambda kind: kind.startswith("tokens as text")) > 0.75, name
        assert found["decoded by another tokenizer"]["rate"] > 0.6, name
        # Words of one language in disorder are told by their seams alone, if they have some.
        assert rate(found, lambda kind: kind.startswith("shuffled")) > 0.5, name
    assert broken["byte-level"]["random ids"]["rate"] > 0.9
    assert model["T = 1"]["rate"] < 0.01
    # With noise on its weights it writes pieces of words in disorder, which entropy and KL see and the text does not.
    assert model["T = 10"]["rate"] > 0.9
