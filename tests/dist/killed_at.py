"""``python -m trainer`` that is killed at a moment: killed_at.py TIMES RANK SECONDS train RUN.toml ...

SECONDS after its start; RANK 2 means both ranks. TIMES gets a line with the time of every step, and of the kill.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from trainer.__main__ import main
from trainer.interrupts import leave
from trainer.output import Output

RANK = int(os.environ["RANK"])


def run(times: Path, rank: int, seconds: float, arguments: list[str]) -> int:
    def note(what: str) -> None:
        with times.open("a") as file:
            file.write(f"{what} {time.time()}\n")

    def die() -> None:
        time.sleep(seconds)
        note("killed")
        os.kill(os.getpid(), signal.SIGKILL)

    def step(self: Output, *given: Any) -> Any:
        found = real(self, *given)
        if self.world.is_main:
            note("step")
        return found

    real, Output.step = Output.step, step  # type: ignore[method-assign]
    if rank in (RANK, 2):
        threading.Thread(target=die, daemon=True).start()
    return main(arguments)


if __name__ == "__main__":
    leave(run(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:]))
