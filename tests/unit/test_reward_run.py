"""Runs of three rewards at once, one of which is away for a while, or for good, or was paid for when the run died."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tiny_rewards import write_encoder
from tests.tiny_run import PROMPTS
from tests.unit.test_embedding_reward import vectors
from trainer import run_status
from trainer.__main__ import main
from trainer.config.grpo import Reward
from trainer.record.run_dir import read_lines
from trainer.rewards import asking
from trainer.rewards.runtime import RewardRuntime

JUDGE = r'''

async def judge(completion_ids, trainer_state, **_):
    """Writes down that it was asked; while there is a file called away, with a number in it, it fails so often."""
    from pathlib import Path
    step = trainer_state.global_step + 1
    with open("asked.txt", "a") as file:
        file.write(f"{step}\n")
    left = int(Path("away").read_text()) if step == 2 and Path("away").exists() else 0
    if left:
        Path("away").write_text(str(left - 1))
        raise ConnectionError("refused")
    return [sum(ids) % 7 / 7 for ids in completion_ids]
'''

RUN_FILE = """
[run]
dir = "out"
steps = 3
[model]
name_or_path = "model"
[data]
source = "train.jsonl"
chat_template = "off"
[rollout]
prompts_per_step = 2
num_generations = 4
max_new_tokens = 4
[checkpoint]
every = 1
[[reward]]
name = "short"
kind = "builtin"
function = "length"
limit = 2
[[reward]]
name = "similarity"
kind = "embedding"
path = "encoder"
[[reward]]
name = "judge"
kind = "python"
function = "rewards.py:judge"
weight = 0.5
max_unscored = 0.25
"""
N = 8
"""Completions of a step."""


@pytest.fixture
def folder(run_here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its judge in the place of a service."""
    with (run_here / "rewards.py").open("a") as file:
        file.write(JUDGE)
    write_encoder(run_here / "encoder")
    rows = [{"prompt": prompt, "answer": f"the answer is {at}"} for at, prompt in enumerate(PROMPTS)]
    (run_here / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run_here / "run.toml").write_text(RUN_FILE)
    resolve = RewardRuntime._resolve

    def paid(self: RewardRuntime, section: Reward) -> Any:
        found = resolve(self, section)
        return replace(found, concurrency=64, keeps_time=True, paid="judge") if section.name == "judge" else found

    monkeypatch.setattr(RewardRuntime, "_resolve", paid)
    monkeypatch.setattr(asking, "PAUSES_S", (0.01, 0.02))
    monkeypatch.setattr("trainer.record.run_dir.RunDirectory.lock", lambda _: None)  # until the process ends
    return run_here


def records(run_dir: Path) -> dict[int, list[dict[str, Any]]]:
    """What was trained on, by step."""
    return {step: read_lines(run_dir / f"rollouts/step-{step:06d}.jsonl") for step in (1, 2, 3)}


def asked(folder: Path, step: int) -> int:
    return (folder / "asked.txt").read_text().split().count(str(step))


def away(folder: Path, calls: int) -> None:
    (folder / "away").write_text(str(calls))


_unharmed: list[dict[int, list[dict[str, Any]]]] = []


@pytest.fixture
def unharmed(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """The records of the run that nothing happens to."""
    if not _unharmed:
        assert main(["train", "run.toml", "--run.dir", "unharmed"]) == 0
        assert [asked(folder, step) for step in (2, 3)] == [N, N]
        (folder / "asked.txt").unlink()
        _unharmed.append(records(folder / "unharmed"))
        shutil.rmtree(folder / "unharmed")
    return _unharmed[0]


def test_f22_a_judge_that_is_away_for_a_while_leaves_no_wrong_number(
    folder: Path, unharmed: dict[int, list[dict[str, Any]]], capfd: pytest.CaptureFixture[str]
) -> None:
    away(folder, N + 3)  # the whole step, and three of the first further try
    assert main(["train", "run.toml"]) == 0
    out, err = capfd.readouterr()
    why = "reward 'judge' (rewards.py:judge), step 2: {} of 8 completions have no score (ConnectionError: refused"
    assert why.format(8) in out and "asked for again in 0.01 s" in out and "Traceback" not in out + err
    assert why.format(3) in out and "asked for again in 0.02 s" in out
    found = records(folder / "out")
    assert found == unharmed
    for row in (row for rows in found.values() for row in rows):
        ids = row["completion_ids"]
        text, answer = row["completion"].strip(), f"the answer is {row['row']}"
        cosine = float(np.prod(vectors(folder / "encoder", [text, answer]), axis=0).sum()) if text else 0.0
        parts = {"short": min(1.0, max(0.0, 2 - len(ids) / 2)), "similarity": cosine, "judge": sum(ids) % 7 / 7}
        assert row["rewards"] == pytest.approx(parts, abs=1e-6)
        assert row["reward"] == pytest.approx(parts["short"] + parts["similarity"] + 0.5 * parts["judge"], abs=1e-6)
    metrics = read_lines(folder / "out/metrics.jsonl")
    assert [row["unscored_fraction"] for row in metrics] == [0.0] * 3
    assert [row["rewards/judge/failed_fraction"] for row in metrics] == [0.0] * 3
    judged = [sum(row["rewards"]["judge"] for row in rows) / N for rows in found.values()]
    assert [row["reward/judge"] for row in metrics] == pytest.approx(judged)


def test_f23_a_judge_that_stays_away_ends_the_run_with_a_checkpoint_to_go_on_from(
    folder: Path, unharmed: dict[int, list[dict[str, Any]]], capfd: pytest.CaptureFixture[str]
) -> None:
    away(folder, 10**6)
    assert main(["train", "run.toml", "--checkpoint.every", "0"]) == 3
    out = capfd.readouterr().out
    assert "reward 'judge' (rewards.py:judge) failed on 8 of 8 completions in step 2, more than max_unscored" in out
    assert "saved out/checkpoints/step-000001; go on with --resume auto" in out
    status = run_status.read(folder / "out")
    assert (status["state"], status["exit_code"], status["step"]) == ("stopped", 3, 1)
    assert asked(folder, 2) == 3 * N
    (folder / "away").unlink()
    assert main(["train", "run.toml", "--checkpoint.every", "0", "--resume", "auto"]) == 0
    assert records(folder / "out") == unharmed


def test_f24_a_run_that_dies_between_rewards_and_update_pays_once(
    folder: Path, unharmed: dict[int, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as dying:
        calls: list[int] = []

        def die(*_: Any) -> None:
            calls.append(1)
            if len(calls) == 2:
                raise RuntimeError("killed")

        dying.setattr("trainer.train.kl_in_reward", lambda *_: die())
        with pytest.raises(RuntimeError, match="killed"):
            main(["train", "run.toml"])
    assert asked(folder, 2) == N and len(read_lines(folder / "out/paid/rank-00000.jsonl")) == N
    assert main(["train", "run.toml", "--resume", "auto"]) == 0
    assert [asked(folder, step) for step in (2, 3)] == [N, N]
    assert records(folder / "out") == unharmed
    steps = {line["step"] for line in read_lines(folder / "out/paid/rank-00000.jsonl")}
    assert steps == {1, 2}  # what would be done again from the oldest checkpoint that is kept, that of step 1
