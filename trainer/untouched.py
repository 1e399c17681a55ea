"""Where DeepSpeed would change or save what it must not, or leave its ranks waiting."""

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

DISK = ("inline_container", "PytorchStreamWriter", "iostream")
"""Of torch's words for a full disk; neither disk nor path are among them."""


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


@contextmanager
def outlived(owner: Any, name: str, refused: list[OSError]) -> Iterator[None]:
    """``owner.name`` writes. What the disk refuses is noted, so that this rank comes to the collectives behind it."""
    write = getattr(owner, name)

    def attempt(*arguments: Any, **named: Any) -> None:
        try:
            write(*arguments, **named)
        except OSError as error:
            refused.append(error)
        except RuntimeError as error:
            if not any(word in str(error) for word in DISK):
                raise
            path, said = named.get("path", *arguments[-1:]), str(error).splitlines()[0]
            refused.append(OSError(errno.ENOSPC, f"a write failed, as on a full disk (torch: {said})", str(path)))

    setattr(owner, name, attempt)
    try:
        yield
    finally:
        setattr(owner, name, write)
