"""The vocabulary head in chunks: log-prob, entropy and exact KL of scored tokens without ever holding (N, V) logits.

With V = 151,936 and fp32, one copy of the logits of 8 x 256 tokens is 1.2 GiB, and a plain loss keeps several.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from trainer.algorithm.kl import full_kl

CHUNK_BYTES = 64 * 2**20
"""Size of one fp32 chunk of logits; a few of them are alive at once."""


COPIES = {False: 4, True: 6}
"""fp32 copies of a chunk alive at the peak, without and with the exact KL; counted in tests/unit/test_head.py."""


def peak_bytes(columns: int, tokens: int, *, exact: bool) -> int:
    """Most bytes that scoring so many tokens holds at once, beside hidden states and weights."""
    return COPIES[exact] * 4 * columns * min(tokens, chunk_rows(columns))


def whole_bytes(columns: int, tokens: int) -> int:
    """What a plain log-softmax over all of them would hold in bf16 training: logits and their gradient in 2 bytes;
    their fp32 copy, its log-softmax and its gradient in 4."""
    return (2 + 2 + 4 + 4 + 4) * columns * tokens


def chunk_rows(columns: int) -> int:
    return max(1, CHUNK_BYTES // (4 * columns))


def token_terms(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    reference_hidden: Tensor | None,
    reference_weight: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob of the targets, entropy, exact KL(policy || reference): (n,) each, fp32, from hidden (n, H).

    The KL is zeros without a reference. All three are of the distribution softmax(logits / temperature).
    """
    logps = (linear(hidden, weight, bias).float() / temperature).log_softmax(-1)
    target_logps = logps.gather(-1, targets[:, None]).squeeze(-1)
    with torch.no_grad():
        entropy = -(logps.exp() * logps.nan_to_num(neginf=0.0)).sum(-1)
    if reference_hidden is None or reference_weight is None:
        return target_logps, entropy, torch.zeros_like(target_logps)
    with torch.no_grad():
        reference_logps = (linear(reference_hidden, reference_weight, bias).float() / temperature).log_softmax(-1)
    return target_logps, entropy, full_kl(logps, reference_logps)


class ChunkedHead(nn.Module):
    """The language-model head of a policy. A module of its own, so that ZeRO-3 gathers its weight for the forward and,
    by the hook on its outputs, for the recomputation in the backward."""

    def __init__(self, lm_head: nn.Linear, temperature: float) -> None:
        super().__init__()
        # The same Parameter as the model's (and as its embedding's, when tied), under a second name.
        self.weight = lm_head.weight
        self.bias = lm_head.bias
        self.temperature = temperature

    def forward(
        self, hidden: Tensor, targets: Tensor, reference_hidden: Tensor | None, reference_weight: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(N, H), (N,) -> log-probs, entropies, exact KLs, (N,) fp32 each.

        ``reference_weight`` None with reference hidden states: the reference has this very head (LoRA).
        """
        if reference_hidden is not None and reference_weight is None:
            reference_weight = self.weight
        rows = chunk_rows(self.weight.shape[0])
        parts = []
        for start in range(0, len(targets), rows):
            chunk = slice(start, start + rows)
            reference_chunk = None if reference_hidden is None else reference_hidden[chunk]
            # Recomputed in the backward pass: what is kept is hidden states, not logits.
            parts.append(
                checkpoint(
                    token_terms,
                    hidden[chunk],
                    self.weight,
                    self.bias,
                    targets[chunk],
                    self.temperature,
                    reference_chunk,
                    reference_weight,
                    use_reentrant=False,
                    preserve_rng_state=False,
                )
            )
        logps, entropy, kl = (torch.cat(part) for part in zip(*parts, strict=True))
        return logps, entropy, kl
