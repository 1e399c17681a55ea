"""The rewards of a run: resolved and checked before the first rollout, then asked once a step."""

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from trainer.batch import Completion, Prompt
from trainer.config.grpo import Reward
from trainer.errors import Refused, Stopped
from trainer.rewards import builtin
from trainer.rewards.arguments import Signature, TrainerState, mismatches
from trainer.rewards.calls import RewardFunction, Scores, row_name, score_rows, start_event_loop
from trainer.rewards.embedding import EmbeddingReward
from trainer.rewards.frozen import ModelReward
from trainer.rewards.functions import copy_files, resolve
from trainer.rewards.reward_model import RewardModel


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

    def __init__(self, rewards: Sequence[Reward], run_file_dir: Path) -> None:
        self.sections = tuple(rewards)
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
                where = f", function = {section.function!r}" if section.function else ""
                problems.append(f"reward {section.name!r}{where}: {refusal}")
        if problems:
            raise Refused("\n".join(problems))
        self._loop = start_event_loop() if any(reward.is_async for reward in self._functions) else None

    def check(self, prompts: Sequence[Prompt]) -> list[str]:
        """What in the data keeps a reward from scoring them, in words; empty when nothing does."""
        problems = []
        for section, reward in zip(self.sections, self._functions, strict=True):
            strict = section.kind == "builtin"
            found = mismatches(reward.signature, prompts, strict=strict)
            if strict and not found:
                found = builtin.unusable_rows(reward.function, reward.signature, prompts)
            problems += [f"{reward.label} {problem}" for problem in found]
        return problems

    def load(self, device: torch.device) -> list[str]:
        """Reads the weights of encoders and reward models, once; what each is, in words."""
        return [model.load(device) for model in self._models() if model.network is None]

    def score(self, completions: list[Completion], step: int) -> RewardResult:
        """Fill ``rewards`` and ``reward`` of each completion. ``step``: rollout steps done before this one.

        Stopped when a function breaks its contract, or fails on a larger share of the rows than its ``max_unscored``.
        """
        result = RewardResult()
        for completion in completions:
            completion.rewards, completion.reward = {}, None
        if not completions:  # a rank may have no share of a small step
            return result
        every = self._ask_all(completions, TrainerState(global_step=step, max_steps=self.max_steps))
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

    def probe(self, completions: list[Completion]) -> list[tuple[Reward, RewardFunction, Scores | str]]:
        """What each reward says of a few completions before the first step, or how it breaks its contract. Nothing is
        kept, and no share of failures ends anything."""
        state = TrainerState(global_step=0, max_steps=self.max_steps)
        found: list[tuple[Reward, RewardFunction, Scores | str]] = []
        for section, reward in zip(self.sections, self._functions, strict=True):
            try:
                found.append((section, reward, score_rows(reward, completions, state, self._loop)))
            except Stopped as broken:
                found.append((section, reward, str(broken)))
        return found

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

    def model_hashes(self) -> dict[str, str]:
        """Key of the run file -> SHA-256 of what the loaded model behind it is."""
        return {model.key: model.sha256 for model in self._models() if model.network is not None}

    def _models(self) -> list[ModelReward]:
        functions: list[Any] = [reward.function for reward in self._functions]
        return [function for function in functions if isinstance(function, ModelReward)]

    def _resolve(self, section: Reward) -> RewardFunction:
        if section.kind == "python":
            function = resolve(section.function, self.folder, self._files)
        elif section.kind == "builtin":
            function = builtin.bind(section)
        elif section.kind == "embedding":
            function = EmbeddingReward(section)
        elif section.kind == "model":
            function = RewardModel(section)
        else:
            raise Refused(f'kind = "{section.kind}" is not available in this version')
        try:
            signature = Signature.of(function)
        except (TypeError, ValueError):
            raise Refused("Python cannot tell its parameters; wrap it in a function of yours") from None
        label = f"reward {section.name!r} ({section.function or section.path})"
        return RewardFunction(section.name, label, function, signature, section.timeout, section.retries)

    def _ask_all(self, completions: list[Completion], state: TrainerState) -> list[Scores]:
        """Plain functions one after another in the main thread, then all async ones at the same time."""

        def ask(i: int) -> Scores:
            return score_rows(self._functions[i], completions, state, self._loop)

        is_async = [reward.is_async for reward in self._functions]
        scores = {i: ask(i) for i, waits in enumerate(is_async) if not waits}
        waiting = [i for i, waits in enumerate(is_async) if waits]
        if waiting:
            with ThreadPoolExecutor(len(waiting)) as pool:
                scores |= dict(zip(waiting, pool.map(ask, waiting), strict=True))
        return [scores[i] for i in range(len(is_async))]


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
