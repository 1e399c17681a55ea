"""What the update must be: GRPO in single-process plain torch, one completion at a time, full logits, float64.

Written from the papers and the conventions of trainer/algorithm/README.md, and sharing no code with the trainer's step.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Update(NamedTuple):
    gradient: dict[str, Tensor]
    loss: float
    kl: float
    grad_norm: float


def plain_update(
    causal: nn.Module,
    reference: nn.Module,
    as_reference: Callable[[], AbstractContextManager[object]],
    rows: list[dict[str, Any]],
    *,
    loss_type: str,
    estimator: str,
    placement: str,
    coef: float,
    ratio_weighted: bool,
    temperature: float,
    max_new_tokens: int,
    mask_truncated: bool,
) -> Update:
    """Gradient of the whole step's loss in the trainable parameters of ``causal`` (both models in float64)."""
    scored = [row for row in rows if row["rewards"]["score"] is not None]
    trained = [row for row in scored if not (mask_truncated and row["finish"] == "length")]

    def log_softmax(model: nn.Module, row: dict[str, Any]) -> Tensor:
        ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]])
        logits = model(input_ids=ids, use_cache=False).logits[0, len(row["prompt_ids"]) - 1 : -1]
        return (logits / temperature).log_softmax(-1)

    def tokens(row: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """(T,) log-probs and (T,) KL estimate of one completion."""
        all_logps = log_softmax(causal, row)
        with torch.no_grad(), as_reference():
            all_reference = log_softmax(reference, row)
        target = torch.tensor(row["completion_ids"])[:, None]
        logps, reference_logps = all_logps.gather(1, target)[:, 0], all_reference.gather(1, target)[:, 0]
        difference = logps - reference_logps
        kl = {
            "k1": lambda: difference,
            "k2": lambda: difference**2 / 2,
            "k3": lambda: torch.exp(-difference) - 1 + difference,
            "exact": lambda: (all_logps.exp() * (all_logps - all_reference)).sum(-1),
        }[estimator]()
        return logps, kl

    scores = {id(row): tokens(row) for row in scored}
    rewards = {
        id(row): row["rewards"]["score"] - (coef * scores[id(row)][1].sum().item() if placement == "reward" else 0.0)
        for row in scored
    }
    advantages: dict[int, float] = {}
    for group in {row["group"] for row in scored}:
        members = [row for row in scored if row["group"] == group]
        values = [rewards[id(row)] for row in members]
        mean = sum(values) / len(values)
        std = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
        for row in members:
            advantages[id(row)] = 0.0 if max(values) == min(values) else (rewards[id(row)] - mean) / (std + 1e-4)

    # The metric is over what the KL is charged to.
    measured = torch.cat([scores[id(row)][1].detach() for row in (scored if placement == "reward" else trained)])
    total = torch.zeros((), dtype=torch.float64)
    token_count = 0
    for row in trained:
        logps, kl = scores[id(row)]
        advantage = advantages[id(row)]
        old = torch.tensor(row["sampling_logps"], dtype=torch.float64)
        ratio = torch.exp(logps - old)
        if loss_type == "gspo":
            ratio = torch.exp((logps - old).mean()).expand(len(logps))
        if loss_type == "cispo":
            loss = -torch.clamp(ratio, max=1.2).detach() * advantage * logps
        else:
            loss = -torch.min(ratio * advantage, torch.clamp(ratio, 0.8, 1.2) * advantage)
        token_count += len(kl)
        if placement == "loss":
            weight = {"k2": ratio.detach(), "k3": ratio, "exact": 1.0}[estimator] if ratio_weighted else 1.0
            loss = loss + coef * weight * kl
        total = total + (loss.mean() if loss_type in ("grpo", "gspo") else loss.sum())
    count = {
        "grpo": len(trained),
        "gspo": len(trained),
        "dapo": token_count,
        "cispo": token_count,
        "dr_grpo": len(trained) * max_new_tokens,
    }[loss_type]
    loss = total / count
    named = {name: parameter for name, parameter in causal.named_parameters() if parameter.requires_grad}
    gradient = dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))
    norm = math.sqrt(sum(float((g**2).sum()) for g in gradient.values()))
    return Update(gradient, float(loss), float(measured.mean()), norm)
