"""What is exported generates the policy's greedy tokens in vLLM. Run by tools/vllm.sh, which makes an environment."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, set_seed

from tests.tiny import TINY
from tests.tiny_run import start, step, write_run
from trainer.checkpoint.command import Options, export_checkpoint
from trainer.checkpoint.export import export
from trainer.config import dump
from trainer.world import World

PROMPTS = [[5, 6, 7, 8, 9], [40, 41, 42], [100, 17, 230, 4]]
RUNS: dict[str, dict[str, Any]] = {
    "lora": {"optim.lr": 5.0},
    "full": {"optim.lr": 0.5, "lora.r": 0},
    "scaled": {"optim.lr": 5.0, "model.rope.type": "yarn", "model.rope.factor": 4.0},
}


def larger_qwen2() -> Qwen2ForCausalLM:
    """With heads of 64 dimensions, the smallest of vLLM's kernels, and weights whose greedy tokens do not repeat."""
    set_seed(0)
    sizes = {"vocab_size": 300, "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    return Qwen2ForCausalLM(Qwen2Config(**TINY | sizes, tie_word_embeddings=True, initializer_range=0.1)).eval()


@torch.no_grad()
def greedy(model: PreTrainedModel, tokens: int) -> list[list[int]]:
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        for _ in range(tokens):
            ids = torch.cat([ids, model(input_ids=ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)], 1)
        found.append(ids[0, len(prompt) :].tolist())
    return found


def run(folder: Path, world: World, name: str) -> tuple[Path, PreTrainedModel]:
    """A finished run and its policy."""
    run_dir = folder / name
    run_dir.mkdir()
    state = start(folder, world, {"lora.r": 8, "run.dir": str(run_dir)} | RUNS[name])
    step(state)
    export(state.policy, state.engine, world, run_dir, state.config)
    (run_dir / "config.toml").write_text(dump(state.config))
    (run_dir / "run_status.json").write_text('{"state": "done", "step": 1}')
    return run_dir, state.policy.causal


@pytest.mark.peer
@pytest.mark.timeout(900)
def test_i4_vllm_generates_the_tokens_of_the_policy(tmp_path: Path, world: World) -> None:
    folder = write_run(tmp_path, larger_qwen2())
    cells: dict[str, dict[str, Any]] = {}
    expected = {}
    for name in RUNS:
        run_dir, causal = run(folder, world, name)
        # Beyond the unscaled window where it is scaled.
        tokens, window = (90, 256) if name == "scaled" else (24, 64)
        common: dict[str, Any] = {"prompts": PROMPTS, "tokens": tokens, "window": window}
        if name == "scaled":
            common["overrides"] = {"max_position_embeddings": window}  # as its model card says
        expected[name] = greedy(causal, tokens)
        if name == "full":
            cells[name] = common | {"model": str(run_dir / "model")}
            continue
        merged = run_dir / "merged"
        export_checkpoint(run_dir, merged, options=Options(merge=True))
        cells[f"{name} merged"] = common | {"model": str(merged)}
    cells["lora adapter"] = {
        **cells["lora merged"],
        "model": str(folder / "model"),
        "adapter": str(folder / "lora/adapter"),
    }
    cells["base"] = {**cells["lora merged"], "model": str(folder / "model")}
    (tmp_path / "cells.json").write_text(json.dumps(cells))

    worker = Path(__file__).with_name("vllm_greedy.py")
    # The environment of this one would be looked into first.
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    variables |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [os.environ["ZERO_GRPO_VLLM_PYTHON"], str(worker), "cells.json", "found.json"],
        cwd=tmp_path, env=variables, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    for name, tokens in found.items():
        if name != "base":
            assert tokens == expected[name.split()[0]], name
    assert found["base"] != found["lora adapter"], "an adapter without effect proves nothing"
