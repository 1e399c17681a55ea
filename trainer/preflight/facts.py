"""What this run is, as its checkpoints are signed with it: settings, and hashes of what the settings stand for."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.batch import Prompt
from trainer.checkpoint.manifest import Facts
from trainer.config import RunConfig
from trainer.config.deepspeed_json.read import locate
from trainer.models.fingerprint import fingerprint
from trainer.models.policy import Policy
from trainer.record.environment import installed_version
from trainer.rewards.runtime import RewardRuntime

LAYOUT = (
    "elastic_checkpoint",
    "parameter_alignment",
    "round_robin_gradients",
    "sub_group_size",
    "zero_hpz_partition_size",
)
"""Keys of zero_optimization that decide where a number lies in a shard."""
PACKAGES = ("torch", "deepspeed", "transformers", "peft")


def facts_of(
    config: RunConfig,
    deepspeed: dict[str, Any],
    prompts: Sequence[Prompt],
    rewards: RewardRuntime,
    policy: Policy,
    world_size: int,
) -> Facts:
    """``prompts``: those to train on, in order. ``policy``: as loaded, before its first update."""
    return Facts(
        world_size=world_size,
        zero_stage=stage_of(deepspeed),
        dtype=str(policy.dtype).removeprefix("torch."),
        config=config.model_dump(mode="json", exclude_none=True),
        sources={
            "model.name_or_path": fingerprint(policy.causal),
            "data.source": _prompts_sha256(prompts),
            "engine.deepspeed": hashlib.sha256(Path(locate(config.engine.deepspeed)).read_bytes()).hexdigest(),
            **{f"rewards/{name}": sha256 for name, sha256 in rewards.file_hashes().items()},
            **rewards.model_hashes(),
        },
        trained={name: list(p.shape) for name, p in policy.causal.named_parameters() if p.requires_grad},
        versions={name: installed_version(name) for name in PACKAGES},
        layout={key: value for key, value in deepspeed.get("zero_optimization", {}).items() if key in LAYOUT},
    )


def stage_of(deepspeed: dict[str, Any]) -> int:
    stage: int = deepspeed.get("zero_optimization", {}).get("stage", 0)
    return stage


def _prompts_sha256(prompts: Sequence[Prompt]) -> str:
    digest = hashlib.sha256()
    for prompt in prompts:
        record = [prompt.index, prompt.ids, prompt.columns]
        digest.update(json.dumps(record, sort_keys=True, default=str).encode(errors="backslashreplace"))
    return digest.hexdigest()
