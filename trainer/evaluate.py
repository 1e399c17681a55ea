"""Held-out reward: sampled and greedy, on the same prompts each time, with errors clustered by prompt."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trainer.batch import Completion, Prompt
from trainer.rollout.decoder import Decoder, Group
from trainer.world import World


@dataclass(frozen=True)
class Score:
    """Mean reward over prompts and its standard error; a prompt's own completions are not independent, so they count
    once."""

    mean: float
    stderr: float
    per_prompt: tuple[float | None, ...]
    """Mean reward of each prompt's completions, in order of the prompts; None where none was scored."""
    unscored: int
    """Completions that no reward scored."""


@dataclass(frozen=True)
class Evaluation:
    step: int
    sampled: Score
    greedy: Score

    @classmethod
    def of(cls, record: dict[str, Any]) -> "Evaluation":
        """What ``record`` returned, also after a trip through JSON."""
        sampled, greedy = (
            Score(
                math.nan if one["mean"] is None else one["mean"],
                math.nan if one["stderr"] is None else one["stderr"],
                tuple(one["per_prompt"]),
                one["unscored"],
            )
            for one in (record["sampled"], record["greedy"])
        )
        return cls(record["step"], sampled, greedy)

    def record(self) -> dict[str, Any]:
        """For JSON, which has no NaN: a mean or an error that does not exist is null."""
        record = asdict(self)
        for kind in ("sampled", "greedy"):
            for name in ("mean", "stderr"):
                if math.isnan(record[kind][name]):
                    record[kind][name] = None
        return record


def clustered(rewards_by_prompt: Sequence[Sequence[float | None]]) -> Score:
    """Score of the completions of each prompt; a prompt without any scored completion stays out of the mean."""
    scored = [[reward for reward in rewards if reward is not None] for rewards in rewards_by_prompt]
    per_prompt = tuple(sum(rewards) / len(rewards) if rewards else None for rewards in scored)
    means = [mean for mean in per_prompt if mean is not None]
    unscored = sum(map(len, rewards_by_prompt)) - sum(map(len, scored))
    mean = sum(means) / len(means) if means else math.nan
    return Score(mean, _stderr(means), per_prompt, unscored)


def rise(before: Score, after: Score) -> tuple[float, float]:
    """Mean rise over the prompts scored both times, and its standard error, paired by prompt; NaN where there are
    none."""
    pairs = zip(before.per_prompt, after.per_prompt, strict=True)
    differences = [b - a for a, b in pairs if a is not None and b is not None]
    return (sum(differences) / len(differences) if differences else math.nan), _stderr(differences)


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
