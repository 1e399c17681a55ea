"""Rewards -> advantages, within each group of completions of one prompt (DeepSeekMath, arXiv 2402.03300, section
4.1)."""

from typing import Literal

import torch
from torch import Tensor

Scale = Literal["group", "batch", "none"]
Baseline = Literal["mean", "leave_one_out"]


def group_statistics(rewards: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, std (ddof 1) and number of scored completions of each row's group: (B,), (B,), (B,) float64.

    ``rewards`` (B,) with NaN where a row is unscored; ``groups`` (B,) int64, any labels. Unscored rows leave the
    statistics. The std is two-pass: sqrt(E[x^2] - E[x]^2) turns rewards of 0.35 into advantages of thousands.
    """
    _, group_of_row = torch.unique(groups, return_inverse=True)
    scored = ~rewards.isnan()
    values = torch.where(scored, rewards, 0.0).double()
    sums = torch.zeros(int(group_of_row.max()) + 1 if len(groups) else 0, dtype=torch.float64)

    def per_group(x: Tensor) -> Tensor:
        return sums.clone().index_add_(0, group_of_row, x)

    count = per_group(scored.double())
    mean = per_group(values) / count.clamp(min=1)
    deviation = torch.where(scored, values - mean[group_of_row], 0.0)
    std = (per_group(deviation.square()) / (count - 1).clamp(min=1)).sqrt()
    # Equal rewards that binary fractions cannot hold (eight times 0.3) leave a mean that is off by a rounding error.
    # Their spread is exactly zero, and has to be, or eps would decide the advantage.
    high = torch.full_like(sums, -torch.inf).scatter_reduce_(
        0, group_of_row, torch.where(scored, values, -torch.inf), "amax"
    )
    low = torch.full_like(sums, torch.inf).scatter_reduce_(
        0, group_of_row, torch.where(scored, values, torch.inf), "amin"
    )
    equal = high <= low
    std = torch.where(equal, 0.0, std)
    mean = torch.where(equal & (count > 0), high, mean)
    return mean[group_of_row], std[group_of_row], count[group_of_row]


def group_advantages(
    rewards: Tensor,
    groups: Tensor,
    *,
    scale: Scale = "group",
    baseline: Baseline = "mean",
    eps: float = 1e-4,
    batch_std: float | None = None,
) -> Tensor:
    """A = (r - baseline) / (std + eps), (B,) float32; exactly 0 for unscored rows and for groups of equal rewards.

    ``scale``: ``group`` divides by the group's std (ddof 1), ``batch`` by ``batch_std`` (of all scored rewards of the
    step over all ranks), ``none`` does not divide (Dr. GRPO, arXiv 2503.20783).
    ``baseline``: ``mean`` of the group, or ``leave_one_out``, the mean of the others (RLOO, arXiv 2402.14740).
    With ``scale="group"`` and ``baseline="mean"`` no advantage exceeds (G-1)/sqrt(G).
    """
    mean, std, count = group_statistics(rewards, groups)
    advantages = torch.where(rewards.isnan(), 0.0, rewards.double() - mean)
    if baseline == "leave_one_out":
        # r - (S - r)/(n - 1) = (r - mean) * n/(n - 1); a group of one has no others, so no signal.
        advantages = advantages * count / (count - 1).clamp(min=1)
    if scale == "group":
        advantages = advantages / (std + eps)
    elif scale == "batch":
        if batch_std is None:
            raise ValueError('scale="batch" needs batch_std, the std of the whole step over all ranks')
        advantages = advantages / (batch_std + eps)
    return torch.where((std == 0) | rewards.isnan(), 0.0, advantages).float()
