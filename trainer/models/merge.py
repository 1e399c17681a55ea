"""An adapter added into the weights of its base model."""

import os

import torch

from trainer.errors import Stopped
from trainer.models.policy import Policy
from trainer.models.reload import logits, probes, relative_gap

ALLOWED = 1e-4
"""Largest difference of the logits before and after, in fp32, relative to the largest logit."""


def merge(policy: Policy) -> tuple[Policy, float]:
    """A policy without adapter that computes the same, and how far its logits are from before. Consumes ``policy``.

    Added in fp32, where 16-bit weights are exact, then rounded once to the policy's dtype; the difference is that
    before the rounding. Raises Stopped where it is too large. Tied embeddings stay tied: no adapter sits on them.
    """
    assert policy.peft is not None
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # PEFT imports DeepSpeed to ask whether its weights are partitioned
    _cast(policy.causal, torch.float32)
    sequences = probes(policy.causal)
    before = logits(policy.causal, sequences)
    causal = policy.peft.merge_and_unload(safe_merge=True, adapter_names=["default"])
    gap = relative_gap(logits(causal, sequences), before)
    if not gap <= ALLOWED:
        raise Stopped(
            f"merging changed the model: logits differ by {gap:.3g} of the largest, allowed are {ALLOWED:g}. Nothing "
            "was written. Fix: export the adapter alone, without --merge."
        )
    _cast(causal, policy.dtype)
    return Policy(causal, None, policy.tokenizer, policy.generation_config, policy.dtype), gap


def _cast(causal: torch.nn.Module, dtype: torch.dtype) -> None:
    """Parameters alone: rotary frequencies stay in fp32."""
    for parameter in causal.parameters():
        parameter.data = parameter.data.to(dtype)
