"""Runs on every host before the ranks do: fed through ssh to its Python, so it needs the standard library alone."""

import base64
import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterable
from typing import Any

SIOCGIFADDR = 0x8915
"""Linux: the address of an interface."""

MODEL_FILES = (".json", ".jinja", ".model", ".txt", ".safetensors", ".bin", ".gguf")

SECONDS_TO_APPEAR = 3.0
"""A file that another host has just written may take a while on a network file system."""


def look(ask: dict[str, Any]) -> dict[str, Any]:
    """``missing``: those of ``paths`` that are not here. ``address``: of this host, as ``peer`` would reach it.

    ``port``: the one asked for, 0 for any; None when it is in use. ``machine``: which it is; "" where nothing tells.
    ``versions`` and ``facts``: where asked for.
    """
    deadline = time.monotonic() + SECONDS_TO_APPEAR
    while missing := [path for path in ask["paths"] if not os.path.exists(path)]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.2)
    address = _address(ask["peer"])
    answer: dict[str, Any] = {"missing": missing, "address": address, "port": _port(ask["port"]), "machine": _machine()}
    if "versions" in ask:
        answer["versions"] = _versions(**ask["versions"])
    if "facts" in ask:
        answer["facts"] = _facts(address, **ask["facts"])
    return answer


def _machine() -> str:
    """Its boot, and what a container has of its own: the network, and the numbers of processes."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            return " ".join((boot.read().strip(), *(os.readlink(f"/proc/self/ns/{name}") for name in ("net", "pid"))))
    except OSError:
        return ""


def _versions(*, packages: Iterable[str], root: str, model: str = "") -> dict[str, str]:
    """Of Python, the packages and the project; "" of a revision that nothing tells. ``model``: a folder to hash."""
    versions = {"Python": platform.python_version()}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "none"
    commit, changed = (
        _said("git", "-C", root, "rev-parse", "--short", "HEAD"),
        _said("git", "-C", root, "status", "-suno"),
    )
    versions["revision"] = commit and commit + (" and changes" if changed else "")
    return versions | ({"model": _hash(model)} if model else {})


def _facts(address: str, *, folder: str) -> dict[str, Any]:
    """Bytes and seconds since 1970; None of what is not there."""
    cards = _said("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader")
    return {
        "gpus": cards.splitlines(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": _available_memory(),
        "disk": shutil.disk_usage(folder).free if os.path.isdir(folder) else None,
        "shared": shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else None,
        "interface": _interface(address),
        "clock": time.time(),
    }


def _hash(folder: str) -> str:
    """Of a model's files: name, size and first MiB of each. It holds settings, tokenizer and the headers of the
    weights whole, of the weights a piece."""
    found = hashlib.sha256()
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else []:
        path = os.path.join(folder, name)
        if name.endswith(MODEL_FILES) and os.path.isfile(path):
            with open(path, "rb") as file:
                found.update(f"{name} {os.path.getsize(path)}\n".encode() + file.read(2**20))
    return found.hexdigest()[:12]


def _available_memory() -> int:
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def _said(*command: str) -> str:
    """What a program prints; nothing where it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _interface(address: str) -> str:
    """The one that has this IPv4 address: what GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME would name."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
            except OSError:  # an interface without an IPv4 address
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return ""


def _address(peer: str) -> str:
    """The one of the interface that leads to ``peer``; else the one that ssh came in by."""
    try:
        family, _, _, _, target = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing
            address = str(probe.getsockname()[0])
        if address != "::1" and not address.startswith("127."):
            return address
    except OSError:
        pass
    return (os.environ.get("SSH_CONNECTION", "").split() or ["", "", "127.0.0.1"])[2]


def _port(wanted: int) -> int | None:
    with socket.socket() as probe:
        # As the ranks' store binds it: a port whose last connections are still closing is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", wanted))
        except OSError:
            return None
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.stdout.write(json.dumps(look(json.loads(base64.urlsafe_b64decode(sys.argv[1])))) + "\n")
