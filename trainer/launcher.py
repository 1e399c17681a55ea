"""``zero-grpo train ... --gpus N``: several ranks on this machine, through the deepspeed launcher.

The launcher's own lines and every rank's stray output go to a log; the terminal shows what rank 0 says. Nothing that was
started outlives this process.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

MARK = "\x1e"
"""Rank 0 begins each line meant for the user with it (ASCII record separator), when ``WRAPPED`` is set."""
WRAPPED = "ZERO_GRPO_WRAPPED"


def say(text: str) -> None:
    """Prints for the user, from rank 0, also through the launcher's pipe."""
    if os.environ.get(WRAPPED):
        text = "".join(f"{MARK}{line}\n" for line in text.split("\n"))
        sys.stdout.write(text)
    else:
        sys.stdout.write(text + "\n")
    sys.stdout.flush()


def launch(arguments: Sequence[str], ranks: int) -> int:
    """Runs ``python -m trainer ARGUMENTS`` on ``ranks`` ranks and returns the run's exit code."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(ranks), "--master_port", str(port)]
    command += ["--module", "trainer", *arguments]
    log = Path(tempfile.mkstemp(prefix="zero-grpo-", suffix=".log")[1])
    environment = os.environ | {WRAPPED: "1", "PYTHONUNBUFFERED": "1"}
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    # A session of its own, so that all of it can be ended at once and nothing else is.
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True
    )
    said = False
    interrupted = False
    try:
        assert process.stdout is not None
        with log.open("w", encoding="utf-8") as file:
            for line in process.stdout:
                if line.startswith(MARK):
                    said = True
                    sys.stdout.write(line[1:])
                    sys.stdout.flush()
                else:
                    file.write(line)
                    file.flush()
    except KeyboardInterrupt:
        interrupted = True
    finally:
        code = _end(process, interrupted=interrupted)
    if interrupted:
        return 130
    if code not in (0, 2, 3, 5, 75, 130):
        sys.stdout.write(f"a rank ended with code {code}; what all ranks and the launcher printed: {log}\n")
        return 4
    if code == 0 or said:
        log.unlink()
    return code


def _end(process: subprocess.Popen[str], *, interrupted: bool) -> int:
    """Waits for the launcher, then ends what is left of its session."""
    if interrupted:
        _signal(process, signal.SIGINT)
    try:
        code = process.wait(timeout=30 if interrupted else None)
    except subprocess.TimeoutExpired:
        code = 130
    _signal(process, signal.SIGKILL)
    return code


def _signal(process: subprocess.Popen[str], number: signal.Signals) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return
