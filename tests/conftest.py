"""Fixtures of all tests."""

import gc
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

from tests.tiny_run import RUN_FILE, write_run
from trainer import interrupts
from trainer.world import World, connect, disconnect

RESULTS = Path(__file__).parent / "results"


class OneLaunchAtATime(LoadFileScheduling):
    """Among the workers of xdist: a file of unit tests has one worker, and so have all tests that start ranks together.

    Ranks wait half of the time, for one another and for what a test does to them, and unit tests use it. Two launches
    at a time would make both slow, and the margins of time-outs small.
    """

    def _split_scope(self, nodeid: str) -> str:
        return super()._split_scope(nodeid) if nodeid.startswith("tests/unit/") else "launches"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling:
    return OneLaunchAtATime(config, log)


def pytest_collection_finish() -> None:
    """The libraries' million objects are spared at every collection, and at every count of the tensors there are."""
    gc.freeze()


@pytest.fixture
def results() -> Iterator[Callable[[str, dict[str, Any]], None]]:
    """Keeps what a long test measured as tests/results/NAME.json, with commit and duration."""
    start = time.time()

    def keep(name: str, measured: dict[str, Any]) -> None:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=RESULTS.parent, capture_output=True, text=True, check=False
        ).stdout.strip()
        RESULTS.mkdir(exist_ok=True)
        content = {"commit": commit, "seconds": round(time.time() - start), **measured}
        (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")

    yield keep


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """A job of one rank, for the whole session: DeepSpeed cannot join a second one in the same process."""
    before = set(os.environ)
    joined = connect("cpu", timeout_seconds=60)
    # DeepSpeed insists on LOCAL_RANK; the others would make ranks of every process that a test starts.
    for name in set(os.environ) - before - {"LOCAL_RANK"}:
        del os.environ[name]
    yield joined
    disconnect()


@pytest.fixture
def in_this_process(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Commands run as a job of this one process, and leave its signals as they were."""
    monkeypatch.setattr("trainer.run.connect", lambda *_, **__: world)
    monkeypatch.setattr("trainer.run.disconnect", lambda: None)
    monkeypatch.setattr("trainer.interrupts._deferred", False)
    handlers = {number: signal.getsignal(number) for number in interrupts.KINDS}
    yield world
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def written_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"))


@pytest.fixture
def run_here(written_run: Path, tmp_path: Path, in_this_process: World, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that is right, in a folder of its own, where the command runs."""
    target = tmp_path / "run"
    shutil.copytree(written_run, target)
    (target / "run.toml").write_text(RUN_FILE)
    monkeypatch.chdir(target)
    return target
