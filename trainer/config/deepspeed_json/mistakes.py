"""What can be wrong with one key of a DeepSpeed JSON, and the file as it would be accepted."""

import copy
import json
from typing import Any, NamedTuple

Block = dict[str, Any]

REMOVE = object()
"""The correction that leaves a key out."""


class Mistake(NamedTuple):
    path: str
    """Dotted, as `zero_optimization.stage`."""
    text: str
    """Got, expected and why, after the path."""
    correction: Any = REMOVE


def shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:56] + " ..."


def corrected(block: Block, mistakes: list[Mistake]) -> str:
    """The JSON with every correction in place."""
    result = copy.deepcopy(block)
    for mistake in mistakes:
        *outer, last = mistake.path.split(".")
        at = result
        for name in outer:
            at = at.get(name, {})
        if isinstance(at, dict):
            if mistake.correction is REMOVE:
                at.pop(last, None)
            else:
                at[last] = mistake.correction
    return json.dumps(result, indent=2)
