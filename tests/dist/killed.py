"""``python -m trainer`` with an end of its own: killed at one point of its second save.

    killed.py EVENTS.json RANK POINT train RUN.toml ...

A point is the number of an operation on files below ``checkpoints/``, as Python's audit events and ``torch.save`` show
them; this process is killed just before it, or, for a ``torch.save``, when half of the file is written. With RANK -1
nobody is killed, and every rank writes its operations to EVENTS.json.RANK.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

from trainer.__main__ import main
from trainer.checkpoint.save import Checkpoints
from trainer.interrupts import leave

RANK = int(os.environ["RANK"])
FILE_EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "shutil.rmtree")
SECOND_SAVE = 2


class Killer:
    def __init__(self, rank: int, point: int) -> None:
        self.point = point if rank == RANK else None
        self.saves = 0
        self.saving = False
        self.events: list[str] = []

    def reached(self, what: str) -> bool:
        """Whether this operation is the chosen point."""
        if not (self.saving and self.saves == SECOND_SAVE):
            return False
        self.events.append(what)
        return self.point == len(self.events) - 1

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in FILE_EVENTS and "/checkpoints" in str(arguments[0]):
            name = str(arguments[0]).split("/checkpoints", 1)[1]
            if self.reached(f"{event} {name}"):
                die()

    def save(self, real: Callable[..., None], record: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        real(record, path, *args, **kwargs)
        if self.reached(f"half of {Path(path).name}"):
            os.truncate(path, Path(path).stat().st_size // 2)
            die()


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def run(events: str, rank: int, point: int, arguments: list[str]) -> int:
    killer = Killer(rank, point)
    sys.addaudithook(killer.audit)
    torch_save, save = torch.save, Checkpoints.save
    torch.save = lambda *args, **kwargs: killer.save(torch_save, *args, **kwargs)

    def counted(self: Checkpoints, *args: Any, **kwargs: Any) -> Path:
        killer.saves += 1
        killer.saving = True
        try:
            return save(self, *args, **kwargs)
        finally:
            killer.saving = False

    Checkpoints.save = counted  # type: ignore[method-assign]
    code = main(arguments)
    if rank < 0:
        Path(f"{events}.{RANK}").write_text(json.dumps(killer.events))
    return code


if __name__ == "__main__":
    leave(run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]))
