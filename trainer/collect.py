"""The first half of a step: completions, sampled or recorded, and what they are worth."""

from pathlib import Path
from typing import Any

import torch

from trainer.algorithm.advantages import group_advantages
from trainer.batch import Completion, Prompt
from trainer.record.metrics import Sums
from trainer.record.rollout_rows import read_rollouts
from trainer.rewards.runtime import total_reward
from trainer.rollout.decoder import Group
from trainer.state import State
from trainer.world import World

MOST_MESSAGES = 20
"""Told of the rewards of one step."""


def share(prompts: list[Prompt], world: World) -> list[Group]:
    """This rank's groups, dealt out. One rank samples and scores a group, so that its statistics need no communication;
    which rank trains it is decided when lengths are known (balance.py)."""
    return [Group(place, prompt) for place, prompt in enumerate(prompts)][world.rank :: world.size]


def sample(state: State, groups: list[Group]) -> list[Completion]:
    """G completions of each prompt: decoded, or read from ``rollout.replay``."""
    if state.config.rollout.replay:
        return recorded(state)
    generations = state.config.rollout.num_generations
    return state.decoder.generate(groups, step=state.step, generations=generations, more_seed=state.rollbacks)


def recorded(state: State) -> list[Completion]:
    """This rank's groups of the recorded step, with their recorded rewards; advantages are computed anew."""
    rows = read_rollouts(Path(state.config.rollout.replay), state.step + 1)
    tokenizer = state.policy.tokenizer
    weights = {reward.name: reward.weight for reward in state.config.reward}
    completions = []
    for row in rows:
        if row["group"] % state.world.size != state.world.rank:
            continue
        completions.append(
            Completion(
                group=row["group"],
                generation=row["index"],
                prompt=recorded_prompt(row),
                ids=tuple(row["completion_ids"]),
                sampling_logps=tuple(row["sampling_logps"]),
                finish=row["finish"],
                text=str(tokenizer.decode(row["completion_ids"], skip_special_tokens=True)),
                rewards=row["rewards"],
                reward=recorded_reward(row, weights),
            )
        )
    return completions


def recorded_prompt(row: dict[str, Any]) -> Prompt:
    """The prompt of a recorded row; its text and columns are optional there."""
    return Prompt(row["row"], row.get("prompt", ""), tuple(row["prompt_ids"]), None, row.get("columns", {}))


def recorded_reward(row: dict[str, Any], weights: dict[str, float]) -> float | None:
    """The sum by today's weights. A recorded ``reward`` of null stays unscored: one of its parts had failed."""
    return None if row.get("reward", 0.0) is None else total_reward(row["rewards"], weights)


def score(state: State, completions: list[Completion], sums: Sums) -> list[str]:
    """Fills in the rewards; what is to be told of it. Recorded completions have theirs already."""
    if state.config.rollout.replay:
        return []
    result = state.rewards.score(completions, state.step)
    for name, (total, count) in result.metrics.items():
        sums.add(name, total, count)
    for name, values in result.columns.items():
        for completion, value in zip(completions, values, strict=True):
            completion.extra[name] = value
    return result.messages


def of_all_ranks(messages: list[str], world: World) -> list[str]:
    """What all ranks have to tell, each thing once: rank 0 prints, and has its own completions alone. A collective."""
    told = list(dict.fromkeys(message for part in world.gather_objects(messages) for message in part))
    others = len(told) - MOST_MESSAGES
    return told if others <= 0 else [*told[:MOST_MESSAGES], f"and {others} more messages of this kind"]


def trained(completions: list[Completion], mask_truncated: bool) -> list[Completion]:
    """Scored completions that the loss reads. The others stay in the records and in the group statistics."""
    return [c for c in completions if c.reward is not None and c.ids and not (mask_truncated and c.finish == "length")]


def set_advantages(state: State, completions: list[Completion]) -> None:
    """Advantages within each group; unscored completions stay out of its statistics."""
    grpo = state.config.grpo
    rewards = torch.tensor(
        [float("nan") if c.reward is None else c.reward - c.kl_penalty for c in completions], dtype=torch.float64
    )
    groups = torch.tensor([c.group for c in completions], dtype=torch.long)
    batch_std = _batch_std(rewards, state.world) if grpo.scale_rewards == "batch" else None
    advantages = group_advantages(
        rewards, groups, scale=grpo.scale_rewards, baseline=grpo.baseline, eps=grpo.advantage_eps, batch_std=batch_std
    )
    for completion, advantage in zip(completions, advantages.tolist(), strict=True):
        completion.advantage = advantage


def _batch_std(rewards: torch.Tensor, world: World) -> float:
    """Std (ddof 1) of all scored rewards of the step over all ranks, in two passes."""
    scored = rewards[~rewards.isnan()]
    total, count = world.all_reduce_sum([float(scored.sum()), len(scored)])
    deviation = scored - total / max(count, 1)
    (squares,) = world.all_reduce_sum([float(deviation.square().sum())])
    return float((squares / max(count - 1, 1)) ** 0.5)
