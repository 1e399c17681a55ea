"""A real sentence encoder: the reward's vectors are those of sentence-transformers, with and without it.
tools/embed.sh installs both."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tiny_rewards import write_encoder

ALLOWED = 1e-5
"""Largest difference of two numbers of a vector of length 1, and of two cosines."""
TEXTS = [
    "How do I cook noodles?",
    "  Boil water, then add the noodles and wait eight minutes.\n",
    "Quantum entanglement ties the states of two particles together.",
    "如何煮一碗好吃的牛肉面",
    "42",
    "noodles " * 700,
]
WITH, WITHOUT = "with sentence-transformers", "without it"


def spoken(mode: str, folders: list[Path], out: Path) -> dict[str, Any]:
    """What ``sentence_vectors.py`` finds in a process of its own, in which the package is there or is not."""
    installed = os.environ["ZERO_GRPO_EMBED"]
    path = [str(Path(__file__).parents[2]), *([installed] if mode != "ours" else [])]
    subprocess.run(
        [sys.executable, str(Path(__file__).with_name("sentence_vectors.py")), mode, str(out), json.dumps(TEXTS)]
        + [str(folder) for folder in folders],
        env=os.environ | {"PYTHONPATH": ":".join(path)},
        check=True,
        timeout=300,
    )
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.peer
@pytest.mark.timeout(900)
def test_vectors_and_cosines_are_those_of_sentence_transformers(
    tmp_path: Path, results: Callable[[str, dict[str, Any]], None]
) -> None:
    real = next(Path(os.environ["ZERO_GRPO_EMBED"]).rglob("modules.json")).parent
    tiny = [
        write_encoder(tmp_path / "bge-m3", window=64),
        write_encoder(tmp_path / "mean-dense", pooling="mean", dense=6, window=64),
    ]
    folders = [real, *tiny]
    theirs = spoken("theirs", folders, tmp_path / "theirs.json")
    gaps: dict[str, dict[str, float]] = {}
    for mode, name in [("ours", WITHOUT), ("ours-with", WITH)]:
        found = spoken(mode, folders, tmp_path / f"{mode}.json")
        for folder in folders:
            vectors, expected = (np.array(one[str(folder)]["vectors"]) for one in (found, theirs))
            scores, cosines = found[str(folder)]["scores"], (expected[:-1] * expected[1:]).sum(axis=1)
            gap = max(float(np.abs(vectors - expected).max()), float(np.abs(scores - cosines).max()))
            gaps.setdefault(folder.name, {})[name] = gap
            assert found[str(folder)]["type"] == (mode == "ours-with")
            assert gap <= ALLOWED, (folder.name, name, gap)
    noodles, answer, physics = np.array(theirs[str(real)]["vectors"])[:3]
    assert noodles @ answer > 0.5 > 0.2 > noodles @ physics  # it is a real one
    results(
        "peer-sentence-transformers", {"allowed": ALLOWED, "largest_difference": gaps, "version": theirs["version"]}
    )
