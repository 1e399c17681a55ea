"""What of a module DeepSpeed would change or save, and must not."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def exact_buffers(module: nn.Module, device: torch.device) -> Iterator[None]:
    """fp32 buffers stay what they are. In bf16 an engine casts the whole module, and rotary frequencies rounded to 8
    bits turn long prompts into noise."""
    exact = {name: buffer for name, buffer in module.named_buffers() if buffer.dtype == torch.float32}
    yield
    for name, buffer in exact.items():
        owner, _, leaf = name.rpartition(".")
        module.get_submodule(owner).register_buffer(leaf, buffer.to(device), persistent=False)


def without_frozen(module: nn.Module) -> Callable[..., None]:
    """A hook on state_dict. DeepSpeed leaves a frozen weight out of a checkpoint by its first name alone: a tied head
    has further ones, and the scales of 4-bit weights are no parameters at all."""
    named = module.named_parameters(remove_duplicate=False)
    kept = {name for name, one in named if one.requires_grad} | {name for name, _ in module.named_buffers()}

    def drop(_: nn.Module, state: dict[str, Any], *__: Any) -> None:
        for name in set(state) - kept:
            del state[name]

    return drop
