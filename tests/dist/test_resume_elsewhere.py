"""A run that goes on on another number of ranks, or in another ZeRO stage, is the run that was not stopped."""

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.dist.launch import run_ranks
from tests.tiny_run import write_run

TOLERANCE = 1e-5
"""In fp32, where ranks round sums in another order: of gradient norms, KL and entropy relative to themselves, and of
losses to the largest one of the run, since the policy's part of a loss is a sum of advantages, whose mean is 0."""

BF16 = {"loss": 1e-3, "grad_norm": 0.05, "entropy": 1e-4, "kl": 0.5}
"""As TOLERANCE, of bf16: a weight of the forward pass has 8 bits, the KL of the first steps few of them."""

Cell = dict[str, Any]
Found = dict[str, Any]


def launch(phase: str, cells: list[Cell], folder: Path, ranks: int, port: int) -> Found:
    """What each cell found, by its name."""
    (folder / f"{phase}.cells.json").write_text(json.dumps(cells))
    worker = str(Path(__file__).with_name("elsewhere.py"))
    for rank in run_ranks([worker, phase, str(folder)], ranks, port, timeout=1500):
        assert rank.code == 0, rank.output[-3000:]
    found = json.loads((folder / f"{phase}.json").read_text())
    return {cell["name"]: one for cell, one in zip(cells, found, strict=True)}


def cell(ranks: int, stage: int | str, r: int, dtype: str = "fp32", bits: int = 0, optim: str = "adamw") -> Cell:
    settings = {"stage": stage, "r": r, "dtype": dtype, "bits": bits, "optim": optim}
    return {
        "name": f"{ranks}x{stage}-r{r}-{dtype}-{bits}-{optim}",
        "ranks": ranks,
        "source": "",
        "without": "",
        **settings,
    }


def gone_on(source: Cell, ranks: int, stage: int | str) -> Cell:
    name = f"{source['name']}-on-{ranks}x{stage}"
    return source | {"name": name, "ranks": ranks, "stage": stage, "source": source["name"]}


def differences(one: Found, other: Found) -> dict[str, float]:
    """The largest of all steps, by metric."""
    found = {}
    for metric in ("loss", "grad_norm", "kl", "entropy"):
        mine, its = ([record["metrics"][metric] for record in records["records"]] for records in (one, other))
        scales = [max(map(abs, mine))] * len(mine) if metric == "loss" else mine
        found[metric] = max(abs(a - b) / scale for a, b, scale in zip(mine, its, scales, strict=True))
    return found


def compare(hop: Cell, saved: Found, resumed: Found) -> dict[str, float]:
    """Master weights, moments and steps bit for bit as they were saved, the weights of the forward pass too; then the
    same samples and losses. Returns the differences."""
    assert saved["held"] == resumed["held"] and len(saved["held"]) > 10, hop
    assert saved["weights"] == resumed["weights"], hop
    found = differences(saved, resumed)
    if hop["dtype"] == "fp32":
        assert [one["samples"] for one in saved["records"]] == [one["samples"] for one in resumed["records"]], hop
        assert max(found.values()) <= TOLERANCE, (hop, found)
    else:
        assert all(found[metric] <= most for metric, most in BF16.items()), (hop, found)
    return found


def test_3_2_a_run_goes_on_on_other_ranks_and_in_another_stage(tmp_path: Path) -> None:
    """1 to 2 ranks and 2 to 1, ZeRO 2 to 3, 3 to 2 and 0 to 2, full and LoRA, each for five steps."""
    write_run(tmp_path)
    alone, two = cell(1, 2, 4), [cell(2, 3, 0), cell(2, 0, 0)]
    hops = [gone_on(alone, 2, 3), gone_on(two[1], 2, 2), gone_on(two[0], 1, 2)]
    control = hops[1] | {"name": "control", "without": "exp_avg"}
    found = launch("alone", [alone], tmp_path, 1, 29731)
    found |= launch("two", [*two, *hops[:2], control], tmp_path, 2, 29733)
    found |= launch("again", hops[2:], tmp_path, 1, 29735)
    for hop in hops:
        compare(hop, found[hop["source"]], found[hop["name"]])
    # launch/README.md: 16T in stage 3; in stage 2 12T and 4T a rank.
    assert [found[hop["name"]]["bytes_read"] for hop in hops] == [16, 12 + 4 * 2, 12 + 4]
    source, without = found[control["source"]], found["control"]
    lost = {name for name, held in source["held"].items() if without["held"][name] != held}
    assert len(lost) == 1 and lost.pop().endswith(" exp_avg"), "of one weight a moment was not put back"
    assert max(differences(source, without).values()) > TOLERANCE
    notes = [" ".join(found[hop["name"]]["notes"]) for hop in hops]
    assert "resumed in ZeRO stage 3, saved in stage 2 resumed on 2 rank(s), saved with 1" in notes[0]
    assert "random generators of ranks from 1 on begin anew" in notes[0]
    assert "rank(s)" not in notes[1] and "resumed on 1 rank(s), saved with 2" in notes[2]


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_3_2_every_stage_to_every_stage(tmp_path: Path, results: Callable[[str, dict[str, Any]], None]) -> None:
    """Between 1 and 2 ranks all of them, full; some of LoRA, bf16, 4-bit, SGD, optimizer offload and 3 ranks, which
    divide no weight."""
    write_run(tmp_path)
    layouts = list(product((1, 2), range(4)))
    hops = [gone_on(cell(*one, 0), *other) for one, other in product(layouts, layouts) if one != other]
    for ranks, others in ((1, 2), (2, 1)):
        hops += [gone_on(cell(ranks, stage, 4), others, stage) for stage in range(4)]
    hops += [gone_on(cell(2, stage, 0, "bf16"), 1, (stage + 1) % 4) for stage in range(4)]
    hops += [gone_on(cell(2, stage, 0, "bf16"), 1, stage) for stage in range(4)]
    hops += [gone_on(cell(2, stage, 0), 3, other) for stage, other in ((2, 2), (3, 3), (1, 3))]
    hops += [gone_on(cell(3, stage, 0), 2, other) for stage, other in ((2, 2), (3, 3), (3, 1))]
    hops += [gone_on(cell(1, stage, 0, "bf16"), 2, (stage + 1) % 4) for stage in range(4)]
    offloads = [(2, "2-offload"), ("2-offload", "3-offload"), ("3-offload", 3)]
    hops += [gone_on(cell(2, one, 0), 1, other) for one, other in offloads]
    hops += [gone_on(cell(1, one, 0), 2, other) for one, other in offloads]
    hops += [gone_on(cell(2, 2, 4, "fp32", 4), 1, 3), gone_on(cell(2, 2, 0, optim="sgd"), 1, 3)]
    names = {hop["source"] for hop in hops}
    sources = {
        one["name"]: one
        for one in (
            *(cell(ranks, stage, r) for ranks in (1, 2, 3) for stage in range(4) for r in (0, 4)),
            *(cell(ranks, stage, 0, "bf16") for ranks in (1, 2) for stage in range(4)),
            *(cell(ranks, f"{stage}-offload", 0) for ranks in (1, 2) for stage in (2, 3)),
            cell(2, 2, 4, "fp32", 4),
            cell(2, 2, 0, optim="sgd"),
        )
    }
    found: Found = {}
    for number, (kind, ranks) in enumerate(product(("saved", "resumed"), (1, 2, 3))):
        cells = [sources[name] for name in sorted(names)] if kind == "saved" else hops
        mine = [one for one in cells if one["ranks"] == ranks]
        found |= launch(f"{kind}-{ranks}", mine, tmp_path, ranks, 29741 + 2 * number)
    rows = [{"hop": hop["name"]} | compare(hop, found[hop["source"]], found[hop["name"]]) for hop in hops]
    results("resume-elsewhere", {"tolerance": TOLERANCE, "tolerance_bf16": BF16, "hops": rows})
