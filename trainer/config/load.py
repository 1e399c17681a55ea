"""A run file and its overrides, as a RunConfig that has been checked whole."""

from collections.abc import Sequence
from typing import Any

from trainer.config import overrides, secrets, source
from trainer.config.fields import Path
from trainer.config.mistakes import mistakes
from trainer.config.problems import Problem, refuse
from trainer.config.rules import broken
from trainer.config.schema import RunConfig
from trainer.errors import KEYS_OF_RUN, Refused


def load(path: str, arguments: Sequence[str] = ()) -> RunConfig:
    """Read a run file and lay `--section.key value` overrides over it.

    Raises `Refused` with every problem of both in one message: where, key, got, expected, fix.
    """
    text = source.read(path)
    tree = source.parse(path, text)
    flags, wrong = overrides.apply(tree, arguments)
    names = _of_rewards(tree, "name")
    KEYS_OF_RUN.update(key for key in _of_rewards(tree, "key_env") if key)
    problems = secrets.take(tree)
    config, found = mistakes(tree, names)
    problems += found
    if config is not None:
        # A rule is only asked about values that are what the user meant.
        bad = [key for problem in problems for key in problem.keys]
        problems += [problem for problem in broken(config) if not _touches(problem, bad)]
    located = [("command line", text) for text in wrong]
    if problems:
        lines = source.key_lines(text)
        located += [(_place(path, problem, flags, lines), problem.text) for problem in problems]
    refuse(path, located)
    if config is None:
        raise Refused(f"{path}: cannot be read as a run file.")
    return config


def load_foreign(path: str, arguments: Sequence[str] = ()) -> RunConfig:
    """The same of a run file that came with weights: that a model's code may run is said on the command line, or not
    at all."""
    return load(path, ("--model.trust_remote_code", "false", *arguments))


def _of_rewards(tree: dict[str, Any], key: str) -> tuple[str, ...]:
    """Of each reward the text of ``key``, "" where it has none."""
    rewards = tree.get("reward")
    if not isinstance(rewards, list):
        return ()
    found = [entry.get(key) if isinstance(entry, dict) else None for entry in rewards]
    return tuple(one if isinstance(one, str) else "" for one in found)


def _touches(problem: Problem, bad: list[Path]) -> bool:
    return any(key[: len(other)] == other or other[: len(key)] == key for key in problem.keys for other in bad)


def _place(path: str, problem: Problem, flags: dict[Path, str], lines: dict[Path, int]) -> str:
    """The flag or line that set one of the keys; else the line of the table around the first; else the file."""
    for key in problem.keys:
        flag = next((flag for set_path, flag in flags.items() if set_path[: len(key)] == key), None)
        if flag:
            return f"command line, {flag}"
        if key in lines:
            return f"{path}:{lines[key]}"
    around = problem.keys[0]
    while around:
        if around in lines:
            return f"{path}:{lines[around]}"
        around = around[:-1]
    return path
