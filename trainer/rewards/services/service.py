"""A [[reward]] that a service answers, as a function with TRL's signature."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from trainer.rewards.arguments import HANDED, text_of
from trainer.rewards.failed import Failed
from trainer.rewards.services.breaker import Breaker, ServiceError, Unavailable
from trainer.rewards.services.judge import Row, speaks_to_judge


@dataclass(frozen=True)
class Scored:
    """One row's score, 0 to 1 but for a server of the user's own, or why it has none."""

    value: float | ServiceError
    cut: bool = False
    """Whether a part of the row had to be left out for the service's window."""


class Backend(Protocol):
    """What one kind of service is asked, and how its answer is read."""

    def batches(self, rows: Sequence[Row]) -> list[list[int]]:
        """Which of the rows that wait go in one call."""

    async def score(self, rows: Sequence[Row]) -> list[Scored]:
        """One call. ServiceError where it gives no score for any row, Stopped where no call ever will."""

    async def prepare(self, prompt_tokens: int, new_tokens: int) -> list[str]:
        """Asks once, before the first rollout, for what the service has to hold; what is worth telling. Refused where
        its window is smaller."""


Waiting = tuple[Row, "asyncio.Future[Scored]"]


class Service:
    """Rows are asked for one by one or many at once; those that come at the same moment go in one call where the
    service takes several. A row without a score is Failed, never a number."""

    def __init__(self, name: str, backend: Backend) -> None:
        self.name, self.backend, self.breaker = name, backend, Breaker()
        self._waiting: list[Waiting] = []
        self._calls: set[asyncio.Task[None]] = set()

    async def __call__(
        self,
        prompts: list[Any],
        completions: list[Any],
        log_metric: Callable[[str, float], None],
        log_extra: Callable[[str, list[Any]], None],
        answer: list[Any] | None = None,
        **columns: list[Any],
    ) -> list[float | Failed]:
        answers = answer or [None] * len(prompts)
        rows = [
            Row(
                request=_request(prompt),
                completion=text_of(completion),
                reference=None if answers[place] in (None, "") else str(answers[place]),
                columns={name: values[place] for name, values in columns.items() if name not in HANDED},
            )
            for place, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
        ]
        scored = await asyncio.gather(*(self._score(row) for row in rows))
        speaks = [speaks_to_judge(row.completion) for row in rows]
        for what, flags in (("speaks_to_judge", speaks), ("cut", [one.cut for one in scored])):
            log_metric(f"rewards/{self.name}/{what}", sum(flags) / len(flags))
            if any(flags):
                log_extra(f"{self.name}/{what}", list(flags))
        return [_outcome(one.value) for one in scored]

    async def _score(self, row: Row) -> Scored:
        loop = asyncio.get_running_loop()
        scored: asyncio.Future[Scored] = loop.create_future()
        self._waiting.append((row, scored))
        if len(self._waiting) == 1:
            loop.call_soon(self._send)  # after all others that are being asked for now
        return await scored

    def _send(self) -> None:
        waiting, self._waiting = self._waiting, []
        for batch in self.backend.batches([row for row, _ in waiting]):
            call = asyncio.ensure_future(self._call([waiting[place] for place in batch]))
            self._calls.add(call)  # the loop itself holds tasks weakly
            call.add_done_callback(self._calls.discard)

    async def _call(self, batch: list[Waiting]) -> None:
        rows = [row for row, _ in batch]
        try:
            found = await self.breaker.ask(lambda: self.backend.score(rows))
        except ServiceError as failure:
            found = [Scored(failure)] * len(rows)
        except Exception as error:  # Stopped, or a fault of ours: to those who wait
            for _, scored in batch:
                if not scored.done():
                    scored.set_exception(error)
            return
        for (_, scored), one in zip(batch, found, strict=True):
            if not scored.done():  # nobody waits any more
                scored.set_result(one)


def _outcome(value: float | ServiceError) -> float | Failed:
    if not isinstance(value, ServiceError):
        return value
    return Failed(str(value), may_heal=isinstance(value, Unavailable))


def _request(prompt: str | list[dict[str, Any]]) -> str:
    """The prompt as text: of a chat with more than one message, each with its role."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return str(prompt[0]["content"])
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)
