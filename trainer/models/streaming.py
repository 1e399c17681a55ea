"""Frozen weights that stay on the CPU and pass through the device layer by layer, at most two layers at a time.

One pass of the weights serves a whole rollout batch: layers outside, micro-batches inside. The weights of a 1.5B model
in bf16 (3.1 GB) take 0.12 s at 25 GB/s, once a step, and hide behind the compute of some 2,000 tokens. What stays on
the device between layers is one hidden state a token: 0.1 GB for 37,000 tokens of 1536 numbers in bf16.
"""

import copy
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers.masking_utils import create_causal_mask

from trainer import heartbeat
from trainer.batch import PackedRows
from trainer.models.scorer import TokenScorer
from trainer.models.shared_prefix import layout

Place = Literal["host", "device"]
M = TypeVar("M", bound=nn.Module)


class Placement:
    """The one hand that puts frozen weights on the CPU or on the device, and the bytes of each role that are there.

    On a CPU, host and device are one memory, so what counts is the place that a copy is meant for. Each copy is a
    storage of its own, and is counted until that storage is freed, whoever still holds it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.held: Counter[tuple[str, Place]] = Counter()
        """Bytes alive, by role ("reference") and place."""
        self.peak: Counter[tuple[str, Place]] = Counter()
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, tensor: Tensor, role: str, place: Place, *, pinned: bool = True) -> Tensor:
        """``tensor`` there, in a storage of its own; on the host page-locked, where a card will read it."""
        pinned &= place == "host" and self.device.type == "cuda"
        home = self.device if place == "device" else torch.device("cpu")
        copied = torch.empty_like(tensor, device=home, pin_memory=pinned, requires_grad=False)
        copied.copy_(tensor.detach(), non_blocking=place == "device")
        storage, key = copied.untyped_storage(), (role, place)
        self.held[key] += storage.nbytes()
        self.peak[key] = max(self.peak[key], self.held[key])
        weakref.finalize(storage, self._freed, key, storage.nbytes())
        return copied

    def _freed(self, key: tuple[str, Place], size: int) -> None:
        self.held[key] -= size

    def count(self, storages: Sequence[torch.UntypedStorage], role: str, place: Place) -> None:
        """Of a role whose storages are not copies of ours: what they hold now, all that there is."""
        self.held[role, place] = sum(storage.nbytes() for storage in storages)
        self.peak[role, place] = max(self.peak[role, place], self.held[role, place])

    def frozen(self, model: M, role: str, place: Place, *, pinned: bool = True) -> M:
        """A copy of the model in that place, its ties kept, never trained."""
        copies: dict[int, Any] = {id(one): self.copy(one, role, place, pinned=pinned) for one in model.buffers()}
        for one in model.parameters():
            copied = self.copy(one, role, place, pinned=pinned)
            copies[id(one)] = nn.Parameter(copied, requires_grad=False)
        return copy.deepcopy(model, copies).eval()

    def through(self, modules: Sequence[nn.Module], role: str) -> Iterator[Callable[..., Any]]:
        """Each module in turn, to be called with its weights on the device; those of the next one arrive meanwhile."""
        arriving = self._bring(modules[0], role)
        for number, module in enumerate(modules):
            weights, arrived = arriving
            if number + 1 < len(modules):
                arriving = self._bring(modules[number + 1], role)
            if arrived is not None:
                torch.cuda.current_stream(self.device).wait_event(arrived)
            yield partial(_call, module, weights)
            if arrived is not None:
                # Calls return before they are computed. Without this the host would run ahead, and bring many layers.
                torch.cuda.current_stream(self.device).synchronize()
            weights.clear()  # the caller's loop variable holds the dictionary

    def _bring(self, module: nn.Module, role: str) -> tuple[dict[str, Tensor], torch.cuda.Event | None]:
        with nullcontext() if self._side is None else torch.cuda.stream(self._side):
            named = (*module.named_parameters(), *module.named_buffers())
            weights = {name: self.copy(tensor, role, "device") for name, tensor in named}
            return weights, None if self._side is None else self._side.record_event()


def _call(module: nn.Module, weights: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
    return functional_call(module, weights, args, kwargs)


class _Last(nn.Module):
    """What follows the layers: the last norm, and the chunked head on the states that predict a target."""

    def __init__(self, norm: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.norm, self.head = norm, head

    def forward(self, states: Tensor, score_at: Tensor, targets: Tensor) -> dict[str, Tensor]:
        scored = self.norm(states).flatten(0, 1).index_select(0, score_at)
        logps, *_ = self.head(scored, targets, None, None)
        return {"logps": logps, "hidden": scored}


class StreamedScorer:
    """What ``TokenScorer`` computes, of all micro-batches in one pass of the weights through the device.

    It takes the decoder apart at its layers, which is right for some architectures alone: see ``streams``.
    """

    def __init__(self, scorer: TokenScorer, placement: Placement, role: str) -> None:
        """``scorer`` lies on the host; of its weights only the rotary frequencies, a few bytes, stay on the device."""
        self.causal, self.placement, self.role = scorer.causal, placement, role
        self.decoder = cast(Any, scorer.causal.get_decoder())
        self.decoder.rotary_emb.to(placement.device)
        self.modules = [*self.decoder.layers, _Last(self.decoder.norm, scorer.head)]

    @torch.no_grad()
    def __call__(self, batches: Sequence[PackedRows]) -> list[dict[str, Tensor]]:
        """Of each micro-batch logps (N,) and hidden (N, H)."""
        states: list[Any] = [self._embedded(rows) for rows in batches]
        arguments = [self._arguments(rows, embedded) for rows, embedded in zip(batches, states, strict=True)]
        for module, run in zip(self.modules, self.placement.through(self.modules, self.role), strict=True):
            if module is self.modules[-1]:
                arguments = [{"score_at": rows.score_at, "targets": rows.targets} for rows in batches]
            for number, given in enumerate(arguments):
                heartbeat.beat()
                states[number] = run(states[number], **given)
        return states

    def _embedded(self, rows: PackedRows) -> Tensor:
        """Looked up on the CPU: the table is larger than two layers, and its rows that are needed are few."""
        embedded: Tensor = self.decoder.embed_tokens(rows.input_ids.cpu())
        return embedded.to(self.placement.device)

    def _arguments(self, rows: PackedRows, embedded: Tensor) -> dict[str, Any]:
        """What the decoder gives its layers, beside the states."""
        mask = create_causal_mask(
            config=self.decoder.config,
            inputs_embeds=embedded,
            attention_mask=rows.attention_mask,
            past_key_values=None,
            position_ids=rows.position_ids,
        )
        return {
            "attention_mask": mask,
            "position_ids": rows.position_ids,
            "position_embeddings": self.decoder.rotary_emb(embedded, rows.position_ids),
            "use_cache": False,
            **layout(rows.groups, self.decoder.config, embedded.dtype, embedded.device),
        }
