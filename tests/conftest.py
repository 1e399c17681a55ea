"""Fixtures of all tests."""

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

RESULTS = Path(__file__).parent / "results"


@pytest.fixture
def results() -> Iterator[Callable[[str, dict[str, Any]], None]]:
    """Keeps what a long test measured as tests/results/NAME.json, with commit and duration."""
    start = time.time()

    def keep(name: str, measured: dict[str, Any]) -> None:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
        RESULTS.mkdir(exist_ok=True)
        content = {"commit": commit, "seconds": round(time.time() - start), **measured}
        (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")

    yield keep
