"""A whole run in miniature: folder with model, prompts and rewards, and the state that real start-up code makes of
it."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.tiny import tiny_qwen2, tiny_tokenizer
from trainer.batch import Completion
from trainer.collect import share
from trainer.config import RunConfig
from trainer.data.order import prompts_for_step
from trainer.preflight.prepare import check, load_models, start_engine
from trainer.record.rollout_rows import row
from trainer.state import State
from trainer.train import grpo_step
from trainer.world import World

OF_THE_MACHINE = ("seconds", "tokens_per", "slowest_rank", "peak_memory", "held_memory", "memory_slope")
"""Metrics, by how they begin, that two equal runs need not share: what a clock or an allocator says."""

REWARDS = '''
def spread(completion_ids, **_):
    """Another number for nearly every completion."""
    return [sum(ids) % 17 / 17 for ids in completion_ids]


def constant(completion_ids, **_):
    return [1.0 for ids in completion_ids]


def even_prompts(prompts, completion_ids, **_):
    """No score for the completions of prompts that begin with an odd number."""
    return [None if int(prompt.split()[0]) % 2 else sum(ids) % 17 / 17 for prompt, ids in zip(prompts, completion_ids)]


def none(completion_ids, **_):
    return [None for ids in completion_ids]


def broken_on_odd_prompts(prompts, **_):
    if any(int(prompt.split()[0]) % 2 for prompt in prompts):
        raise KeyError("gold")
    return [float(len(prompt)) for prompt in prompts]
'''

PROMPTS = [
    "0 + 3?",
    "1 + 3 is a longer question",
    "2 ?",
    "3 + 3 = ?",
    "4 what is the answer",
    "5 minus 2 =",
    "6 ?",
    "7 then 8 then 9 then",
]
"""Of 3 to 20 tokens. Number n lies in row n."""

SETTINGS: dict[str, Any] = {
    "run.steps": 5,
    "data.chat_template": "off",
    "rollout.prompts_per_step": 4,
    "rollout.num_generations": 4,
    "rollout.max_new_tokens": 8,
    "lora.r": 4,
    "optim.name": "sgd",
    "optim.lr": 0.5,
    "optim.warmup_steps": 0,
    "optim.max_grad_norm": 0.0,
    "engine.device": "cpu",
    "log.samples_every": 0,
}

RUN_FILE = """
[run]
dir = "out"
steps = 2
[model]
name_or_path = "model"
[data]
source = "train.jsonl"
chat_template = "off"
[rollout]
prompts_per_step = 4
num_generations = 4
max_new_tokens = 8
[[reward]]
name = "score"
kind = "python"
function = "rewards.py:spread"
"""
"""A run file for the folder that ``write_run`` makes, from within it."""


def write_run(folder: Path, model: PreTrainedModel | None = None) -> Path:
    """``folder/model``, ``train.jsonl`` and ``rewards.py``; returns the folder."""
    (model or tiny_qwen2()).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    (folder / "train.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    (folder / "rewards.py").write_text(REWARDS)
    return folder


def run_config(folder: Path, settings: dict[str, Any] | None = None, *, reward: str = "spread") -> RunConfig:
    """The run file of ``folder``; ``settings`` by dotted key."""
    sections: dict[str, Any] = {"reward": [{"name": "score", "kind": "python", "function": f"rewards.py:{reward}"}]}
    paths = {"model.name_or_path": str(folder / "model"), "data.source": str(folder / "train.jsonl")}
    for key, value in (paths | SETTINGS | (settings or {})).items():
        *tables, name = key.split(".")
        table = sections
        for part in tables:
            table = table.setdefault(part, {})
        table[name] = value
    return RunConfig.model_validate(sections)


def start(
    folder: Path, world: World, settings: dict[str, Any] | None = None, *, reward: str = "spread", away: float = 0.0
) -> State:
    """A run ready for its first step. ``away``: how far the policy is taken from its reference before."""
    checked = check(run_config(folder, settings, reward=reward), folder, world)
    models = load_models(checked, world)
    if away:
        move(models.policy.causal, away)
    return start_engine(checked, models, world)


@torch.no_grad()
def move(causal: PreTrainedModel, size: float) -> None:
    """Adds noise to what is trained; of adapters, to B alone, which begins at 0."""
    generator = torch.Generator().manual_seed(3)
    for name, parameter in sorted(causal.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator) * size
        if parameter.requires_grad and "lora_A" not in name:
            parameter += noise.to(parameter)


def step(state: State) -> tuple[dict[str, float], list[Completion]]:
    """The next step of the run."""
    rows = prompts_for_step(
        len(state.prompts), state.config.rollout.prompts_per_step, state.step, state.config.data.seed
    )
    found = grpo_step(state, share([state.prompts[row] for row in rows], state.world))
    state.step += 1
    return found


def replay(folder: Path, world: World, *, reward: str = "spread") -> dict[str, Any]:
    """Settings that train on one recorded step of the untouched model, as if an older policy had sampled it."""
    target = folder / f"recorded-{reward}"
    if not target.exists():
        state = start(folder, world, reward=reward)
        _, completions = step(state)
        state.engine.close()
        target.mkdir()
        lines = [json.dumps(row(completion, 1)) + "\n" for completion in completions]
        (target / "step-000001.jsonl").write_text("".join(lines))
    return {"rollout.replay": str(target), "run.steps": 1}


def ragged(folder: Path) -> dict[str, Any]:
    """Settings that train on a recorded step whose completions have 1 to 4 tokens and a reward of their own each."""
    target = folder / "ragged"
    if not target.exists():
        target.mkdir()
        rows = [
            {
                "step": 1,
                "group": number // 4,
                "index": number % 4,
                "row": number // 4,
                "prompt_ids": list(range(3 + number // 4)),
                "completion_ids": [5 + number] * (number % 4 + 1),
                "sampling_logps": [-5.7] * (number % 4 + 1),
                "rewards": {"score": float(number**2)},
                "finish": "stop",
            }
            for number in range(16)
        ]
        (target / "step-000001.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"rollout.replay": str(target), "run.steps": 1}


def weights(state: State, *, everything: bool = False) -> dict[str, Tensor]:
    """Copies of the trained weights, or of all; whole, also under ZeRO-3."""
    named = {name: p for name, p in state.policy.causal.named_parameters() if everything or p.requires_grad}
    with state.engine.whole(list(named.values())):
        return {name: parameter.detach().clone() for name, parameter in named.items()}


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Largest absolute difference of two sets of weights."""
    return max(float((one[name].float() - other[name].float()).abs().max()) for name in one)


def repeatable(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics of a step that an equal run has, bit for bit."""
    return {name: value for name, value in metrics.items() if not name.startswith(OF_THE_MACHINE)}
