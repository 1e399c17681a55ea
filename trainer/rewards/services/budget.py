"""What fits into a service's window: texts cut in their middle, so that a question keeps its beginning and an answer
its end."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from trainer.errors import Refused

Starts = Callable[[str], list[int]]
"""Of a text: for each of its units (tokens), the character that it begins in."""

CUT = "\n[... left out, too long ...]\n"
BYTES_PER_TOKEN = 4
"""Of ordinary text, about; only to choose a window, never to decide what fits."""


def bytes_as_units(text: str) -> list[int]:
    """For want of the service's tokenizer: no tokenizer makes more tokens of a text than it has bytes."""
    return [place for place, char in enumerate(text) for _ in char.encode("utf-8", "replace")]


def tokens_of(path: str) -> Starts:
    """By the tokenizer in a folder. Refused where it cannot say which characters a token stands for."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise Refused(f"path = {path!r}: no tokenizer can be read there: {str(error).splitlines()[0]}") from None
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise Refused(f"path = {path!r}: its tokenizer gives no offsets (it is not a fast one); leave `path` out")

    def starts(text: str) -> list[int]:
        offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        return [start for start, _ in offsets]

    return starts


@dataclass
class Budget:
    """The window of a service, in tokens by ``starts``; None: not known, so nothing is cut."""

    starts: Starts
    window: int | None = None

    def fit(self, texts: Mapping[str, str], kept: int) -> tuple[dict[str, str], bool]:
        """The texts, cut where together they are more than the window less ``kept``; and whether any was.

        Short ones stay whole: what they leave of their share goes to the longer ones.
        """
        if self.window is None:
            return dict(texts), False
        room = self.window - kept
        sizes = {name: len(self.starts(text)) for name, text in texts.items()}
        if sum(sizes.values()) <= room:
            return dict(texts), False
        fitted = {}
        for place, name in enumerate(sorted(texts, key=sizes.__getitem__)):
            share = room // (len(texts) - place)
            fitted[name] = shorten(texts[name], share, self.starts)
            room -= min(sizes[name], share)
        return {name: fitted[name] for name in texts}, True


def shorten(text: str, limit: int, starts: Starts) -> str:
    """Head and tail of a text within ``limit`` units, cut between characters; "" where nothing fits."""
    at = starts(text)
    if len(at) <= limit:
        return text
    keep = limit - len(starts(CUT))
    while keep > 0:
        head, tail = keep - keep // 2, len(at) - keep // 2
        shortened = text[: at[head]] + CUT + (text[at[tail] :] if tail < len(at) else "")
        # More where a cut fell within a character, or where the tokens beside it are others now.
        if (excess := len(starts(shortened)) - limit) <= 0:
            return shortened
        keep -= excess
    return ""
