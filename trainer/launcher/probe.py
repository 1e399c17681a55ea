"""Runs on every host before the ranks do: fed through ssh to its Python, so it needs the standard library alone."""

import base64
import json
import os
import socket
import sys
import time
from typing import Any

SECONDS_TO_APPEAR = 3.0
"""A file that another host has just written may take a while on a network file system."""


def look(ask: dict[str, Any]) -> dict[str, Any]:
    """``missing``: those of ``paths`` that are not here. ``address``: of this host, as ``peer`` would reach it.

    ``port``: the one asked for, 0 for any; None when it is in use.
    """
    deadline = time.monotonic() + SECONDS_TO_APPEAR
    while missing := [path for path in ask["paths"] if not os.path.exists(path)]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.2)
    return {"missing": missing, "address": _address(ask["peer"]), "port": _port(ask["port"])}


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
