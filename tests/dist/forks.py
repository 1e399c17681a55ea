"""Forks ranks. Importing torch, transformers and DeepSpeed costs a process seconds; here it is done once.

Usage: python -m tests.dist.forks. A line on stdin asks for a launch, {"arguments", "folder", "timeout", "ranks":
[{"environment", "output"}]}; the answer is a line with the exit codes. A rank is what ``python ARGUMENTS`` would be:
forked before any thread was started, with its own environment, arguments, folder and output. It imports the trainer
itself.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import sys
import time

import numpy
import torch

from trainer.quiet import quiet_libraries

LIBRARIES = (
    "bitsandbytes",
    "deepspeed",
    "peft",
    "torch._dynamo",
    "transformers.generation",
    "transformers.models.qwen2.modeling_qwen2",
)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    quiet_libraries()
    for name in LIBRARIES:
        importlib.import_module(name)
    # A thread would not be in the forks, nor would they get the locks that it holds.
    assert len(os.listdir("/proc/self/task")) == 1
    gc.freeze()
    for line in sys.stdin:
        launch = json.loads(line)
        pids = []
        for rank in launch["ranks"]:
            if pid := os.fork():
                pids.append(pid)
            else:
                become(launch["arguments"], launch["folder"], **rank)
                return
        deadline = time.monotonic() + launch["timeout"]
        print(json.dumps([ended(pid, deadline) for pid in pids]), file=answers, flush=True)


def become(arguments: list[str], folder: str | None, environment: dict[str, str], output: str) -> None:
    """Runs ``python ARGUMENTS`` in this process."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.clear()
    os.environ.update(environment)
    if folder:
        os.chdir(folder)
    # What a new process would find otherwise: the level was read at the import, and the forks' numbers are the same.
    torch.distributed.set_debug_level_from_env()
    numpy.random.seed()
    if arguments[0] == "-m":
        sys.argv, sys.path[0] = arguments[1:], os.getcwd()
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = arguments, os.path.dirname(arguments[0])
        runpy.run_path(arguments[0], run_name="__main__")


def ended(pid: int, deadline: float) -> int:
    """The exit code of a rank, which is killed when it outlives the deadline."""
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


if __name__ == "__main__":
    main()
