"""A circuit breaker: a service that is down is not asked for every row again."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

FAILURES = 5
"""Calls in a row, each with all its tries, after which the circuit opens."""
COOL_DOWN_S = 3.0
"""Shorter than the shortest pause of a run whose service is away."""


class ServiceError(Exception):
    """A call that gave no score, and why. Its text is for the user and holds no key."""


class Unavailable(ServiceError):
    """The service itself is in trouble: not reached, overloaded, or what answers is something else."""


class Breaker:
    """Closed: calls go through. Open, after FAILURES in a row: they fail at once. Half-open, COOL_DOWN_S later: one
    goes through, the others wait for what it finds, and the circuit closes or opens again."""

    def __init__(self) -> None:
        self._failures = 0
        self._opened = 0.0
        self._why = ""
        self._trial = asyncio.Lock()

    @property
    def state(self) -> str:
        if self._failures < FAILURES:
            return "closed"
        return "open" if time.monotonic() < self._opened + COOL_DOWN_S else "half-open"

    async def ask(self, call: Callable[[], Awaitable[T]]) -> T:
        """``call()``, or Unavailable at once while the circuit is open."""
        self._fail_fast()
        if self.state == "closed":
            return await self._counted(call)
        async with self._trial:
            self._fail_fast()
            if self.state == "half-open":
                return await self._counted(call)
        return await self._counted(call)

    def _fail_fast(self) -> None:
        if self.state == "open":
            raise Unavailable(f"not asked, after {self._failures} failures in a row (the last: {self._why})")

    async def _counted(self, call: Callable[[], Awaitable[T]]) -> T:
        try:
            result = await call()
        except Unavailable as failure:
            self._failures += 1
            self._opened, self._why = time.monotonic(), str(failure)
            raise
        except ServiceError:  # it answers; that this row has no score says nothing of the next
            self._failures = 0
            raise
        self._failures = 0
        return result
