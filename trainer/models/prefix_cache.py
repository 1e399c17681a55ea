"""Keys and values while decoding: of each prompt once, of each row what it has decoded itself.

Attention over a prompt that G rows share reads its keys once for all of them; the two parts of a row's attention are
put together by their log-sum-exps (Hydragen, arXiv 2402.05099).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

FIRST_CAPACITY = 64
"""Tokens a row has room for at first; doubled when they are used up."""


@dataclass
class _Layer:
    prompts: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """By group: keys and values, (1, kv heads, P, head dim)."""
    own: tuple[Tensor, Tensor] | None = None
    """(slots, kv heads, capacity, head dim) keys and values; slot r is row r's."""


class PrefixCache:
    """Rows 0 .. R-1 are active. What the layers of one forward pass read is laid out by ``append_rows`` before it."""

    def __init__(self, slots: int, limit: int, device: torch.device) -> None:
        """Room for ``slots`` rows of at most ``limit`` tokens."""
        self.slots = slots
        self.limit = limit
        self.device = device
        self.group_of: list[int] = []
        """Of each active row."""
        self.lengths: list[int] = []
        """Tokens each active row has stored, that of the pass at hand included."""
        self._layers: dict[int, _Layer] = {}
        self._capacity = 0
        self._entering: Sequence[int] = ()
        # The layout of the pass at hand.
        self._rows = self._last = torch.empty(0, dtype=torch.long, device=device)
        self._longest = 0
        self._seen: Tensor | None = None
        self._order: Tensor | None = None
        self._back: Tensor | None = None
        self._sizes: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self.group_of)

    def enter(self, groups: Sequence[int], generations: int) -> None:
        """The coming pass is over the prompts of these groups; so many rows of each are active after it."""
        self._entering = groups
        self.group_of += [group for group in groups for _ in range(generations)]
        self.lengths += [0] * (len(groups) * generations)

    def store_prompts(self, layer: int, key: Tensor, value: Tensor, lengths: list[int]) -> None:
        """``key``, ``value`` (1, kv heads, L, head dim) of the packed prompts of the groups that enter."""
        # Copies: a view would keep the other prompts of its pass alive.
        parts = zip(*([part.contiguous() for part in whole.split(lengths, 2)] for whole in (key, value)), strict=True)
        self._layers.setdefault(layer, _Layer()).prompts.update(zip(self._entering, parts, strict=True))

    def append_rows(self) -> bool:
        """The coming pass is over one more token of each active row. True where the buffers have to grow for it."""
        self.lengths = [length + 1 for length in self.lengths]
        self._longest = longest = max(self.lengths)
        before = self._capacity
        while self._capacity < longest:
            self._capacity = min(self.limit, max(FIRST_CAPACITY, 2 * self._capacity))
        last = torch.tensor(self.lengths, device=self.device) - 1
        self._last, self._rows = last, torch.arange(len(self), device=self.device)
        ragged = min(self.lengths) < longest
        self._seen = (torch.arange(longest, device=self.device) <= last[:, None])[:, None, None] if ragged else None
        # Rows of one group side by side, as its prompt's keys are read for all of them at once.
        order = sorted(range(len(self)), key=lambda row: self.group_of[row])
        self._sizes = [(group, self.group_of.count(group)) for group in sorted(set(self.group_of))]
        self._order = self._back = None
        if order != list(range(len(self))):
            self._order = torch.tensor(order, device=self.device)
            self._back = torch.argsort(self._order)
        return self._capacity > before

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """One new token of each row: (R, heads, 1, head dim), keys and values (R, kv heads, 1, head dim) ->
        (R, 1, heads, head dim). ``scaling`` None: 1 / sqrt(head dim)."""
        rows, heads, _, width = query.shape
        kept = self._layers[layer]
        keys, values = kept.own = self._room(kept.own, key)
        if self._seen is None:  # all rows are as long as each other
            keys[:rows, :, self._longest - 1] = key[:, :, 0]
            values[:rows, :, self._longest - 1] = value[:, :, 0]
        else:
            keys[self._rows, :, self._last] = key[:, :, 0]
            values[self._rows, :, self._last] = value[:, :, 0]
        # Heads that read the same keys side by side.
        query = query.view(rows, key.shape[1], -1, width)
        own, own_lse = _attention(
            query, keys[:rows, :, : self._longest], values[:rows, :, : self._longest], self._seen, scaling
        )
        ordered = query if self._order is None else query[self._order]
        parts, start = [], 0
        for group, size in self._sizes:
            together = ordered[start : start + size].transpose(0, 1).flatten(1, 2)[None]
            parts.append(
                tuple(
                    part[0].unflatten(1, (size, -1)).transpose(0, 1)
                    for part in _attention(together, *kept.prompts[group], None, scaling)
                )
            )
            start += size
        shared, shared_lse = parts[0] if len(parts) == 1 else (torch.cat(part) for part in zip(*parts, strict=True))
        if self._back is not None:
            shared, shared_lse = shared[self._back], shared_lse[self._back]
        weight = torch.sigmoid(shared_lse - own_lse)[..., None]
        return own.float().lerp(shared.float(), weight).to(own.dtype).view(rows, 1, heads, width)

    def drop(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        """Takes rows out; the last ones move into their slots: (from, to) of each move, in order."""
        moves = []
        for row in sorted(rows, reverse=True):
            last = len(self) - 1
            if row != last:
                moves.append((last, row))
                for kept in self._layers.values():
                    for part in kept.own or ():
                        part[row, :, : self.lengths[last]] = part[last, :, : self.lengths[last]]
                self.group_of[row], self.lengths[row] = self.group_of[last], self.lengths[last]
            self.group_of.pop()
            self.lengths.pop()
        for kept in self._layers.values():
            for group in kept.prompts.keys() - set(self.group_of):
                del kept.prompts[group]
        return moves

    def _room(self, own: tuple[Tensor, Tensor] | None, like: Tensor) -> tuple[Tensor, Tensor]:
        """Buffers in which every row has room for its tokens."""
        if own is not None and own[0].shape[2] == self._capacity:
            return own
        shape = (self.slots, like.shape[1], self._capacity, like.shape[3])
        fresh = like.new_zeros(shape), like.new_zeros(shape)  # what no row has written has weight 0, and must be finite
        for old, new in zip(own or (), fresh, strict=own is not None):
            new[:, :, : old.shape[2]] = old
        return fresh


def _attention(
    query: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None, scaling: float | None
) -> tuple[Tensor, Tensor]:
    """(B, h, q, d), (B, h, k, d), (B, h, k, d), mask (B, 1, 1, k) -> (B, h, q, d) and the log-sum-exp of the scores
    (B, h, q), fp32."""
    if query.device.type == "cpu":
        # One pass with fp32 sums; the public function keeps the log-sum-exp to itself.
        mask = None if seen is None else torch.zeros_like(seen, dtype=query.dtype).masked_fill_(~seen, -torch.inf)
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return fused(query, keys, values, 0.0, False, attn_mask=mask, scale=scaling)
    return plain_attention(query, keys, values, seen, scaling)


def plain_attention(
    query: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None, scaling: float | None
) -> tuple[Tensor, Tensor]:
    """The same in the open."""
    scores = (query @ keys.transpose(-1, -2)).float() * (scaling or query.shape[-1] ** -0.5)
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp_().to(values.dtype) @ values, lse
