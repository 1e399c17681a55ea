"""One problem of a run file, and all of them in one message."""

from collections.abc import Iterable
from typing import NamedTuple

from trainer.config.fields import Path
from trainer.errors import Refused


class Problem(NamedTuple):
    """What is wrong, under the keys that it concerns; the first one that the user wrote is where he is sent."""

    keys: tuple[Path, ...]
    text: str


def dotted(path: Path, rewards: tuple[str, ...] = ()) -> str:
    """A path as overrides write it: `grpo.kl.coef`, `reward.accuracy.weight` (the index for a reward without name)."""
    parts = [str(part) for part in path]
    if len(path) > 1 and path[0] == "reward" and isinstance(path[1], int) and path[1] < len(rewards):
        parts[1] = rewards[path[1]] or parts[1]
    return ".".join(parts)


def refuse(source: str, located: Iterable[tuple[str, str]]) -> None:
    """Raise `Refused` with every problem, each after its place; do nothing where there is none."""
    lines = [f"{place}: {text}" for place, text in located]
    if lines:
        raise Refused(*lines, of=source)
