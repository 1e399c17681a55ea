"""One recorded rollout batch of ragged lengths, a tiny policy that differs from its reference, and their run file."""

import json
import random
from pathlib import Path
from typing import Any

import torch

from tests.tiny import tiny_qwen2, tiny_tokenizer
from trainer.config import RunConfig
from trainer.models.policy import Policy

GROUPS, GENERATIONS = 5, 4
"""Five groups: two ranks get three and two."""
MAX_NEW_TOKENS = 9


def write_inputs(folder: Path) -> None:
    """``folder/model`` and recordings: policy, reference and recorded sampler all differ."""
    tiny_qwen2().save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    for placement, equal in (("loss", 3), ("reward", None)):
        record(folder / f"rollouts-{placement}", equal)
    partitioned = {"stage": 3, "overlap_comm": False, "stage3_param_persistence_threshold": 0}
    (folder / "partitioned.json").write_text(json.dumps({"zero_optimization": partitioned}))


def record(folder: Path, equal: int | None) -> None:
    """One recorded step. ``equal``: the group whose rewards are all the same. With the KL in the reward such a group
    would divide the rounding of its KL by its tiny spread, which compares nothing."""
    draw = random.Random(7)
    folder.mkdir()
    with (folder / "step-000001.jsonl").open("w") as file:
        for group in range(GROUPS):
            prompt = [draw.randrange(256) for _ in range(draw.randint(2, 9))]
            for index in range(GENERATIONS):
                length = draw.randint(1, MAX_NEW_TOKENS)
                row = {
                    "step": 1,
                    "group": group,
                    "index": index,
                    "row": group,
                    "prompt_ids": prompt,
                    "completion_ids": [draw.randrange(256) for _ in range(length)],
                    "sampling_logps": [-5.7 + draw.gauss(0, 0.3) for _ in range(length)],
                    # One row that no reward could score.
                    "rewards": {
                        "score": None if (group, index) == (1, 2) else 0.5 if group == equal else draw.random() * 2
                    },
                    "finish": "length" if length == MAX_NEW_TOKENS else "stop",
                }
                file.write(json.dumps(row) + "\n")


def run_config(folder: Path, **cell: Any) -> RunConfig:
    """SGD with lr 1, no clipping, no decay: the update is the gradient."""
    # Such small weights would stay whole under the shipped zero3.
    deepspeed = str(folder / "partitioned.json") if cell.get("partitioned") else f"zero{cell['stage']}"
    sections: dict[str, dict[str, Any]] = {
        "run": {"steps": 1},
        "model": {"name_or_path": str(folder / "model")},
        "lora": {"r": 4 if cell["lora"] else 0, **({"alpha": 16.0} if cell["lora"] else {})},
        "quant": {"bits": cell.get("bits", 0)},
        "rollout": {
            "replay": str(folder / f"rollouts-{cell['placement']}"),
            "prompts_per_step": GROUPS,
            "num_generations": GENERATIONS,
            "max_new_tokens": MAX_NEW_TOKENS,
            "temperature": 0.8,
        },
        "grpo": {
            "loss_type": cell["loss_type"],
            "mask_truncated": cell.get("mask_truncated", False),
            "kl": {
                "coef": cell.get("coef", 0.3),
                "estimator": cell["estimator"],
                "placement": cell["placement"],
                "ratio_weighted": cell.get("ratio_weighted", True),
            },
        },
        "optim": {"name": "sgd", "lr": 1.0, "warmup_steps": 0, "max_grad_norm": 0.0},
        "engine": {"deepspeed": deepspeed, "micro_batch": cell["micro"], "device": "cpu"},
    }
    return RunConfig.model_validate(sections)


def move_away(policy: Policy) -> None:
    """Takes the policy away from its reference: B of every adapter, or every weight."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in sorted(policy.causal.named_parameters()):
            if "lora_B" in name or policy.peft is None:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * (0.1 if policy.peft else 0.03))
