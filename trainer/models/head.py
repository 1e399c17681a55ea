"""The vocabulary head in chunks: log-prob, entropy and exact KL of scored tokens without ever holding (N, V) logits.

With V = 151,936 and fp32, one copy of the logits of 8 x 256 tokens is 1.2 GiB, and a plain loss keeps several. Here a
chunk of rows has logits at a time. A trained head computes them again in its backward pass (as verl's
FusedLinearForPPO); a frozen head forms the gradient of its hidden states in the forward pass (as Liger's fused losses).
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

CHUNK_ROWS = 256
"""Tokens of a chunk. An A10 multiplies about 210 rows in bf16 in the time of one read of the weight (125 TFLOP/s,
600 GB/s): with fewer, its memory would set the pace."""

COPIES = {False: 2, True: 3}
"""fp32 copies of a chunk that are held, without and with the exact KL; counted in tests/unit/test_head.py."""


def peak_bytes(columns: int, tokens: int, *, exact: bool) -> int:
    """Most bytes that scoring so many tokens holds at once, beside hidden states, weights and gradients of both."""
    return COPIES[exact] * 4 * columns * min(tokens, CHUNK_ROWS)


def whole_bytes(columns: int, tokens: int) -> int:
    """What a plain log-softmax over all of them would hold in bf16 training: logits and their gradient in 2 bytes;
    their fp32 copy, its log-softmax and its gradient in 4."""
    return (2 + 2 + 4 + 4 + 4) * columns * tokens


class ChunkedHead(nn.Module):
    """The language-model head of a policy. A module of its own, so that ZeRO-3 gathers its weight for the forward and,
    by the hook on its outputs, for the backward."""

    def __init__(self, lm_head: nn.Linear, temperature: float) -> None:
        super().__init__()
        # The same Parameter as the model's (and as its embedding's, when tied), under a second name.
        self.weight = lm_head.weight
        self.bias = lm_head.bias
        # A reference with a head of its own is the policy as it began, bias included.
        first_bias = None if lm_head.bias is None else lm_head.bias.detach().clone()
        self.register_buffer("first_bias", first_bias, persistent=False)
        self.temperature = temperature

    def forward(
        self, hidden: Tensor, targets: Tensor, reference_hidden: Tensor | None, reference_weight: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(N, H), (N,) -> log-probs, entropies, exact KLs, (N,) fp32 each; the entropies have no gradient.

        Without reference hidden states the KLs are zeros. ``reference_weight`` None with them: the reference has this
        very head (LoRA).
        """
        head = (self.weight, self.bias)
        reference_head = head if reference_weight is None else (reference_weight, self.first_bias)
        return _TokenTerms.apply(hidden, *head, self.temperature, targets, reference_hidden, reference_head)


class _TokenTerms(Function):
    """Of each row, with target y, z = h W' + b, p = softmax(z / T), and q likewise of the reference:

        ln p_y,    entropy = -sum_i p_i ln p_i,    KL = sum_i p_i (ln p_i - ln q_i);
        d ln p_y / dz_i = (1[i = y] - p_i) / T,    dKL / dz_i = p_i (ln p_i - ln q_i - KL) / T.

    What arrives in the backward pass, g at ln p_y and k at the KL, is a factor of each row. So of a frozen head only
    (d ln p_y / dz) W and (dKL / dz) W are kept, (N, H) each, by the forward pass: 4NVH operations where logits computed
    twice take 6.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        temperature: float,
        targets: Tensor,
        reference_hidden: Tensor | None,
        reference_head: tuple[Tensor, Tensor | None],
    ) -> tuple[Tensor, Tensor, Tensor]:
        # The Parameters themselves: ZeRO-3 takes their storage after the forward and brings another for the backward.
        ctx.heads = (weight, bias), reference_head, temperature
        ctx.frozen = not any(ctx.needs_input_grad[1:3])
        logps, entropy, kl = (hidden.new_zeros(len(hidden), dtype=_wide(weight.dtype)) for _ in range(3))
        logp_slope = torch.empty_like(hidden) if ctx.frozen and ctx.needs_input_grad[0] else None
        kl_slope = torch.empty_like(hidden) if logp_slope is not None and reference_hidden is not None else None
        for rows, logs, probs, gap in _distributions(hidden, reference_hidden, *ctx.heads):
            target = targets[rows, None]
            logps[rows] = logs.gather(1, target)[:, 0]
            entropy[rows] = -logs.mul_(probs).sum(1)
            if gap is not None:
                kl[rows] = torch.mul(gap, probs, out=logs).sum(1)
            if kl_slope is not None and gap is not None:
                by_logits = gap.sub_(kl[rows, None]).mul_(probs)
                torch.mm(_factor(by_logits, weight.dtype, logs), weight, out=kl_slope[rows])
            if logp_slope is not None:
                by_logits = probs.neg_().scatter_add_(1, target, torch.ones_like(target, dtype=probs.dtype))
                torch.mm(_factor(by_logits, weight.dtype, logs), weight, out=logp_slope[rows])
        ctx.save_for_backward(*((logp_slope, kl_slope) if ctx.frozen else (hidden, targets, reference_hidden, kl)))
        ctx.mark_non_differentiable(entropy, *([kl] if reference_hidden is None else []))
        return logps, entropy, kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logps: Tensor, _: Tensor, grad_kl: Tensor) -> tuple[Tensor | None, ...]:
        (weight, bias), _, temperature = ctx.heads
        g, k = grad_logps[:, None] / temperature, grad_kl[:, None] / temperature
        if ctx.frozen:
            logp_slope, kl_slope = ctx.saved_tensors
            grad_hidden = g * logp_slope if kl_slope is None else g * logp_slope + k * kl_slope
            return grad_hidden.to(logp_slope.dtype), *[None] * 6
        hidden, targets, reference_hidden, kl = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        # Summed in fp32 and rounded once, at the end: a sum in bf16 stands still where a chunk adds less than 1/512.
        grad_weight = torch.zeros_like(weight, dtype=_wide(weight.dtype)) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias, dtype=_wide(weight.dtype)) if ctx.needs_input_grad[2] else None
        for rows, logs, probs, gap in _distributions(hidden, reference_hidden, *ctx.heads):
            # g (1[i = y] - p_i) + k p_i (ln p_i - ln q_i - KL)
            factor = -g[rows] if gap is None else gap.sub_(kl[rows, None]).mul_(k[rows]).sub_(g[rows])
            by_logits = probs.mul_(factor).scatter_add_(1, targets[rows, None], g[rows])
            if grad_bias is not None:
                grad_bias += by_logits.sum(0)
            by_logits = _factor(by_logits, weight.dtype, logs)
            torch.mm(by_logits, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                _add_product(grad_weight, by_logits.t(), hidden[rows])
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *[None] * 4,
        )


Head = tuple[Tensor, Tensor | None]
"""Weight (V, H) and bias (V,)."""


def _distributions(
    hidden: Tensor, reference_hidden: Tensor | None, head: Head, reference_head: Head, temperature: float
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor | None]]:
    """Of each chunk: its rows, and ln p, p and ln p - ln q (None without a reference), (rows, V), to be overwritten.

    All chunks have the same buffers: on a CPU, new pages cost more than the arithmetic that fills them.
    """
    weight, _ = head
    shape = (min(len(hidden), CHUNK_ROWS), len(weight))
    buffers = [hidden.new_empty(shape, dtype=_wide(weight.dtype)) for _ in range(COPIES[reference_hidden is not None])]
    for rows in (slice(start, start + CHUNK_ROWS) for start in range(0, len(hidden), CHUNK_ROWS)):
        logs, probs, *rest = (buffer[: len(hidden[rows])] for buffer in buffers)
        if reference_hidden is not None:
            _log_softmax(reference_hidden[rows], reference_head, temperature, rest[0], probs)
        _log_softmax(hidden[rows], head, temperature, logs, probs)
        yield rows, logs, probs, torch.sub(logs, rest[0], out=rest[0]) if rest else None


def _log_softmax(hidden: Tensor, head: Head, temperature: float, logs: Tensor, probs: Tensor) -> None:
    """Fills ``logs`` with the log-probabilities, ``probs`` with the probabilities, of softmax(logits / temperature).

    The product is in the weights' dtype, as in the model's own head; all that follows is in fp32.
    """
    weight, bias = head
    product = logs if logs.dtype == weight.dtype else _narrow(probs, weight.dtype)
    if bias is None:
        torch.mm(hidden, weight.t(), out=product)
    else:
        torch.addmm(bias, hidden, weight.t(), out=product)
    if product is not logs:
        logs.copy_(product)
    logs.div_(temperature)
    logs.sub_(logs.amax(1, keepdim=True))
    total = torch.exp(logs, out=probs).sum(1, keepdim=True)
    probs.div_(total)
    # Finite, so that a token of probability 0 contributes 0 to every sum, not 0 * inf = NaN.
    logs.sub_(total.log()).clamp_(min=torch.finfo(logs.dtype).min)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, the sum in the dtype of ``total``."""
    if left.dtype == total.dtype:
        torch.addmm(total, left, right, out=total)
    else:
        total += left @ right


def _factor(values: Tensor, dtype: torch.dtype, memory: Tensor) -> Tensor:
    """``values`` in the weights' dtype; where that is not their own, in ``memory``."""
    return values if values.dtype == dtype else _narrow(memory, dtype).copy_(values)


def _narrow(buffer: Tensor, dtype: torch.dtype) -> Tensor:
    """The first bytes of a buffer as one of its shape, in a narrower dtype."""
    return buffer.view(dtype).flatten()[: buffer.numel()].view_as(buffer)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """fp32; float64 where the weights have it."""
    return torch.promote_types(dtype, torch.float32)
