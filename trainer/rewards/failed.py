"""A row without a score, and whether another try may bring one. Imports nothing heavy: worker processes need it."""

import socket
import ssl
from dataclasses import dataclass

MAY_HEAL = (ConnectionError, TimeoutError, socket.gaierror, ssl.SSLError)
"""What libraries raise, or raise their own errors from, where a network or a service is away."""


@dataclass(frozen=True)
class Failed:
    """In place of a row's number: it should have had one, and why it has none. (None: the reward does not apply.)"""

    why: str
    may_heal: bool = False
    """Another try in a while may succeed: a time-out, no connection, a service that is too busy or down."""


def may_heal(error: BaseException | None) -> bool:
    """Whether a network or a service was away: the error, or one that it was raised from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, MAY_HEAL):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False
