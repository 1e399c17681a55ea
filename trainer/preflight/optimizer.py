"""What the optimizer needs of this machine: tools to compile DeepSpeed's CPU Adam, or bitsandbytes."""

import os
import shlex
import shutil
import sys
import sysconfig
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch.utils.cpp_extension import get_default_build_root

from trainer.config import RunConfig
from trainer.errors import Refused
from trainer.plan.settings import zero_of

STALE_SECONDS = 15 * 60.0
"""The build takes a minute or two."""


def check_optimizer(config: RunConfig, deepspeed: dict[str, Any]) -> None:
    """Refused before the weights are read, where the optimizer could not be made after."""
    if config.optim.name == "adamw8bit" and find_spec("bitsandbytes") is None:
        raise Refused(
            'optim.name = "adamw8bit" needs the package bitsandbytes, which is not installed. '
            'Fix: pip install bitsandbytes, or optim.name = "adamw".'
        )
    if not zero_of(deepspeed["zero_optimization"]).offload_optimizer:
        return
    name = config.engine.deepspeed
    instead = (
        f'engine.deepspeed = "{name.removesuffix("-offload")}", which keeps the optimizer on the GPU'
        if name.endswith("-offload")
        else f"take zero_optimization.offload_optimizer out of {name}"
    )
    builds = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    _refuse_stale_lock(builds)
    if missing := list(_missing_tools(builds)):
        raise Refused(
            f'engine.deepspeed = "{name}" offloads the optimizer, whose CPU Adam is compiled at the first use, and '
            f"this machine lacks {', '.join(missing)}. Fix: install that, or {instead}."
        )


def _refuse_stale_lock(builds: Path) -> None:
    """A build that was killed has left its lock: torch would wait for its release for ever."""
    for lock in (*builds.glob("cpu_adam/lock"), *builds.glob("*/cpu_adam/lock")):
        age = time.time() - lock.stat().st_mtime
        if age > STALE_SECONDS:
            raise Refused(
                f"engine.deepspeed asks for optimizer offload, but the build of its CPU Adam is locked by {lock}, "
                f"{age / 60:.0f} minutes old: a build that was killed leaves it behind, and every later one waits "
                "for it for ever. "
                f"Fix: rm {lock} (when no other run is compiling just now)."
            )


def _missing_tools(builds: Path) -> Iterator[str]:
    """In words, with what installs each. torch asks ninja also whether an earlier build is still good."""
    spec = find_spec("deepspeed")  # which does not import it
    if spec and any(list(Path(at).glob("ops/adam/cpu_adam_op*.so")) for at in spec.submodule_search_locations or ()):
        return  # compiled when it was installed
    if not shutil.which("ninja"):
        beside = Path(sys.executable).with_name("ninja")
        yield f"ninja on its PATH ({f'it is {beside}' if beside.is_file() else 'pip install ninja'})"
    if any(builds.glob("cpu_adam/cpu_adam.so")) or any(builds.glob("*/cpu_adam/cpu_adam.so")):
        return
    compiler = shlex.split(os.environ.get("CXX", "c++"))[0]
    if not shutil.which(compiler):
        yield f"a C++ compiler ({compiler}; apt install g++)"
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.is_file():
        yield f"Python's headers ({header}; apt install python3-dev)"
