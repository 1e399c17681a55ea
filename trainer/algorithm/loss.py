"""The policy objectives, as sums over scored tokens. Division happens once, by the caller, by a count over all ranks.

All tensors are flat: N scored tokens of C completions; ``completion`` (N,) says which one a token belongs to.
Objectives: grpo arXiv 2402.03300, dapo 2503.14476, dr_grpo 2503.20783, gspo 2507.18071, cispo 2506.13585.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from trainer.algorithm.kl import MAX_DELTA

LossType = Literal["grpo", "dapo", "dr_grpo", "gspo", "cispo"]


class Objective(NamedTuple):
    """Per token: the term to be summed, the importance ratio, and whether the clip cut its gradient off."""

    loss: Tensor
    """(N,) -surrogate; minimising it raises the advantage-weighted likelihood."""
    ratio: Tensor
    """(N,) pi(token) / pi_old(token); for gspo the sequence's ratio at each of its tokens."""
    clipped: Tensor
    """(N,) bool."""


def per_completion_sum(values: Tensor, completion: Tensor, completions: int) -> Tensor:
    """(N,) -> (C,): the sum of each completion's tokens."""
    return torch.zeros(completions, dtype=values.dtype, device=values.device).index_add(0, completion, values)


def importance_ratio(
    logps: Tensor, old_logps: Tensor, completion: Tensor, completions: int, *, per_sequence: bool
) -> Tensor:
    """pi / pi_old of each token, (N,); per sequence: exp of the mean log-ratio of its tokens (GSPO, equation 7).

    The log-ratio is bounded before the exponential, where a gradient would be inf * 0.
    """
    log_ratio = logps - old_logps
    if per_sequence:
        tokens = per_completion_sum(torch.ones_like(log_ratio), completion, completions).clamp(min=1)
        log_ratio = (per_completion_sum(log_ratio, completion, completions) / tokens)[completion]
    return log_ratio.clamp(max=MAX_DELTA).exp()


def policy_objective(
    logps: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    completion: Tensor,
    *,
    loss_type: LossType,
    eps_low: float,
    eps_high: float,
    dual_clip: float = 0.0,
) -> Objective:
    """The surrogate of each scored token. ``advantages`` (C,), one per completion of the micro-batch.

    ``dual_clip`` c > 1 bounds the loss of a negative advantage by c |A| (arXiv 1912.09729); 0 is off.
    """
    advantage = advantages[completion]
    ratio = importance_ratio(logps, old_logps, completion, len(advantages), per_sequence=loss_type == "gspo")
    if loss_type == "cispo":
        # The clipped weight is a constant: clipped tokens keep their gradient, which is the point of CISPO.
        return Objective(-ratio.detach().clamp(max=1 + eps_high) * advantage * logps, ratio, ratio > 1 + eps_high)
    clipped_ratio = ratio.clamp(1 - eps_low, 1 + eps_high)
    surrogate = torch.minimum(ratio * advantage, clipped_ratio * advantage)
    clipped = ((ratio < 1 - eps_low) & (advantage < 0)) | ((ratio > 1 + eps_high) & (advantage > 0))
    if dual_clip:
        bound = dual_clip * advantage
        clipped = clipped | ((advantage < 0) & (surrogate < bound))
        surrogate = torch.where(advantage < 0, torch.maximum(surrogate, bound), surrogate)
    return Objective(-surrogate, ratio, clipped)


def token_weights(completion: Tensor, completions: int, loss_type: LossType) -> Tensor:
    """(N,) fp32 weight of each scored token in the sum: 1, or 1/|o_i| where each completion counts as one.

    With ``normaliser`` this is the whole difference between a mean over tokens and a mean over completions.
    """
    weights = torch.ones(len(completion), device=completion.device)
    if loss_type in ("grpo", "gspo"):
        weights = weights / per_completion_sum(weights, completion, completions)[completion]
    return weights


def normaliser(trained_tokens: int, trained_completions: int, max_new_tokens: int, loss_type: LossType) -> int:
    """N of one optimizer step, from counts over all ranks and micro-batches. 0 means: no update.

    A completion is trained when it is scored and not masked. dapo, cispo: trained tokens. grpo, gspo: trained
    completions. dr_grpo: trained completions times the token limit, a constant that no length can move.
    """
    if loss_type in ("dapo", "cispo"):
        return trained_tokens
    if loss_type in ("grpo", "gspo"):
        return trained_completions
    return trained_completions * max_new_tokens
