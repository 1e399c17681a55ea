"""What a run ran on: versions, git, hosts, hardware. Never a secret: only the variables named here are recorded."""

import json
import os
import platform
import socket
import subprocess
import sys
from importlib.metadata import Distribution, PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = (
    "zero-grpo",
    "torch",
    "deepspeed",
    "transformers",
    "tokenizers",
    "peft",
    "datasets",
    "bitsandbytes",
)
RECORDED_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "GLOO_SOCKET_IFNAME",
    "HF_HUB_OFFLINE",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NCCL_DEBUG",
    "NCCL_IB_DISABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_SOCKET_IFNAME",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "RANK",
    "TOKENIZERS_PARALLELISM",
    "WORLD_SIZE",
)


def collect() -> dict[str, Any]:
    """A JSON-safe description of this process's surroundings; the caller gathers those of the other hosts."""
    return {
        "python": sys.version.split()[0],
        "packages": {name: installed_version(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        **git_state(Path.cwd()),
        **installed_from(),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cpu": {"model": cpu_model(), "cores": os.cpu_count()},
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "variables": {name: os.environ[name] for name in RECORDED_VARIABLES if name in os.environ},
    }


def installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def git_state(directory: Path) -> dict[str, Any]:
    """``git``: commit of the directory's checkout, and whether it has changes; ``git_absent``: why there is none."""
    try:
        commit = _git(directory, "rev-parse", "HEAD")
        return {"git": {"commit": commit, "dirty": bool(_git(directory, "status", "--porcelain"))}}
    except subprocess.CalledProcessError as error:
        return {"git_absent": f"{directory}: {error.stderr.strip()}"}
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"git_absent": str(error)}


def installed_from() -> dict[str, Any]:
    """``installed_from``: PEP 610's record of where this package came from, as URL and commit; an index leaves none."""
    try:
        record = Distribution.from_name("zero-grpo").read_text("direct_url.json")
    except PackageNotFoundError:
        return {}
    return {"installed_from": json.loads(record)} if record else {}


def _git(directory: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=directory, capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()


def cpu_model() -> str:
    """The name in /proc/cpuinfo; elsewhere the architecture."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
