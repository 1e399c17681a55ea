"""What stands behind a signal, in words: the causes that an alarm suspects and that the doctor names."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Cause:
    what: str
    fix: str


CAUSES: dict[str, Cause] = {
    "update_too_large": Cause(
        "the updates are too large for this model: the policy leaves the reference faster than the reward can teach",
        "lower optim.lr to a third or less, keep optim.max_grad_norm = 1, or raise grpo.kl.coef; go on from a "
        "checkpoint from before",
    ),
    "not_from_training": Cause(
        "the text is broken before any update has moved the model, so training is not the reason",
        "check that tokenizer and weights belong together and were really loaded (model.name_or_path), that prompts "
        "are rendered as the model was taught (data.chat_template), and that it can do the task at all: read the "
        "samples. A base model at rollout.temperature = 1 may ramble: lower it, or take an instruct model",
    ),
    "decoding": Cause(
        "the text breaks while the KL stays small, so the policy is near its reference and what decodes is at fault, "
        "or the reference has the fault as well",
        "compare sampling_logp_gap; look at rollout.temperature, top_p, top_k, the RoPE window (model.rope) and the "
        "tokenizer",
    ),
    "reward_hacking": Cause(
        "the reward rises while the text gets worse: the policy has found what the reward pays for and nobody wants",
        "read the excerpt, make the reward refuse it (format, length, repetition), or raise grpo.kl.coef",
    ),
    "wrong_direction": Cause(
        "the reward falls as training goes on: the update moves away from it",
        "check the sign of the reward and of its weight, that a higher number is better, and that the answer column "
        "belongs to the prompt; then lower optim.lr",
    ),
    "nothing_to_choose": Cause(
        "the policy writes nearly the same completion every time, and the reward has not risen: groups are equal, and "
        "there is nothing left to learn from",
        "lower optim.lr or raise grpo.kl.coef, go on from a checkpoint from before; rollout.temperature = 1 and no "
        "top_p or top_k keep samples apart",
    ),
    "grown_sure": Cause(
        "the policy has grown sure of its answers, and the reward has risen with it, as in a healthy run: the floor is "
        "an absolute number",
        "nothing while the samples read well; watch.entropy_floor moves the floor",
    ),
    "sampling_differs": Cause(
        "tokens are sampled from another distribution than the one that scores them, so every ratio is wrong",
        "look at rollout.temperature, the RoPE window, dropout, and model.dtype (bf16 differs by a few hundredths)",
    ),
    "outliers": Cause(
        "few tokens carry most of the KL: the policy writes what the reference thinks impossible",
        "look for these tokens in the excerpt; lower optim.lr, or cut what the reward pays for them",
    ),
    "pull_too_strong": Cause(
        "the KL term weighs as much as the reward",
        "where the KL grows, lower optim.lr or go back to a checkpoint from before: with a smaller grpo.kl.coef it "
        "would drift on; where the reward is low, look at the reward first",
    ),
    "runs_on": Cause(
        "completions no longer end by themselves",
        "read the excerpt: a loop is a collapse (lower optim.lr); an unfinished thought wants a larger "
        "rollout.max_new_tokens; a reward that grows with length wants a limit",
    ),
    "off_policy": Cause(
        "most tokens of an update are clipped: the policy is far from the one that sampled",
        "lower optim.lr or grpo.updates_per_rollout",
    ),
    "leak": Cause(
        "memory that a step takes is not given back",
        "look for tensors that a reward function or a hook keeps; a checkpoint and a restart give it back",
    ),
    "reference_differs": Cause(
        "the reference is not the policy as it began: the KL measures two models, and pulls towards another one",
        "load both from one model.name_or_path; look at reference.mode, lora.start_adapter and RoPE",
    ),
    "dropout": Cause(
        "dropout is on while tokens are scored: ratio and KL are noise from the first step on",
        "set every dropout to 0 (lora.dropout, attention_dropout of config.json), also in models made by hooks",
    ),
    "kl_outside_response": Cause(
        "tokens of the prompt or of padding are scored, so KL and loss count what nobody sampled",
        "build the mask from the lengths of the completions, never from attention_mask or ids != pad",
    ),
    "end_not_trained": Cause(
        "the end token of a completion is masked (pad = EOS): the policy never learns to stop",
        "build the mask from the lengths of the completions, not from ids != pad",
    ),
    "filtered_sampling": Cause(
        "tokens are drawn through a filter that the scores do not know (repetition penalty, top-p, top-k, min-p)",
        "rollout.repetition_penalty = 1, top_p = 1, top_k = 0, min_p = 0; set all of them explicitly, or the "
        "checkpoint's generation_config.json fills them in",
    ),
    "tokenizer_mismatch": Cause(
        "tokenizer and weights do not belong together: ids mean other texts to the model than to the tokenizer",
        "put tokenizer files and weights of one model into model.name_or_path, and decode with that tokenizer",
    ),
    "group_layout": Cause(
        "advantages do not compare the completions of one prompt with each other",
        "keep the completions of a prompt in one group, in the order in which rewards come back",
    ),
    "reward_fails": Cause(
        "the reward fails or is no finite number on completions of this model",
        "mend the reward function on the completions shown; None is the answer where it does not apply",
    ),
}


def suspected(alarm: str, row: Mapping[str, float], begin: Mapping[str, float]) -> str:
    """The most likely cause (a key of ``CAUSES``) of an alarm, from the step's metrics and those of the beginning."""
    if alarm in FIXED_CAUSES:
        return FIXED_CAUSES[alarm]
    if alarm == "scored_tokens":
        return "kl_outside_response" if row.get("scored_per_sampled", 2.0) > 1 else "end_not_trained"
    if alarm == "kl_at_start":
        # Only policy and reference differ, or any two passes do.
        return "dropout" if begin.get("sampling_logp_gap", 0.0) > 0.01 else "reference_differs"
    if alarm.startswith("garble") and row.get("kl", 1.0) < 0.05:
        return "decoding"
    if reward_change(row, begin) < -0.5 and not alarm.startswith("entropy_"):
        return "update_too_large" if row.get("kl", 0.0) > 0.1 else "wrong_direction"
    if alarm in ("entropy_collapse", "entropy_floor"):
        return "grown_sure" if reward_change(row, begin) > 0.25 else "nothing_to_choose"
    if reward_change(row, begin) > 0.25 and alarm != "kl":
        return "reward_hacking"
    return "update_too_large"


FIXED_CAUSES = {
    "garbled_from_start": "not_from_training",
    "sampling_gap": "sampling_differs",
    "advantages": "group_layout",
    "decoded_text": "tokenizer_mismatch",
    "reward_failing": "reward_fails",
    "kl_outliers": "outliers",
    "reward_kl_ratio": "pull_too_strong",
    "truncation": "runs_on",
    "clipping": "off_policy",
    "memory": "leak",
}
"""Alarms whose signal already is the cause."""


def reward_change(row: Mapping[str, float], begin: Mapping[str, float]) -> float:
    """Of the mean reward since the beginning, in standard deviations of a completion's reward then; 0 where unknown."""
    if not begin.get("reward_std") or "reward_mean" not in row or "reward_mean" not in begin:
        return 0.0
    return (row["reward_mean"] - begin["reward_mean"]) / begin["reward_std"]
