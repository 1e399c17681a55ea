"""The manifest of a checkpoint: what it holds, bit for bit, and of which run it is.

A folder without a valid manifest is no checkpoint. Truncation, a flipped bit and a file that is gone are found by size
and SHA-256 before anything is loaded, and so are pickles that cannot be read, or name more than DeepSpeed's own three
classes.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from trainer import heartbeat
from trainer.checkpoint.pickles import opened
from trainer.errors import NoCheckpoint
from trainer.outside import read as read_json

Check = Literal["full", "size"]
"""``checkpoint.verify``."""

NAME = "MANIFEST.json"
FORMAT = 3


@dataclass(frozen=True)
class Facts:
    """What a run must have in common with a checkpoint to go on from it."""

    world_size: int
    zero_stage: int
    dtype: str
    config: dict[str, Any]
    """The run file, resolved."""
    sources: dict[str, str]
    """Key of the run file -> SHA-256 of what it stood for: base weights, prompts, reward files."""
    trained: dict[str, list[int]]
    """Name -> shape of every trained weight."""
    versions: dict[str, str | None]
    layout: dict[str, Any] = field(default_factory=dict)
    """Settings of DeepSpeed's that decide where a number lies in a shard."""


@dataclass(frozen=True)
class Manifest:
    step: int
    run_id: str
    facts: Facts
    files: dict[str, tuple[int, str]]
    """Path inside the folder -> bytes, SHA-256."""


SHAPE = TypeAdapter(Manifest)


def file_sha256(path: Path) -> str:
    """With a beat for every piece: a shard may take longer than a rank may be silent."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
            heartbeat.beat()
    return digest.hexdigest()


def listed(folder: Path) -> list[str]:
    """Every file of a checkpoint but the manifest, in one order on all ranks.

    NoCheckpoint for what is neither file nor folder: DeepSpeed would follow a link to a pickle that nobody looked into.
    """
    files = []
    for path in folder.rglob("*"):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise NoCheckpoint(
                f"{path}: a link or a device, expected files and folders alone. Fix: copy the whole folder."
            )
        if path.is_file():
            files.append(path.relative_to(folder).as_posix())
    return sorted(name for name in files if name != NAME)


def measured(folder: Path, name: str) -> tuple[int, str]:
    """Size and hash of a file, synced first, so that a power cut cannot take it back."""
    path = folder / name
    sync(path)
    return path.stat().st_size, file_sha256(path)


def sync(path: Path) -> None:
    """A file's contents, or a folder's list of names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write(folder: Path, manifest: Manifest) -> None:
    """The last file of a checkpoint."""
    record: dict[str, Any] = {"format": FORMAT, **asdict(manifest)}
    record["sha256"] = _own_hash(record)
    path = folder / NAME
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    sync(path)


def read(folder: Path) -> Manifest:
    """Raises NoCheckpoint, in words, unless the folder holds a whole manifest of this format."""
    path = folder / NAME
    if not folder.is_dir():
        raise NoCheckpoint(f"{folder}: no such folder")
    try:
        record = read_json(path)
        own = record.pop("sha256")
    except FileNotFoundError:
        raise NoCheckpoint(f"{folder}: no {NAME}: it is no checkpoint, or was not saved to its end") from None
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise NoCheckpoint(f"{path}: cannot be read ({type(error).__name__}: {error})") from error
    if record.get("format") != FORMAT:
        raise NoCheckpoint(f"{path}: format {record.get('format')}, this version reads {FORMAT}")
    if own != _own_hash(record):
        raise NoCheckpoint(f"{path}: it does not have the sha256 that it states: changed or damaged")
    try:
        return SHAPE.validate_python(record)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise NoCheckpoint(f"{path}: {where}: {first['msg']}: not what this version writes") from error


def verify(folder: Path, check: Check = "full") -> Manifest:
    """The manifest of a checkpoint whose every file is as it was saved. Raises NoCheckpoint naming file and difference.

    "full" reads all of it, at the speed of the disk (SHA-256 takes 1.7 GiB/s on one core); "size" only what the pickles
    hold beside tensors.
    """
    try:
        return _verified(folder, check)
    except OSError as error:
        raise NoCheckpoint(f"{error.filename or folder}: cannot be read ({error.strerror})") from error


def _verified(folder: Path, check: Check) -> Manifest:
    manifest, present = read(folder), set(listed(folder))
    for name, (size, sha256) in manifest.files.items():
        path = folder / name
        if name not in present:  # a path that leads out of the folder is none of its files either
            raise NoCheckpoint(f"{path}: missing")
        if (found := path.stat().st_size) != size:
            raise NoCheckpoint(f"{path}: {found} bytes, saved were {size}")
        if check == "full" and (hashed := file_sha256(path)) != sha256:
            raise NoCheckpoint(f"{path}: sha256 {hashed[:12]}…, saved was {sha256[:12]}…: damaged")
    for name in sorted(present):
        if name not in manifest.files:
            raise NoCheckpoint(f"{folder / name}: not a file of this checkpoint")
        if name.endswith(".pt"):
            opened(folder / name)
    return manifest


def _own_hash(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
