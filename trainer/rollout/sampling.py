"""Keyed sampling: one uniform per (seed, step, prompt, generation, position), turned into a token by the inverse CDF.

So a completion does not depend on the rank, the batch or the order it was decoded in, and a run repeats exactly.
"""

from dataclasses import dataclass
from typing import Literal, cast

import numpy as np
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from trainer.config.grpo import Rollout
from trainer.errors import Stopped

PURPOSE: dict[Literal["train", "eval"], int] = {"train": 0, "eval": 1}


@dataclass(frozen=True)
class NoiseKey:
    """What the noise of one completion is made of."""

    seed: int
    purpose: Literal["train", "eval"]
    step: int
    prompt: int
    generation: int

    def uniforms(self, positions: int) -> np.ndarray:
        """(positions,) float64 in [0, 1). Philox is counter-based, and numpy guarantees its stream for ever."""
        words = np.random.SeedSequence([self.seed, PURPOSE[self.purpose], self.step, self.prompt, self.generation])
        return np.random.Generator(np.random.Philox(words)).random(positions)


def inverse_cdf(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """The token whose slice of the cumulative distribution holds the uniform: (S, V), (S,) -> (S,).

    float64, since 150,000 fp32 additions lose whole tokens; a token of probability 0 has no slice and is never drawn.
    """
    cdf = probabilities.double().cumsum(-1)
    threshold = uniforms.double()[:, None] * cdf[:, -1:]
    drawn = torch.searchsorted(cdf, threshold, right=True).squeeze(-1)
    last = (probabilities > 0).long().mul(torch.arange(cdf.shape[-1], device=cdf.device)).amax(-1)
    return torch.minimum(drawn, last)


class KeyedSampler(LogitsProcessor):
    """Draws the next tokens itself and leaves ``generate`` nothing but the argmax of a one-hot row.

    The order of the filters is transformers' own: penalty, temperature, top-k, top-p, min-p.
    """

    def __init__(self, rollout: Rollout, uniforms: Tensor | None, *, tokenizer_size: int, dtype: torch.dtype) -> None:
        """``uniforms`` (S, max_new_tokens); None decodes greedily."""
        self.uniforms = uniforms
        self.temperature = rollout.temperature
        self.tokenizer_size = tokenizer_size
        self.dtype = dtype
        self.before = LogitsProcessorList()
        self.after = LogitsProcessorList()
        if rollout.repetition_penalty != 1:
            self.before.append(RepetitionPenaltyLogitsProcessor(rollout.repetition_penalty))
        if rollout.top_k:
            self.after.append(TopKLogitsWarper(rollout.top_k))
        if rollout.top_p < 1:
            self.after.append(TopPLogitsWarper(rollout.top_p))
        if rollout.min_p:
            self.after.append(MinPLogitsWarper(rollout.min_p))
        self.tokens: list[Tensor] = []
        self.logps: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """(S, context), (S, V) fp32 logits -> (S, V), 0 at the drawn token and -inf elsewhere."""
        if not torch.isfinite(scores).all():
            raise Stopped(
                f"rollout: the logits of decoding position {len(self.tokens)} hold NaN or infinity (weights in "
                f"{self.dtype}). "
                'Sampling from them would write token 0 ("!") for ever. The usual causes: an update that was too large '
                "(lower optim.lr, keep optim.max_grad_norm), or activations that overflow in 16 bits (model.dtype)."
            )
        # As scored later: the temperature, but none of the filters.
        logps = (scores / self.temperature).log_softmax(-1)
        context = cast(torch.LongTensor, input_ids)
        allowed = self.before(context, cast(torch.FloatTensor, scores)) / self.temperature
        # Rows of the embedding beyond the tokenizer are padding of the matrix: ids that no text has.
        allowed[:, self.tokenizer_size :] = -torch.inf
        allowed = self.after(context, cast(torch.FloatTensor, allowed))
        if self.uniforms is None:
            drawn = allowed.argmax(-1)
        else:
            drawn = inverse_cdf(allowed.softmax(-1), self.uniforms[:, len(self.tokens)])
        self.tokens.append(drawn)
        self.logps.append(logps.gather(-1, drawn[:, None]).squeeze(-1))
        return torch.full_like(scores, -torch.inf).scatter_(-1, drawn[:, None], 0.0)
