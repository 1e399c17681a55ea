"""Bytes and calls of every collective of a step, counted on gloo ranks, are those of the formulas in tools/comm.py."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.dist.comm import MICRO
from tests.dist.launch import run_ranks
from tests.tiny_run import write_run
from tools.comm import Step, calls, payloads

HIDDEN = 32
"""Of the tiny model."""
WORKER = str(Path(__file__).with_name("comm.py"))
SMALL = {"forward broadcast": 1000, "step all_reduce": 100, "sums all_reduce": 2000}
"""What else there is, and never more bytes of it than this, on any number of ranks."""


def counted(folder: Path, ranks: int, *more: str) -> dict[str, dict[str, Any]]:
    write_run(folder)
    results = folder / "results.json"
    for rank in run_ranks([WORKER, str(folder), str(results), *more], ranks, 29711, TORCH_DISTRIBUTED_DEBUG="OFF"):
        assert rank.code == 0, rank.output[-3000:]
    return json.loads(results.read_text())


def compared(name: str, cell: dict[str, Any], ranks: int) -> dict[str, list[float]]:
    """Part of a step -> bytes counted and by formula, calls counted and by formula: equal, but for adapters under stage
    3, whose formula is a bound, and calls under stage 3, of which it is one."""
    stage, r, dtype, *_ = name.split()
    step = Step(
        int(stage),
        ranks,
        cell["weights"],
        cell["trained"],
        itemsize={"fp32": 4, "bf16": 2}[dtype],
        micro=MICRO,
        # With LoRA the reference is the policy with its adapter off: passes of its own.
        forwards=MICRO if r != "0" else 0,
        head=cell["head"],
        persistent=cell["persistent"],
        recomputed=cell["recomputed"],
        modules=cell["modules"],
        recomputed_modules=cell["recomputed_modules"],
        bucket=HIDDEN**2 if stage == "3" else 50_000_000,
    )
    told = {part: size for part, (_, size) in cell["collectives"].items()}
    found, most = {}, calls(step)
    for (part, kind), expected in payloads(step).items():
        if ranks == 1 and kind == "all_gather":  # nothing to gather
            assert f"{part} {kind}" not in told
            continue
        size = told.pop(f"{part} {kind}")
        least = 0.7 if stage == "3" and r != "0" and part in ("forward", "backward") and kind == "all_gather" else 1
        assert least * expected <= size <= expected, (name, ranks, part, kind, size, expected)
        many, bound = cell["collectives"][f"{part} {kind}"][0], most[part, kind]
        by_module = stage == "3" and r == "0" and part in ("forward", "backward") and kind == "all_gather"
        assert many == bound if stage != "3" or by_module else many <= bound, (name, ranks, part, kind, many, bound)
        found[f"{part} {kind}"] = [size, expected, many, bound]
    # What ranks tell each other grows with the step's completions, which is with the ranks here.
    objects = told.pop("objects all_gather")
    assert objects < 1000 + 400 * cell["completions"], objects
    found["objects all_gather, at most"] = [objects, 1000 + 400 * cell["completions"]]
    assert {part: size for part, size in told.items() if size > SMALL[part]} == {}
    return found


def test_bytes_of_a_step_are_those_of_the_formulas(tmp_path: Path) -> None:
    for name, cell in counted(tmp_path, 2, "quick").items():
        assert len(compared(name, cell, 2)) >= 3


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_bytes_of_a_step_on_1_2_and_4_ranks(tmp_path: Path, results: Callable[[str, dict[str, Any]], None]) -> None:
    found = {}
    for ranks in (1, 2, 4):
        (tmp_path / str(ranks)).mkdir()
        cells = counted(tmp_path / str(ranks), ranks)
        found[f"{ranks} ranks"] = {name: compared(name, cell, ranks) for name, cell in cells.items()}
    results("comm", {"bytes counted and by formula, calls counted and by formula": found})
