"""Which parts of a text are garbled, by the text alone, for a reader's eye.

A piece is (kind, text); the kind of what is healthy is "". Invisible characters are replaced by their escapes, so that
nothing in a completion can steer a page or a terminal.
"""

import re
import unicodedata
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np

from trainer.errors import escape

Piece = tuple[str, str]
PLAIN, CUT, CONTROL, LOOP = "", "cut", "control", "loop"

HEAD, TAIL = 3000, 1000
"""Characters of a long text that are kept."""

LONGEST_PERIOD, REPEATS, SHORTEST_LOOP = 80, 6, 32
"""A loop repeats at most so many characters, so many times at least, and is so long at least."""

PATTERNS = {
    "replacement": re.compile("\ufffd+"),  # half a character, or bytes that are no UTF-8
    "marker": re.compile(
        "\u2581+"  # SentencePiece's space: another tokenizer decodes
        "|(?:[\u0120\u010a]+[^\\s\u0120\u010a]{0,30}){3,}"  # byte-level BPE's space and newline, not decoded
    ),
}
WORDLIKE = re.compile(r"\w")
JOINERS = "\u200c\u200d"
"""Invisible, and part of healthy Persian, Hindi and emoji."""


@lru_cache(4096)  # the completions of a group share their prompt
def pieces(text: str) -> tuple[Piece, ...]:
    """The text with its garbled parts marked; a long one without its middle."""
    if len(text) <= HEAD + TAIL:
        return tuple(_marked(text))
    left_out = f"[{len(text) - HEAD - TAIL:,} characters left out]"
    return (*_marked(text[:HEAD]), (CUT, left_out), *_marked(text[-TAIL:]))


def marked_share(parts: Sequence[Piece]) -> float:
    """Share of the shown characters that are marked."""
    total = sum(len(text) for kind, text in parts if kind != CUT)
    return sum(len(text) for kind, text in parts if kind not in (PLAIN, CUT)) / total if total else 0.0


def _marked(text: str) -> list[Piece]:
    """Each character belongs to one piece; where two kinds overlap, the one found first in this order has it."""
    kinds = [CONTROL if invisible(char) else PLAIN for char in text]
    spans = [(name, *found.span()) for name, pattern in PATTERNS.items() for found in pattern.finditer(text)]
    # A cut completion may end within a character.
    spans = [one for one in spans if one != ("replacement", len(text) - 1, len(text))]
    for name, start, end in spans + [(LOOP, *span) for span in loops(text)]:
        kinds[start:end] = [kind or name for kind in kinds[start:end]]
    parts: list[Piece] = []
    for kind, char in zip(kinds, text, strict=True):
        shown = escape(char) if kind == CONTROL else char
        if parts and parts[-1][0] == kind:
            parts[-1] = (kind, parts[-1][1] + shown)
        else:
            parts.append((kind, shown))
    return parts


def invisible(char: str) -> bool:
    """Steers instead of showing: controls but for newline and tab, direction overrides, lone surrogates."""
    return char not in "\n\t" + JOINERS and unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp")


def loops(text: str) -> Iterator[tuple[int, int]]:
    """(start, end) of each part that repeats itself with one period."""
    if len(text) < SHORTEST_LOOP:
        return
    codes = np.array([ord(char) for char in text], dtype=np.int32)
    for period in range(1, min(LONGEST_PERIOD, len(text) // REPEATS) + 1):
        same = np.concatenate(([False], codes[period:] == codes[:-period], [False]))
        starts, ends = np.flatnonzero(same[1:] & ~same[:-1]), np.flatnonzero(same[:-1] & ~same[1:])
        for start, end in zip(starts.tolist(), (ends + period).tolist(), strict=True):
            long_enough = end - start >= max(REPEATS * period, SHORTEST_LOOP)
            if long_enough and WORDLIKE.search(text, start, end):  # else a rule of a table, an indentation
                yield start, end
