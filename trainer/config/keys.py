"""`zero-grpo keys`: every key with type, default and meaning, from the model itself."""

import difflib
import textwrap
from collections.abc import Sequence

from pydantic.fields import FieldInfo

from trainer.config.fields import expected, keys, literal, section_of
from trainer.config.rules import available
from trainer.errors import Refused

WIDTH = 100


def describe(section: str = "") -> str:
    """Every key, those of one table (`grpo.kl`), or one key (`optim.lr`). Raises `Refused` for any other name."""
    wanted = section.strip("[]").replace("-", "_")
    chosen = [(path, field) for path, field in keys() if not wanted or f"{'.'.join(path)}.".startswith(f"{wanted}.")]
    if not chosen:
        tables = [".".join(path) for path, field in keys() if section_of(field.annotation) is not None]
        close = difflib.get_close_matches(wanted, [".".join(path) for path, _ in keys()], n=1)
        hint = f"Did you mean {close[0]}? " if close else ""
        raise Refused(f"zero-grpo keys {section}: there is no such table or key. {hint}Tables: {', '.join(tables)}.")
    return "\n".join(_entry(path, field) for path, field in chosen).strip("\n") + "\n"


def _entry(path: Sequence[str], field: FieldInfo) -> str:
    meaning = textwrap.fill(field.description or "", WIDTH, initial_indent="    ", subsequent_indent="    ")
    if section_of(field.annotation) is not None:
        name = ".".join(path)
        header = f"[[{name}]]" if path == ("reward",) else f"[{name}]"
        return f"\n{header}  {field.description}"
    kind = expected(field.annotation, field.metadata)
    return f"  {'.'.join(path)}: {kind}; {_default(field)}{_not_yet('.'.join(path))}\n{meaning}"


def _not_yet(key: str) -> str:
    """What of a key this version refuses, in brackets; empty where it takes all that the type allows."""
    refused = available.NOT_YET[key][0] if key in available.NOT_YET else ()
    return f" ({', '.join(map(literal, refused))}: not in this version)" if refused else ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    return "no default" if default is None else f"default {literal(default)}"
