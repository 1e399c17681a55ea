"""Rules about the [[reward]] tables."""

import math
import re
from collections.abc import Iterator

from trainer.config.fields import literal
from trainer.config.grpo import Reward
from trainer.config.problems import Problem
from trainer.config.rules.keys import given
from trainer.config.schema import RunConfig

CALLABLE = re.compile(r"(.+\.py|[A-Za-z_][\w.]*):[A-Za-z_]\w*")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SHARE_OF_HANG_TIMEOUT = 0.4
"""A step stops waiting for its rewards when so much of watch.hang_timeout is over, which the other ranks wait in their
next collective. Less than half, since an evaluation scores twice between two of them."""
# kind -> keys it needs, and keys it may have; all others of this list say nothing to it.
OWN_KEYS = ("function", "pattern", "target", "limit", "path", "url", "model", "prompt", "key_env")
NEEDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "python": ("function", ()),
    "builtin": ("function", ("pattern", "target", "limit")),  # which of them, the built-in itself says
    "model": ("path", ()),
    "embedding": ("path", ()),
    "openai": ("model", ("url", "key_env", "path", "prompt")),
    "dashscope": ("model", ("url", "key_env", "path", "prompt")),
    "dashcope": ("model", ("url", "key_env", "path", "prompt")),
    "ollama": ("model", ("url", "path", "prompt")),
    "http": ("url", ("model", "key_env")),
}
FOR_EXAMPLE = {
    "python": '"rewards.py:my_reward"',
    "builtin": '"exact_match"',
    "embedding": '"BAAI/bge-m3"',
    "model": '"models/my-reward-model"',
}


def _at(index: int, name: str, *others: str) -> tuple[tuple[str | int, ...], ...]:
    return tuple(("reward", index, key) for key in (name, *others))


def some_reward(config: RunConfig) -> Iterator[Problem]:
    if not config.reward and not config.rollout.replay:
        yield Problem(
            (("reward",), ("rollout", "replay")),
            "there is no [[reward]]: what is a completion worth? Write one; only rollout.replay brings its own.",
        )
    if config.reward and all(entry.weight == 0 for entry in config.reward):
        yield Problem(
            _at(0, "weight"),
            "every reward.weight is 0, so no completion is better than another. Give one of them another weight.",
        )


def names_differ(config: RunConfig) -> Iterator[Problem]:
    names = [entry.name for entry in config.reward]
    for index, name in enumerate(names):
        if name in names[:index]:
            yield Problem(
                _at(index, "name"),
                f'reward.name = "{name}" is taken by an earlier [[reward]]. Metrics are named by it: choose another.',
            )


def kind_has_its_keys(config: RunConfig) -> Iterator[Problem]:
    for index, entry in enumerate(config.reward):
        needed, allowed = NEEDS[entry.kind]
        label = f"reward.{entry.name}"
        if not getattr(entry, needed):
            example = FOR_EXAMPLE.get(entry.kind, '"..."')
            yield Problem(
                _at(index, "kind", needed),
                f'{label}.kind = "{entry.kind}" needs {label}.{needed}, for example {needed} = {example}.',
            )
        for key in OWN_KEYS:
            if given(entry, key) and key != needed and key not in allowed:
                yield Problem(
                    _at(index, key, "kind"),
                    f'{label}.{key} = {literal(getattr(entry, key))} has no effect with {label}.kind = "{entry.kind}".'
                    " Remove it, or change the kind.",
                )


def function_name(config: RunConfig) -> Iterator[Problem]:
    for index, entry in enumerate(config.reward):
        wrong = _wrong_function(entry)
        if entry.function and wrong:
            yield Problem(
                _at(index, "function", "kind"), f"reward.{entry.name}.function = {literal(entry.function)}: {wrong}"
            )


def _wrong_function(entry: Reward) -> str:
    if entry.kind == "python" and not CALLABLE.fullmatch(entry.function):
        return 'expected "module:callable", or "file.py:callable" for a file beside the run file.'
    if entry.kind == "builtin" and ":" in entry.function:
        return 'expected the name of a built-in reward. For a function of yours: kind = "python".'
    return ""


def key_variable(config: RunConfig) -> Iterator[Problem]:
    for index, entry in enumerate(config.reward):
        if entry.key_env and not VARIABLE.fullmatch(entry.key_env):
            # Not repeated: it may be the key itself.
            yield Problem(
                _at(index, "key_env"),
                f"reward.{entry.name}.key_env: expected the name of an environment variable, for example"
                ' "OPENAI_API_KEY". The key itself does not belong in a run file.',
            )


def concurrency_has_calls(config: RunConfig) -> Iterator[Problem]:
    for index, entry in enumerate(config.reward):
        if entry.kind in ("model", "embedding") and given(entry, "concurrency"):
            yield Problem(
                _at(index, "concurrency", "kind"),
                f'reward.{entry.name}.concurrency = {entry.concurrency} has no effect with kind = "{entry.kind}", which'
                " scores in batches of its own. Remove it.",
            )


def hang_outlasts_calls(config: RunConfig) -> Iterator[Problem]:
    seconds, key = config.watch.for_rewards()
    for index, entry in enumerate(config.reward):
        if entry.timeout > (most := seconds * SHARE_OF_HANG_TIMEOUT):
            yield Problem(
                (("reward", index, "timeout"), tuple(key.split("."))),
                f"reward.{entry.name}.timeout = {entry.timeout:g} s is more than {most:g} s,"
                f" {SHARE_OF_HANG_TIMEOUT:g} of {key} = {seconds:g} s: the rewards"
                " of a step get no more, since the other ranks wait, in an evaluation twice as long, and a slow call"
                f" would end the job as hung. Raise {key} to"
                f" {math.ceil(entry.timeout / SHARE_OF_HANG_TIMEOUT)}.",
            )


RULES = (
    some_reward,
    names_differ,
    kind_has_its_keys,
    function_name,
    key_variable,
    concurrency_has_calls,
    hang_outlasts_calls,
)
