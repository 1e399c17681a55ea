"""One call of every reward before the first rollout: on a row's reference answer, on another row's, on nothing."""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from trainer.batch import Completion, Prompt
from trainer.config.grpo import Reward
from trainer.errors import Refused
from trainer.preflight import paid_probe
from trainer.rewards.answers import Scores
from trainer.rewards.calls import RewardFunction
from trainer.rewards.runtime import RewardRuntime
from trainer.rollout.rope_guard import Lengths

REFERENCE, SHUFFLED, EMPTY, QUESTION = "reference", "shuffled", "empty", "prompt"
"""What the completions of the probe say: the answer of their row, that of another row, nothing, or their prompt again
where rows have no answer."""


@dataclass
class Probes:
    """What the rewards said."""

    row: int
    """Number of the row that was asked about, from 1."""
    scores: dict[str, dict[str, float | None]] = field(default_factory=dict)
    """By reward, then by completion; None where it did not score that one."""
    seconds: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        return {name: {"row": self.row, **scores} for name, scores in self.scores.items()}


def probe_rewards(
    rewards: RewardRuntime, prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, lengths: Lengths
) -> Probes:
    """Calls each reward once. Errors: it breaks its contract, or fails on all. Warnings: it fails on some, or finds the
    right answer no better than a wrong one."""
    prompt = prompts[0]
    said = _said(prompts)
    end = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    completions = [
        Completion(
            group=0,
            generation=place,
            prompt=prompt,
            ids=(*tokenizer(text, add_special_tokens=False)["input_ids"], *end),
            sampling_logps=(),
            finish="stop",
            text=text,
        )
        for place, text in enumerate(said.values())
    ]
    probes = Probes(prompt.index + 1)
    try:
        probes.notes += rewards.prepare(lengths.prompt, lengths.new)
    except Refused as refusal:
        probes.errors += refusal.problems
        return probes
    for section, reward, scores in _asked(rewards, completions, probes):
        if isinstance(scores, str):
            probes.errors.append(f"{scores} (asked about row {probes.row} before the first rollout)")
            continue
        probes.scores[section.name] = dict(zip(said, scores.values, strict=True))
        forgiven = section.fallback is not None or section.max_unscored == 1
        _judge(probes, reward.label, list(said), scores, forgiven=forgiven)
        if REFERENCE in said and "answer" in reward.signature.accepted:
            _compare(probes, reward.label, probes.scores[section.name])
    return probes


def _asked(
    rewards: RewardRuntime, completions: list[Completion], probes: Probes
) -> list[tuple[Reward, RewardFunction, Scores | str]]:
    """Asks all rewards; of those that a key pays for only what has not been asked within the hour. The ranks of a host
    wait for one another there alone."""
    paid = [section for section in rewards.sections if section.key_env]
    found = _ask(rewards, [one for one in rewards.sections if not one.key_env], completions, {}, probes)
    with paid_probe.one_at_a_time() if paid else nullcontext():
        kept = {one.name: before for one in paid if (before := paid_probe.known(one, completions)) is not None}
        found |= _ask(rewards, paid, completions, {name: before.scores for name, before in kept.items()}, probes)
        for section in paid:
            _, reward, scores = found[section.name]
            if section.name in kept:
                ago = time.time() - kept[section.name].at
                probes.notes.append(f"{reward.label} was tried {ago / 60:.0f} minutes ago, and not again")
            elif isinstance(scores, Scores):
                paid_probe.keep(section, completions, scores)
    return [found[section.name] for section in rewards.sections]


def _ask(
    rewards: RewardRuntime,
    sections: Sequence[Reward],
    completions: list[Completion],
    known: dict[str, Scores],
    probes: Probes,
) -> dict[str, tuple[Reward, RewardFunction, Scores | str]]:
    """By name; ``probes`` gets the seconds of each."""
    found, start = {}, time.perf_counter()
    for section, reward, scores in rewards.probe(completions, known, {section.name for section in sections}):
        found[section.name] = (section, reward, scores)
        probes.seconds[section.name], start = time.perf_counter() - start, time.perf_counter()
    return found


def _said(prompts: Sequence[Prompt]) -> dict[str, str]:
    """The text of each completion of the probe, all as answers to the first prompt."""
    answers = [str(prompt.columns["answer"]) for prompt in prompts if prompt.columns.get("answer") not in (None, "")]
    if not answers or prompts[0].columns.get("answer") in (None, ""):
        return {QUESTION: prompts[0].text, EMPTY: ""}
    other = next((answer for answer in answers if answer != answers[0]), None)
    return {REFERENCE: answers[0]} | ({} if other is None else {SHUFFLED: other}) | {EMPTY: ""}


def _judge(probes: Probes, label: str, said: Sequence[str], scores: Scores, *, forgiven: bool) -> None:
    """``forgiven``: the run file says that the run goes on where all fail."""
    reasons = "; ".join(dict.fromkeys(scores.failures.values()))
    where = ", ".join(said[place] for place in scores.failures)
    if len(scores.failures) == len(said):
        (probes.warnings if forgiven else probes.errors).append(
            f"{label} fails on every completion that it was tried on ({where}, row {probes.row}): {reasons}"
        )
    elif scores.failures:
        probes.warnings.append(f"{label} fails on some completions ({where}, row {probes.row}): {reasons}")
    elif all(value is None for value in scores.values):
        probes.warnings.append(
            f"{label} scored none of the completions that it was tried on ({', '.join(said)}, row {probes.row}): "
            "unscored completions teach nothing"
        )


def _compare(probes: Probes, label: str, scores: dict[str, float | None]) -> None:
    right = scores[REFERENCE]
    others = {name: value for name, value in scores.items() if name != REFERENCE and value is not None}
    if right is None or not others or right > max(others.values()):
        return
    told = ", ".join(f"{name} {value:g}" for name, value in others.items())
    probes.warnings.append(
        f"{label} gives the reference answer of row {probes.row} {right:g}, and no less to what is wrong: {told}. "
        "Fine where an answer has to be in a form that the reference lacks; otherwise look at data.answer_column"
    )
