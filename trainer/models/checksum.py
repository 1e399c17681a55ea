"""A number for the exact bits of each weight, to tell whether all ranks still hold the same."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trainer.models.quantised import parts

CHUNK = 2**22
"""Elements at a time: each takes 16 bytes meanwhile."""
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def checksums(module: nn.Module) -> dict[str, int]:
    """By name, of every parameter, the frozen ones too: sum of (2i + 1) x_i modulo 2^64 over its words x_i.

    Any one word that differs shows: its factor is odd. Integers, so that no order of summing changes it.
    """
    return {name: _checksum(parts(parameter)) for name, parameter in module.named_parameters()}


def _checksum(tensors: Sequence[Tensor]) -> int:
    total = 0
    for tensor in tensors:
        words = tensor.contiguous().flatten().view(WORDS[tensor.element_size()])
        for start in range(0, len(words), CHUNK):
            part = words[start : start + CHUNK].to(torch.int64)
            odd = torch.arange(2 * start + 1, 2 * (start + len(part)), 2, device=part.device)
            total += int(part.mul_(odd).sum())
    return total % 2**64


def unlike(everyones: Sequence[dict[str, int]]) -> dict[str, list[int]]:
    """Weights whose numbers differ, and the ranks that differ from most; all ranks, where there is no majority."""
    found = {}
    for name in everyones[0]:
        values = [one[name] for one in everyones]
        most = max(set(values), key=values.count)
        if odd := [rank for rank, value in enumerate(values) if value != most]:
            found[name] = odd if 2 * len(odd) < len(values) else list(range(len(values)))
    return found
