"""The two ends of a side of tools/bench.py: a process that lives through all repeats, and who tells it what to do."""

import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tools.bench_inputs import Settings


class OutOfMemory(Exception):
    """The side that this order went to did not have enough of it, and has ended."""


class Side:
    """A process that runs ``target(connection, settings, folder)``; each order gets one answer."""

    def __init__(self, name: str, target: Callable[..., None], settings: Settings, folder: Path) -> None:
        self.name = name
        context = multiprocessing.get_context("spawn")  # a forked one would share this process's memory and threads
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(theirs, settings, folder), daemon=True)
        self.process.start()
        theirs.close()

    def answer(self) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = self.connection.recv()
        except EOFError:
            self.process.join()
            raise SystemExit(
                f"{self.name} ended with exit code {self.process.exitcode}"
                + (": killed, most likely since memory ran out" if self.process.exitcode == -9 else "")
            ) from None
        if "out_of_memory" in answer:
            self.process.join()
            raise OutOfMemory(answer["out_of_memory"])
        if "error" in answer:
            self.process.join()
            raise SystemExit(f"{self.name}:\n{answer['error']}")
        return answer

    def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        self.connection.send(order)
        return self.answer()

    def close(self) -> None:
        with suppress(BrokenPipeError):  # it may have ended by itself
            self.connection.send(None)
        self.process.join()


@contextmanager
def answering(connection: Connection, threads: int) -> Iterator[None]:
    """Inside a side: its threads, its output beside the table's, and what it raises as its answer."""
    os.dup2(2, 1)  # progress bars and greetings of libraries; stdout is the table's
    torch.set_num_threads(threads)
    try:
        yield
    except torch.OutOfMemoryError as error:
        connection.send({"out_of_memory": str(error).splitlines()[0]})
    except BaseException:
        connection.send({"error": traceback.format_exc()})
    finally:
        connection.close()


def differences(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """Relative L2 distances of the log-probs, of the whole gradient, and of the worst single tensor's gradient."""
    if set(found["gradient"]) != set(expected["gradient"]):
        raise RuntimeError(f"not the same tensors: {sorted(set(found['gradient']) ^ set(expected['gradient']))}")
    apart, norm = {}, {}
    for name, gradient in expected["gradient"].items():
        apart[name] = float((found["gradient"][name].double() - gradient.double()).norm())
        norm[name] = float(gradient.double().norm())
    logps = expected["logps"].double()
    return {
        "logps": float((found["logps"].double() - logps).norm() / logps.norm()),
        "gradient": sum(one**2 for one in apart.values()) ** 0.5 / sum(one**2 for one in norm.values()) ** 0.5,
        "tensor": max(apart[name] / norm[name] for name in norm),
    }
