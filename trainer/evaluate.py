"""Held-out reward: sampled and greedy, on the same prompts each time, with errors clustered by prompt."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainer.batch import Completion, Prompt
from trainer.rollout.hf import Decoder, Group
from trainer.world import World


@dataclass(frozen=True)
class Score:
    """Mean reward over prompts and its standard error; a prompt's own completions are not independent, so they count
    once."""

    mean: float
    stderr: float
    per_prompt: tuple[float, ...]
    """Mean reward of each scored prompt's completions, in order of the prompts."""
    unscored: int
    """Completions that no reward scored."""


@dataclass(frozen=True)
class Evaluation:
    step: int
    sampled: Score
    greedy: Score


def clustered(rewards_by_prompt: Sequence[Sequence[float | None]]) -> Score:
    """Score of the completions of each prompt; a prompt without any scored completion is left out."""
    scored = [[reward for reward in rewards if reward is not None] for rewards in rewards_by_prompt]
    means = tuple(sum(rewards) / len(rewards) for rewards in scored if rewards)
    unscored = sum(map(len, rewards_by_prompt)) - sum(map(len, scored))
    mean = sum(means) / len(means) if means else math.nan
    return Score(mean, _stderr(means), means, unscored)


def rise(before: Score, after: Score) -> tuple[float, float]:
    """Mean rise over the same prompts and its standard error, paired by prompt."""
    differences = [b - a for a, b in zip(before.per_prompt, after.per_prompt, strict=True)]
    return sum(differences) / len(differences), _stderr(differences)


def answer_and_score(
    decoder: Decoder,
    score: Callable[[list[Completion]], None],
    prompts: Sequence[Prompt],
    *,
    generations: int,
    world: World,
) -> tuple[list[Completion], list[Completion]]:
    """This rank's share: ``generations`` sampled completions and one greedy one of each of its prompts, scored.

    The noise is keyed by prompt and not by step: two evaluations differ by the policy alone.
    """
    mine = [Group(place, prompt) for place, prompt in enumerate(prompts)][world.rank :: world.size]
    sampled = decoder.generate(mine, step=0, generations=generations, purpose="eval")
    greedy = decoder.generate(mine, step=0, generations=1, purpose="eval", greedy=True)
    score(sampled)
    score(greedy)
    return sampled, greedy


def gathered(completions: Sequence[Completion], prompts: int, world: World) -> Score:
    """The score over all ranks' completions. A collective: what may fail on one rank alone has been done before."""
    rewards: list[list[float | None]] = [[] for _ in range(prompts)]
    for part in world.gather_objects([(completion.group, completion.reward) for completion in completions]):
        for group, reward in part:
            rewards[group].append(reward)
    return clustered(rewards)


def _stderr(values: Sequence[float]) -> float:
    if len(values) < 2:
        return math.nan
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))
