"""What pydantic finds wrong with a run file, in the words of the run file."""

import copy
import difflib
from collections.abc import Sequence
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from trainer.config.fields import Path, expected, field_at, keys, literal, section_of
from trainer.config.names import VALUES, answer
from trainer.config.problems import Problem, dotted
from trainer.config.schema import RunConfig
from trainer.config.section import Section


def mistakes(tree: dict[str, Any], rewards: tuple[str, ...]) -> tuple[RunConfig | None, list[Problem]]:
    """The config and every mistake in the tree, one a key.

    With mistakes the config is made of what is left, so that the rules between keys can still be asked; None where
    too little is left.
    """
    # An absent [model] would be reported as a missing table instead of the missing key.
    tree.setdefault("model", {})
    try:
        return RunConfig.model_validate(tree), []
    except ValidationError as error:
        details = error.errors(include_url=False)
    found: dict[Path, Problem] = {}
    rest = copy.deepcopy(tree)
    for detail in details:
        path = _key(detail["loc"])
        if path not in found:
            found[path] = Problem((path,), _text(path, detail, _at(tree, path), rewards))
            _drop(rest, path)
    try:
        return RunConfig.model_validate(rest), list(found.values())
    except ValidationError:
        return None, list(found.values())


def _key(location: tuple[int | str, ...]) -> Path:
    """The part of pydantic's location that the user wrote: no branch of a union, no item of a list of values."""
    if location[:2] == ("data", "chat_template_kwargs"):
        return location[:2]
    for end in range(1, len(location)):
        field = field_at(location[:end])
        if field is not None and section_of(field.annotation) is None:
            return location[:end]
    return location


def _at(tree: Any, path: Path) -> Any:
    for name in path:
        if isinstance(tree, dict) and name not in tree:
            return None
        tree = tree[name]
    return tree


def _drop(tree: dict[str, Any], path: Path) -> None:
    if path[0] == "reward":
        # Leaving out one of several would renumber the others.
        tree["reward"] = []
    elif path == ("model", "name_or_path"):
        tree["model"] = {**tree["model"], "name_or_path": "?"}
    else:
        inner = _at(tree, path[:-1])
        if isinstance(inner, dict):
            inner.pop(path[-1], None)
        if path == ("model",):
            tree["model"] = {"name_or_path": "?"}


def _text(path: Path, detail: Any, got: Any, rewards: tuple[str, ...]) -> str:
    label = dotted(path, rewards)
    if detail["type"] == "extra_forbidden":
        return _unknown(path, label, got)
    field = field_at(path)
    assert field is not None, f"pydantic names {path}, which is not in the model"
    if detail["type"] == "missing" and len(detail["loc"]) == len(path):
        return f"{label} is missing. {field.description}"
    section = section_of(field.annotation)
    if section is not None:
        return f"{label} = {literal(got)}: {_table(path, section, got)}"
    if detail["type"] == "value_error":
        return f"{label} = {literal(got)}: expected a whole number of 64 bits."
    wanted = (
        f"text of the form {detail['ctx']['pattern']}"
        if detail["type"] == "string_pattern_mismatch"
        else _wanted(field)
    )
    return f"{label} = {literal(got)}: expected {wanted}.{_hint('.'.join(str(part) for part in path), field, got)}"


def _wanted(field: FieldInfo) -> str:
    text = expected(field.annotation, field.metadata)
    return text.replace("a number", "a finite number", 1)


def _table(path: Path, section: type[Section], got: Any) -> str:
    if path[0] == "reward" and isinstance(got, dict):
        return "expected a list of tables. Write [[reward]], in double brackets."
    if path[0] != "reward" and isinstance(got, list):
        return f"expected one table. Write [{path[-1]}], in single brackets."
    return f"expected a table with the keys {', '.join(section.model_fields)}."


def _unknown(path: Path, label: str, got: Any) -> str:
    section = section_of(field.annotation) if (field := field_at(path[:-1])) is not None else RunConfig
    names = [str(part) for part in path if isinstance(part, str)]
    if isinstance(got, dict) and got:
        answers = [f"{'.'.join(leaf)}: {answer(leaf)}" for leaf in _leaves(got, names) if answer(leaf)]
        if answers:
            return f"there is no table [{label}]. " + " ".join(answers[:12])
    if isinstance(got, dict) or (isinstance(got, list) and any(isinstance(item, dict) for item in got)):
        close = difflib.get_close_matches(names[-1], _tables(), n=1)
        wanted = f"Did you mean [{_tables()[close[0]]}]?" if close else f"Tables: {', '.join(_tables().values())}."
        return f"there is no table [{label}]. {wanted}"
    help_text = answer(names)
    if not help_text and section is not None:
        help_text = f"Keys here: {', '.join(section.model_fields)}."
    return f"{label} is not a key. {help_text}"


def _tables() -> dict[str, str]:
    return {path[-1]: ".".join(path) for path, field in keys() if section_of(field.annotation) is not None}


def _leaves(tree: dict[str, Any], prefix: Sequence[str]) -> list[list[str]]:
    found = []
    for name, value in tree.items():
        path = [*prefix, name]
        found += _leaves(value, path) if isinstance(value, dict) else [path]
    return found


def _hint(key: str, field: FieldInfo, got: Any) -> str:
    kind = field.annotation
    if isinstance(got, str) and get_origin(kind) is Literal:
        theirs = VALUES.get(key, {}).get(got.lower())
        choices = [choice for choice in get_args(kind) if isinstance(choice, str)]
        close = [theirs] if theirs else difflib.get_close_matches(got.lower(), choices, n=1)
        return f' Did you mean "{close[0]}"?' if close else ""
    if isinstance(got, str) and kind is bool:
        return " Write true or false, without quotes."
    if isinstance(got, str) and kind in (int, float) and _is_number(got):
        return " Remove the quotes."
    if isinstance(got, float) and kind is int and got.is_integer():
        return f" Write {int(got)}, without a decimal point."
    if isinstance(got, str) and get_origin(kind) is tuple:
        return f" Write [{literal(got)}]."
    return ""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
