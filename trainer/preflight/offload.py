"""Optimizer offload needs DeepSpeed's CPU Adam, which is compiled at the first use."""

import os
import time
from pathlib import Path
from typing import Any

from torch.utils.cpp_extension import get_default_build_root

from trainer.errors import Refused

STALE_SECONDS = 15 * 60.0
"""The build takes a minute or two."""


def check_offload(deepspeed_config: dict[str, Any]) -> None:
    """Refused where a build that was killed has left its lock: torch would wait for its release for ever."""
    offload = deepspeed_config["zero_optimization"].get("offload_optimizer") or {}
    if offload.get("device", "none") == "none":
        return
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    for lock in (*root.glob("cpu_adam/lock"), *root.glob("*/cpu_adam/lock")):
        age = time.time() - lock.stat().st_mtime
        if age > STALE_SECONDS:
            raise Refused(
                f"engine.deepspeed asks for optimizer offload, but the build of its CPU Adam is locked by {lock}, "
                f"{age / 60:.0f} minutes old: a build that was killed leaves it behind, and every later one waits "
                "for it for ever. "
                f"Fix: rm {lock} (when no other run is compiling just now)."
            )
