"""One small real run in a process of its own, with functions of the trainer replaced beforehand.

    record = run_once("lr x 100", {"optim.lr": 0.1}, [], steps=60, folder=Path(".cache/lab/lr"))

A run is forked from a process that has imported everything, so it costs its steps; what it replaces ends with it. The
product has no switches for faults: each is a function that is put in the place of one of the trainer's.
"""

import contextlib
import ctypes
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / ".cache" / "demo-model"
RECIPE = ROOT / "launch" / "recipes" / "demo.toml"
LIMIT = 900
"""Seconds after which a run is given up."""
ASKING = ("live.py", "parts.py", "probes_model.py", "probes_rollout.py", "probes_step.py")
PROBES = hashlib.sha256(b"".join((ROOT / "trainer" / "doctor" / name).read_bytes() for name in ASKING)).hexdigest()[:12]
"""Of the code that asks, as this process has it. How answers are ranked is judged anew."""
JUDGES = {"lab_judge.py", "lab_peers.py", "lab_table.py"}
TRAINED_BY = hashlib.sha256(
    b"".join(
        file.read_bytes()
        for file in sorted([*(ROOT / "trainer").rglob("*.py"), *(ROOT / "tools").glob("lab_*.py")])
        if file.name not in JUDGES and file.parent.name != "doctor"
    )
).hexdigest()[:12]
"""Of the code that trains."""
PR_SET_PDEATHSIG = 1
"""Linux: a child goes with its parent."""

SETTINGS: dict[str, Any] = {
    "model.name_or_path": str(MODEL),
    "data.source": str(MODEL / "train.jsonl"),
    "data.eval_source": "",
    "engine.device": "cpu",
    "rollout.prompts_per_step": 8,
    "rollout.max_new_tokens": 16,
    "checkpoint.every": 0,
    "log.samples_every": 0,
    # A lab wants to see what comes after the alarm.
    "watch.on_garble": "warn",
}
"""Of every run, over those of the demo."""

Replace = Callable[[Any, str, Any], None]
"""``setattr``, or one that can be undone."""
Patch = Callable[[Replace], None]
"""Puts one function in the place of another."""


def run_once(
    name: str,
    settings: Mapping[str, Any],
    patches: Sequence[Patch],
    steps: int,
    folder: Path,
    *,
    ranks: int = 1,
    doctor: bool = True,
) -> dict[str, Any]:
    """Trains, then (``doctor``) asks the same parts. Returns how it ended; ``folder/run`` is its run directory.

    ``settings``: of the run file by dotted key, over the demo's and ``SETTINGS``. ``folder`` holds the record as well:
    a run that is there already, with the same settings and by the same code, is not repeated; the doctor is asked again
    when it has changed.
    """
    asked = {
        "name": name,
        "settings": dict(settings),
        "patches": [patch.__name__ for patch in patches],
        "steps": steps,
        "ranks": ranks,
        "code": TRAINED_BY,
    }
    file = folder / "record.json"
    known = json.loads(file.read_text()) if file.is_file() else {}
    if any(known.get(key) != value for key, value in asked.items()) or known["state"] == "crashed":
        known = asked | _train(asked, patches, folder)
        file.write_text(json.dumps(known, indent=1) + "\n")
    if doctor and known.get("asked_by") != PROBES and known["state"] != "crashed":
        known |= {"doctor": _ask(patches, folder), "asked_by": PROBES}
        file.write_text(json.dumps(known, indent=1) + "\n")
    return known


def run_file(settings: Mapping[str, Any], steps: int, run_dir: Path) -> str:
    """The demo's, with these settings laid over it."""
    tree = tomllib.loads(RECIPE.read_text())
    for key, value in (SETTINGS | {"run.steps": steps, "run.dir": str(run_dir)} | dict(settings)).items():
        *tables, last = key.split(".")
        table = tree
        for part in tables:
            table = table.setdefault(part, {})
        table[last] = value
    return tomli_w.dumps(tree)


def commit() -> str:
    """Of the working tree, and whether it is dirty."""
    asked = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()


def import_everything() -> None:
    """What a child would import, once in the parent; nothing here computes, so that forking is safe."""
    from trainer.quiet import quiet_libraries

    quiet_libraries()
    import deepspeed  # noqa: F401

    import trainer.doctor.live
    import trainer.run  # noqa: F401


def _train(asked: Mapping[str, Any], patches: Sequence[Patch], folder: Path) -> dict[str, Any]:
    run_dir, end = folder.resolve() / "run", folder.resolve() / "end.json"
    _clear(folder)
    (folder / "run.toml").write_text(run_file(asked["settings"], asked["steps"], run_dir))
    started = time.perf_counter()

    def work() -> None:
        from trainer.config import load
        from trainer.errors import Refused, RunEnd
        from trainer.run import Resume, train_run

        for patch in patches:
            patch(setattr)
        found = {"state": "done", "reason": ""}
        try:
            train_run(load("run.toml"), Path.cwd(), Resume())
        except RunEnd as ended:
            found = {"state": "refused" if isinstance(ended, Refused) else "stopped", "reason": str(ended)}
        if os.environ["RANK"] == "0":
            end.write_text(json.dumps(found))

    _in_children(work, folder, "train.log", asked["ranks"])
    found = json.loads(end.read_text()) if end.is_file() else {"state": "crashed", "reason": _tail(folder)}
    return found | {"seconds": round(time.perf_counter() - started, 1), "commit": commit()}


def _ask(patches: Sequence[Patch], folder: Path) -> dict[str, Any]:
    """``zero-grpo doctor run.toml``, of the trainer as it is with the patches: the record of a diagnosis."""
    answer = folder.resolve() / "doctor.json"
    answer.unlink(missing_ok=True)

    def work() -> None:
        from trainer.doctor.live import diagnose_run_file

        for patch in patches:
            patch(setattr)
        answer.write_text(json.dumps(diagnose_run_file("run.toml", []).record(), default=str))

    _in_children(work, folder, "doctor.log", 1)
    return json.loads(answer.read_text()) if answer.is_file() else {"crashed": _tail(folder, "doctor.log")}


def _in_children(work: Callable[[], None], folder: Path, log: str, ranks: int) -> None:
    """``work()`` in one process a rank, in ``folder``, what they say in ``log``."""
    import_everything()
    sys.stdout.flush()
    sys.stderr.flush()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = []
    for rank in range(ranks):
        if child := os.fork():
            children.append(child)
            continue
        code = 70
        try:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.alarm(LIMIT)
            os.chdir(folder)
            place = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(place, 1)
            os.dup2(place, 2)
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)
    for child in children:
        os.waitpid(child, 0)


def _clear(folder: Path) -> None:
    """Of what an earlier try has left."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _tail(folder: Path, log: str = "train.log") -> str:
    text = (folder / log).read_text(errors="replace") if (folder / log).is_file() else ""
    return "\n".join(text.splitlines()[-12:])
