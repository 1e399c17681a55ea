"""Starts the ranks of a test as plain processes with a launcher's environment, and ends them all."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Rank:
    code: int
    output: str


def run_ranks(
    arguments: Sequence[str],
    ranks: int,
    port: int,
    *,
    timeout: float = 300,
    folder: Path | None = None,
    **variables: str,
) -> list[Rank]:
    """``python ARGUMENTS`` on every rank over loopback, in ``folder`` or here.

    A rank that outlives the time-out is ended and has code -9.
    """
    common = os.environ | {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        # gloo mixes up unlike shapes without a word, unless asked to compare them.
        "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    }
    # To files: a pipe that nobody reads while another rank is waited for fills up, and stops its rank in a write.
    outputs = [tempfile.TemporaryFile("w+", errors="replace") for _ in range(ranks)]  # noqa: SIM115  (closed below)
    processes = [
        subprocess.Popen(
            [sys.executable, *arguments],
            cwd=folder,
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | variables,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        for rank, output in enumerate(outputs)
    ]
    deadline = time.monotonic() + timeout
    found = []
    for process, output in zip(processes, outputs, strict=True):
        try:
            process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        output.seek(0)
        found.append(Rank(process.returncode, output.read()))
        output.close()
    return found
