"""What was written, loaded again by plain PEFT or plain transformers and compared with the policy in memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from trainer.config.sections import Model, Quant
from trainer.errors import Stopped
from trainer.models import quantised
from trainer.models.policy import Policy, adapter_weights
from trainer.models.rope import rope_settings, window
from trainer.models.source import arguments_of
from trainer.models.vocabulary import embedding_rows

LENGTHS = (3, 17, 48)
"""Tokens of the sequences whose logits are compared."""
SAME_DEVICE = 1e-5
"""Largest difference of two logits, relative to the largest logit, in fp32 on one device."""
ALLOWED = {
    (torch.float32, True): SAME_DEVICE,
    (torch.float32, False): 1e-3,
    (torch.bfloat16, True): 3e-2,
    (torch.bfloat16, False): 2e-1,
}
"""By dtype, and whether both models are on one device: other kernels add in another order, and 30 layers that round to
8 bits make a few hundredths of it. What such a comparison cannot see, the comparison of every bit does."""


@dataclass(frozen=True)
class Verified:
    """What was compared, and how close it came."""

    tensors: int
    """Equal bit for bit."""
    gap: float
    """Largest difference of two logits, relative to the largest logit."""
    allowed: float
    dtype: torch.dtype
    """Of the policy."""


@torch.no_grad()
def logits(causal: PreTrainedModel | PeftModel, sequences: Sequence[Tensor]) -> list[Tensor]:
    """(1, L, V) fp32 on the CPU for each sequence of (1, L)."""
    device = next(causal.parameters()).device
    return [causal(input_ids=ids.to(device), use_cache=False).logits.float().cpu() for ids in sequences]


def probes(causal: PreTrainedModel) -> list[Tensor]:
    """A few short token sequences, (1, L) each, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    rows, longest = embedding_rows(causal), window(causal.config).unscaled
    return [torch.randint(rows, (1, min(length, longest)), generator=generator) for length in LENGTHS]


def relative_gap(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Largest difference of two logits over the largest expected logit; NaN where either holds one."""
    apart = torch.stack([(one - other).abs().max() for one, other in zip(found, expected, strict=True)]).max()
    return float(apart / torch.stack([other.abs().max() for other in expected]).max())


def verify(policy: Policy, folder: Path, model: Model, quant: Quant = quantised.NOT_QUANTISED) -> Verified:
    """Raises Stopped, saying what differs, unless ``folder`` holds the policy. One process, with whole parameters.

    The names must be those that PEFT or transformers itself gives a model of this configuration, every tensor must have
    the policy's bits, and the logits must agree.
    """
    sequences = probes(policy.causal)
    expected = logits(policy.causal, sequences)
    weights = policy.causal.state_dict() if policy.peft is None else adapter_weights(policy.peft)
    device = _device(policy.causal)
    _compare_names(folder, "in the file", _stored_names(folder), set(weights) - _tied(policy))
    base = _base(policy, folder, model, quant, device) if policy.peft else None
    try:
        found = _plain(folder, base, model, device)
    except Exception as error:  # peft, transformers and safetensors raise kinds of their own
        raise Stopped(_failed(folder, f"cannot be loaded: {' '.join(str(error).split())[:400]}")) from error
    found.eval()
    loaded = get_peft_model_state_dict(found, save_embedding_layers=False) if policy.peft else found.state_dict()
    _compare_names(folder, "of a model of that configuration", set(loaded), set(weights))
    _compare_tensors(folder, weights, loaded)
    ours, theirs = rope_settings(policy.causal.config), rope_settings(found.config)
    if ours != theirs:
        raise Stopped(_failed(folder, f"RoPE settings are {theirs}, the policy's {ours}"))
    allowed = ALLOWED[policy.dtype, device == next(policy.causal.parameters()).device]
    gap = relative_gap(logits(found, sequences), expected)
    if not gap <= allowed:  # NaN is no agreement
        raise Stopped(_failed(folder, f"logits differ by {gap:.3g} of the largest, allowed are {allowed:g}"))
    return Verified(len(weights), gap, allowed, policy.dtype)


def _base(policy: Policy, folder: Path, model: Model, quant: Quant, device: torch.device) -> PreTrainedModel:
    """As the model card says that it is loaded. Raises Stopped: it may have gone since the run began."""
    load: Any = AutoModelForCausalLM.from_pretrained
    named: dict[str, Any] = {} if model.gguf_file else arguments_of(model)
    where = folder / "base" if model.gguf_file else model.name_or_path
    try:
        scaled = (folder / "config.json").is_file()
        own = {"trust_remote_code": model.trust_remote_code}
        config = AutoConfig.from_pretrained(folder, **own) if scaled else AutoConfig.from_pretrained(where, **named)
        arguments = named | quantised.loading(config, quant, policy.dtype)
        base: PreTrainedModel = load(
            where, config=config, dtype=policy.dtype, attn_implementation=model.attn, **arguments
        ).to(device)
        quantised.settle(base, policy.dtype)
    except Exception as error:  # transformers, safetensors and the hub's client raise kinds of their own
        raise Stopped(
            f"the adapter in {folder} was not compared: its base model {model.name_or_path} cannot be loaded again: "
            f"{' '.join(str(error).split())[:400]}"
        ) from error
    return base


def _plain(
    folder: Path, base: PreTrainedModel | None, model: Model, device: torch.device
) -> PeftModel | PreTrainedModel:
    if base is not None:
        # In the policy's dtype, as it was trained: widened to fp32, PEFT's default, it would round at other places.
        return PeftModel.from_pretrained(base, str(folder), autocast_adapter_dtype=False)
    load: Any = AutoModelForCausalLM.from_pretrained
    arguments = {"attn_implementation": model.attn, "trust_remote_code": model.trust_remote_code}
    causal: PreTrainedModel = load(folder, **arguments).to(device)
    return causal


def _device(causal: PreTrainedModel) -> torch.device:
    """Where a second copy of the model is loaded: beside the first where there is room, on the CPU otherwise."""
    device = next(causal.parameters()).device
    if device.type == "cuda":
        torch.cuda.empty_cache()
        needed = sum(parameter.numel() * parameter.element_size() for parameter in causal.parameters())
        if torch.cuda.mem_get_info(device)[0] < 1.2 * needed:
            return torch.device("cpu")
    return device


def _tied(policy: Policy) -> set[str]:
    """Names of a full model's tensors that are stored under another name."""
    if policy.peft is not None:
        return set()
    return (
        set(policy.causal.state_dict())
        - {name for name, _ in policy.causal.named_parameters()}
        - {name for name, _ in policy.causal.named_buffers()}
    )


def _stored_names(folder: Path) -> set[str]:
    names: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            names |= set(opened.keys())
    return names


def _compare_names(folder: Path, where: str, theirs: set[str], ours: set[str]) -> None:
    if differing := sorted(theirs ^ ours):
        what = f"{len(differing)} names {where} are not the policy's or are missing (first: {differing[0]})"
        raise Stopped(_failed(folder, what))


def _compare_tensors(folder: Path, ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """By value: in fp32 a bf16 number is the same number."""
    for name, tensor in ours.items():
        one, other = (side.to("cpu", torch.float32) for side in (theirs[name], tensor))
        if not torch.equal(one, other):
            raise Stopped(_failed(folder, f"{name} is not the policy's"))


def _failed(folder: Path, what: str) -> str:
    return f"what was exported is not the policy: {what}. The files lie in {folder}, for comparison; do not use them."
