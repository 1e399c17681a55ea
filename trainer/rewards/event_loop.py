"""The event loop on which rewards wait: for services, for worker processes, for the user's own async functions."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any

from trainer.limit import Overdue


class EventLoop:
    """One for the whole run, in a daemon thread: clients that a module opens stay bound to a loop that lives."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._running: set[concurrent.futures.Future[Any]] = set()
        self._cancelled = False
        threading.Thread(target=self._loop.run_forever, name="async rewards", daemon=True).start()

    def run(self, coroutine: Coroutine[Any, Any, Any], seconds: float) -> Any:
        """What the coroutine returns; after ``seconds`` it is cancelled, and this is Overdue. From any other thread.

        concurrent.futures.CancelledError after ``cancel``.
        """
        if self._cancelled:
            coroutine.close()
            raise concurrent.futures.CancelledError
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        self._running.add(future)
        try:
            # Not `future.result(seconds)`: its TimeoutError looks like one that the function raised.
            if not concurrent.futures.wait([future], timeout=seconds).done:
                future.cancel()
                raise Overdue
            return future.result()
        finally:
            self._running.discard(future)

    def open(self) -> None:
        """Takes back ``cancel``."""
        self._cancelled = False

    def cancel(self) -> None:
        """Ends what runs here, and lets nothing more begin."""
        self._cancelled = True
        for future in list(self._running):
            future.cancel()
