"""``zero-grpo train ... --gpus N``: several ranks on this machine, through the deepspeed launcher.

The launcher's own lines and every rank's stray output go to a log; the terminal shows what rank 0 says. Nothing that
was
started outlives this process.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

MARK = "\x1e"
"""Rank 0 begins each line meant for the user with it (ASCII record separator), when ``WRAPPED`` is set."""
WRAPPED = "ZERO_GRPO_WRAPPED"

ASKED_TO_END = {signal.SIGINT: 130, signal.SIGTERM: 75}
SECONDS_TO_END = 30.0
"""For the ranks to record how they ended."""


def say(text: str) -> None:
    """Prints for the user, from rank 0, also through the launcher's pipe."""
    if os.environ.get(WRAPPED):
        text = "".join(f"{MARK}{line}\n" for line in text.split("\n"))
        sys.stdout.write(text)
    else:
        sys.stdout.write(text + "\n")
    sys.stdout.flush()


def launch(arguments: Sequence[str], ranks: int, run_dir: Path) -> int:
    """Runs ``python -m trainer ARGUMENTS`` on ``ranks`` ranks and returns the run's exit code."""
    log = Path(tempfile.mkstemp(prefix="zero-grpo-", suffix=".log")[1])
    environment = os.environ | {WRAPPED: "1", "PYTHONUNBUFFERED": "1"}
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    # A session of its own, so that all of it can be ended at once and nothing else is.
    process = subprocess.Popen(
        _command(arguments, ranks),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    asked = _forward_signals(process)
    said: list[str] = []
    reader = threading.Thread(target=_sort, args=(process, log, said), daemon=True)
    reader.start()
    code = process.wait()
    _end_group(process, reader)
    if asked:
        code = ASKED_TO_END[signal.Signals(asked[0])]
    if code in (0, 2, 3, 5, 75, 130) and (said or code == 0):
        _keep_log(log, run_dir, code)
        return code
    sys.stdout.write(f"a rank ended with code {code}; what all ranks and the launcher printed: {log}\n")
    return code if code in (2, 3, 5, 75, 130) else 4


def _command(arguments: Sequence[str], ranks: int) -> list[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(ranks), "--master_port", str(port)]
    return [*command, "--module", "trainer", *arguments]


def _sort(process: subprocess.Popen[str], log: Path, said: list[str]) -> None:
    """What rank 0 says to the terminal, the rest to the log, until nobody writes any more."""
    assert process.stdout is not None
    with log.open("w", encoding="utf-8") as file:
        for line in process.stdout:
            if line.startswith(MARK):
                said[:] = [line]
                sys.stdout.write(line[1:])
                sys.stdout.flush()
            else:
                file.write(line)
                file.flush()


def _keep_log(log: Path, run_dir: Path, code: int) -> None:
    """Beside the run's records, since it holds what reward functions printed; a refused run has none."""
    if code != 2 and run_dir.is_dir():
        log.chmod(0o644)
        shutil.move(log, run_dir / "launcher.log")
    else:
        log.unlink()


def _forward_signals(process: subprocess.Popen[str]) -> list[int]:
    """Ctrl-C and SIGTERM go to all that was started; who asks again, or waits too long, gets SIGKILL."""
    asked: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        _signal(process, signal.SIGKILL if asked else signal.Signals(number))
        asked.append(number)

    for number in ASKED_TO_END:
        signal.signal(number, forward)
    return asked


def _end_group(process: subprocess.Popen[str], reader: threading.Thread) -> None:
    """The launcher has ended: a while for its ranks to do so, then SIGKILL for what is left of the session."""
    deadline = time.monotonic() + SECONDS_TO_END
    # Whichever shows first: a process that nobody reaps stays in its group, but holds no pipe open.
    while reader.is_alive() and _signal(process, 0) and time.monotonic() < deadline:
        time.sleep(0.1)
    _signal(process, signal.SIGKILL)
    reader.join(timeout=5)


def _signal(process: subprocess.Popen[str], number: int) -> bool:
    """Whether there was anybody left to signal."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return False
    return True
