"""Rewards that ship. Each is a function with TRL's signature: completions and columns in, one number per row out."""

import functools
import importlib.util
import logging
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from trainer.batch import Completion, Prompt
from trainer.config.grpo import Reward
from trainer.errors import Refused
from trainer.limit import Overdue, call_within
from trainer.outside import parsed
from trainer.rewards.arguments import Signature, arguments, in_rows, text_of
from trainer.rewards.evaluated import as_data, row_is_data
from trainer.rewards.failed import Failed
from trainer.rewards.functions import describe, did_you_mean

# A sign (not the minus of "5-3"), digits with or without thousands separators, decimals or a denominator.
_SIGN = r"((?<![\w.)\]}])-\$?|\$-)?"
NUMBER = re.compile(_SIGN + r"((?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+|/0*[1-9]\d*)?|\.\d+)")
_INSIDE = r"((?:(?!</?(?:think|answer)>).)+)"
THINK_THEN_ANSWER = re.compile(rf"<think>{_INSIDE}</think>\s*<answer>{_INSIDE}</answer>", re.DOTALL)
SECONDS_PER_ANSWER = 5.0
CHECKED_ROWS = 256


def exact_match(completions: list[Any], answer: list[Any]) -> list[float]:
    """1 where the completion is the answer, white space around both aside.

    >>> exact_match([" 42\\n", "It is 42"], answer=["42", "42"])
    [1.0, 0.0]
    """
    return [float(text_of(c).strip() == str(a).strip()) for c, a in zip(completions, answer, strict=True)]


def last_number(completions: list[Any], answer: list[Any]) -> list[float]:
    """1 where the last number of the completion equals the last number of the answer, as numbers, not as text.

    Reads -3, 1,234, $2.50, .5, 3/4 and GSM8K's "#### 42". ValueError where an answer holds no number.

    >>> last_number(["So 1,200 + 34 = $1,234.00.", "none"], answer=["...\\n#### 1234", "7"])
    [1.0, 0.0]
    """
    scores = []
    for completion, row_answer in zip(completions, answer, strict=True):
        wanted = number_at_end(str(row_answer))
        if wanted is None:
            raise ValueError(f"the answer {row_answer!r:.80} holds no number")
        scores.append(float(number_at_end(text_of(completion)) == wanted))
    return scores


def number_at_end(text: str) -> Fraction | None:
    """The last number in a text, exactly; None where there is none."""
    numbers = _numbers(text)
    return _value(*numbers[-1]) if numbers else None


def _numbers(text: str) -> list[tuple[str, str]]:
    return NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))


def _value(sign: str, digits: str) -> Fraction | None:
    try:
        value = Fraction(digits.replace(",", ""))
    except ValueError:  # thousands of digits, which Python does not convert
        return None
    return -value if sign else value


def gsm8k(completions: list[Any], answer: list[Any]) -> list[float]:
    """1 where the completion's final number is the one after "####" in the answer, as numbers, not as text.

    Final is what follows the last "####", else what the last \\boxed{} holds, else the last number. Reads -3, 1,234,
    $2.50, 1{,}234, .5, 3/4, \\frac{3}{4}, with or without units. ValueError where an answer holds no number.

    >>> gsm8k(["#### 42 eggs, of 50", "\\boxed{1{,}200}", "So 7"], answer=["6 * 7\\n#### 42", "#### 1,200", "#### 8"])
    [1.0, 1.0, 0.0]
    """
    scores = []
    for completion, row_answer in zip(completions, answer, strict=True):
        wanted = _after_hashes(str(row_answer)) if "####" in str(row_answer) else number_at_end(str(row_answer))
        if wanted is None:
            raise ValueError(f'the answer {str(row_answer)[-80:]!r} holds no number after "####"')
        scores.append(float(_final_number(text_of(completion)) == wanted))
    return scores


def _final_number(text: str) -> Fraction | None:
    for marked in (_after_hashes(text), _boxed(text)):
        if marked is not None:
            return marked
    return number_at_end(_plain(text))


def _after_hashes(text: str) -> Fraction | None:
    """The first number after the last "####"."""
    _, found, rest = text.rpartition("####")
    numbers = _numbers(_plain(rest)) if found else []
    return _value(*numbers[0]) if numbers else None


def _boxed(text: str) -> Fraction | None:
    """The last number inside of the last \\boxed{...}, which may hold further braces."""
    _, found, rest = text.rpartition("\\boxed{")
    depth = 1
    for at, char in enumerate(rest if found else ""):
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return number_at_end(_plain(rest[:at]))
    return None


def _plain(text: str) -> str:
    """Numbers as people write them, of LaTeX's 1{,}234, 1,\\!234, \\$5 and \\frac{3}{4}."""
    text = text.replace("{,}", ",").replace("\\!", "").replace("\\$", "$")
    return re.sub(r"\\[dt]?frac\{(\d+)\}\{(\d+)\}", r"\1/\2", text)


def regex(completions: list[Any], *, pattern: re.Pattern[str]) -> list[float]:
    """1 where the key `pattern`, a Python regular expression, is found in the completion.

    >>> regex(["The answer is 7.", "7"], pattern=re.compile("answer is [0-9]+"))
    [1.0, 0.0]
    """
    return [float(pattern.search(text_of(completion)) is not None) for completion in completions]


def think_then_answer(completions: list[Any]) -> list[float]:
    """1 where the completion is <think>...</think><answer>...</answer> and nothing else, each tag once, none empty.

    >>> think_then_answer(["<think>2 + 2</think>\\n<answer>4</answer>", "4"])
    [1.0, 0.0]
    """
    return [float(THINK_THEN_ANSWER.fullmatch(text_of(completion).strip()) is not None) for completion in completions]


def length(completion_ids: list[list[int]], *, target: int = 0, limit: int = 0) -> list[float]:
    """How well the completion keeps to a length (sampled tokens, end token included), from 1 down to 0.

    Key `target`: 1 at the target, falling linearly to 0 at no tokens and at twice the target.
    Key `limit`: 1 up to the limit, then falling linearly to 0 at twice the limit.

    >>> length([[5] * 50, [5] * 100, [5] * 150], target=100), length([[5] * 50, [5] * 100, [5] * 150], limit=100)
    ([0.5, 1.0, 0.5], [1.0, 1.0, 0.5])
    """
    if target:
        return [max(0.0, 1 - abs(len(ids) - target) / target) for ids in completion_ids]
    return [min(1.0, max(0.0, 2 - len(ids) / limit)) for ids in completion_ids]


def math_verify(completions: list[Any], answer: list[Any]) -> list[float | Failed]:
    """1 where the completion's final expression equals the answer as mathematics (LaTeX or plain), by math-verify.

    An answer without $ is read as one expression, whole: "3, 4" is both numbers, not the last. Comparing for
    more than 5 s fails on that row.

    >>> math_verify(["Thus $x = \\\\boxed{0.5}$", "2"], answer=["\\\\frac{1}{2}", "3"])
    [1.0, 0.0]
    """
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limit is off; ours is on

    def equal(text: str, row_answer: str) -> float:
        gold = parse(row_answer if "$" in row_answer else f"${row_answer}$", parsing_timeout=None)
        if not gold:
            raise ValueError(f"math-verify reads nothing in the answer {row_answer!r:.80}")
        return float(verify(gold, parse(text, parsing_timeout=None), timeout_seconds=None))

    scores: list[float | Failed] = []
    for completion, row_answer in zip(completions, answer, strict=True):
        try:
            # One limit per row: a model that writes 9^9^9^9 must not cost the whole step its rewards.
            compare = functools.partial(equal, text_of(completion), str(row_answer))
            scores.append(call_within(SECONDS_PER_ANSWER, compare))
        except Overdue:
            scores.append(Failed(f"not compared within {SECONDS_PER_ANSWER:g} s"))
    return scores


def reasoning_gym(completions: list[Any], entry: list[Any], source: list[str]) -> list[float | Failed]:
    """The score that the row's Reasoning Gym task gives, 0 to 1.

    Columns: `source`, the task as in data.source ("reasoning_gym:TASK?max_value=9"), or its bare name, and `entry`, the
    task's row (a dict, or that dict as JSON). What is scored is the text in the last <answer>...</answer>, or the whole
    completion where there is none.

    >>> row = {"question": "4 - 1 - 7 =", "answer": "-4", "metadata": {}}
    >>> reasoning_gym(["<think>3 - 7</think><answer>-4</answer>", "5"], entry=[row, row], source=["chain_sum"] * 2)
    [1.0, 0.0]
    """
    from reasoning_gym.utils import extract_answer

    scores: list[float | Failed] = []
    for completion, row, task in zip(completions, entry, source, strict=True):
        text = text_of(completion)
        said = extract_answer(text)
        row = parsed(row) if isinstance(row, str) else row
        answer = text.strip() if said is None else said
        # The task itself, and the one that a row of a composite comes from.
        names = [
            task.removeprefix("reasoning_gym:").partition("?")[0],
            (row.get("metadata") or {}).get("source_dataset"),
        ]
        for name in names:
            answer = as_data(name, answer)
        if all(row_is_data(name, row) for name in names):
            scores.append(float(_task_scorer(task)(answer=answer, entry=row)))
        else:
            scores.append(Failed("its row holds code where its task evaluates a number or a formula"))
    return scores


@functools.cache
def _task_scorer(task: str) -> Callable[..., float]:
    from reasoning_gym import create_dataset

    name, _, query = task.removeprefix("reasoning_gym:").partition("?")
    parts = [part.partition("=") for part in query.split("&") if part]
    # With its arguments: some tasks score by them.
    return create_dataset(name, **{key: parsed(value) for key, _, value in parts}).score_answer


BUILTINS: dict[str, Callable[..., Any]] = {
    "exact_match": exact_match,
    "last_number": last_number,
    "gsm8k": gsm8k,
    "regex": regex,
    "format": think_then_answer,
    "length": length,
    "math_verify": math_verify,
    "reasoning_gym": reasoning_gym,
}


def bind(section: Reward) -> Callable[..., Any]:
    """The built-in that a [[reward]] section names, with the section's keys in place. Refused where they do not fit."""
    name = section.function
    if name not in BUILTINS:
        raise Refused(f"there is no such built-in{did_you_mean(name, BUILTINS)}; there are: {', '.join(BUILTINS)}")
    if name in ("math_verify", "reasoning_gym") and importlib.util.find_spec(name) is None:
        raise Refused(f"needs the package {name.replace('_', '-')}: pip install 'zero-grpo[tasks]'")
    keys = {"pattern": section.pattern, "target": section.target, "limit": section.limit}
    given = {key: value for key, value in keys.items() if value}
    unread = [key for key in given if key not in Signature.of(BUILTINS[name]).accepted]
    if unread:
        raise Refused(f"{name} does not read the key {unread[0]!r}; remove it")
    if name == "length" and len(given) != 1:
        raise Refused(f"length needs either `target` or `limit` (tokens), got {' and '.join(given) or 'neither'}")
    if name == "regex":
        given["pattern"] = _compiled(section.pattern)
    return functools.partial(BUILTINS[name], **given) if given else BUILTINS[name]


def unusable_rows(function: Callable[..., Any], signature: Signature, prompts: Sequence[Prompt]) -> list[str]:
    """Rows among the first 256 whose reference a built-in cannot use, found by letting it score an empty completion."""
    rows, reason = [], ""
    for prompt in prompts[:CHECKED_ROWS]:
        empty = Completion(group=0, generation=0, prompt=prompt, ids=(), sampling_logps=(), finish="stop", text="")
        try:
            function(**arguments(signature, [empty]))
        except Exception as error:  # a scorer of a library may raise anything
            reason = reason or f"row {prompt.index + 1}: {describe(error)}"
            rows.append(prompt.index + 1)
    return [f"cannot score {in_rows(rows)}; {reason}"] if rows else []


def _compiled(pattern: str) -> re.Pattern[str]:
    if not pattern:
        raise Refused('regex needs the key `pattern`, for example pattern = "answer is [0-9]+"')
    try:
        return re.compile(pattern)
    except re.error as error:
        raise Refused(f"pattern = {pattern!r} is no regular expression: {error}") from None
