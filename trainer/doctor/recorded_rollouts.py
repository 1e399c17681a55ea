"""What recorded completions say: group by group, token by token."""

import re
import statistics

import torch

from trainer.algorithm.advantages import group_advantages
from trainer.doctor.finding import Finding
from trainer.doctor.records import Recorded, Row, Verdict


def groups(run: Recorded) -> Verdict:
    """A group is one prompt's completions, and its advantages are those of its rewards."""
    grpo = run.config.grpo
    checked = 0
    for step, rows in run.rollouts.items():
        prompts: dict[int, set[int]] = {}
        for row in rows:
            prompts.setdefault(row["group"], set()).add(row["row"])
        mixed = [group for group, found in prompts.items() if len(found) > 1]
        if mixed:
            return [Finding("group_layout", 0.95, {"step": step, "groups_of_several_prompts": len(mixed)})]
        if grpo.kl.placement == "reward" and grpo.kl.coef:
            continue  # what is compared is the reward less its KL, which is not recorded
        wanted = advantages_of(rows, run)
        off = max(abs(row["advantage"] - advantage) for row, advantage in zip(rows, wanted, strict=True))
        if off > 1e-3 * max(1.0, *map(abs, wanted)):
            return [Finding("group_layout", 0.95, {"step": step, "advantage_off_by": off})]
        checked += len(rows)
    return f"advantages of {checked} completions are those of their groups' rewards" if checked else ""


def advantages_of(rows: list[Row], run: Recorded) -> list[float]:
    grpo = run.config.grpo
    rewards = torch.tensor([float("nan") if row["reward"] is None else row["reward"] for row in rows]).double()
    scored = rewards[~rewards.isnan()]
    batch_std = float(scored.std()) if len(scored) > 1 else 0.0
    return group_advantages(
        rewards,
        torch.tensor([row["group"] for row in rows]),
        scale=grpo.scale_rewards,
        baseline=grpo.baseline,
        eps=grpo.advantage_eps,
        batch_std=batch_std,
    ).tolist()


def sampled_as_scored(run: Recorded) -> Verdict:
    """Tokens drawn from p have E[-ln p] = H(p): the mean surprise of a step's samples is its entropy.

    A penalty or a higher temperature draws tokens that p finds less likely, top-p, top-k or a lower temperature draws
    likelier ones. ``sampling_logp_gap`` tells the two apart: it compares the same tokens, so a filter leaves it at 0.
    """
    entropies = {row["step"]: row["entropy"] for row in run.metrics if "entropy" in row}
    gap = statistics.median([row["sampling_logp_gap"] for row in run.metrics if "sampling_logp_gap" in row] or [0.0])
    differences, errors, entropy = [], [], 0.0
    for step, rows in run.rollouts.items():
        # With the KL in the loss all scored completions are read, without it those that have an advantage.
        all_read = bool(run.config.grpo.kl.coef)
        read = [row for row in rows if row["reward"] is not None and (all_read or row["advantage"])]
        sums = [-sum(row["sampling_logps"]) for row in read]
        counts = [len(row["sampling_logps"]) for row in read]
        if step not in entropies or len(read) < 8 or run.config.grpo.mask_truncated:
            continue
        mean = sum(sums) / sum(counts)
        # Of a ratio of sums, completions being independent.
        square = sum((one - mean * count) ** 2 for one, count in zip(sums, counts, strict=True))
        differences.append(mean - entropies[step])
        errors.append(square**0.5 / sum(counts))
        entropy += entropies[step]
    if not differences or run.config.rollout.replay:
        return ""
    off = statistics.fmean(differences)
    error = sum(one * one for one in errors) ** 0.5 / len(errors)
    entropy /= len(differences)
    evidence = {"mean_surprise_less_entropy": off, "standard_error": error, "entropy": entropy, "gap": gap}
    if abs(off) <= max(4 * error, 0.05, 0.1 * entropy):
        return f"mean surprise of the samples less the entropy: {off:+.3f} ± {error:.3f} nats"
    if gap > 2 * run.same:
        return [Finding("temperature_mismatch", 0.85, evidence)]
    return [Finding("filtered_sampling", 0.75, evidence)]


def texts(run: Recorded) -> Verdict:
    """Recorded text against recorded ids, by the policy's vocabulary: letters and digits alone, which byte-level BPE
    and SentencePiece both write as themselves."""
    if not run.tokens:
        return ""
    spelled = {number: token for token, number in run.tokens.items()}
    beyond = other = total = 0
    shown = ""
    for rows in run.rollouts.values():
        for row in rows:
            total += 1
            beyond += any(number not in spelled for number in row["completion_ids"])
            pieces = "".join(spelled.get(number, "") for number in row["completion_ids"])
            if _letters(pieces) != _letters(row["completion"]):
                other, shown = other + 1, shown or row["completion"][:80]
    if total and max(beyond, other) > 0.2 * total:
        evidence = {"texts_unlike_their_ids": other / total, "ids_beyond": beyond / total, "example": shown}
        return [Finding("tokenizer_mismatch", 0.95, evidence)]
    return f"{total} texts are those of their ids" if total else ""


def _letters(text: str) -> str:
    """Without what is written like a special token, which the text leaves out."""
    return re.sub(r"<[^<>]*>|\[[^\[\]]*\]|[^A-Za-z0-9<>\[\]]|[<>\[\]]", "", text)


ROLLOUT_CHECKS = (groups, sampled_as_scored, texts)
