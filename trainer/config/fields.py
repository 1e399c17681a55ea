"""What a key of the run file may hold, read from the model itself: the one source of `keys` and of error messages."""

import json
import types
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo

from trainer.config.schema import RunConfig
from trainer.config.section import Section

Path = tuple[str | int, ...]
"""A place in a run file: ("grpo", "kl", "coef"), ("reward", 0, "weight")."""


def section_of(annotation: Any) -> type[Section] | None:
    """The section that a field holds, or holds a list of; None for a plain key."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    if get_origin(annotation) is tuple:
        return section_of(get_args(annotation)[0])
    return None


def field_at(path: Sequence[str | int]) -> FieldInfo | None:
    """The field at a path; None where there is no such key. List indices are passed over."""
    section: type[Section] | None = RunConfig
    field = None
    for name in path:
        if isinstance(name, int):
            continue
        if section is None or name not in section.model_fields:
            return None
        field = section.model_fields[name]
        section = section_of(field.annotation)
    return field


def keys(
    section: type[Section] = RunConfig, prefix: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """Every key with its field, tables before what they hold."""
    for name, field in section.model_fields.items():
        path = (*prefix, name)
        yield path, field
        inner = section_of(field.annotation)
        if inner is not None:
            yield from keys(inner, path)


@cache
def dotted_keys() -> tuple[str, ...]:
    """Every key that holds a value, dotted, in the order of the model: `run.dir`, ..., `hooks.before_rollout`."""
    return tuple(".".join(path) for path, field in keys() if section_of(field.annotation) is None)


def expected(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """A type and its range in words: `a number > 0 and <= 1`, `"loss" or "reward"`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return expected(arguments[0], arguments[1:])
    if origin is Literal:
        return _either([literal(value) for value in arguments])
    if origin in (Union, types.UnionType):
        return _either([expected(argument) for argument in arguments if argument is not type(None)])
    if section_of(annotation) is not None:
        return "a list of tables" if origin is tuple else "a table"
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return f"a list, each item {expected(arguments[0])}"
        return f"a list of {len(arguments)}, each {expected(arguments[0])}"
    if origin is dict:
        return "a table"
    plain = {int: "a whole number", float: "a number", bool: "true or false", str: "text in quotes"}[annotation]
    limits = _limits(metadata)
    return f"{plain} {limits}" if limits else plain


def literal(value: Any) -> str:
    """A value as it stands in a run file, on one line and not longer than 60 characters."""
    if isinstance(value, list | tuple):
        text = f"[{', '.join(literal(item) for item in value)}]"
    elif isinstance(value, dict):
        text = f"{{{', '.join(f'{name} = {literal(item)}' for name, item in value.items())}}}"
    elif isinstance(value, str | bool):
        text = json.dumps(value, ensure_ascii=False)
    else:
        text = str(value)
    return text if len(text) <= 60 else text[:56] + " ..."


def _limits(metadata: Sequence[Any]) -> str:
    found = []
    for item in _flat(metadata):
        match item:
            case annotated_types.Gt(gt=limit):
                found.append(f"> {limit}")
            case annotated_types.Ge(ge=limit):
                found.append(f">= {limit}")
            case annotated_types.Lt(lt=limit):
                found.append(f"< {limit}")
            case annotated_types.Le(le=limit):
                found.append(f"<= {limit}")
            case annotated_types.MinLen():
                found.append("that is not empty")
    return " and ".join(found)


def _flat(metadata: Sequence[Any]) -> Iterator[Any]:
    # Annotated[int, Field(ge=1)] keeps the limits inside the FieldInfo; a field of a model has them unpacked.
    for item in metadata:
        if isinstance(item, FieldInfo):
            yield from item.metadata
        else:
            yield item


def _either(choices: list[str]) -> str:
    return choices[0] if len(choices) == 1 else f"{', '.join(choices[:-1])} or {choices[-1]}"
