"""`--section.key value` on the command line, laid over the parsed run file."""

import tomllib
from collections.abc import Sequence
from typing import Any, Literal, get_args, get_origin

from trainer.config import secrets
from trainer.config.fields import Path, field_at
from trainer.outside import NotJson, parsed, too_deep


def apply(tree: dict[str, Any], arguments: Sequence[str]) -> tuple[dict[Path, str], list[str]]:
    """Set each override in the tree, a later one winning.

    Returns the flag that set each path, and what is wrong with arguments that set none; wrong values are the model's
    to refuse.
    """
    flags: dict[Path, str] = {}
    wrong: list[str] = []
    for flag, text in split(arguments, wrong):
        path = _path(flag, tree, wrong)
        if path:
            _set(tree, path, _value(path, text), flag, wrong)
            flags[path] = flag
    return flags, wrong


def split(arguments: Sequence[str], wrong: list[str]) -> list[tuple[str, str]]:
    """(flag, text) of each override; what is none goes to `wrong`."""
    found = []
    rest = list(arguments)
    while rest:
        flag, equals, text = rest.pop(0).partition("=")
        if not flag.startswith("--") or len(flag) < 3:
            argument = flag + equals + text
            shown = "an argument that looks like a secret" if secrets.is_secret(argument) else argument
            wrong.append(f"{shown} is not an override: those are written --section.key value.")
        elif equals:
            found.append((flag, text))
        elif not rest or rest[0].startswith("--"):
            wrong.append(f"{flag} has no value. Write {flag} VALUE, for a switch {flag} true.")
        else:
            found.append((flag, rest.pop(0)))
    return found


def _path(flag: str, tree: dict[str, Any], wrong: list[str]) -> Path:
    parts = flag[2:].split(".")
    if not all(parts):
        wrong.append(f"{flag} has an empty name between its dots.")
        return ()
    # What stands inside chat_template_kwargs is the template's own name, and a reward's name is the user's.
    named = [part.replace("-", "_") for part in parts]
    if named[:2] == ["data", "chat_template_kwargs"]:
        return ("data", "chat_template_kwargs", *parts[2:])
    if named[0] != "reward" or len(parts) == 1:
        return tuple(named)
    rewards = tree.get("reward")
    rewards = rewards if isinstance(rewards, list) else []
    names = [str(entry.get("name", "")) if isinstance(entry, dict) else "" for entry in rewards]
    if parts[1] in names:
        index = names.index(parts[1])
    elif parts[1].isascii() and parts[1].isdigit() and int(parts[1]) < len(rewards):
        index = int(parts[1])
    else:
        there = ", ".join(name or str(place) for place, name in enumerate(names)) or "none"
        wrong.append(f"{flag}: no reward is called {parts[1]!r}. Rewards in the run file: {there}.")
        return ()
    return ("reward", index, *named[2:])


def _set(tree: dict[str, Any], path: Path, value: Any, flag: str, wrong: list[str]) -> None:
    at: Any = tree
    for name in path[:-1]:
        at = at[name] if isinstance(name, int) else at.setdefault(name, {})
        if not isinstance(at, dict | list):
            wrong.append(f"{flag}: {name} is a value in the run file, expected a table.")
            return
    if isinstance(at, list):
        wrong.append(f"{flag}: a reward is named first: --reward.NAME.weight.")
        return
    at[path[-1]] = value


def _value(path: Path, text: str) -> Any:
    """A TOML value, else a JSON one, else the text itself; a key that holds text takes any text unquoted."""
    value = _literal(text)
    field = field_at(path)
    if field is not None and not isinstance(value, str) and _holds_text(field.annotation):
        return text
    return value


def _literal(text: str) -> Any:
    # A line break would let one value set further keys of the little document below.
    if "\n" not in text and "\r" not in text:
        try:
            value = tomllib.loads(f"value = {text}")["value"]
            return text if too_deep(value) else value
        except (ValueError, RecursionError):
            pass
    if text[:1] in ("[", "{"):
        try:
            return parsed(text)
        except NotJson:
            pass
    return text


def _holds_text(annotation: Any) -> bool:
    if get_origin(annotation) is Literal:
        return all(isinstance(choice, str) for choice in get_args(annotation))
    return annotation is str
