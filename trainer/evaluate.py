"""Held-out reward: sampled and greedy, on the same prompts each time, with errors clustered by prompt."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trainer.batch import Completion, Prompt
from trainer.rollout.decoder import Decoder, Group
from trainer.world import World

Rewards = Sequence[Sequence[float | None]]
"""Of the completions of each prompt; None where one is unscored."""


ROUNDING = 1e-9


@dataclass(frozen=True)
class Score:
    """Mean over prompts and its standard error; a prompt's own completions are not independent, so they count once."""

    mean: float
    stderr: float
    per_prompt: tuple[float | None, ...]
    """Of each prompt's completions, in order of the prompts; None where none was scored."""
    unscored: int
    """Completions that no reward scored."""


@dataclass(frozen=True)
class Measures:
    """What is told of one reward, or of their weighted sum."""

    sampled: Score
    greedy: Score
    pass_at: dict[int, Score]
    """k -> the chance that one of k samples is correct."""


@dataclass(frozen=True)
class Evaluation:
    step: int
    correct_at: float
    """The reward from which a completion is correct, for pass@k."""
    total: Measures
    """Of the weighted sum."""
    parts: dict[str, Measures]
    """Of each reward by its name, without its weight."""

    @property
    def sampled(self) -> Score:
        return self.total.sampled

    @property
    def greedy(self) -> Score:
        return self.total.greedy

    @classmethod
    def of(cls, record: dict[str, Any]) -> "Evaluation":
        """What ``record`` returned, also after a trip through JSON, whose keys are text."""
        parts = {name: _measures(part) for name, part in record["parts"].items()}
        return cls(record["step"], record["correct_at"], _measures(record), parts)

    def record(self) -> dict[str, Any]:
        """For JSON, which has no NaN: a mean or an error that does not exist is null."""
        parts = {name: _record(part) for name, part in self.parts.items()}
        return {"step": self.step, "correct_at": self.correct_at, **_record(self.total), "parts": parts}


def measured(sampled: Rewards, greedy: Rewards, *, generations: int, correct_at: float) -> Measures:
    """``generations``: samples of each prompt; pass@k for its powers of two, and for all of them."""
    ks = sorted({2**power for power in range(generations.bit_length())} | {generations})
    return Measures(clustered(sampled), clustered(greedy), {k: pass_at(k, sampled, correct_at) for k in ks})


def clustered(rewards_by_prompt: Rewards) -> Score:
    """Score of the completions of each prompt; a prompt without any scored completion stays out of the mean."""
    scored = _scored(rewards_by_prompt)
    return _score([sum(rewards) / len(rewards) if rewards else None for rewards in scored], rewards_by_prompt)


def pass_at(k: int, rewards_by_prompt: Rewards, correct_at: float) -> Score:
    """The chance that one of k samples has at least the reward ``correct_at``: 1 - C(n - c, k) / C(n, k) for c of a
    prompt's n scored samples, which is unbiased (Chen et al., arXiv 2107.03374). A prompt with n < k stays out.

    A weighted sum of rewards that are all earned may fall short of 1 by rounding: 0.7 + 0.2 + 0.1.
    """
    chances: list[float | None] = []
    for rewards in _scored(rewards_by_prompt):
        wrong = sum(reward < correct_at - ROUNDING for reward in rewards)
        chances.append(1 - math.comb(wrong, k) / math.comb(len(rewards), k) if len(rewards) >= k else None)
    return _score(chances, rewards_by_prompt)


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
    completions = decoder.generate(mine, step=0, generations=generations, purpose="eval", greedy=1)
    sampled = [completion for completion in completions if completion.generation < generations]
    greedy = [completion for completion in completions if completion.generation == generations]
    score(sampled)
    score(greedy)
    return sampled, greedy


def gathered(
    step: int,
    completions: tuple[Sequence[Completion], Sequence[Completion]],
    *,
    prompts: int,
    generations: int,
    correct_at: float,
    world: World,
) -> Evaluation:
    """The evaluation over all ranks' (sampled, greedy) completions. A collective: what may fail on one rank alone has
    been done before."""
    kinds = []
    for kind in completions:
        shares = world.gather_objects([(one.group, one.reward, one.rewards) for one in kind])
        kinds.append([row for share in shares for row in share])

    names = list(dict.fromkeys(name for rows in kinds for _, _, parts in rows for name in parts))
    columns = [[[(group, reward) for group, reward, _ in rows] for rows in kinds]]
    columns += [[[(group, parts[name]) for group, _, parts in rows] for rows in kinds] for name in names]
    total, *others = [
        measured(*(_by_prompt(column, prompts) for column in pair), generations=generations, correct_at=correct_at)
        for pair in columns
    ]
    return Evaluation(step, correct_at, total, dict(zip(names, others, strict=True)))


def _by_prompt(rewards: Sequence[tuple[int, float | None]], prompts: int) -> Rewards:
    by_prompt: list[list[float | None]] = [[] for _ in range(prompts)]
    for group, reward in rewards:
        by_prompt[group].append(reward)
    return by_prompt


def _scored(rewards_by_prompt: Rewards) -> list[list[float]]:
    return [[reward for reward in rewards if reward is not None] for rewards in rewards_by_prompt]


def _score(per_prompt: Sequence[float | None], rewards_by_prompt: Rewards) -> Score:
    values = [value for value in per_prompt if value is not None]
    unscored = sum(reward is None for rewards in rewards_by_prompt for reward in rewards)
    mean = sum(values) / len(values) if values else math.nan
    return Score(mean, _stderr(values), tuple(per_prompt), unscored)


def _stderr(values: Sequence[float]) -> float:
    if len(values) < 2:
        return math.nan
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))


def _record(measures: Measures) -> dict[str, Any]:
    def score(one: Score) -> dict[str, Any]:
        return {name: None if value != value else value for name, value in asdict(one).items()}

    return {
        "sampled": score(measures.sampled),
        "greedy": score(measures.greedy),
        "pass_at": {str(k): score(one) for k, one in measures.pass_at.items()},
    }


def _measures(record: dict[str, Any]) -> Measures:
    def score(one: dict[str, Any]) -> Score:
        mean, stderr = (math.nan if one[name] is None else one[name] for name in ("mean", "stderr"))
        return Score(mean, stderr, tuple(one["per_prompt"]), one["unscored"])

    by_k = {int(k): score(one) for k, one in record["pass_at"].items()}
    return Measures(score(record["sampled"]), score(record["greedy"]), by_k)
