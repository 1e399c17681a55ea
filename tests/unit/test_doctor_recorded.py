"""The doctor on records: each check on made rows, and a run directory that a healthy run would leave."""

import json
from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_run import run_config
from trainer.__main__ import main
from trainer.config import dump
from trainer.doctor.causes import CAUSES
from trainer.doctor.finding import EXPLAINS, Diagnosis, Finding, ranked
from trainer.doctor.recorded import diagnose_records as diagnose
from trainer.doctor.records import Recorded, read
from trainer.errors import Refused
from trainer.record import kl_histogram
from trainer.record.kl_histogram import EDGES
from trainer.record.run_dir import read_lines

TOKENS = {"hello": 0, "\u0120world": 1, "42": 2, "!": 3, "<|im_end|>": 4}
STEPS = 30


def metrics(step: int) -> dict[str, Any]:
    """A run that learns."""
    gained = step / STEPS
    return {
        "step": step,
        "loss": 0.0,
        "reward_mean": 0.3 + 0.4 * gained,
        "reward_std": 0.45,
        "zero_std_fraction": 0.2,
        "unscored_fraction": 0.0,
        "kl": 0.05 * gained**1.5 if step > 1 else 0.0,
        "kl_std": 0.1 * gained,
        "kl_max": gained,
        "kl_outside_response": 0.0,
        "kl_coef": 0.04,
        "entropy": 0.9 - 0.3 * gained,
        "clip_fraction": 0.0,
        "grad_norm": 0.4,
        "lr": 1e-5,
        "completion_tokens_mean": 3.0,
        "truncated_fraction": 0.1,
        "garble_rate": 0.0,
        "garble/token_loop": 0.0,
        "garble/word_marks": 0.0,
        "garble/scripts": 0.0,
        "sampling_logp_gap": 1e-6,
        "held_memory_gib": 1.0,
        "top_token_share": 0.2,
        "repetition": 0.0,
    }


def rollouts(step: int) -> list[dict[str, Any]]:
    """Four prompts, four completions; rewards 0, 0, 1, 1. Their surprise is the step's entropy."""
    surprise = metrics(step)["entropy"]
    return [
        {
            "step": step,
            "group": group,
            "index": index,
            "row": group,
            "prompt": "say",
            "completion": "hello world42",
            "prompt_ids": [0],
            "completion_ids": [0, 1, 2, 4],
            "sampling_logps": [-surprise + 0.01 * (index - 1.5)] * 4,
            "rewards": {"score": float(index > 1)},
            "reward": float(index > 1),
            "advantage": 0.86587 if index > 1 else -0.86587,
            "finish": "stop",
            "columns": {},
        }
        for group in range(4)
        for index in range(4)
    ]


def healthy(settings: dict[str, Any] | None = None) -> Recorded:
    return Recorded(
        run_config(Path("nowhere"), {"run.steps": STEPS} | (settings or {})),
        [metrics(step) for step in range(1, STEPS + 1)],
        {step: rollouts(step) for step in (1, 15, 30)},
        {"state": "done", "reason": "", "exit_code": 0},
        TOKENS,
        {},
    )


def test_a_healthy_run_has_no_cause() -> None:
    found = diagnose(healthy(), "made")
    assert found.findings == [], found.text()
    assert len(found.fine) == 14 and set(found.not_checked) == {"document_readings"}


Change = Callable[[dict[str, Any]], dict[str, Any]]


def growing(key: str, rate: float, start: float = 0.0) -> Change:
    return lambda row: {key: start + rate * row["step"]}


CHANGED: dict[str, tuple[Change, str]] = {
    "another reference": (lambda row: {"kl": row["kl"] + 0.2}, "reference_differs"),
    "dropout": (lambda row: {"kl": row["kl"] + 0.02, "sampling_logp_gap": 0.15}, "dropout"),
    "dynamic rope": (lambda row: {"sampling_logp_gap": 0.3}, "sampling_differs"),
    "coefficient / ranks": (lambda row: {"kl_coef": 0.01}, "coefficient_scaled"),
    "kl runs away": (
        lambda row: {"kl": 1e-6 * 1.7 ** row["step"] if row["step"] > 1 else 0.0, "reward_mean": 0.3},
        "kl_sign",
    ),
    "kl runs away, with the reward": (
        lambda row: {"kl": 3e-8 * 1.7 ** row["step"] if row["step"] > 1 else 0.0},
        "none",
    ),
    "kl at once": (lambda row: {"kl": 0.9 if row["step"] > 4 else row["kl"]}, "update_too_large"),
    "padding in one step": (
        lambda row: {"scored_per_sampled": 1.2 if row["step"] == 7 else 1.0},
        "kl_outside_response",
    ),
    "reference moves": (lambda row: {"kl": 0.0}, "reference_moves"),
    "reward falls": (
        lambda row: {"reward_mean": 0.6 - 0.02 * row["step"], "kl": 0.0001 * row["step"] - 0.0001},
        "wrong_direction",
    ),
    "sign of the loss": (
        lambda row: {"reward_mean": max(0.0, 0.55 - 0.025 * row["step"]), "kl": 0.5 * (row["step"] / 30 - 1 / 30) ** 3},
        "wrong_direction",
    ),
    "padding": (lambda row: {"kl_outside_response": row["kl"] / 2}, "kl_outside_response"),
    "negative kl": (lambda row: {"kl": -row["kl"]}, "kl_sign"),
    "no gradient": (lambda row: {"grad_norm": 0.0, "kl": 0.0}, "no_gradient"),
    "constant": (
        lambda row: {"reward_std": 0.0, "reward_mean": 1.0, "zero_std_fraction": 1.0, "grad_norm": 0.0, "kl": 0.0},
        "reward_constant",
    ),
    "never solved": (lambda row: {"zero_std_fraction": 1.0, "reward_mean": 0.01}, "reward_constant"),
    "unscored": (lambda row: {"unscored_fraction": 0.6}, "unscored"),
    "cut": (lambda row: {"truncated_fraction": 0.9}, "runs_on"),
    "word marks": (lambda row: {"garble_rate": 0.9, "garble/word_marks": 0.9}, "tokenizer_mismatch"),
    "loops": (
        lambda row: {
            "garble_rate": row["step"] / 30,
            "garble/token_loop": row["step"] / 30,
            "entropy": 0.9 * 0.9 ** row["step"],
            "reward_mean": 0.3,
        },
        "nothing_to_choose",
    ),
    "word salad": (
        lambda row: {"garble_rate": row["step"] / 30, "garble/scripts": row["step"] / 30, "kl": row["step"] / 10 - 0.1},
        "update_too_large",
    ),
    "clipped": (lambda row: {"clip_fraction": 0.9 if row["step"] > 15 else 0.0}, "off_policy"),
    "leak": (growing("held_memory_gib", 0.1), "none"),  # 50 steps of patience
}


@pytest.mark.parametrize("fault", CHANGED)
def test_metrics_that_name_their_cause(fault: str) -> None:
    change, cause = CHANGED[fault]
    run = healthy()
    run.rollouts.clear()
    for row in run.metrics:
        row |= change(row)
    found = diagnose(run, fault)
    assert (found.causes[0].cause if found.causes else "none") == cause, found.text()


def test_steps_without_a_gradient_and_the_reason_of_the_end() -> None:
    """A refused gradient leaves a rate without a norm, its loss may be finite; nothing to train on leaves neither."""
    for absent, expected in (
        (("grad_norm",), ["gradient_overflow"]),
        (("grad_norm", "loss"), ["loss_overflow"]),
        (("grad_norm", "loss", "lr"), []),
    ):
        run = healthy()
        for row in run.metrics[10:]:
            for name in absent:
                del row[name]
        assert [one.cause for one in diagnose(run, "").causes] == expected
    for reason, cause in (
        ("rollout: the logits of decoding position 3 hold NaN or infinity", "non_finite"),
        ("step 3: the gradient norm is nan (rank 0: loss inf); no rank updated", "loss_overflow"),
        (
            "step 3: the gradient norm is inf (every loss was finite, so it arose in the backward pass)",
            "gradient_overflow",
        ),
        ("reward 'x' failed on 9 of 9 completions, more than max_unscored = 0.1 allows", "reward_fails"),
        (
            "reward 'x' returned nan for row 3 of prompts.jsonl; return None where the row cannot be scored",
            "reward_fails",
        ),
        ("reward 'x' returned a str; expected numbers", "reward_fails"),
        ("runs/nan/checkpoints: the checkpoint cannot be written: no space left on device", "stopped"),
        ("a guard of another kind", "stopped"),
    ):
        run = healthy()
        run.status.update(state="stopped", reason=reason)
        assert [one.cause for one in diagnose(run, "").causes] == [cause]


def test_a_fallback_reward_is_named() -> None:
    section = {"name": "score", "kind": "python", "function": "rewards.py:spread", "fallback": 0.1}
    run = healthy()
    config = run.config.model_validate(run.config.model_dump() | {"reward": [section]})
    run = Recorded(config, run.metrics, run.rollouts, run.status, run.tokens, {})
    for row in run.metrics:
        row["rewards/score/failed_fraction"] = 0.3
    (cause,) = diagnose(run, "").causes
    assert cause.cause == "fallback_reward" and cause.evidence["fallback"] == 0.1


def colder(row: dict[str, Any]) -> None:
    row["sampling_logps"] = [logp * 0.6 for logp in row["sampling_logps"]]


def penalised(row: dict[str, Any]) -> None:
    row["sampling_logps"] = [logp * 1.5 for logp in row["sampling_logps"]]


def interleaved(row: dict[str, Any]) -> None:
    row["row"] = row["index"]


def advantages_of_others(row: dict[str, Any]) -> None:
    row["advantage"] = -row["advantage"]


def decoded_by_another(row: dict[str, Any]) -> None:
    row["completion"] = "\u2581\u2581zq\u2581"


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (colder, "filtered_sampling"),
        (penalised, "filtered_sampling"),
        (interleaved, "group_layout"),
        (advantages_of_others, "group_layout"),
        (decoded_by_another, "tokenizer_mismatch"),
    ],
)
def test_rollouts_that_name_their_cause(change: Callable[[dict[str, Any]], None], cause: str) -> None:
    run = healthy()
    for rows in run.rollouts.values():
        for row in rows:
            change(row)
    (found,) = diagnose(run, "").causes
    assert found.cause == cause


def test_a_gap_beside_another_surprise_is_the_temperature() -> None:
    run = healthy()
    for row in run.metrics:
        row["sampling_logp_gap"] = 0.3
    for rows in run.rollouts.values():
        for one in rows:
            colder(one)
    assert diagnose(run, "").causes[0].cause == "temperature_mismatch"


def test_a_cause_comes_before_what_follows_from_it() -> None:
    found = ranked([Finding("reference_differs", 0.95, {"kl": 1.0}), Finding("rope_differs", 0.9, {"theta": 1.0})])
    assert [one.cause for one in found] == ["rope_differs", "reference_differs"]
    assert len(Diagnosis("x", found).causes) == 1
    again = ranked([Finding("dropout", 0.5, {"a": 1}), Finding("dropout", 0.9, {"b": 2})])
    assert again == [Finding("dropout", 0.9, {"a": 1, "b": 2})]


def test_names_of_causes_are_causes() -> None:
    named = set(EXPLAINS) | {cause for causes in EXPLAINS.values() for cause in causes}
    assert named <= set(CAUSES)


def test_the_command_reads_a_run_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = healthy()
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "config.toml").write_text(dump(run.config))
    (tmp_path / "run_status.json").write_text(json.dumps({"state": "running", "reason": ""}))
    (tmp_path / "rollouts" / "vocabulary.json").write_text(json.dumps({"tokens": TOKENS}))
    for step in range(1, STEPS + 1):
        rows = "".join(json.dumps(row) + "\n" for row in rollouts(step))
        (tmp_path / "rollouts" / f"step-{step:06d}.jsonl").write_text(rows)
    # The last line is being written.
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in run.metrics) + '{"step": 31, "k')
    assert len(read(tmp_path).rollouts) == 12
    assert main(["doctor", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "no cause found" in said and "- coefficient: " in said
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row | {"kl_coef": 0.02}) + "\n" for row in run.metrics))
    assert main(["doctor", str(tmp_path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["healthy"], found["causes"][0]["cause"]) == (False, "coefficient_scaled")
    assert set(found["causes"][0]) == {"cause", "what", "confidence", "evidence", "fix"}
    assert main(["doctor", str(tmp_path), "--run.seed", "3"]) == 2


def test_a_completion_may_hold_what_looks_like_the_end_of_a_line(tmp_path: Path) -> None:
    lines = [json.dumps(row | {"note": "one\u2028two\u0085three"}, ensure_ascii=False) for row in rollouts(1)]
    (tmp_path / "step.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    assert len(read_lines(tmp_path / "step.jsonl")) == len(lines)


def test_a_replayed_run_was_sampled_by_another_policy() -> None:
    for replay, expected in (("", ["sampling_differs"]), ("recorded", [])):
        run = healthy({"rollout.replay": replay} if replay else None)
        for row in run.metrics:
            row["sampling_logp_gap"] = 0.3
        run.rollouts.clear()
        assert [one.cause for one in diagnose(run, "").causes] == expected


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"no config\.toml"):
        read(tmp_path)


def test_the_documents_readings_stand_beside_what_they_want_to_know() -> None:
    """Two peaks, which the document takes for padding: in a run of two ranks that scores no padding."""
    run = healthy()
    for row in run.metrics:
        row |= {"kl_rank_min": row["kl"], "kl_rank_max": 2 * row["kl"]}
    counts = [0] * (len(EDGES) - 1)
    counts[bisect_left(EDGES, 1e-3)], counts[bisect_left(EDGES, 1.0)] = 80, 20
    run.histogram.update(kl_histogram.record(30, counts, run.metrics[-1]))
    found = diagnose(run, "made")
    assert found.findings == []
    padding, dropout, ranks = found.fine["document_readings"].split(" | ")
    assert padding.startswith("of step 30: a peak near 0") and "yes (80.0% within" in padding
    assert padding.endswith("padding: KL outside the response 0")
    assert "no (" in dropout and dropout.endswith("dropout: KL at step 1 0")
    assert "no (" in ranks and ranks.endswith("ranks: KL from 0.0439 to 0.0878")
