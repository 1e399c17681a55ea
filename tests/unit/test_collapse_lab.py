"""The collapse lab: each fault changes the number that it should, records are kept, tables add up; and, in full, that
causes are named, alarms come in time, and healthy runs have none."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import trainer.update
from tests.tiny_run import ragged, start, step, weights
from tools import lab_faults as faults
from tools import lab_judge, lab_models, lab_rewards, lab_run
from tools.collapse_lab import chosen, keep
from tools.lab_run import Patch, run_once
from tools.lab_runs import FAULTS, HEALTHY, VARIANTS
from tools.lab_table import matrix, page, totals
from trainer.batch import Completion
from trainer.config import RunConfig
from trainer.doctor.causes import CAUSES
from trainer.doctor.records import Recorded
from trainer.errors import Refused
from trainer.world import World

SETTINGS = {"grpo.kl.coef": 0.5, "rollout.max_new_tokens": 6}


class Steps:
    """One step of a tiny run: as it is, or with functions replaced for as long."""

    def __init__(self, folder: Path, world: World, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.world, self.patch = folder, world, patch

    def __call__(self, *patches: Patch, away: float = 0.0, **settings: Any) -> Any:
        wanted = SETTINGS | {key.replace("__", "."): value for key, value in settings.items()}
        with self.patch.context() as undone:
            for one in patches:
                one(undone.setattr)
            state = start(self.folder, self.world, wanted, away=away)
            metrics, completions = step(state)
            after = weights(state)
        state.engine.close()
        return metrics, completions, after


@pytest.fixture
def steps(written_run: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> Steps:
    return Steps(written_run, world, monkeypatch)


def ids(completions: Sequence[Completion]) -> list[tuple[int, ...]]:
    return [one.ids for one in completions]


def drawn(completions: Sequence[Completion]) -> list[tuple[float, ...]]:
    return [(*one.ids, *one.sampling_logps) for one in completions]


def test_signs_and_coefficients_change_their_part_of_the_loss_alone(steps: Steps) -> None:
    healthy, _, _ = steps(away=0.1)
    kl = healthy["kl"] * 0.5
    assert kl > 1e-3
    for patch, change in (
        (faults.kl_sign, -2 * kl),
        (faults.kl_over_ranks(4), -0.75 * kl),
        (faults.loss_sign, -2 * (healthy["loss"] - kl)),
    ):
        broken, _, _ = steps(patch, away=0.1)
        assert broken["loss"] - healthy["loss"] == pytest.approx(change, abs=1e-5)
        assert broken["kl"] == pytest.approx(healthy["kl"]) and broken["kl_coef"] == 0.5
    divided, _, _ = steps(faults.coefficient_by_ranks(4), away=0.1)
    assert divided["kl_coef"] == 0.125


def test_masks_score_more_or_fewer_tokens_than_were_sampled(steps: Steps) -> None:
    recorded = {key.replace(".", "__"): value for key, value in ragged(steps.folder).items()}
    masks: tuple[tuple[Patch, ...], ...] = ((), (faults.padding_scored,), (faults.ends_masked,))
    scored = [steps(*patches, **recorded)[0]["scored_per_sampled"] for patches in masks]
    # 16 completions of 1 to 4 tokens: 40. To the longest of all: 64. Each is one id over and over, which ends it.
    assert scored == [1.0, 64 / 40, 0.0]


def test_before_any_update_each_fault_shows_where_it_should(steps: Steps) -> None:
    full = {"lora__r": 0}
    healthy, sampled, _ = steps(**full)
    assert healthy["kl"] == 0 and healthy["sampling_logp_gap"] < 5e-6

    def of(*patches: Patch, **settings: Any) -> tuple[bool, bool, bool]:
        """KL, gap, and whether it was sampled from another distribution."""
        metrics, completions, _ = steps(*patches, **(full | settings))
        return metrics["kl"] > 0, metrics["sampling_logp_gap"] > 1e-5, drawn(completions) != drawn(sampled)

    assert of(faults.dropout_of(0.1)) == (True, True, False)
    assert of(faults.trained_at_theta(100.0)) == (True, True, False), "its reference is an engine of its own"
    assert of(faults.trained_at_theta(100.0), lora__r=4) == (False, True, False)
    assert of(faults.built_at_theta(100.0), faults.no_rope_guard) == (False, False, True)
    assert of(faults.sampled_with(temperature=1.5)) == (False, True, True)
    assert of(faults.sampled_with(repetition_penalty=1.5)) == (False, False, True)
    assert of(faults.reference_of(0.5)) == (True, False, False)
    with pytest.raises(Refused):
        of(faults.built_at_theta(100.0))


@pytest.mark.parametrize("patch", [faults.groups_tiled, faults.groups_shifted])
def test_advantages_are_those_of_others(steps: Steps, patch: Patch) -> None:
    def unlike(completions: Sequence[Completion]) -> float:
        """Pairs of one prompt whose advantages go against their rewards."""
        pairs = [(a, b) for a in completions for b in completions if a.group == b.group and a.reward > b.reward]
        return sum(a.advantage <= b.advantage for a, b in pairs) / len(pairs)

    (_, healthy, _), (_, broken, _) = steps(), steps(patch)
    assert unlike(healthy) == 0 < unlike(broken)


def test_numbers_that_are_none(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, after = steps(faults.nan_after(1))
    assert sum(int(weight.isnan().sum()) for weight in after.values()) == 1
    metrics, _, _ = steps(faults.gradients_in_fp16(1e30))
    assert "grad_norm" not in metrics and "loss" in metrics
    healthy, same = steps()[0]["grad_norm"], steps(faults.gradients_in_fp16(1024.0))[0]["grad_norm"]
    assert same == pytest.approx(healthy, rel=1e-2) and same != healthy
    faults.k3_overflows(monkeypatch.setattr)
    zero, far = torch.zeros(1), torch.full((1,), -12.0)
    assert trainer.update.sampled_kl(zero - 1, zero, "k3").item() == pytest.approx(math.e - 2, abs=1e-2)
    assert trainer.update.sampled_kl(far, zero, "k3").isinf().all()


def test_models_made_for_it(steps: Steps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab_models, "MODEL", steps.folder / "model")
    monkeypatch.setattr(lab_models, "SMALL_WINDOW", tmp_path / "window")
    monkeypatch.setattr(lab_models, "OTHER_TOKENIZER", tmp_path / "tokenizer")
    before = (steps.folder / "model" / "config.json").read_text()
    lab_models.make_models()
    lab_models.make_models()
    assert (steps.folder / "model" / "config.json").read_text() == before
    assert json.loads((tmp_path / "window" / "config.json").read_text())["max_position_embeddings"] == 16
    (_, right, _), (_, other, _) = steps(), steps(faults.decoded_by_another)
    assert ids(right) == ids(other)
    assert sum(a.text != b.text for a, b in zip(right, other, strict=True)) > len(right) / 2


def test_rewards_of_the_lab() -> None:
    texts, answers = ["613", "603", "61", "", "61x"], ["613"] * 5
    assert lab_rewards.digits(texts, answers) == pytest.approx([1, 2 / 3, 2 / 3, 0, 2 / 3])
    assert lab_rewards.near(texts, answers) == pytest.approx([1, 1 / 11, 1 / 553, 0, 0])
    assert lab_rewards.carried(texts, answers) == [1, 0, 0, 0, 1]
    assert lab_rewards.even(["12", "13", ""]) == [1, 0, 0]
    with pytest.raises(ConnectionError):
        lab_rewards.fails_on_carries(["1"], ["1"], ["What is 606 + 7?"])
    assert lab_rewards.fails_on_carries(["1"], ["1"], ["What is 607 + 7?"]) == [1]


def test_a_run_is_not_repeated_unless_it_crashed_or_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def train(asked: dict[str, Any], patches: Sequence[Patch], folder: Path) -> dict[str, Any]:
        folder.mkdir(parents=True, exist_ok=True)
        done.append("trained")
        return {"state": "crashed" if len(done) == 1 else "done", "reason": "", "seconds": 1.0}

    monkeypatch.setattr(lab_run, "_train", train)
    monkeypatch.setattr(lab_run, "_ask", lambda *_: done.append("asked") or {"causes": []})

    def once(settings: dict[str, Any], patches: Sequence[Patch] = ()) -> dict[str, Any]:
        return run_once("x", settings, patches, 5, tmp_path / "x")

    assert once({"optim.lr": 0.1})["state"] == "crashed"
    first = once({"optim.lr": 0.1})
    assert done == ["trained", "trained", "asked"] and once({"optim.lr": 0.1}) == first and len(done) == 3
    once({"optim.lr": 0.2})
    once({"optim.lr": 0.2}, [faults.nan_after(1)])
    once({"optim.lr": 0.2}, [faults.nan_after(2)])
    assert done[3:] == ["trained", "asked"] * 3
    monkeypatch.setattr(lab_run, "TRAINED_BY", "another trainer")
    once({"optim.lr": 0.2}, [faults.nan_after(2)])
    assert done[9:] == ["trained", "asked"]


@pytest.mark.parametrize(("steps", "guard"), [(4, {"guard": 5}), (5, {})])
def test_a_refused_export_is_no_alarm(steps: int, guard: dict[str, int]) -> None:
    config = RunConfig.model_validate(
        {
            "run": {"dir": "x", "steps": 5},
            "model": {"name_or_path": "m"},
            "data": {"source": "d.jsonl"},
            "reward": [{"name": "r", "kind": "builtin", "function": "exact_match"}],
        }
    )
    recorded = Recorded(config, [{"step": step} for step in range(1, steps + 1)], {}, {}, {}, {})
    found = lab_judge._alarms(recorded, {"state": "stopped"}, [], 5)
    assert found["alarms"] == guard and bool(found["first_alarm"]) == bool(guard)


def test_ranks_are_children_of_their_own(tmp_path: Path, world: World) -> None:
    def work() -> None:
        Path(f"rank-{os.environ['RANK']}-of-{os.environ['WORLD_SIZE']}").touch()
        os.write(1, b"said\n")

    lab_run._in_children(work, tmp_path, "log", ranks=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "rank-0-of-2", "rank-1-of-2"]
    assert (tmp_path / "log").read_text() == "said\nsaid\n"


def test_every_run_is_one_of_its_own_and_names_real_causes() -> None:
    runs = [*FAULTS, *VARIANTS, *HEALTHY]
    assert len({run.name for run in runs}) == len(runs)
    assert len(FAULTS) == 17 and len(HEALTHY) == 20 and sum(run.held_out for run in VARIANTS) == 14
    assert not any(run.held_out and run.note for run in runs), "a note says what was known beforehand"
    assert {cause for run in runs for cause in run.causes} <= set(CAUSES)
    assert not any(run.causes for run in HEALTHY) and all(run.causes for run in (*FAULTS, *VARIANTS))
    assert [run.name for run in chosen(["NaN weights", "faults"])][:2] == ["NaN weights", "KL sign inverted"]
    with pytest.raises(SystemExit, match="no such run or set"):
        chosen(["absent"])


def row(name: str, causes: list[str], named: list[str], alarm: tuple[int, str] | None, **more: Any) -> dict[str, Any]:
    first = {"step": alarm[0], "alarm": "some", "cause": alarm[1]} if alarm else None
    found = [[cause, 0.9] for cause in named]
    alarms = {"some": alarm[0]} if alarm else {}
    shown = {
        "first_alarm": first,
        "alarms": alarms,
        "by_records": found,
        "by_parts": [],
        "seconds": 1.0,
        "commit": "abc",
    }
    return {"name": name, "causes": causes, "held_out": False, "named": found, **shown, **more}


def test_tables(tmp_path: Path) -> None:
    rows = [
        row("a", ["dropout"], ["dropout", "decoding"], (3, "dropout"), garbled_at=9, garble_most=0.8),
        row("b", ["kl_sign"], ["update_too_large", "kl_sign"], (9, "decoding"), garbled_at=9),
        row("c", ["loss_sign"], ["decoding"], None, garbled_at=None),
        row("d", [], [], None, peers={"rlprobe": ["warn X at 3"], "rldoctor": []}),
        row("e", [], ["decoding"], (5, "decoding"), held_out=True),
    ]
    lines = matrix(rows[:3]).splitlines()
    assert lines[0] == "| injected | A | B | C | D | E | right |"
    assert lines[2:5] == [
        "| a (A) | 1 a |  |  | 2 |  | first |",
        "| b (B) |  | 2 |  | a | 1 | second |",
        "| c (C) |  |  |  | 1 |  | no |",
    ]
    said = totals(rows)
    assert "first in 1 of 3, among the first two in 2" in said
    assert "An alarm in 2; before 40 % of the text was garbled in 1 of 2" in said
    assert "healthy runs: 2; alarmed 1; called ill by the doctor 1; findings by rlprobe in 1, by rldoctor in 0" in said
    assert "| d | - | warn X at 3 | - |" in page(rows)
    keep(rows, tmp_path / "kept.json")
    kept = json.loads((tmp_path / "kept.json").read_text())
    assert kept["seconds"] == 5 and kept["runs"] == rows and kept["trained_by"] == ["abc"]


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_b39_causes_are_named_in_time_and_healthy_runs_are_left_alone() -> None:
    """All runs of tools/collapse_lab.py, but for those that .cache/lab has; keeps tests/results/collapse-lab.json."""
    root = lab_run.ROOT
    if not lab_run.MODEL.is_dir():
        subprocess.run([sys.executable, "tools/tiny_model.py", str(lab_run.MODEL)], cwd=root, check=True)
    subprocess.run([sys.executable, "tools/collapse_lab.py"], cwd=root, check=True)
    rows = json.loads((root / "tests" / "results" / "collapse-lab.json").read_text())["runs"]
    broken = [row for row in rows if row["causes"] and not row["held_out"]]
    named = [[cause for cause, _ in row["named"]] for row in broken]
    right = [set(row["causes"]) for row in broken]
    assert sum(bool({*one[:1]} & true) for one, true in zip(named, right, strict=True)) >= len(broken) - 1
    assert all({*one[:2]} & true for one, true in zip(named, right, strict=True))
    garbled = [row for row in broken if row.get("garbled_at")]
    assert [row["name"] for row in garbled if row["first_alarm"]["step"] >= row["garbled_at"]] == []
    assert [row["name"] for row in rows if not row["causes"] and (row["alarms"] or row["named"])] == []
