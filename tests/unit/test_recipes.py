"""Every recipe is a run file that passes all checks but those of a model and data that lie on the hub."""

import json
import tomllib
from pathlib import Path

import pytest
import torch

from tests.fake_pass import CONFIGS
from tests.tiny import tiny_qwen2, tiny_tokenizer
from trainer.__main__ import main
from trainer.config import load, recipes, shipped
from trainer.preflight.survey import survey

CARDS = {
    "a10-1.5b-lora": 1,
    "a10-7b-qlora": 1,
    "a10-7b-lora-bf16": 1,
    "4xa10-1.5b-full-zero2": 4,
    "4xa10-7b-full-zero3-offload": 4,
    "2x4xa10-hostfile": 8,
}
"""Recipes for 24 GB cards, and how many of them."""


def recipe(name: str) -> str:
    return str(shipped.recipes() / f"{name}.toml")


@pytest.mark.parametrize("name", recipes.names())
def test_every_recipe_is_a_run_file(name: str) -> None:
    config = load(recipe(name))
    assert config.run.dir and (config.grpo.kl.coef <= 0.04 or name == "seed")  # which says so at its start


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A model and GSM8K's rows, as the overrides that a machine without network takes."""
    folder = tmp_path_factory.mktemp("local")
    model = tiny_qwen2()
    model.config.max_position_embeddings = 4096
    model.save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    rows = [{"question": f"What is {n} + 999?", "answer": f"999 + {n} =\n#### {n + 999:,}"} for n in range(99)]
    (folder / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = ["--data.source", str(folder / "gsm8k.jsonl"), "--data.config=", "--data.eval_fraction", "0.1"]
    return ["--model.name_or_path", str(folder / "model"), *data, "--run.dir", str(folder / "out")]


@pytest.mark.parametrize(("name", "cards"), CARDS.items())
def test_a_recipe_for_24_gb_cards_passes_the_checks(name: str, cards: int, local: list[str]) -> None:
    config = load(recipe(name), local)
    found = survey(config, Path(), torch.device("cpu"), ranks=cards, begins=True)
    assert found.errors == [] and found.unasked == []
    assert found.batch is not None and found.batch.prompts_a_rank in [(4, 4), (8, 8)]
    assert found.probes is not None
    assert found.probes.scores == {"correct": {"reference": 1.0, "shuffled": 0.0, "empty": 0.0}}
    assert found.warnings == []


@pytest.mark.parametrize(("name", "cards"), CARDS.items())
def test_the_table_of_recipes_is_what_plan_says(
    name: str, cards: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """launch/README.md, row by row. The model is its config.json and nothing else."""
    sizes = CONFIGS["1.5B" if "1.5b" in name else "7B"]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "max_position_embeddings": 32768} | sizes))
    words = ["--model.name_or_path", str(tmp_path), "--gpu", "a10", "--gpus", str(cards), "--json"]
    assert main(["plan", recipe(name), *words]) == 0
    found = json.loads(capsys.readouterr().out)
    phase = max(found["totals_gib"], key=found["totals_gib"].get)
    parts = found["phases_gib"][phase]
    grouped = (("weights",), ("gradients", "optimizer"), ("KV cache",), ("activations", "head chunks"))
    sums = [sum(parts.pop(part) for part in group) for group in grouped] + [sum(parts.values())]
    cells = [f"`{name}`", str(cards), *(f"{size:.1f}" for size in sums)]
    cells += [f"**{found['peak_gib']:.1f}**, {phase}", f"{found['host_gib']:.1f}"]
    table = (shipped.recipes().parent / "README.md").read_text("utf-8")
    assert f"| {' | '.join(cells)} |" in table.splitlines()


@pytest.mark.parametrize("name", CARDS)
def test_a_recipe_says_why_of_every_value_that_it_sets(name: str) -> None:
    text = recipes.read(name)
    assert f"zero-grpo init {name} > run.toml" in text
    assert max(map(len, text.splitlines())) <= 120
    settings = [line for line in text.splitlines() if " = " in line and not line.startswith("#")]
    assert [line for line in settings if "   # " not in line and "  # " not in line] == []


def test_the_first_two_train_gsm8k_and_the_rates_are_those_that_are_known_to_hold() -> None:
    trees = {name: tomllib.loads(recipes.read(name)) for name in CARDS}
    for name, tree in trees.items():
        assert (tree["data"]["source"], tree["data"]["config"]) == ("openai/gsm8k", "main")
        assert [reward["function"] for reward in tree["reward"]] == ["gsm8k"]
        lr, full = tree.get("optim", {}).get("lr", 2e-5), tree.get("lora", {}).get("r") == 0
        assert lr == (1e-6 if full else 1e-5 if "7b" in name or "hostfile" in name else 2e-5)
    assert trees["a10-7b-qlora"]["quant"] == {"bits": 4} and trees["a10-7b-qlora"]["optim"]["max_grad_norm"] == 0.3
    assert "256 GB of host memory" in recipes.read("4xa10-7b-full-zero3-offload")


def test_the_readme_of_the_deepspeed_files_says_why_of_every_key() -> None:
    readme = (shipped.ds_configs() / "README.md").read_text("utf-8")
    reasons = [line.split("|") for line in readme.splitlines() if line.startswith("| `")]
    told = " ".join(cells[1] for cells in reasons if len(cells) == 5)

    def keys(block: dict[str, object], above: str = "") -> list[str]:
        found = []
        for key, value in block.items():
            found += keys(value, f"{key}.") if isinstance(value, dict) else [f"{above}{key}"]
        return found

    for file in shipped.ds_configs().glob("*.json"):
        for key in keys(json.loads(file.read_text())["zero_optimization"]):
            assert f"`{key}`" in told or f"`{key.rpartition('.')[2]}`" in told, f"{file.name}: {key}"
