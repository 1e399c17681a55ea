"""Which weights a run began from, told cheaply: a resumed run reads its frozen weights anew."""

import hashlib

import torch
from torch import nn

from trainer.models.policy import REFERENCE_ADAPTER
from trainer.models.quantised import parts

ELEMENTS = 256
"""At least so many of each larger parameter are read, spread over all of it."""


@torch.no_grad()
def fingerprint(causal: nn.Module) -> str:
    """SHA-256 over name, shape and some elements of every weight that training does not begin by drawing.

    A hash of all bytes would read 15 GB at every start of a 7B model; this tells another model, another revision and
    another start adapter apart.
    """
    digest = hashlib.sha256()
    named = causal.named_parameters()
    for name, parameter in sorted(named, key=lambda pair: pair[0].replace(".base_layer.", ".")):
        if "lora_" in name and f".{REFERENCE_ADAPTER}." not in name:
            continue
        base = name.replace(".base_layer.", ".")  # PEFT's level around an adapted layer
        for part in parts(parameter):
            flat = part.reshape(-1)
            sample = flat[:: max(1, flat.numel() // ELEMENTS)].float().cpu()
            digest.update(f"{base} {tuple(part.shape)} ".encode() + sample.numpy().tobytes())
    return digest.hexdigest()
