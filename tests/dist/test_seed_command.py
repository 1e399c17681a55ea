"""The seed document's flags train, and its recipe starts and says what is unsafe; both on a tiny model."""

import json
import tomllib
from pathlib import Path

import datasets
import pytest

from tests.dist.launch import ROOT, run_ranks
from tests.dist.test_launch import TORCHRUN, run
from tests.tiny import tiny_qwen2
from tests.tiny_rewards import write_encoder
from tests.tiny_run import PROMPTS, write_run
from tests.unit.test_seed_command import FLAGS, UNSAFE
from trainer.config import recipes


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(write_run(tmp_path))
    return tmp_path


def converted(folder: Path) -> None:
    """raw_data.jsonl by the document's own ``convert_to_slime_format``, with its two splits."""
    rows = [
        {"query": row["query"], "chosen": row["reference_answer"], "rejected": "", "id": number}
        for number, row in enumerate(RAW)
    ]
    shuffled = datasets.Dataset.from_list(rows).shuffle(seed=42)
    most = int(0.9 * len(rows))
    splits = {"train": shuffled.select(range(most)), "eval": shuffled.select(range(most, len(rows)))}
    datasets.DatasetDict(splits).save_to_disk(folder / "your_dataset_dir")


RAW = [
    {"query": "如何煮一碗好吃的牛肉面", "reference_answer": "1. 准备食材..."},
    {"query": "解释量子纠缠", "reference_answer": "量子纠缠是..."},
    *({"query": f"{number} + 3", "reference_answer": f"the answer is {number + 3}"} for number in range(3)),
]


def test_the_documents_own_run_ends_with_all_that_it_promises(folder: Path) -> None:
    tiny_qwen2(max_position_embeddings=512).save_pretrained("model")
    write_encoder(folder / "bge-m3", window=8192)
    converted(folder)
    here = {"Qwen/Qwen2.5-1.5B": "model", "BAAI/bge-m3": "bge-m3"}
    more = ["--local_rank=0", "--lora_r", "4", "--log.samples_every", "2", "--log.histogram_every", "2"]
    flags = [here.get(word, word) for word in FLAGS]
    ended = run(folder, *TORCHRUN, str(ROOT / "launch/train_grpo.py"), *flags, *more)
    assert ended.code == 0, ended.out + ended.err
    said = "4 a device x 4 accumulated x 2 rank(s) = 32 completions a step."
    assert ended.out.count(said) == 1, "of two ranks, one speaks"
    assert "step 3/3" in ended.out
    encoder = "reward 'similarity': cosine of XLMRobertaModel's vectors of 32 numbers (cls)"
    assert encoder in " ".join(ended.out.split())
    run_dir = folder / "qwen25-grpo-checkpoint"
    resolved = tomllib.loads((run_dir / "config.toml").read_text("utf-8"))
    assert (resolved["rollout"]["prompts_per_step"], resolved["rollout"]["max_new_tokens"]) == (4, 128)
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["kl_coef"] for row in metrics] == [0.5] * 3
    assert all(-1 <= row["reward/similarity"] <= 1 and row["rewards/similarity/cut"] == 0 for row in metrics)
    assert any(row["reward_group_std"] > 0 for row in metrics)
    assert (run_dir / "adapter/adapter_model.safetensors").is_file()
    assert (run_dir / "samples/step_2.txt").is_file() and (run_dir / "histograms/step-000002.json").is_file()
    assert {file.name for file in (run_dir / "eval").iterdir()} == {"step-000000.json", "step-000003.json"}
    assert json.loads((run_dir / "run_status.json").read_text())["state"] == "done"


def test_the_recipe_starts_and_says_what_is_unsafe(folder: Path) -> None:
    (folder / "run.toml").write_text(recipes.read("seed"), "utf-8")
    write_encoder(folder / "bge-m3")
    rows = [{"query": prompt, "reference_answer": "7"} for prompt in PROMPTS]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    paths = ["--model.name_or_path", "model", "--data.source", "train.jsonl", "--data.chat_template", "off"]
    paths += ["--reward.similarity.path", "bge-m3"]
    small = ["--rollout.prompts_per_step", "4", "--rollout.max_new_tokens", "40"]
    (rank,) = run_ranks(["-m", "trainer", "preflight", "run.toml", *paths, *small], 1, 29751)
    assert rank.code == 0, rank.output
    told = " ".join(rank.output.split())  # a page of 100 columns
    assert [said for _, _, said, _ in UNSAFE if said not in told] == []
    assert "RoPE scaling is set but not needed" in told and "Leave out [model.rope]" in told
