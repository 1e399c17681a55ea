"""Whether a completion is broken as text: one number a way of being broken, from its ids and its text alone.

Made for byte-level BPE and SentencePiece alike. What the prompt itself holds (raw bytes, loops, a script) is no sign.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np

LIMITS: dict[str, float] = {
    "replacement": 0.01,  # characters U+FFFD: bytes that are no UTF-8
    "word_marks": 0.1,  # characters U+2581, SentencePiece's mark of a space
    "raw_bytes": 0.04,  # characters of bytes written out: <0xE4>, the letters of byte-level BPE, UTF-8 read as Latin-1
    "token_loop": 0.5,  # tokens in the longest run of one id
    "ngram_loop": 0.6,  # tokens in the longest stretch that repeats 2 to 32 ids
    "repetition": 0.9,  # 4-grams that are there before
    "respelled": 0.08,  # tokens that the tokenizer would not write this text with
    "scripts": 0.03,  # letters of a second foreign script, a third, ...
    "beyond": 0.0,  # ids that the tokenizer does not have
    "control": 0.01,  # control, private or unassigned characters
    "empty": 0.0,  # 1 where no character is left
}
"""Each part of the garble, as a share of the completion, and what a healthy one stays under."""

FEWEST_LOOPED, FEWEST_NGRAMS, FEWEST_RESPELLED = 16, 64, 24
"""Tokens below which the statement would be chance: 1,000,000,000,000 is a run of twelve zeros."""
FEWEST_SEAMS = 4
LONGEST_PERIOD = 32
REPETITIVE_PROMPT = 0.6
"""Repeated 4-grams of a prompt, a grid of zeros say, whose answer may repeat itself as well."""

_CONTINUES = "[\u0080-\u00aa\u00ac-\u00ba\u00bc-\u00bf\u0122-\u0143]"
"""Letters of the bytes 0x80 to 0xBF; without two quotation marks, which close German words in -\u00df."""
RAW_BYTES = re.compile(
    # SentencePiece's spelling of a byte.
    r"<0x[0-9A-F]{2}>"
    # Byte-level BPE writes space, newline and tab as these letters; Maltese has the first two at the head of a word.
    r"|(?:(?<![\s\w'-])|(?<=[a-z0-9]))[\u0120\u010a]|[\u0120\u010a](?=[\u0120\u010a])"
    # A character of 2, 3 or 4 bytes of UTF-8, one letter a byte, by the table of byte-level BPE or as Latin-1.
    rf"|[\u00c2-\u00df]{_CONTINUES}|[\u00e0-\u00ef]{_CONTINUES}{{2}}|[\u00f0-\u00f4]{_CONTINUES}{{3}}"
)
FAMILIES = {"HIRAGANA": "CJK", "KATAKANA": "CJK", "BOPOMOFO": "CJK", "HANGUL": "HANGUL"}
"""Scripts that one language writes together."""
COMMON = ("LATIN", "GREEK", "FULLWIDTH", "HALFWIDTH", "MATHEMATICAL", "MODIFIER", "DOUBLE-STRUCK", "MICRO", "SCRIPT")
"""What code and formulas use in any language; by the first word of a character's name."""


def garble_parts(
    ids: Sequence[int],
    text: str,
    *,
    prompt: str,
    prompt_ids: Sequence[int],
    tokenizer_size: int,
    cut: bool,
    canonical: Sequence[int] | None = None,
) -> dict[str, float]:
    """Every part of ``LIMITS`` of one completion. ``cut``: at the length limit, so that its last character may be half.

    ``canonical``: the ids that the tokenizer gives for ``text``; without them nothing is respelled.
    """
    if cut:
        text = text.removesuffix("\ufffd")
    characters = max(1, len(text))
    token_loop, ngram_loop = loop_shares(ids, cut=cut)
    repeated = repetition(ids) if len(ids) >= FEWEST_NGRAMS else 0.0
    if max(token_loop, ngram_loop, repeated) > 0.5 and repetition(prompt_ids) > REPETITIVE_PROMPT:
        token_loop = ngram_loop = repeated = 0.0
    return {
        "replacement": _unless(text.count("\ufffd") / characters, "\ufffd" in prompt),
        "word_marks": _unless(text.count("\u2581") / characters, "\u2581" in prompt),
        "raw_bytes": raw_byte_share(text, prompt),
        "token_loop": token_loop,
        "ngram_loop": ngram_loop,
        "repetition": repeated,
        "respelled": respelled_share(ids, canonical),
        "scripts": foreign_share(text, prompt),
        "beyond": sum(token >= tokenizer_size for token in ids) / max(1, len(ids)),
        "control": control_share(text, prompt),
        "empty": float(not text.strip()),
    }


def broken_parts(parts: Mapping[str, float]) -> list[str]:
    """Those beyond their limit; none: a healthy completion."""
    return [name for name, share in parts.items() if share > LIMITS[name]]


def repetition(ids: Sequence[int], n: int = 4) -> float:
    """Share of n-grams that have been there before."""
    total = len(ids) - n + 1
    if total < 2:
        return 0.0
    return 1 - len(set(zip(*(ids[i:] for i in range(n)), strict=False))) / total


def loop_shares(ids: Sequence[int], *, cut: bool) -> tuple[float, float]:
    """Tokens in the longest stretch that repeats one id, and in the longest that repeats 2 to 32, four times at least.

    A stretch counts from ``FEWEST_LOOPED`` tokens on; in a cut completion also one that is nearly all of it.
    """
    sequence = np.asarray(ids)
    found = [0.0, 0.0]
    total = len(sequence)
    for period in range(1, min(LONGEST_PERIOD, total // 4) + 1):
        same = sequence[period:] == sequence[:-period]
        if np.count_nonzero(same) + period <= total * 0.3:  # most of them, and the longest run need not be looked for
            continue
        breaks = np.flatnonzero(np.concatenate(([True], ~same, [True])))
        length = int(np.diff(breaks).max()) - 1 + period
        enough = length >= FEWEST_LOOPED or (cut and length >= 8 and length >= 0.9 * total)
        if enough and length >= 4 * period:
            kind = int(period > 1)
            found[kind] = max(found[kind], length / total)
    if found[0] > LIMITS["token_loop"]:  # one id repeats with every period
        found[1] = 0.0
    return found[0], found[1]


def respelled_share(ids: Sequence[int], canonical: Sequence[int] | None) -> float:
    """Tokens whose text the tokenizer would write with others: a model that writes text uses its tokenizer's spelling,
    and tokens that do not belong together leave seams."""
    if canonical is None or len(ids) < FEWEST_RESPELLED:
        return 0.0
    changed = len(ids) - (Counter(ids) & Counter(canonical)).total()
    return changed / len(ids) if changed >= FEWEST_SEAMS else 0.0


def raw_byte_share(text: str, prompt: str) -> float:
    if text.isascii() and "<0x" not in text:
        return 0.0
    found = sum(len(match[0]) for match in RAW_BYTES.finditer(text))
    return 0.0 if not found or RAW_BYTES.search(prompt) else found / len(text)


def control_share(text: str, prompt: str) -> float:
    if text.isprintable():
        return 0.0
    found = {character: count for character, count in Counter(text).items() if is_control(character)}
    return sum(count for character, count in found.items() if character not in prompt) / max(1, len(text))


@cache
def is_control(character: str) -> bool:
    """Control, private-use or unassigned. Format characters join emoji and Indic letters."""
    return character not in "\t\n\r\f" and unicodedata.category(character) in ("Cc", "Co", "Cn", "Cs")


def foreign_share(text: str, prompt: str) -> float:
    """Letters of the second foreign script and of every further one. One foreign script is a translation; Latin and
    Greek are everywhere."""
    if text.isascii():
        return 0.0
    scripts: Counter[str] = Counter()
    for character, count in Counter(text).items():
        scripts[script_of(character)] += count
    letters = scripts.total() - scripts.pop("", 0)
    known = {script_of(character) for character in set(prompt)}
    foreign = sorted(count for script, count in scripts.items() if script not in COMMON and script not in known)
    return sum(foreign[:-1]) / max(1, letters)


@cache
def script_of(character: str) -> str:
    """LATIN, CYRILLIC, CJK, ARABIC, ...: the first word of a letter's name; "" of what is no letter."""
    if not character.isalpha():
        return ""
    name = unicodedata.name(character, "").split(" ")[0].split("-")[0]
    return FAMILIES.get(name, name)


def _unless(share: float, known: bool) -> float:
    return 0.0 if known else share
