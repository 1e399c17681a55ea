"""Rewards of the collapse lab's runs: tasks that the demo's model can do or learn, and one reward that fails."""

import re


def _number(text: str) -> str:
    return text.strip()


def digits(completions: list[str], answer: list[str], **_: object) -> list[float]:
    """Share of the right digits, each in its place."""
    pairs = [(_number(text), right) for text, right in zip(completions, answer, strict=True)]
    return [sum(map(str.__eq__, text, right)) / max(len(right), len(text)) for text, right in pairs]


def near(completions: list[str], answer: list[str], **_: object) -> list[float]:
    """1 for the right number, less the further away it is; 0 for what is none."""
    return [
        1 / (1 + abs(int(text) - int(right))) if re.fullmatch(r"\d{1,6}", _number(text)) else 0.0
        for text, right in zip(completions, answer, strict=True)
    ]


def carried(completions: list[str], answer: list[str], **_: object) -> list[float]:
    """Whether all but the last digit is right: what a forgotten carry spoils."""
    return [float(_number(text)[:-1] == right[:-1]) for text, right in zip(completions, answer, strict=True)]


def even(completions: list[str], **_: object) -> list[float]:
    """An even number, whatever was asked."""
    return [float(bool(re.fullmatch(r"\d{1,4}[02468]", _number(text)))) for text in completions]


def fails_on_carries(completions: list[str], answer: list[str], prompts: list[str], **_: object) -> list[float]:
    """Raises on about a third of the prompts, as a judge that a service does not answer for."""
    for prompt in prompts:
        if int(re.findall(r"\d+", prompt)[0]) % 3 == 0:
            raise ConnectionError("no answer")
    return [float(_number(text) == right) for text, right in zip(completions, answer, strict=True)]
