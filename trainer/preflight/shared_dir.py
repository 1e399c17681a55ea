"""Whether run.dir is one folder for all hosts: rank 0 alone writes there, and a resumed run is read by every rank."""

import os
import secrets
import socket
import time
from pathlib import Path

from trainer.errors import Refused
from trainer.world import World

SECONDS_TO_APPEAR = 3.0
"""A file that another host has just written may take a while on a network file system."""


def check_shared(folder: Path, world: World) -> None:
    """Refused, on every rank, when a file that rank 0 writes into ``folder`` is not there for all. Leaves nothing."""
    if world.size == 1:
        return
    made: list[Path] = []
    name, error = "", None
    if world.is_main:
        name = f".shared-{secrets.token_hex(8)}"
        made = [path for path in (folder, *folder.absolute().parents) if not path.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
        except OSError as problem:
            error = Refused(
                f"run.dir: cannot write into {folder}: {problem.strerror}. Fix: set run.dir to a path you can write."
            )
    world.agree(error)
    name = world.gather_objects(name)[0]
    found = world.gather_objects((socket.gethostname(), _appears(folder / name)))
    if world.is_main:
        (folder / name).unlink()
        for empty in made:
            empty.rmdir()
    blind = sorted({host for host, sees in found if not sees})
    if blind:
        raise Refused(
            f"run.dir: {folder.absolute()} on {found[0][0]} is not the folder of that name on {', '.join(blind)}: "
            "what is written on one does not appear on the other. Fix: put run.dir on a file system that all share."
        )


def _appears(path: Path) -> bool:
    deadline = time.monotonic() + SECONDS_TO_APPEAR
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
        if path.parent.is_dir():
            os.listdir(path.parent)  # makes a network file system look again
    return True
