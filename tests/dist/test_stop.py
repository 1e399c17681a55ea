"""Stopped by a signal or by a guard: what is saved, and that the resumed run shows no trace of the stop."""

import json
import signal
from pathlib import Path

import pytest

from tests.dist.launch import Rank, run_ranks
from tests.dist.test_launch import RUN, ZERO_GRPO, run, started, status, wait_for
from tests.tiny_run import write_run
from trainer.checkpoint.store import Store

SLOW = """
import random, time

def spread(completion_ids, **_):
    time.sleep(0.15)
    return [random.random() + sum(ids) % 17 / 17 for ids in completion_ids]
"""
FAILS_LATE = """
def spread(completion_ids, trainer_state, **_):
    if trainer_state.global_step == 3:
        raise ValueError("the judge is out")
    return [sum(ids) % 17 / 17 for ids in completion_ids]
"""
ADAPTER = "adapter/adapter_model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_run(tmp_path)
    (tmp_path / "run.toml").write_text(RUN.replace("steps = 2", "steps = 12") + "\n[optim]\nwarmup_steps = 5\n")
    return tmp_path


def test_f8_sigterm_saves_at_once_and_the_resumed_run_is_the_unharmed_one(folder: Path) -> None:
    """Two ranks, signalled anywhere in a step; there is no periodic checkpoint before. The rewards draw random numbers,
    those of the evaluations between the steps too."""
    (folder / "rewards.py").write_text(SLOW)
    evaluation = ("--data.eval_fraction", "0.25", "--eval.every", "1", "--eval.num_generations", "1")
    command = (*ZERO_GRPO, "--gpus", "2", "--checkpoint.every", "0", *evaluation)
    unharmed = run(folder, *command, "--run.dir", "unharmed")
    assert unharmed.code == 0

    process = started(folder, command)
    wait_for(lambda: (folder / "out/metrics.jsonl").exists() or process.poll() is not None)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    step = status(folder)["step"]
    assert (process.returncode, err) == (75, "")
    assert out.strip().splitlines()[-1] == (
        f"preempted: SIGTERM, by a scheduler or a launcher, after step {step}; "
        f"saved out/checkpoints/step-{step:06d}; go on with --resume auto."
    )
    assert (status(folder)["state"], status(folder)["exit_code"]) == ("preempted", 75)
    assert 0 < step < 12

    resumed = run(folder, *command, "--resume", "auto")
    assert resumed.code == 0 and f"going on from out/checkpoints/step-{step:06d}, after step {step}" in resumed.out
    assert (folder / "out" / ADAPTER).read_bytes() == (folder / "unharmed" / ADAPTER).read_bytes()
    rewards = [
        [json.loads(line)["reward_mean"] for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("out", "unharmed")
    ]
    assert rewards[0] == rewards[1] and len(rewards[0]) == 12


def test_a_guard_saves_and_the_corrected_run_goes_on(folder: Path) -> None:
    (folder / "rewards.py").write_text(FAILS_LATE)
    ended = run(folder, *ZERO_GRPO)
    assert (ended.code, ended.err) == (3, "") and "the judge is out" in ended.out.split("stopped: ")[1]
    assert "saved out/checkpoints/step-000003; go on with --resume auto" in ended.out
    assert (status(folder)["state"], status(folder)["step"]) == ("stopped", 3)

    (folder / "rewards.py").write_text(FAILS_LATE.replace("== 3", "== 99"))
    ended = run(folder, *ZERO_GRPO, "--resume", "auto")
    assert ended.code == 2 and "--allow rewards/rewards.py" in ended.out
    ended = run(folder, *ZERO_GRPO, "--resume", "auto", "--allow", "rewards/rewards.py")
    assert ended.code == 0 and len((folder / "out/metrics.jsonl").read_text().splitlines()) == 12


def test_the_best_checkpoint_outlives_pruning(folder: Path) -> None:
    evaluation = ("--eval.every", "1", "--data.eval_fraction", "0.25", "--eval.best_metric", "sampled")
    command = (*ZERO_GRPO, *evaluation, "--checkpoint.every", "1", "--checkpoint.keep", "1", "--optim.lr", "5e-3")
    ended = run(folder, *command, "--run.steps", "5")
    assert ended.code == 0
    means = [
        json.loads((folder / f"out/eval/step-{step:06d}.json").read_text())["sampled"]["mean"] for step in range(6)
    ]
    best = means.index(max(means))
    assert best < 4, "pruning would have kept it anyway: choose another learning rate"
    checkpoints = folder / "out/checkpoints"
    assert f"zero-grpo export out/checkpoints/step-{best:06d} out/best" in ended.out
    assert (checkpoints / "best").read_text() == f"step-{best:06d}\n"
    assert {path.name for path in checkpoints.glob("step-*")} == {f"step-{best:06d}", "step-000005"}


def test_f9_sigterm_to_one_rank_alone_stops_all_at_one_step(tmp_path: Path) -> None:
    """The rank signals itself in its rollout; nothing of it reaches the other, and there is no launcher."""
    ranks = signalled(tmp_path, "rollout", 29742)
    assert [rank.code for rank in ranks] == [75, 75], ranks[0].output[-3000:]
    found = status(tmp_path)
    assert (found["state"], found["exit_code"], found["step"]) == ("preempted", 75, 2)
    assert "saved out/checkpoints/step-000002; go on with --resume auto." in ranks[0].output


@pytest.mark.full
def test_f10_sigterm_in_the_middle_of_a_save_lets_it_end(tmp_path: Path) -> None:
    ranks = signalled(tmp_path, "save.after_shard", 29743, "--checkpoint.every", "3")
    assert [rank.code for rank in ranks] == [75, 75], ranks[0].output[-3000:]
    assert status(tmp_path)["step"] == 3 and Store(tmp_path / "out").newest().manifest.step == 3  # type: ignore
    assert [path.name for path in (tmp_path / "out/checkpoints").glob("tmp.*")] == []


def signalled(folder: Path, phase: str, port: int, *more: str) -> list[Rank]:
    """Two ranks, of which the second gets a SIGTERM in that phase of step 3."""
    write_run(folder)
    (folder / "run.toml").write_text(RUN.replace("steps = 2", "steps = 12"))
    fault = {"ZERO_GRPO_TEST": "1", "ZERO_GRPO_FAULT": f"term@rank1:step3:phase={phase}"}
    return run_ranks(["-m", "trainer", "train", "run.toml", *more], 2, port, folder=folder, **fault)
