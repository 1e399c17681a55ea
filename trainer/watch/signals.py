"""What the completions of a step say beside their rewards: broken text, repetition, the tokens that there are most."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from trainer.batch import Completion, Prompt
from trainer.record.metrics import Sums
from trainer.watch.garble import FEWEST_RESPELLED, LIMITS, broken_parts, garble_parts, repetition
from trainer.world import World

SHOWN_TOKENS, SHOWN_CHARACTERS = 5, 300
SLOPE_STEPS, FEWEST_OF_A_SLOPE = 50, 20


def measure_text(completions: Sequence[Completion], sums: Sums, tokenizer: PreTrainedTokenizerBase) -> None:
    """``garble_rate`` and each of its parts as a share of this rank's completions, ``repetition``, their mean, and
    ``text_unlike_ids``: texts that the policy's own tokenizer does not make of their ids."""
    for completion, parts in zip(completions, garbles(completions, tokenizer), strict=True):
        broken = broken_parts(parts)
        sums.add("garble_rate", bool(broken), 1)
        for name in LIMITS:
            sums.add(f"garble/{name}", name in broken, 1)
        if len(completion.ids) >= 8:
            sums.add("repetition", repetition(completion.ids), 1)
    for completion in (one for one in completions if one.generation == 0):  # one of each prompt is enough
        text = str(tokenizer.decode(list(completion.ids), skip_special_tokens=True))
        sums.add("text_unlike_ids", text != completion.text, 1)


def garbles(completions: Sequence[Completion], tokenizer: PreTrainedTokenizerBase) -> list[dict[str, float]]:
    """The parts of ``garble.LIMITS`` of each completion. Special tokens are no text, and left out."""
    special, size = set(tokenizer.all_special_ids), len(tokenizer)
    ids = [[token for token in completion.ids if token not in special] for completion in completions]
    long = [i for i, one in enumerate(ids) if len(one) >= FEWEST_RESPELLED]
    texts = [completions[i].text.removesuffix("\ufffd") for i in long]
    spelled = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
    canonical = dict(zip(long, spelled, strict=True))
    return [
        garble_parts(
            ids[i],
            completion.text,
            prompt=completion.prompt.text,
            prompt_ids=completion.prompt.ids,
            tokenizer_size=size,
            cut=completion.finish == "length",
            canonical=canonical.get(i),
        )
        for i, completion in enumerate(completions)
    ]


def garble_of_row(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> dict[str, float]:
    """``garbles`` of a row of the rollout file."""
    prompt = Prompt(row["row"], row["prompt"], tuple(row["prompt_ids"]), None, {})
    ids, finish, text = tuple(row["completion_ids"]), row["finish"], row["completion"]
    return garbles([Completion(row["group"], row["index"], prompt, ids, (), finish, text)], tokenizer)[0]


def top_tokens(completions: Sequence[Completion], world: World) -> list[tuple[int, float]]:
    """The five ids sampled most often over all ranks, each with its share of all tokens. A collective."""
    counts: Counter[int] = Counter()
    for part in world.gather_objects(Counter(token for completion in completions for token in completion.ids)):
        counts.update(part)
    # By id where as frequent, so that every rank names the same ones.
    first = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))[:SHOWN_TOKENS]
    return [(token, count / counts.total()) for token, count in first]


def evidence(completions: Sequence[Completion], tokenizer: PreTrainedTokenizerBase, world: World) -> dict[str, Any]:
    """What an alarm shows of its step: the five most frequent tokens, and the worst completion. A collective."""
    tokens = [
        {"id": token, "text": str(tokenizer.decode([token])), "share": round(share, 4)}
        for token, share in top_tokens(completions, world)
    ]
    mine: tuple[float, dict[str, Any]] | None = None
    for completion, parts in zip(completions, garbles(completions, tokenizer), strict=True):
        broken = broken_parts(parts)
        # The most broken one; where none is, the one of the lowest reward.
        badness = len(broken) + sum(parts[name] for name in broken) or -(completion.reward or 0.0) - 1e9
        if mine is None or badness > mine[0]:
            shown = completion.text[:SHOWN_CHARACTERS]
            excerpt = {"row": completion.prompt.index, "reward": completion.reward, "broken": broken, "text": shown}
            mine = (badness, excerpt)
    found = [one for one in world.gather_objects(mine) if one is not None]
    return {"tokens": tokens, "excerpt": max(found, key=lambda one: one[0])[1]} if found else {"tokens": tokens}


def in_words(shown: Mapping[str, Any]) -> str:
    """``evidence`` on one line."""
    tokens = ", ".join(f"{one['text']!r} (id {one['id']}) {one['share']:.0%}" for one in shown["tokens"])
    excerpt = f" Excerpt: {shown['excerpt']['text'][:80]!r}." if "excerpt" in shown else ""
    return f"Most frequent tokens: {tokens or 'none'}.{excerpt}"


@dataclass
class Slope:
    """Of one number a step, over the last ``SLOPE_STEPS`` of this process."""

    values: list[float] = field(default_factory=list)

    def add(self, value: float) -> float | None:
        """Its rise a step by least squares; None while there are too few."""
        self.values = [*self.values, value][-SLOPE_STEPS:]
        count = len(self.values)
        if count < FEWEST_OF_A_SLOPE:
            return None
        middle, mean = (count - 1) / 2, sum(self.values) / count
        rise = sum((i - middle) * (value - mean) for i, value in enumerate(self.values))
        return rise / sum((i - middle) ** 2 for i in range(count))
