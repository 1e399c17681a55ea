"""The DeepSpeed JSON that `engine.deepspeed` names."""

import json
import math
from pathlib import Path
from typing import Any

from trainer.config import shipped
from trainer.config.deepspeed_json.mistakes import Block
from trainer.errors import Refused


def locate(name: str) -> Path:
    """The file: one that ships, or the user's, read from the working directory."""
    return shipped.ds_configs() / f"{name}.json" if name in shipped.DEEPSPEED else Path(name)


def read(file: Path) -> Block:
    """The parsed file. Raises `Refused` with the line of what is no JSON."""
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise Refused(
            f"{file}: there is no such DeepSpeed configuration (engine.deepspeed). Names that ship:"
            f" {', '.join(shipped.DEEPSPEED)}."
        ) from None
    except UnicodeDecodeError:
        raise Refused(f"{file}: not UTF-8 text, expected a DeepSpeed JSON (engine.deepspeed).") from None
    except OSError as error:
        raise Refused(f"{file}: cannot be read (engine.deepspeed): {error.strerror}.") from None
    try:
        block = json.loads(text, object_pairs_hook=_no_double, parse_float=_finite, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        line = (text.splitlines() or [""])[min(error.lineno, len(text.splitlines()) or 1) - 1]
        comment = " JSON has no comments." if line.lstrip().startswith(("//", "#", "/*")) or " //" in line else ""
        raise Refused(f"{file}:{error.lineno}: not valid JSON: {error.msg}.{comment}\n  {line.strip()[:100]}") from None
    except (_Odd, RecursionError, ValueError) as error:  # ValueError: Python refuses numbers of thousands of digits
        raise Refused(f"{file}: {error or 'nested too deeply'}.") from None
    if not isinstance(block, dict):
        raise Refused(f"{file}: the JSON is a {type(block).__name__}, expected an object with DeepSpeed's keys.")
    return block


class _Odd(Exception):
    """Valid for Python's reader, and not what anybody means."""


def _no_double(pairs: list[tuple[str, Any]]) -> Block:
    names = [name for name, _ in pairs]
    double = next((name for name in names if names.count(name) > 1), None)
    if double is not None:
        raise _Odd(f'the key "{double}" is given twice in one object; keep one')
    return dict(pairs)


def _finite(digits: str) -> float:
    value = float(digits)
    return value if math.isfinite(value) else _no_constant(digits)


def _no_constant(name: str) -> Any:
    raise _Odd(f"{name} is not a number that a configuration can hold")
