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
    cdf = probabilities.cumsum(-1, dtype=torch.float64)
    total = cdf[:, -1:].contiguous()
    drawn = torch.searchsorted(cdf, uniforms.double()[:, None] * total, right=True)
    # A product rounded up to the total would fall behind the last token that has a slice.
    return torch.minimum(drawn, torch.searchsorted(cdf, total)).squeeze(-1)


class Sampler:
    """Draws one token a row. The order of the filters is transformers' own: penalty, temperature, top-k, top-p,
    min-p."""

    def __init__(self, rollout: Rollout, *, tokenizer_size: int, dtype: torch.dtype) -> None:
        """``dtype``: of the weights, for the message about logits that are not finite."""
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

    @property
    def reads_context(self) -> bool:
        """The repetition penalty does."""
        return bool(self.before)

    def __call__(self, scores: Tensor, uniforms: Tensor, context: Tensor, *, position: int) -> tuple[Tensor, Tensor]:
        """(S, V) fp32 logits, (S,), (S, context) token ids -> drawn tokens (S,) and their log-probs (S,) fp32.

        A uniform of NaN draws greedily. ``position`` of the first row in its completion, for the message.
        """
        # As scored later: the temperature, but none of the filters.
        logps = (scores / self.temperature).log_softmax(-1)
        if logps[:, 0].isnan().any():  # one NaN or infinity makes all of its row NaN
            raise Stopped(
                f"rollout: the logits of decoding position {position} hold NaN or infinity (weights in {self.dtype}). "
                'Sampling from them would write token 0 ("!") for ever. The usual causes: an update that was too large '
                "(lower optim.lr, keep optim.max_grad_norm), or activations that overflow in 16 bits (model.dtype)."
            )
        ids = cast(torch.LongTensor, context)
        allowed = self.before(ids, cast(torch.FloatTensor, scores)) / self.temperature
        # Rows of the embedding beyond the tokenizer are padding of the matrix: ids that no text has.
        allowed[:, self.tokenizer_size :] = -torch.inf
        allowed = self.after(ids, cast(torch.FloatTensor, allowed))
        drawn = inverse_cdf(allowed.softmax(-1), uniforms)
        if (greedy := uniforms.isnan()).any():
            drawn = torch.where(greedy, allowed.argmax(-1), drawn)
        return drawn, logps.gather(-1, drawn[:, None]).squeeze(-1)


class KeyedSampler(LogitsProcessor):
    """A ``Sampler`` inside of ``generate``, which it leaves nothing but the argmax of a one-hot row."""

    def __init__(self, sampler: Sampler, uniforms: Tensor, padding: Tensor) -> None:
        """``uniforms`` (S, max_new_tokens); NaN decodes greedily. ``padding`` (S, longest prompt): where there is
        some."""
        self.sampler = sampler
        self.uniforms = uniforms
        self.padding = padding
        self.tokens: list[Tensor] = []
        self.logps: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """(S, context), (S, V) fp32 logits -> (S, V), 0 at the drawn token and -inf elsewhere."""
        position = len(self.tokens)
        if self.sampler.reads_context:
            # Padding is no part of a text: a token of it instead, which the penalty has counted once already.
            input_ids = input_ids.clone()
            prompts = input_ids[:, : self.padding.shape[1]]
            prompts.copy_(torch.where(self.padding, prompts[:, -1:], prompts))
        drawn, logps = self.sampler(scores, self.uniforms[:, position], input_ids, position=position)
        self.tokens.append(drawn)
        self.logps.append(logps)
        return torch.full_like(scores, -torch.inf).scatter_(-1, drawn[:, None], 0.0)
