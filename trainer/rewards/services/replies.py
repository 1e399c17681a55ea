"""What a service said, read strictly: a number where a number was due, or the reason why there is none."""

from collections.abc import Sequence
from typing import Any

from trainer.errors import redacted
from trainer.outside import NotJson
from trainer.outside import parsed as read_json
from trainer.rewards.services.breaker import ServiceError


def parsed(told: bytes | str) -> Any:
    """JSON as the standard has it. A number that is out of every range is one row without a score, not a reply that
    cannot be read. Raises NotJson."""
    return read_json(told, strict=True, any_number=True)


def field(reply: Any, *path: str | int) -> Any:
    """What stands in a reply at ``path``. ServiceError, naming it, where there is nothing."""
    for place, name in enumerate(path):
        inside = isinstance(reply, list if isinstance(name, int) else dict)
        if not inside or (name not in reply if isinstance(name, str) else name >= len(reply)):
            raise ServiceError(f"the reply has no {_dotted(path[: place + 1])}: {shown(reply)}")
        reply = reply[name]
    return reply


def number(value: Any, low: float, high: float) -> float:
    """A JSON number within its declared range. ServiceError for true, "0.8", null, and what lies outside."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ServiceError(f"the score is {shown(value)}; expected a number from {low:g} to {high:g}")
    if not low <= value <= high:  # nor is NaN
        raise ServiceError(f"the score is {shown(value)}, outside of {low:g} to {high:g}")
    return float(value)


def judged(content: Any, top: float) -> float:
    """The score, 0 to 1, of a judge that was to say {"score": N} and nothing else, N from 0 to ``top``."""
    if not isinstance(content, str):
        raise ServiceError(f"the judge's reply is {shown(content)}; expected text")
    try:
        verdict = parsed(content)
    except NotJson as error:
        raise ServiceError(
            f"the judge's reply is not the JSON that was asked for ({error}): {shown(content)}"
        ) from None
    if not isinstance(verdict, dict) or verdict.keys() != {"score"}:
        raise ServiceError(f'the judge\'s reply is {shown(content)}; expected {{"score": N}} and nothing else')
    return number(verdict["score"], 0, top) / top


def by_id(
    entries: Any, ids: Sequence[str | int], id_key: str, score_key: str, low: float, high: float
) -> list[float | ServiceError]:
    """The scores in the order of ``ids``, whatever order they came in. ServiceError for all of them where an id is
    missing, unknown or there twice: which score is whose is then a guess."""
    if not isinstance(entries, list):
        raise ServiceError(f"the scores are {shown(entries)}; expected a list")
    found: dict[str | int, Any] = {}
    for entry in entries:
        name = field(entry, id_key)
        if isinstance(name, bool) or not isinstance(name, str | int) or name not in ids or name in found:
            raise ServiceError(f"the reply scores {id_key} {shown(name)}, which was not asked for, or twice")
        found[name] = field(entry, score_key)
    if missing := [name for name in ids if name not in found]:
        raise ServiceError(f"the reply has {len(found)} of {len(ids)} scores; {id_key} {missing[0]!r} has none")
    return [_each(found[name], low, high) for name in ids]


def _each(value: Any, low: float, high: float) -> float | ServiceError:
    try:
        return number(value, low, high)
    except ServiceError as wrong:
        return wrong


def shown(value: Any) -> str:
    """A piece of a reply for a message, of one line; redacted before it is cut, since half a key is not seen as one."""
    return f"{redacted(repr(value)):.120}"


def _dotted(path: Sequence[str | int]) -> str:
    return ".".join(str(name) for name in path)
