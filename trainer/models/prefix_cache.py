"""Keys and values while decoding: of each prompt once, of each row what it has decoded itself.

Attention over a prompt that G rows share reads its keys once for all of them; the two parts of a row's attention are
put together by their log-sum-exps (Hydragen, arXiv 2402.05099).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

FIRST_CAPACITY = 64
"""Tokens a row has room for at first; doubled when they are used up."""

PROMPT_STEP = 256
"""Of the prompt tokens that a pass of fixed shape reads."""

Pair = tuple[Tensor, Tensor]
"""Keys and values."""


class Shape(NamedTuple):
    """Of a pass over a token of each row, rounded up so that few differ in a rollout. Equal ones read equal buffers."""

    rows: int
    groups: int
    generations: int
    """Rows of a group."""
    own: int
    """Tokens a row has room for."""
    prompt: int
    """Prompt tokens that are read."""
    room: int
    """Prompts there is room for."""


class PrefixCache:
    """Rows 0 .. R-1 and groups 0 .. N-1 are active. ``enter`` comes before a pass over prompts; before one over a token
    of each row ``append_rows``, then ``lay_out`` or ``read_by``."""

    def __init__(self, slots: int, limit: int, prompts: int, longest_prompt: int, device: torch.device) -> None:
        """Room for ``slots`` rows of at most ``limit`` tokens, and for ``prompts`` prompts in all."""
        self.slots = slots
        self.limit = limit
        self.prompts = prompts
        self.longest_prompt = longest_prompt
        self.device = device
        self.groups: list[int] = []
        """The active groups, by the caller's numbers."""
        self.group_of: list[int] = []
        """Of each active row."""
        self.lengths: list[int] = []
        """Tokens each active row has stored, that of the pass at hand included."""
        self._prompt_lengths: list[int] = []
        self._entered: list[int] = []
        self._generations = 0
        self._room_for_prompts = 0
        self._prompts: dict[int, Pair] = {}
        """By layer: (N or more, kv heads, longest prompt of all, head dim)."""
        self._own: dict[int, Pair] = {}
        """By layer: (slots, kv heads, capacity, head dim); slot r is row r's."""
        self._capacity = 0
        self._layout: _Layout | FixedLayout = _Layout(device)

    def __len__(self) -> int:
        return len(self.group_of)

    def enter(self, groups: Sequence[int], lengths: Sequence[int], generations: int) -> None:
        """The coming pass is over the prompts of these groups; so many rows of each are active after it."""
        self.groups += groups
        self._entered = list(lengths)
        self._prompt_lengths += lengths
        self.group_of += [group for group in groups for _ in range(generations)]
        self.lengths += [0] * (len(groups) * generations)
        self._generations = generations
        if self._room_for_prompts < len(self.groups):
            self._room_for_prompts = max(len(self.groups), min(self.prompts, 2 * self._room_for_prompts))

    def store_prompts(self, layer: int, key: Tensor, value: Tensor) -> None:
        """``key``, ``value`` (1, kv heads, L, head dim) of the packed prompts of the groups that have entered."""
        before = len(self.groups) - len(self._entered)
        kept = self._prompts.get(layer)
        if kept is None or len(kept[0]) < self._room_for_prompts:
            shape = (self._room_for_prompts, key.shape[1], self.longest_prompt, key.shape[3])
            self._prompts[layer] = key.new_zeros(shape), key.new_zeros(shape)
            for old, new in zip(kept or (), self._prompts[layer], strict=kept is not None):
                new[:before] = old[:before]
        for at, parts in enumerate(zip(*(part.split(self._entered, 2) for part in (key, value)), strict=True), before):
            for whole, part in zip(self._prompts[layer], parts, strict=True):
                whole[at, :, : part.shape[2]] = part[0]

    def append_rows(self) -> bool:
        """The coming pass is over one more token of each active row. True where the buffers have to grow for it."""
        self.lengths = [length + 1 for length in self.lengths]
        before = self._capacity
        while self._capacity < max(self.lengths):
            self._capacity = min(self.limit, max(FIRST_CAPACITY, 2 * self._capacity))
        return self._capacity > before

    def lay_out(self) -> None:
        """The coming pass reads what there is and no more."""
        self._layout = _Layout(self.device, self.members(), self._prompt_lengths, self.lengths)

    def read_by(self, layout: "FixedLayout") -> None:
        """The coming pass reads what ``layout`` says."""
        layout.look()
        self._layout = layout

    def members(self) -> list[list[int]]:
        """The rows of each group."""
        found: dict[int, list[int]] = {group: [] for group in self.groups}
        for row, group in enumerate(self.group_of):
            found[group].append(row)
        return list(found.values())

    @property
    def shape(self) -> Shape:
        """Of a pass over a token of each row as it is now."""
        return Shape(
            rows=_rounded(len(self), self.slots),
            groups=_rounded(len(self.groups), self._room_for_prompts),
            generations=self._generations,
            own=self._capacity,
            prompt=min(self.longest_prompt, -(-max(self._prompt_lengths) // PROMPT_STEP) * PROMPT_STEP),
            room=self._room_for_prompts,
        )

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
        prompt_keys, prompt_values = (part[: len(at.members), :, : at.longest_prompt] for part in self._prompts[layer])
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
        members: Sequence[list[int]] = (),
        prompt_lengths: Sequence[int] = (),
        lengths: Sequence[int] = (),
    ) -> None:
        most = max(map(len, members), default=0)
        self.longest, self.longest_prompt = max(lengths, default=0), max(prompt_lengths, default=0)
        self.rows = torch.arange(len(lengths), device=device)
        self.last = torch.tensor(lengths, dtype=torch.long, device=device) - 1
        # (N, most rows of a group), of smaller ones filled up with a row that nobody reads again
        self.members = torch.tensor([_filled(part, most, part[0]) for part in members], dtype=torch.long, device=device)
        self.place = torch.tensor(_places(members, most), dtype=torch.long, device=device)
        """Of each row in what is laid out by ``members``."""
        self.own = _seen(lengths, device)
        self.prompts = _seen(prompt_lengths, device)


class FixedLayout:
    """The same for a pass that is recorded once and replayed: no tensor changes its shape or its address, one copy
    fills all of them, and what is left of rows and groups reads and writes where nobody looks."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape = shape
        sizes = (shape.rows,) * 4 + (shape.groups, shape.groups * shape.generations)
        self.numbers = torch.zeros(sum(sizes), dtype=torch.long, device=device)
        self.ids, self.positions, self.last, self.place, self._prompt_lengths, members = self.numbers.split(sizes)
        self.members = members.view(shape.groups, shape.generations)
        self.longest, self.longest_prompt = shape.own, shape.prompt
        self.rows, self._tokens, self._prompt_tokens = (
            torch.arange(size, device=device) for size in (shape.rows, shape.own, shape.prompt)
        )
        self.mask = torch.ones(shape.rows, 1, 1, 1, dtype=torch.bool, device=device)
        """For transformers: one of four dimensions it passes on, of one of two it asks whether anything is hidden."""

    def fill(self, cache: PrefixCache, ids: Sequence[int], positions: Sequence[int]) -> None:
        """The token of each active row, its position, and where all of them are now."""
        rows, groups, generations, *_ = self.shape
        members = cache.members()
        last = [length - 1 for length in cache.lengths]
        columns = (ids, positions, last, _places(members, generations))
        numbers = [number for column in columns for number in _filled(column, rows, 0)]
        numbers += _filled(cache._prompt_lengths, groups, 1)
        for part in members:
            numbers += _filled(part, generations, part[0])
        self.numbers.copy_(torch.tensor(_filled(numbers, len(self.numbers), 0)))

    def look(self) -> None:
        """What is seen of the buffers, from the numbers that lie there now."""
        self.own = (self._tokens <= self.last[:, None])[:, None, None]
        self.prompts = (self._prompt_tokens < self._prompt_lengths[:, None])[:, None, None]


def _places(members: Sequence[list[int]], most: int) -> list[int]:
    """Of each row where ``most`` places are a group's."""
    found = {row: at * most + i for at, part in enumerate(members) for i, row in enumerate(part)}
    return [found[row] for row in range(len(found))]


def _filled(column: Sequence[int], size: int, by: int) -> list[int]:
    return [*column, *[by] * (size - len(column))]


def _rounded(count: int, most: int) -> int:
    """Up to a power of two."""
    return min(most, 1 << (count - 1).bit_length())


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
