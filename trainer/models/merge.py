"""An adapter added into the weights of its base model."""

import os
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from trainer.errors import Stopped
from trainer.models import quantised
from trainer.models.policy import Policy
from trainer.models.reload import logits, probes, relative_gap

ALLOWED = 1e-4
"""Largest difference of the logits before and after, in fp32, relative to the largest logit."""


def merge(policy: Policy) -> tuple[Policy, float]:
    """A policy without adapter that computes the same, and how far its logits are from before. Consumes ``policy``.

    Added in fp32, where 16-bit weights are exact, then rounded once to the policy's dtype; the difference is that
    before the rounding. Raises Stopped where it is too large. Tied embeddings stay tied: no adapter sits on them.
    4-bit weights are unpacked first: the adapter was trained on those very numbers.
    """
    assert policy.peft is not None
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # PEFT imports DeepSpeed to ask whether its weights are partitioned
    _cast(policy.causal, torch.float32)
    sequences = probes(policy.causal)
    before = logits(policy.causal, sequences)
    _unpack(policy.causal)
    causal = policy.peft.merge_and_unload(safe_merge=True, adapter_names=["default"])
    gap = relative_gap(logits(causal, sequences), before)
    if not gap <= ALLOWED:
        raise Stopped(
            f"merging changed the model: logits differ by {gap:.3g} of the largest, allowed are {ALLOWED:g}. Nothing "
            "was written. Fix: export the adapter alone, without --merge."
        )
    _cast(causal, policy.dtype)
    return Policy(causal, None, policy.tokenizer, policy.generation_config, policy.dtype), gap


def _cast(causal: nn.Module, dtype: torch.dtype) -> None:
    """Parameters alone: rotary frequencies stay in fp32. 4-bit layers stay packed, and compute in ``dtype``."""
    for layer in quantised.layers(causal).values():
        quantised.compute_in(layer, dtype)
    for parameter in causal.parameters():
        if not quantised.is_packed(parameter):
            parameter.data = parameter.data.to(dtype)


def _unpack(causal: PreTrainedModel) -> None:
    """Every 4-bit layer becomes a plain one of the same numbers, the adapter above it part of them.

    PEFT's own merge would round the sum to 4 bits again, which is another model.
    """
    for name, layer in quantised.layers(causal).items():
        weight = quantised.unpacked(layer)
        name = name.removesuffix(".base_layer")
        adapted: Any = causal.get_submodule(name)
        if adapted is not layer:
            weight += adapted.get_delta_weight("default")
        plain = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
        plain.weight, plain.bias = nn.Parameter(weight, requires_grad=False), layer.bias
        causal.set_submodule(name, plain)
    quantised.unmarked(causal)
