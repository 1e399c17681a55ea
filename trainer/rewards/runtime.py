"""The rewards of a run: resolved and checked before the first rollout, then asked once a step."""

import functools
import hashlib
import math
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from trainer.batch import Completion, Prompt
from trainer.config.grpo import Reward
from trainer.config.rules.reward import SHARE_OF_HANG_TIMEOUT
from trainer.errors import Refused, Stopped
from trainer.rewards import builtin
from trainer.rewards.answers import Scores, row_name
from trainer.rewards.arguments import Signature, mismatches
from trainer.rewards.asking import ask_until_scored
from trainer.rewards.calls import Occasion, RewardFunction, is_async, score_rows
from trainer.rewards.embedding import EmbeddingReward
from trainer.rewards.event_loop import EventLoop
from trainer.rewards.frozen import ModelReward
from trainer.rewards.functions import TrainerState, copy_files, resolve
from trainer.rewards.ledger import Ledger
from trainer.rewards.processes import InProcesses
from trainer.rewards.reward_model import RewardModel
from trainer.rewards.services.resolve import service
from trainer.rewards.services.service import Service

MOST_REASONS = 5
"""Told of a step."""
NOT_OF_A_SCORE = {"weight", "max_unscored", "fallback", "timeout", "concurrency", "retries"}
"""Keys of a [[reward]] that change no score."""


@dataclass
class RewardResult:
    """What a step's scoring leaves beside the rewards themselves, of this rank's completions."""

    metrics: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Name -> (sum, count) of what was logged; all-reduce both, then divide once."""
    columns: dict[str, list[Any]] = field(default_factory=dict)
    """Column -> one value per completion, from log_extra; None where a row logged none."""
    messages: list[str] = field(default_factory=list)
    """What went wrong without ending the run, each with function and rows."""


class RewardRuntime:
    """All [[reward]] sections of a run, as callables.

    Refused names everything wrong with them at once. ``run_file_dir`` is where "file.py:callable" is looked for.
    """

    def __init__(self, rewards: Sequence[Reward], run_file_dir: Path, *, hang_timeout: float = math.inf) -> None:
        self.sections = tuple(rewards)
        self.patience = hang_timeout * SHARE_OF_HANG_TIMEOUT
        """Seconds that the rewards of a step may take, pauses included."""
        self.ledger: Ledger | None = None
        """Of a run that leaves records."""
        self.max_steps: int | None = None
        """What functions read as trainer_state.max_steps; known once the data are."""
        self.folder = run_file_dir.resolve()
        self._files: dict[Path, ModuleType] = {}
        self._functions: list[RewardFunction] = []
        problems = [f"two rewards are called {name!r}; names must differ" for name in _repeated(self.sections)]
        for section in self.sections:
            try:
                self._functions.append(self._resolve(section))
            except Refused as refusal:
                named = f"function = {section.function!r}" if section.function else f'kind = "{section.kind}"'
                problems.append(f"reward {section.name!r}, {named}: {refusal}")
        if problems:
            raise Refused("\n".join(problems))
        self._loop = EventLoop() if any(reward.is_async for reward in self._functions) else None

    def check(self, prompts: Sequence[Prompt]) -> list[str]:
        """What in the data keeps a reward from scoring them, in words; empty when nothing does."""
        problems = []
        for section, reward in zip(self.sections, self._functions, strict=True):
            strict = section.kind == "builtin"
            found = mismatches(reward.signature, prompts, strict=strict)
            if strict and not found:
                found = builtin.unusable_rows(builtin.bind(section), reward.signature, prompts)
            problems += [f"{reward.label} {problem}" for problem in found]
        return problems

    def load(self, device: torch.device) -> list[str]:
        """Reads the weights of encoders and reward models, once; what each is, in words."""
        return [model.load(device) for model in self._models() if model.network is None]

    def score(self, completions: list[Completion], step: int) -> RewardResult:
        """Fill ``rewards`` and ``reward`` of each completion. ``step``: rollout steps done before this one.

        Stopped when a function breaks its contract, or fails on a larger share of the rows than its ``max_unscored``:
        at once where that would stay so, otherwise after pauses with a further try each.
        """
        result = RewardResult()
        for completion in completions:
            completion.rewards, completion.reward = {}, None
        if not completions:  # a rank may have no share of a small step
            return result
        state = TrainerState(global_step=step, max_steps=self.max_steps)
        occasion = Occasion(state, self._loop, self.ledger, time.monotonic() + self.patience)
        every = ask_until_scored(self.sections, self._functions, completions, occasion)
        failed: list[set[str]] = [set() for _ in completions]
        for section, reward, scores in zip(self.sections, self._functions, every, strict=True):
            _judge_failures(section, reward, scores, completions, step, result)
            _keep(reward, scores, completions, result)
            if section.fallback is None:
                for i in scores.failures:
                    failed[i].add(section.name)
        weights = {section.name: section.weight for section in self.sections}
        for completion, names in zip(completions, failed, strict=True):
            completion.reward = total_reward(completion.rewards, weights, names)
        if all(completion.reward is None for completion in completions):
            result.messages.append(_none_scored(self.sections, completions, step))
        return result

    def prepare(self, prompt_tokens: int, new_tokens: int) -> list[str]:
        """Tells services how long the longest prompt and a completion are. Refused where a window is smaller."""
        notes: list[str] = []
        problems: list[str] = []
        for reward in self._functions:
            if isinstance(asked := reward.function, Service) and self._loop is not None:
                try:
                    waits = 2 * reward.timeout + 10  # it ends by itself after one
                    notes += self._loop.run(asked.backend.prepare(prompt_tokens, new_tokens), waits)
                except Refused as refusal:
                    problems += refusal.problems
        if problems:
            raise Refused(*problems)
        return notes

    def probe(
        self, completions: list[Completion], known: Mapping[str, Scores], names: Collection[str]
    ) -> Iterator[tuple[Reward, RewardFunction, Scores | str]]:
        """What each reward of ``names`` says of a few completions before the first step, or how it breaks its
        contract. Nothing is kept, and no share of failures ends anything. ``known``, by name, are not asked."""
        occasion = Occasion(TrainerState(global_step=0, max_steps=self.max_steps), self._loop)
        for section, reward in zip(self.sections, self._functions, strict=True):
            if section.name not in names:
                continue
            try:
                yield section, reward, known.get(section.name) or score_rows(reward, completions, occasion)
            except Stopped as broken:
                yield section, reward, str(broken)

    def copy_into(self, run_dir: Path) -> None:
        """Keep the user's reward files with the run, in RUN_DIR/rewards."""
        copy_files(self._files, self.folder, run_dir)

    def file_hashes(self) -> dict[str, str]:
        """Path -> SHA-256 of every reward file; the path from the run file's folder, where it lies below that."""
        names = {
            file: file.relative_to(self.folder).as_posix() if file.is_relative_to(self.folder) else str(file)
            for file in self._files
        }
        return {name: hashlib.sha256(file.read_bytes()).hexdigest() for file, name in names.items()}

    def forget_paid_before(self, step: int) -> list[str]:
        """A checkpoint holds the first ``step`` steps: their scores need not be kept any more.

        In words why they still are, where they cannot be forgotten: that costs room and nothing else, and what ends
        this rank here would leave the others waiting.
        """
        try:
            if self.ledger is not None:
                self.ledger.forget_before(step)
        except Stopped as failed:
            return [f"after the checkpoint of step {step}: {failed}"]
        return []

    @staticmethod
    def settings_of(section: Reward) -> str:
        """The keys that the scores of a service depend on."""
        return section.model_dump_json(exclude=NOT_OF_A_SCORE)

    def model_hashes(self) -> dict[str, str]:
        """Key of the run file -> SHA-256 of what the loaded model behind it is."""
        return {model.key: model.sha256 for model in self._models() if model.network is not None}

    def _models(self) -> list[ModelReward]:
        functions: list[Any] = [reward.function for reward in self._functions]
        return [function for function in functions if isinstance(function, ModelReward)]

    def _resolve(self, section: Reward) -> RewardFunction:
        concurrency, paid = None, ""
        if section.kind == "python":
            function = resolve(section.function, self.folder, self._files)
            concurrency = section.concurrency
        elif section.kind == "builtin":
            function = builtin.bind(section)
            concurrency = section.concurrency
        elif section.kind == "embedding":
            function = EmbeddingReward(section)
        elif section.kind == "model":
            function = RewardModel(section)
        else:
            function = service(section)
            concurrency, paid = section.calls_at_a_time, self.settings_of(section)
        try:
            signature = Signature.of(function)
        except (TypeError, ValueError):
            raise Refused("Python cannot tell its parameters; wrap it in a function of yours") from None
        if concurrency is not None and not is_async(function):
            load = functools.partial(resolve, section.function, self.folder, {})
            if section.kind == "builtin":
                load = functools.partial(builtin.bind, section)
            function = InProcesses(load, section.timeout, section.retries)
        return RewardFunction(
            name=section.name,
            label=f"reward {section.name!r} ({section.function or section.path or section.kind})",
            function=function,
            signature=signature,
            timeout=section.timeout,
            retries=section.retries,
            concurrency=concurrency,
            keeps_time=bool(paid) or isinstance(function, InProcesses),
            paid=paid,
        )


def total_reward(
    rewards: Mapping[str, float | None], weights: Mapping[str, float], failed: Collection[str] = ()
) -> float | None:
    """The weighted sum of the rewards that score the row, as in TRL; None = unscored, where none does, or one that
    counts failed.

    None among ``rewards`` is what the function returned: it does not apply to the row, as where the rows are several
    tasks with a function each. One that failed should have applied: without it the sum would be of another scale.
    """
    counted = {name: value for name, value in rewards.items() if weights.get(name, 1.0)}
    if counted.keys() & set(failed):
        return None
    scores = [weights.get(name, 1.0) * value for name, value in counted.items() if value is not None]
    return sum(scores) if scores else None


def _judge_failures(
    section: Reward,
    reward: RewardFunction,
    scores: Scores,
    completions: list[Completion],
    step: int,
    result: RewardResult,
) -> None:
    """Report the rows on which a function failed; put the user's fallback there, or end the run for too many."""
    n, failed = len(completions), len(scores.failures)
    result.metrics[f"rewards/{reward.name}/failed_fraction"] = (float(failed), n)
    reasons = [
        f"{why}: {_row_names(completions[i] for i, reason in scores.failures.items() if reason == why)}"
        for why in dict.fromkeys(scores.failures.values())
    ]
    if (others := len(reasons) - MOST_REASONS) > 0:  # a judge has another for every row
        reasons[MOST_REASONS:] = [f"and {others} other reasons"]
    if failed > section.max_unscored * n:
        raise Stopped(
            f"{reward.label} failed on {failed} of {n} completions in step {step + 1}, "
            f"more than max_unscored = {section.max_unscored:g} allows.\n  " + "\n  ".join(reasons)
        )
    outcome = "unscored" if section.fallback is None else f"given the fallback {section.fallback:g}"
    result.messages += [f"{reward.label}, step {step + 1}, {outcome}: {reason}" for reason in reasons]
    for i in scores.failures:
        scores.values[i] = section.fallback


def _keep(reward: RewardFunction, scores: Scores, completions: list[Completion], result: RewardResult) -> None:
    for completion, value in zip(completions, scores.values, strict=True):
        completion.rewards[reward.name] = value
    for name, value in scores.metrics:
        total, count = result.metrics.get(name, (0.0, 0))
        result.metrics[name] = (total + value, count + 1)
    result.columns |= scores.columns
    result.messages += scores.notes


def _none_scored(sections: Sequence[Reward], completions: list[Completion], step: int) -> str:
    message = f"step {step + 1}: none of the {len(completions)} completions has a reward: nothing to learn from"
    if len(sections) > 1:
        message += ". Every reward with a weight returned None for it, or one of them failed"
    return message


def _row_names(completions: Iterable[Completion]) -> str:
    names = [row_name(completion) for completion in completions]
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")


def _repeated(sections: Sequence[Reward]) -> list[str]:
    names = [section.name for section in sections]
    return sorted({name for name in names if names.count(name) > 1})
