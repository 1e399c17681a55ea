"""A plain Python reward as an async one: its calls run in processes of their own, and one that is stuck is killed.

A timer signal stops what Python runs, not C code that never returns; and nothing survives a crash but another process.
Not multiprocessing: it imports the main program again in every process, and torch with it, and its pools end no
single call. (pebble's do, by SIGTERM first,
which such C code never sees.)
"""

import asyncio
import contextlib
import json
import os
import pickle
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.rewards.failed import Failed

START_S = 120.0
"""For a process to begin and to import the function."""
MOST_BYTES = 2**24
"""Of one answer."""
BEGIN = """import sys
sys.path.insert(0, sys.argv[1])
from trainer.rewards.worker import main
sys.path[:] = sys.argv[2:]
main()"""
"""With the paths of this process, and no environment variable that a process of the function's would inherit. The
trainer first: the user's folder may hold a trainer.py."""


class InProcesses:
    """Each call in a process that runs nothing else meanwhile; there are as many of them as calls at a time."""

    def __init__(self, load: Callable[[], Callable[..., Any]], timeout: float, retries: int) -> None:
        """``load`` finds the function, in each process anew."""
        self.load, self.timeout, self.retries = load, timeout, retries
        self._idle: list[Worker] = []

    async def __call__(self, **keywords: Any) -> Any:
        """What the function returns of one completion, or one Failed."""
        logs = {name: keywords.pop(name) for name in ("log_metric", "log_extra") if name in keywords}
        request = pickle.dumps((keywords, set(logs)))
        try:
            for _ in range(1 + self.retries):
                answer = await self._ask(request)
                if "raised" not in answer:
                    break
        except Lost as lost:  # stuck or crashed: another try would be, too
            return [Failed(str(lost))]
        if "raised" in answer:
            return [Failed(*answer["raised"])]
        for name, value in answer["metrics"]:
            logs["log_metric"](name, value)
        for column, values in answer["columns"].items():
            logs["log_extra"](column, values)
        returned = answer["returned"]
        if not isinstance(returned, list):
            return returned
        return [
            Failed(*value["failed"]) if isinstance(value, dict) and "failed" in value else value for value in returned
        ]

    async def _ask(self, request: bytes) -> dict[str, Any]:
        self._idle = [worker for worker in self._idle if worker.process.returncode is None]
        worker = self._idle.pop() if self._idle else await Worker.begin(self.load)
        answer = await worker.ask(request, self.timeout, f"no answer within {self.timeout:g} s; its process was killed")
        self._idle.append(worker)
        return answer


class Lost(Exception):
    """A worker that is no more, and why."""


class Worker:
    """A process that has loaded the function."""

    def __init__(self, process: Process) -> None:
        self.process = process

    @classmethod
    async def begin(cls, load: Callable[[], Callable[..., Any]]) -> "Worker":
        worker = cls(
            await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-c",
                BEGIN,
                str(Path(__file__).parents[2]),
                *sys.path,
                stdin=PIPE,
                stdout=PIPE,
                limit=MOST_BYTES,
                start_new_session=True,  # Ctrl-C is for the trainer; and what it starts itself is killed with it
            )
        )
        answer = await worker.ask(pickle.dumps(load), START_S, f"its process did not load it within {START_S:g} s")
        if "raised" in answer:
            worker.kill()
            raise Lost(f"its process could not load it: {answer['raised'][0]}")
        return worker

    async def ask(self, request: bytes, seconds: float, late: str) -> dict[str, Any]:
        """Its answer. Lost, and the process with it, when there is none; ``late`` says so when time was over."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            async with asyncio.timeout(seconds):
                self.process.stdin.write(request)
                await self.process.stdin.drain()
                line = await self.process.stdout.readline()
        except TimeoutError:
            self.kill()
            raise Lost(late) from None
        except ConnectionError:
            line = b""
        except ValueError:
            self.kill()
            raise Lost(f"its answer is longer than {MOST_BYTES} bytes; its process was killed") from None
        except BaseException:  # cancelled
            self.kill()
            raise
        if not line.endswith(b"\n"):
            self.kill()  # one that has closed its pipe and lives
            raise Lost(f"its process ended {_how(await self.process.wait())}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def _how(code: int) -> str:
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
