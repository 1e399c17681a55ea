"""The reference policy: who it is, where it lives, and its scores of packed rows. Nothing of it is ever trained."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trainer.batch import PackedRows, ReferenceScores
from trainer.models.policy import Policy, adapter_off, reference_adapter
from trainer.models.scorer import TokenScorer

Kind = Literal["adapter off", "start adapter", "copy on the CPU", "copy on the device"]


@dataclass
class Reference:
    """``switch()`` makes the scorer that is passed the reference; a ``copy`` is a scorer of its own."""

    kind: Kind
    switch: Callable[[], AbstractContextManager[object]]
    copy: TokenScorer | None = None

    @torch.no_grad()
    def score(self, policy: Callable[..., dict[str, Tensor]], rows: PackedRows, *, exact: bool) -> ReferenceScores:
        """Log-probs (N,) and, for the exact estimator, hidden states (N, H) of the scored tokens.

        ``policy`` is the engine's forward, used where the reference is the policy with other adapters.
        """
        with self.switch():
            scores = (self.copy or policy)(rows, return_hidden=exact)
        return ReferenceScores(scores["logps"], scores["hidden"] if exact else None)

    @property
    def head_weight(self) -> Tensor | None:
        """The head of a copy; None when the reference has the policy's frozen head."""
        return None if self.copy is None else self.copy.head.weight.detach()


def make_reference(
    policy: Policy, mode: str, *, temperature: float, device: torch.device, continued: bool
) -> Reference:
    """``mode``: auto | adapter | cpu | gpu. LoRA: the policy with its adapter off, or with the frozen start adapter
    when training continues from one, so that KL is 0 at step 0. Full fine-tuning: a frozen copy."""
    if policy.peft is not None and mode in ("auto", "adapter"):
        peft = policy.peft
        if continued:
            return Reference("start adapter", lambda: reference_adapter(peft))
        return Reference("adapter off", lambda: adapter_off(peft))
    frozen = TokenScorer(copy.deepcopy(policy.causal), temperature).requires_grad_(False).eval()
    if mode == "gpu" or device.type == "cpu":
        return Reference(
            "copy on the CPU" if device.type == "cpu" else "copy on the device", nullcontext, frozen.to(device)
        )
    return Reference("copy on the CPU", lambda: _visiting(frozen, device), frozen)


class _visiting:
    """The copy is on the device inside, on the CPU outside."""

    def __init__(self, frozen: TokenScorer, device: torch.device) -> None:
        self.frozen, self.device = frozen, device

    def __enter__(self) -> None:
        self.frozen.to(self.device)

    def __exit__(self, *_: object) -> None:
        self.frozen.to("cpu")
