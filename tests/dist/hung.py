"""``python -m trainer`` with a fault of trainer/faults.py, whose time it keeps: hung.py TIME train RUN.toml ..."""

import os
import sys
import time
from pathlib import Path

from trainer import faults
from trainer.__main__ import main
from trainer.interrupts import leave


def run(noted: Path, arguments: list[str]) -> int:
    def reached(phase: str, step: int) -> None:
        noted.write_text(f"{time.time()}")  # the last one is that of the fault
        real(phase, step)

    real, faults._reached = faults._reached, reached
    return main(arguments)


if __name__ == "__main__":
    leave(run(Path(f"{sys.argv[1]}.{os.environ['RANK']}"), sys.argv[2:]))
