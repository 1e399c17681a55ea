"""Faults that need two ranks: one launch runs the cells of faults.py, each test reads one. Rows: tests/FAULTS.md."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.dist.faults import RUN
from tests.dist.launch import run_ranks
from tests.tiny_run import ragged, repeatable, start, step, write_run
from trainer.output import Output
from trainer.world import World

STAGES = ("zero0", "zero1", "zero2", "zero3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_run(tmp_path_factory.mktemp("run"))
    ragged(folder)  # before the ranks would write it both
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What both ranks found, by cell."""
    worker = str(Path(__file__).with_name("faults.py"))
    results = folder / "results.json"
    # Every cell compares values, so that the comparison of shapes before each collective, half of the time, can go.
    for rank in run_ranks([worker, str(folder), str(results)], 2, 29706, TORCH_DISTRIBUTED_DEBUG="OFF"):
        assert rank.code == 0, rank.output[-3000:]
    cells = json.loads(results.read_text())
    for cell, ranks in cells.items():
        for number, rank in enumerate(ranks):
            assert "failed" not in rank, f"{cell}, rank {number}: {rank['failed']}"
    return cells


Cells = dict[str, list[dict[str, Any]]]


def test_b05_metrics_are_sums_over_counts_of_all_ranks(found: Cells) -> None:
    one, other = found["metrics_over_ranks"]
    assert one == other
    uneven, one_rank_alone, nothing = one["means"]
    assert uneven == {"kl": 6 / 16, "kl_max": 1.0}
    assert one_rank_alone == {"kl": 3 / 12, "kl_max": 0.0}
    assert "kl" not in nothing


def test_f21_a_flipped_bit_ends_all_ranks_and_nothing_is_saved(found: Cells) -> None:
    for kind in ("fp32 lora_A", "fp32 embed_tokens", "bf16 lora_A", "bf16 embed_tokens"):
        one, other = (rank[kind] for rank in found["a_flipped_bit"])
        assert one == other and one["healthy"]["kind"] == "went on" and not one["kept"]
        assert one["flipped"]["kind"] == "Stopped" and kind.split()[1] in one["flipped"]["message"]
        assert "on rank 0 (host " in one["flipped"]["message"] and ", 1 (host " in one["flipped"]["message"]
        assert ", of which one is wrong. Nothing of it is saved." in one["flipped"]["message"]


def test_a_rank_that_is_slow_three_times_in_a_row_is_told_once(found: Cells) -> None:
    one, other = found["a_slow_rank"]
    assert one == other and min(one["ratios"]) > 1.5
    (note,) = one["notes"]
    assert note.startswith("rank 1 (host ") and "in step 3, the 3. in a row, its rollout took" in note


def test_b12_b13_norm_and_weights_are_the_same_under_every_stage(found: Cells) -> None:
    one, other = found["stages_agree"]
    assert one["norms"] == other["norms"]
    for norms in one["norms"]:
        assert norms == pytest.approx(one["norms"][0], rel=1e-5)
    assert max(one["weights"]) < 1e-6 < 1e-2 < one["moved"]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_i5_a_gradient_that_is_infinite_on_one_rank_moves_none(found: Cells, stage: str, dtype: str) -> None:
    for rank in found["nonfinite_is_refused"]:
        cell = rank[f"{stage} {dtype}"]
        assert cell["moved by the refused step"] == 0
        assert cell["moved by the good step"] > 0 and cell["finite"]
        assert cell["has norm"] == [False, True]
        assert cell["note"].startswith("step 2: ") and "rank 1: loss" in cell["note"] and "rank 0" not in cell["note"]


def test_i5_too_many_refused_steps_end_all_ranks_alike(found: Cells) -> None:
    one, other = found["nonfinite_ends_all_ranks"]
    assert one == other
    assert one["kind"] == "Stopped" and "step 1: " in one["message"] and "backward" in one["message"]
    assert "rank 1: gradient nan of row " in one["message"] and "rank 0" not in one["message"]


def rollouts(folder: Path) -> list[list[dict[str, Any]]]:
    files = sorted((folder / "rollouts").glob("step-*.jsonl"))
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def metrics(folder: Path) -> list[dict[str, float]]:
    return [repeatable(json.loads(line)) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_b30_ranks_sample_different_completions_and_a_run_repeats(found: Cells, folder: Path) -> None:
    one, other = found["run_repeats"]
    assert one["sums"] == other["sums"], "the ranks have different weights"
    steps = rollouts(folder / "first")
    assert len(steps) == 5 and rollouts(folder / "second") == steps
    assert metrics(folder / "second") == metrics(folder / "first")
    for rows in steps:
        ranks = [[row["completion_ids"] for row in rows if row["group"] % 2 == rank] for rank in (0, 1)]
        assert not any(ids in ranks[1] for ids in ranks[0])


def test_i2_one_rank_and_two_ranks_are_the_same_run(found: Cells, folder: Path, world: World) -> None:
    state = start(folder, world, RUN | {"run.dir": str(folder / "alone")}, away=0.05)
    output = Output(state)
    output.begin(goes_on=False)
    for _ in range(5):
        output.step(*step(state))
    for ours, theirs in zip(rollouts(folder / "alone"), rollouts(folder / "first"), strict=True):
        for one, other in zip(ours, theirs, strict=True):
            exact = ("group", "index", "row", "prompt_ids", "completion_ids", "rewards", "finish")
            assert {name: one[name] for name in exact} == {name: other[name] for name in exact}
            assert one["sampling_logps"] == pytest.approx(other["sampling_logps"], abs=1e-5)
            assert one["advantage"] == pytest.approx(other["advantage"], abs=1e-5)
    for one, other in zip(metrics(folder / "alone"), metrics(folder / "first"), strict=True):
        ranks = sorted(other.pop(f"kl_rank_{name}") for name in ("min", "max"))
        assert ranks[0] <= one["kl"] <= ranks[1]
        assert one == pytest.approx(other, rel=1e-5, abs=1e-5)


def test_b32_every_row_keeps_its_advantage_in_every_micro_batch(found: Cells) -> None:
    ranks = found["every_row_keeps_its_advantage"]
    advantages = ranks[0]["advantages"] | ranks[1]["advantages"]
    assert len(advantages) == 16
    for group in range(4):
        rewards = [float((4 * group + index) ** 2) for index in range(4)]
        mean = sum(rewards) / 4
        std = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / 3)
        for index, reward in enumerate(rewards):
            assert advantages[f"{group}.{index}"] == pytest.approx((reward - mean) / (std + 1e-4), rel=1e-5)
    for rank in ranks:
        assert rank["norm"] > 0.1 and rank["apart"] < 1e-6


@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_b35_ranks_with_unequal_work_take_the_same_steps(found: Cells, stage: str) -> None:
    cells = {
        name: [rank[f"{stage} {name}"] for rank in found["uneven_work"]] for name in ("spread", "even_prompts", "none")
    }
    for ranks in cells.values():
        assert [rank["rows"] for rank in ranks] == [12, 8]
        assert ranks[0]["sums"] == ranks[1]["sums"]
    assert [rank["moved"] for rank in cells["spread"]] == [True, True]
    assert [rank["unscored here"] for rank in cells["even_prompts"]] == [0, 8]
    assert [rank["moved"] for rank in cells["even_prompts"]] == [True, True]
    assert cells["even_prompts"][0]["unscored_fraction"] == 8 / 20
    assert [rank["moved"] for rank in cells["none"]] == [False, False]
    assert any("no completion to train on" in note for note in cells["none"][0]["notes"])


def test_b36_ranks_that_stop_at_different_lengths_meet_again(found: Cells) -> None:
    one, other = found["ranks_stop_at_different_lengths"]
    assert (one["lengths"], other["lengths"]) == ([1], [20])
    assert one["next"] == other["next"] > 0


def test_a_reference_is_the_same_wherever_it_lies(found: Cells) -> None:
    """Under ZeRO-3, the exact KL, and unequal work, bit for bit."""
    for rank in found["references_of_a_full_policy"]:
        kinds = [rank[mode].pop("kind") for mode in ("auto", "cpu", "zero3")]
        assert kinds == ["resident copy", "streamed copy", "sharded copy"]
        assert rank["auto"] == rank["cpu"] == rank["zero3"] and rank["auto"]["kl"][1] > 0


def test_b37_gathers_of_a_rollout_do_not_grow_with_its_tokens(found: Cells) -> None:
    for rank in found["gathers_of_a_rollout"]:
        assert rank["6 with hooks"] > 2 * rank["2 with hooks"] > 0, "the count sees nothing"
        assert rank["6"] == rank["2"] < rank["2 with hooks"]
        assert rank["grad_norm"] > 0, "the hooks have to be back for the training pass"


def test_b38_stage_3_has_the_weights_and_the_tokens_of_a_plain_load(found: Cells) -> None:
    for rank in found["stage_3_is_the_model_that_was_saved"]:
        assert rank["apart"] == 0
        assert rank["tokens"] == rank["expected"] and len(rank["tokens"][0]) > 1


def test_b63_b66_what_stage_3_exports_is_whole(found: Cells, folder: Path) -> None:
    adapter, model = (found["exported_from_stage_3"][0][name] for name in ("adapter", "model"))
    whole = torch.load(folder / "model.pt")
    loaded = AutoModelForCausalLM.from_pretrained(model)
    for name, weight in loaded.named_parameters():
        assert torch.equal(weight, whole[name]), name
    trained = torch.load(folder / "adapter.pt")
    peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder / "model"), adapter)
    layers = {name: weight for name, weight in peft.get_base_model().named_parameters() if "lora_" in name}
    assert len(layers) == 28 and sum(bool(weight.any()) for weight in layers.values()) == 28
    for name, weight in layers.items():
        assert torch.equal(weight, trained[name]), name


def test_b45_a_reward_that_fails_on_one_rank_ends_all_with_its_message(found: Cells) -> None:
    one, other = (rank["reward"] for rank in found["one_rank_ends_the_run"])
    assert one == other
    assert one["kind"] == "Stopped" and "broken_on_odd_prompts" in one["message"] and "KeyError" in one["message"]


def test_b40_weights_that_are_nan_on_one_rank_end_all_alike(found: Cells) -> None:
    one, other = (rank["weights"] for rank in found["one_rank_ends_the_run"])
    assert one == other
    assert one["kind"] == "Stopped" and "NaN" in one["message"]


def test_b87_hooks_see_the_longest_prompt_of_all_ranks(found: Cells) -> None:
    one, other = found["hooks_see_the_longest_prompt_of_all_ranks"]
    assert one["own"] != other["own"]
    assert one["longest"] == other["longest"] == max(one["own"], other["own"])
