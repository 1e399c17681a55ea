"""The seed document's flags train, and its recipe starts and says what is unsafe; both on a tiny model."""

import json
import tomllib
from pathlib import Path

import pytest

from tests.dist.launch import ROOT, run_ranks
from tests.dist.test_launch import TORCHRUN, run
from tests.tiny_run import write_run
from tests.unit.test_seed_command import FLAGS, UNSAFE
from trainer.config import recipes


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(write_run(tmp_path))
    return tmp_path


def test_the_documents_flags_train_on_two_ranks(folder: Path) -> None:
    """Started as the document starts them."""
    here = {"--model_name_or_path": "model", "--dataset_name": "train.jsonl", "--max_new_tokens": "4"}
    flags = [here.get(before, word) for before, word in zip(["", *FLAGS[:-1]], FLAGS, strict=True)]
    more = ["--local_rank=0", "--reward_function", "rewards.py:spread", "--num_generations", "4"]
    ended = run(folder, *TORCHRUN, str(ROOT / "launch/train_grpo.py"), *flags, *more, "--num_train_epochs", "1")
    assert ended.code == 0, ended.out + ended.err
    said = "4 a device x 4 accumulated x 2 rank(s) = 32 completions a step."
    assert ended.out.count(said) == 1, "of two ranks, one speaks"
    assert "step 1/1" in ended.out and "BAAI/bge-m3 is set aside" in ended.out
    run_dir = folder / "qwen25-grpo-checkpoint"
    resolved = tomllib.loads((run_dir / "config.toml").read_text("utf-8"))
    assert (resolved["rollout"]["prompts_per_step"], resolved["rollout"]["num_generations"]) == (8, 4)
    (metrics,) = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    assert (metrics["kl_coef"], metrics["completion_tokens_mean"] <= 4) == (0.5, True)
    assert json.loads((run_dir / "run_status.json").read_text())["state"] == "done"


def test_the_recipe_starts_and_says_what_is_unsafe(folder: Path) -> None:
    (folder / "run.toml").write_text(recipes.read("seed"), "utf-8")
    rewards = folder / "rewards.py"
    rewards.write_text(rewards.read_text() + "\nsimilarity = spread\n")
    paths = ["--model.name_or_path", "model", "--data.source", "train.jsonl", "--data.chat_template", "off"]
    small = ["--rollout.prompts_per_step", "4", "--rollout.max_new_tokens", "40"]
    (rank,) = run_ranks(["-m", "trainer", "preflight", "run.toml", *paths, *small], 1, 29751)
    assert rank.code == 0, rank.output
    told = " ".join(rank.output.split())  # a page of 100 columns
    assert [said for _, _, said, _ in UNSAFE if said not in told] == []
    assert "RoPE scaling is set but not needed" in told and "Leave out [model.rope]" in told
