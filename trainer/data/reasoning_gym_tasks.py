"""Procedural tasks of the reasoning-gym package as a source of rows: `reasoning_gym:TASK?size=512&seed=1`."""

import difflib
import json
import typing
from dataclasses import fields
from typing import Any

from pydantic import TypeAdapter, ValidationError

from trainer.data.table import Table, numbered, shown
from trainer.errors import Refused
from trainer.outside import NotJson, parsed

PREFIX = "reasoning_gym:"


def read_reasoning_gym(source: str) -> Table:
    """Columns question, answer, metadata, and for the built-in reward entry (the three in one) and source.

    Raises:
        Refused: the package is missing, or the task or an argument is unknown or invalid.
    """
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise Refused(f"{source}: reasoning-gym is not installed: pip install 'zero-grpo[tasks]'") from error
    task, _, query = source.removeprefix(PREFIX).partition("?")
    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, n=3, cutoff=0.5)
        hint = f"Did you mean {' or '.join(near)}?" if near else f"It has: {', '.join(sorted(DATASETS))}"
        raise Refused(f'{source}: reasoning-gym has no task "{task}". {hint}')
    # Without a seed the package draws one, which would differ from rank to rank.
    arguments = {"seed": 0, **_arguments(source, query, DATASETS[task][1])}
    try:
        dataset = reasoning_gym.create_dataset(task, **arguments)
    except (AssertionError, TypeError, ValueError) as error:
        raise Refused(f"{source}: reasoning-gym refuses these arguments: {error}") from error
    written = {name: json.dumps(value, default=str) for name, value in arguments.items()}
    whole_source = f"{PREFIX}{task}?" + "&".join(f"{name}={value}" for name, value in written.items())
    entries = [dataset[place] for place in range(len(dataset))]
    rows = [{**entry, "entry": entry, "source": whole_source} for entry in entries]
    return numbered(rows, source)


def _arguments(source: str, query: str, config: type) -> dict[str, Any]:
    """`a=1&b=[1,2]` as the values that the task's config class declares; JSON, or bare text."""
    known = {field.name for field in fields(config)}
    types = typing.get_type_hints(config)
    arguments: dict[str, Any] = {}
    for part in filter(None, query.split("&")):
        name, equals, text = part.partition("=")
        if not equals:
            raise Refused(f"{source}: got {shown(part)} after the question mark, expected name=value pairs joined by &")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"It takes: {', '.join(sorted(known))}"
            raise Refused(f'{source}: the task takes no argument "{name}". {hint}')
        try:
            arguments[name] = TypeAdapter(types[name]).validate_python(_json_or_text(text))
        except ValidationError as error:
            problem = error.errors()[0]
            raise Refused(f"{source}: argument {name}: got {shown(text)}; {problem['msg']}") from error
    if arguments.get("size", 1) < 1:
        raise Refused(f"{source}: argument size: got {arguments['size']}, expected at least 1")
    return arguments


def _json_or_text(text: str) -> Any:
    try:
        return parsed(text)
    except NotJson:
        return text
