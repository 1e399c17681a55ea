"""The recipes for 24 GB cards, trained on a CPU: each run file but for model, rows, lengths, steps and device."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2ForCausalLM

from tests.cluster.two_hosts import Hosts, running, unavailable
from tests.tiny import tiny_qwen2, tiny_tokenizer
from tests.unit.test_recipes import CARDS
from trainer.config import load

ROOT = Path(__file__).parents[2]
RECIPES = {
    "a10-1.5b-lora": 1,
    "a10-7b-qlora": 1,
    "a10-7b-lora-bf16": 1,
    "4xa10-1.5b-full-zero2": 2,
    "4xa10-7b-full-zero3-offload": 2,
    "2x4xa10-hostfile": 2,
}
"""Ranks here."""
CHANGED = {
    "run.dir": "out",
    "run.steps": "3",
    "model.name_or_path": "model",
    "data.source": "gsm8k.jsonl",
    "data.config": "",
    "data.eval_fraction": "0.1",
    "data.max_prompt_tokens": "256",
    "rollout.max_new_tokens": "8",
    "engine.token_budget": "600",
    "engine.device": "cpu",
}
WHAT = (
    "Each recipe's run file with a random two-layer Qwen2, 60 rows and answers of 8 tokens, on a CPU: two steps, "
    "resumed for a third, exported. python -m pytest -m full tests/dist/test_recipes.py"
)


@torch.no_grad()
def answering_qwen2(*, tied: bool) -> Qwen2ForCausalLM:
    """Random, but for one direction that the last layer adds to every state, and by which 0, 1 and the end are likely:
    some of its answers are right, and groups differ."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 4096}
    model, tokenizer = tiny_qwen2(tied=tied, **sizes), tiny_tokenizer()
    attention = model.model.layers[-1].self_attn
    attention.v_proj.bias.fill_(50.0)
    way = attention.o_proj.weight.sum(1)
    for token in ("0", "1", "<|im_end|>"):
        model.lm_head.weight[tokenizer.convert_tokens_to_ids(token)] = way / way.norm()
    return model


def write_twin(folder: Path, name: str) -> None:
    """What the run file of a recipe needs here, and the file itself, as ``init`` prints it."""
    answering_qwen2(tied="1.5b" in name).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    rows = [{"question": f"Is {n} odd? 1 or 0.", "answer": f"It ends with {n % 10}.\n#### {n % 2}"} for n in range(60)]
    (folder / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.toml").write_text(command(folder, None, "init", name))


def command(folder: Path, hosts: Hosts | None, *words: str) -> str:
    """``zero-grpo WORDS`` in ``folder``, on the first host where there are two. Its output; it must end with 0."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    line = (sys.executable, "-m", "trainer", *words)
    settings: dict[str, Any] = {"env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = (
        hosts.popen("hosta", line, folder, **settings)
        if hosts
        else subprocess.Popen(line, cwd=folder, text=True, **settings)
    )
    try:
        said, _ = process.communicate(timeout=600)
    finally:
        process.kill()
    assert process.returncode == 0, said
    return said


@contextlib.contextmanager
def ranks_of(name: str, folder: Path) -> Iterator[tuple[Hosts | None, tuple[str, ...], str]]:
    """Hosts, the words that start the recipe's ranks, and what they are."""
    if name != "2x4xa10-hostfile" or unavailable():
        many = RECIPES[name]
        yield None, (("--gpus", str(many)) if many > 1 else ()), f"{many} on this host"
        return
    (folder / "hosts.txt").write_text("hosta slots=1\nhostb slots=1\n")
    with running(folder) as hosts:
        yield hosts, ("--hostfile", "hosts.txt"), "2, one on each of two hosts"


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "out/metrics.jsonl").read_text().splitlines()]


def moved(folder: Path) -> float:
    """How far what was trained is from where it began: of adapters, B from 0."""
    if (adapter := folder / "out/adapter/adapter_model.safetensors").is_file():
        return max(float(one.abs().max()) for name, one in load_file(adapter).items() if "lora_B" in name)
    before, after = (load_file(folder / at / "model.safetensors") for at in ("model", "out/model"))
    return max(float((after[name] - one).abs().max()) for name, one in before.items())


def twin(name: str, folder: Path) -> dict[str, Any]:
    write_twin(folder, name)
    changes = [word for key, value in CHANGED.items() for word in (f"--{key}={value}",)]
    start = time.perf_counter()
    with ranks_of(name, folder) as (hosts, ranks, where):
        command(folder, hosts, "train", "run.toml", *ranks, *changes, "--run.steps=2")
        command(folder, hosts, "train", "run.toml", *ranks, *changes, "--resume", "auto")
        kept = load(folder / "out/config.toml").model_dump()
        asked = load(folder / "run.toml", [f"--{key}={value}" for key, value in CHANGED.items()]).model_dump()
        assert kept == asked, "the run is another than the recipe"
        export = ["export", "out", "whole", *(["--merge"] if asked["lora"]["r"] else [])]
        said = command(folder, hosts, *export)
    steps = metrics(folder)
    assert [one["step"] for one in steps] == [1, 2, 3]
    assert json.loads((folder / "out/run_status.json").read_text())["state"] == "done"
    assert steps[0]["kl"] == 0 and all(one["grad_norm"] > 0 for one in steps)
    assert any(0 < one["reward_mean"] < 1 for one in steps) and moved(folder) > 0
    assert ("into dequantised weights" in said) == (asked["quant"]["bits"] == 4)
    evaluations = sorted(path.name for path in (folder / "out/eval").iterdir())
    assert evaluations[0] == "step-000000.json" and len(evaluations) >= 2
    return {
        "ranks": where,
        "engine": asked["engine"]["deepspeed"],
        "trained": "4-bit LoRA" if asked["quant"]["bits"] else "LoRA" if asked["lora"]["r"] else "all weights",
        "seconds": round(time.perf_counter() - start),
        "reward_mean": [round(one["reward_mean"], 3) for one in steps],
        "kl": [one["kl"] for one in steps],
        "grad_norm": [one["grad_norm"] for one in steps],
        "largest_change_of_a_trained_weight": moved(folder),
        "exported": [line.strip() for line in said.splitlines() if "logits" in line],
    }


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_every_recipe_trains_resumes_and_exports(
    tmp_path: Path, results: Callable[[str, dict[str, Any]], None]
) -> None:
    assert set(RECIPES) == set(CARDS)
    found = {}
    for name in RECIPES:
        folder = tmp_path / name
        folder.mkdir()
        found[name] = twin(name, folder)
    results("recipes", {"what": WHAT, "changed": CHANGED, "recipes": found})
