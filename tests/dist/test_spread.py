"""Two ranks: who trains a group, and whether one without a gradient is computed, changes no update and no record."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.dist.launch import run_ranks
from tests.dist.spread import CELLS, LR, STEPS, write_steps
from tests.tiny_run import OF_THE_MACHINE, write_run

OVER_WHAT_IS_COMPUTED = ("entropy", "sampling_logp_gap", "surprise")
WITHOUT_KL = [name for name in CELLS if not name.startswith("KL")]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What both ranks found, by cell."""
    folder = write_run(tmp_path_factory.mktemp("run"))
    write_steps(folder)
    results = folder / "results.json"
    worker = str(Path(__file__).with_name("spread.py"))
    for rank in run_ranks([worker, str(folder), str(results)], 2, 29707, TORCH_DISTRIBUTED_DEBUG="OFF"):
        assert rank.code == 0, rank.output[-3000:]
    return json.loads(results.read_text())


Cells = dict[str, list[dict[str, Any]]]


@pytest.mark.parametrize("cell", CELLS)
def test_the_update_does_not_depend_on_who_trains_a_group_nor_on_the_skip(found: Cells, cell: str) -> None:
    for rank in found[cell]:
        assert min(rank["moved"]) > 1e-4, "weight decay and momentum act in every step"
        assert max(rank["apart"]) < 1e-3 * LR
        assert rank["usual"]["coefficient"] == pytest.approx(rank["plain"]["coefficient"], rel=1e-6)
        if cell in WITHOUT_KL:
            assert rank["apart"][:2] == [0, 0], "a first step of flat groups alone"


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("name", ["usual", "plain"])
def test_ranks_run_as_many_passes(found: Cells, cell: str, name: str) -> None:
    one, other = ([len(passes) for passes in rank[name]["tokens"]] for rank in found[cell])
    assert one == other


@pytest.mark.parametrize("cell", WITHOUT_KL)
def test_a_rank_with_nothing_left_runs_fillers(found: Cells, cell: str) -> None:
    """The groups of the first and third step are all flat; of the last step one is not, on one rank."""
    ranks = [rank["usual"]["tokens"] for rank in found[cell]]
    updates = CELLS[cell].get("grpo.updates_per_rollout", 1)
    assert [(rank[0], rank[2]) for rank in ranks] == [([1] * updates, [1] * updates)] * 2
    least, most = sorted(sum(rank[3]) for rank in ranks)
    assert least == len(ranks[0][3]) < most


def test_the_fullest_rank_has_less_to_do(found: Cells) -> None:
    usual, plain = ([rank[name]["tokens"] for rank in found["KL in the loss"]] for name in ("usual", "plain"))
    ours, dealt = ([[sum(rank[number]) for rank in of] for number in range(STEPS)] for of in (usual, plain))
    assert [sum(loads) for loads in ours] == [sum(loads) for loads in dealt]
    assert sum(map(max, ours)) < 0.95 * sum(map(max, dealt)), (ours, dealt)
    assert all(max(loads) / sum(loads) < 0.55 for loads in ours), ours


@pytest.mark.parametrize("cell", CELLS)
def test_records_and_metrics_are_the_same(found: Cells, cell: str) -> None:
    left_out = (*OF_THE_MACHINE, "kl_rank", "clip_fraction", *(OVER_WHAT_IS_COMPUTED if cell in WITHOUT_KL else ()))
    for number, rank in enumerate(found[cell]):
        usual, plain = rank["usual"], rank["plain"]
        every = (itertools.chain.from_iterable(one["rows"]) for one in (usual, plain))
        for mine, its in zip(*every, strict=True):
            assert mine["group"] % 2 == number, "the records stay with the rank that sampled"
            assert mine["advantage"] == pytest.approx(its["advantage"], rel=1e-4, abs=1e-6)
            assert mine | {"advantage": 0} == its | {"advantage": 0}
        for mine, its in zip(usual["metrics"], plain["metrics"], strict=True):
            kept = {name: value for name, value in mine.items() if not name.startswith(left_out)}
            assert kept == pytest.approx({name: its[name] for name in kept}, rel=2e-5, abs=1e-6)
            assert {"loss", "grad_norm", "reward_mean", "zero_std_fraction"} <= set(kept)
