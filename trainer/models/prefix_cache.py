"""Keys and values while decoding: of each prompt once, of each row what it has decoded itself.

Attention over a prompt that G rows share reads its keys once for all of them; the two parts of a row's attention are
put together by their log-sum-exps (Hydragen, arXiv 2402.05099).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

FIRST_CAPACITY = 64
"""Tokens a row has room for at first; doubled when they are used up."""

Pair = tuple[Tensor, Tensor]
"""Keys and values."""


class PrefixCache:
    """Rows 0 .. R-1 and groups 0 .. N-1 are active. What the layers of one pass read is laid out by ``enter`` or
    ``append_rows`` before it."""

    def __init__(self, slots: int, limit: int, device: torch.device) -> None:
        """Room for ``slots`` rows of at most ``limit`` tokens."""
        self.slots = slots
        self.limit = limit
        self.device = device
        self.groups: list[int] = []
        """The active groups, by the caller's numbers."""
        self.group_of: list[int] = []
        """Of each active row."""
        self.lengths: list[int] = []
        """Tokens each active row has stored, that of the pass at hand included."""
        self._prompt_lengths: list[int] = []
        self._entered: list[int] = []
        self._prompts: dict[int, Pair] = {}
        """By layer: (N or more, kv heads, longest prompt or more, head dim)."""
        self._own: dict[int, Pair] = {}
        """By layer: (slots, kv heads, capacity, head dim); slot r is row r's."""
        self._capacity = 0
        self._layout = _Layout(device)

    def __len__(self) -> int:
        return len(self.group_of)

    def enter(self, groups: Sequence[int], lengths: Sequence[int], generations: int) -> None:
        """The coming pass is over the prompts of these groups; so many rows of each are active after it."""
        self.groups += groups
        self._entered = list(lengths)
        self._prompt_lengths += lengths
        self.group_of += [group for group in groups for _ in range(generations)]
        self.lengths += [0] * (len(groups) * generations)

    def store_prompts(self, layer: int, key: Tensor, value: Tensor) -> None:
        """``key``, ``value`` (1, kv heads, L, head dim) of the packed prompts of the groups that have entered."""
        heads, width = key.shape[1], key.shape[3]
        before, longest = len(self.groups) - len(self._entered), max(self._prompt_lengths)
        fresh = key.new_zeros(2, len(self.groups), heads, longest, width)
        if before:
            for whole, kept in zip(fresh, self._prompts[layer], strict=True):
                part = kept[:before, :, :longest]
                whole[:before, :, : part.shape[2]] = part
        for at, parts in enumerate(zip(*(part.split(self._entered, 2) for part in (key, value)), strict=True), before):
            for whole, part in zip(fresh, parts, strict=True):
                whole[at, :, : part.shape[2]] = part[0]
        self._prompts[layer] = (fresh[0], fresh[1])

    def append_rows(self) -> bool:
        """The coming pass is over one more token of each active row. True where the buffers have to grow for it."""
        self.lengths = [length + 1 for length in self.lengths]
        before = self._capacity
        while self._capacity < max(self.lengths):
            self._capacity = min(self.limit, max(FIRST_CAPACITY, 2 * self._capacity))
        self._layout = _Layout(self.device, self.groups, self._prompt_lengths, self.group_of, self.lengths)
        return self._capacity > before

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """One new token of each row: (R, heads, 1, head dim), keys and values (R, kv heads, 1, head dim) ->
        (R, 1, heads, head dim). ``scaling`` None: 1 / sqrt(head dim)."""
        rows, heads, _, width = query.shape
        at = self._layout
        keys, values = self._own[layer] = self._room(self._own.get(layer), key)
        where = (slice(rows), slice(None), at.longest - 1) if at.own is None else (at.rows, slice(None), at.last)
        keys[where], values[where] = key[:, :, 0], value[:, :, 0]
        # Heads that read the same keys side by side.
        query = query.view(rows, key.shape[1], -1, width)
        own, own_lse = _attention(query, keys[:rows, :, : at.longest], values[:rows, :, : at.longest], at.own, scaling)
        # Rows of one group side by side: (N, kv heads, rows x heads, head dim).
        together = query[at.members].transpose(1, 2).flatten(2, 3)
        prompt_keys, prompt_values = (part[: len(self.groups), :, : at.longest_prompt] for part in self._prompts[layer])
        shared, shared_lse = (
            part.unflatten(2, (at.members.shape[1], -1)).transpose(1, 2).flatten(0, 1)[at.place]
            for part in _attention(together, prompt_keys, prompt_values, at.prompts, scaling)
        )
        weight = torch.sigmoid(shared_lse - own_lse)[..., None]
        return own.float().lerp(shared.float(), weight).to(own.dtype).view(rows, 1, heads, width)

    def drop(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        """Takes rows out, and groups with their last row; the last ones move into their places: (from, to) of each
        move of a row, in order."""
        moves = []
        for row in sorted(rows, reverse=True):
            last = len(self) - 1
            if row != last:
                moves.append((last, row))
                for own in self._own.values():
                    for part in own:
                        part[row, :, : self.lengths[last]] = part[last, :, : self.lengths[last]]
            _replace_by_last(row, self.group_of, self.lengths)
        for at in reversed(range(len(self.groups))):
            if self.groups[at] not in self.group_of:
                for prompts in self._prompts.values():
                    for part in prompts:
                        part[at] = part[len(self.groups) - 1]
                _replace_by_last(at, self.groups, self._prompt_lengths)
        return moves

    def _room(self, own: Pair | None, like: Tensor) -> Pair:
        """Buffers in which every row has room for its tokens."""
        if own is not None and own[0].shape[2] == self._capacity:
            return own
        shape = (self.slots, like.shape[1], self._capacity, like.shape[3])
        fresh = like.new_zeros(shape), like.new_zeros(shape)  # what no row has written has weight 0, and must be finite
        for old, new in zip(own or (), fresh, strict=own is not None):
            new[:, :, : old.shape[2]] = old
        return fresh


class _Layout:
    """Which rows and keys belong together in one pass over a token of each row."""

    def __init__(
        self,
        device: torch.device,
        groups: Sequence[int] = (),
        prompt_lengths: Sequence[int] = (),
        group_of: Sequence[int] = (),
        lengths: Sequence[int] = (),
    ) -> None:
        members: dict[int, list[int]] = {group: [] for group in groups}
        for row, group in enumerate(group_of):
            members[group].append(row)
        most = max(map(len, members.values()), default=0)
        place = {row: at * most + i for at, part in enumerate(members.values()) for i, row in enumerate(part)}
        self.longest, self.longest_prompt = max(lengths, default=0), max(prompt_lengths, default=0)
        self.rows = torch.arange(len(group_of), device=device)
        self.last = torch.tensor(lengths, dtype=torch.long, device=device) - 1
        # (N, most rows of a group), of smaller ones filled up with a row that nobody reads again
        self.members = torch.tensor(
            [part + part[:1] * (most - len(part)) for part in members.values()], dtype=torch.long, device=device
        )
        self.place = torch.tensor([place[row] for row in range(len(group_of))], dtype=torch.long, device=device)
        """Of each row in what is laid out by ``members``."""
        self.own = _seen(lengths, device)
        self.prompts = _seen(prompt_lengths, device)


def _seen(lengths: Sequence[int], device: torch.device) -> Tensor | None:
    """(B, 1, 1, longest) bool; None where all are as long as each other."""
    if not lengths or min(lengths) == max(lengths):
        return None
    ends = torch.tensor(lengths, device=device)
    return (torch.arange(max(lengths), device=device) < ends[:, None])[:, None, None]


def _replace_by_last(at: int, *columns: list[int]) -> None:
    for column in columns:
        column[at] = column[-1]
        column.pop()


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
