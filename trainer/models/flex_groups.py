"""Packed groups in one kernel a layer, on a card: FlexAttention (arXiv 2412.05496) with the groups as its block mask.

SDPA takes a call a completion and a copy of its prompt's keys for each of its heads. Here blocks that nobody sees are
not read, and heads that share keys read the same ones.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad

from trainer.batch import Groups

BLOCK = 128
"""Tokens on a side of a block, the kernels' own number."""


def attend(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scaling: float | None) -> Tensor:
    """(1, heads, L, head dim), keys and values (1, kv heads, L, head dim) -> (1, heads, L, head dim).
    ``scaling`` None: 1 / sqrt(head dim)."""
    return kernel(scaling or query.shape[-1] ** -0.5)(query, key, value, mask)


@cache
def kernel(scaling: float) -> Callable[[Tensor, Tensor, Tensor, BlockMask], Tensor]:
    """Compiled for the first length, then once for any, with a gradient and without; ``use_flex`` sees to all of it.

    Each packed row has a length of its own: padding rows to some few lengths would compile for each of them, and put up
    to a block of tokens through every layer. ``fullgraph``, since torch would otherwise turn to (L, L) scores without a
    word where it compiles no further.
    """

    def packed(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask) -> Tensor:
        return flex_attention(query, key, value, block_mask=mask, scale=scaling, enable_gqa=True)

    return torch.compile(packed, fullgraph=True)


def block_mask(groups: Groups, device: torch.device) -> BlockMask:
    """Who sees whom in a packed row, for all of its layers.

    A token sees two ranges: of its prompt, and of its own sequence up to itself. Blocks are told from the ends of both,
    (L, L / 128) numbers; torch's ``create_block_mask`` would ask every pair, 268 million in a row of 16,384 tokens.
    """
    first, end, own = _ranges(groups).to(device)
    length = len(own)
    blocks = -(-length // BLOCK)
    begin = torch.arange(0, blocks * BLOCK, BLOCK, dtype=torch.int32, device=device)

    def within(start: Tensor, stop: Tensor) -> Tensor:
        return (torch.minimum(stop[:, None], begin + BLOCK) - torch.maximum(start[:, None], begin)).clamp(min=0)

    keys = within(first, end) + within(own, torch.arange(1, length + 1, dtype=torch.int32, device=device))
    pairs = pad(keys, (0, 0, 0, blocks * BLOCK - length)).view(blocks, BLOCK, blocks).sum(1)
    whole = pairs == BLOCK * BLOCK

    def sees(batch: Tensor, head: Tensor, at: Tensor, key: Tensor) -> Tensor:
        return (key <= at) & ((key >= own[at]) | ((key >= first[at]) & (key < end[at])))

    return BlockMask.from_kv_blocks(
        *_listed((pairs > 0) & ~whole),
        *_listed(whole),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(length, length),
    )


def _ranges(groups: Groups) -> Tensor:
    """(3, L) int32: of each token where what it sees of its prompt begins and ends, and where its own sequence begins.
    A prompt is a sequence of its own."""
    lengths, ranges, at = [], [], 0
    for prompt, own in groups:
        start = at
        for size in (prompt, *own):
            lengths.append(size)
            ranges.append((start, start if at == start else start + prompt, at))
            at += size
    return torch.tensor(ranges, dtype=torch.int32).repeat_interleave(torch.tensor(lengths), 0).T.contiguous()


def _listed(dense: Tensor) -> tuple[Tensor, Tensor]:
    """(Q, K) bool -> how many blocks of keys each block of queries reads, (1, 1, Q), and which ones first, (1, 1, Q,
    K)."""
    ordered = dense[None, None].int()
    return ordered.sum(-1, dtype=torch.int32), ordered.argsort(dim=-1, descending=True, stable=True).int()
