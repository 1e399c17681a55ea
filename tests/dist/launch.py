"""Starts the ranks of a test with a launcher's environment, and ends them all."""

import atexit
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    with tempfile.TemporaryDirectory() as outputs:
        files = [Path(outputs) / str(rank) for rank in range(ranks)]
        starts = [
            {"environment": common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | variables, "output": str(file)}
            for rank, file in enumerate(files)
        ]
        launch = {"arguments": list(arguments), "folder": str(folder or Path.cwd()), "timeout": timeout}
        codes = FORKS.launch(launch, starts)
        return [Rank(code, file.read_text(errors="replace")) for code, file in zip(codes, files, strict=True)]


class Forks:
    """Two servers that fork ranks (forks.py), in turn.

    Two, since a process has one order for its sets of strings: ranks in which it is the same would meet where others
    would not, and a resumed run would repeat what it should not.
    """

    def __init__(self) -> None:
        self.servers: list[subprocess.Popen[str]] = []
        self.turns = itertools.count()

    def launch(self, launch: dict[str, Any], starts: list[dict[str, str | dict[str, str]]]) -> list[int]:
        """The exit codes of the ranks."""
        if not self.servers:
            self.servers = [_server(), _server()]
            atexit.register(self.end)
        turn = next(self.turns)
        codes = [0] * len(starts)
        try:
            for number, server in enumerate(self.servers):
                assert server.stdin is not None
                server.stdin.write(json.dumps(launch | {"ranks": starts[(number + turn) % 2 :: 2]}) + "\n")
                server.stdin.flush()
            for number, server in enumerate(self.servers):
                assert server.stdout is not None
                codes[(number + turn) % 2 :: 2] = json.loads(server.stdout.readline())
        except BaseException:  # a time-out of the test, say: nothing of it may go on
            self.end()
            raise
        return codes

    def end(self) -> None:
        """With the ranks that still run."""
        for server in self.servers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()
        self.servers = []


def _server() -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"}
    environment["CUDA_VISIBLE_DEVICES"] = ""  # a library that looks for a card would start CUDA, which no fork may use
    return subprocess.Popen(
        [sys.executable, "-m", "tests.dist.forks"],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


FORKS = Forks()
