"""What decodes: prompts in, completions with the log-probs of their sampler out."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import StopStringCriteria

from trainer.batch import Completion, Prompt
from trainer.config.grpo import Rollout
from trainer.rollout.sampling import NoiseKey, Sampler

MAX_ROWS = 128
"""Rows that decode together; more only adds memory. Samples do not depend on it."""


@dataclass(frozen=True)
class Group:
    """One prompt of a step and its place in it."""

    group: int
    prompt: Prompt


Noise = Callable[[Group, int], np.ndarray]
"""Of a completion, by its generation: (max_new_tokens,) uniforms; NaN decodes greedily."""


@dataclass(frozen=True)
class Decoder(ABC):
    """All that decoding needs, made once. Samples depend on their key alone, not on which decoder draws them."""

    causal: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    rollout: Rollout
    stop_ids: tuple[int, ...]
    seed: int
    between_tokens: Callable[[], None] = lambda: None
    """Called at every position; what it raises ends the rollout. A rollout is the longest part of a step."""
    uncounted: Callable[[], AbstractContextManager[None]] = nullcontext
    """Around passes that hold no more memory than one before."""
    most_rows: int | None = None
    """That decode at a time; None: MAX_ROWS."""
    most_prompts: int | None = None
    """That rows decode on at a time; None: twice those of the rows."""

    def generate(
        self,
        groups: Sequence[Group],
        *,
        step: int,
        generations: int,
        purpose: Literal["train", "eval"] = "train",
        greedy: int = 0,
        more_seed: int = 0,
    ) -> list[Completion]:
        """``generations`` sampled completions of each prompt and then ``greedy`` ones, in order of group and
        generation.

        The model decodes in eval mode; its modes are as before afterwards. ``more_seed`` is added to the seed.
        """

        def noise(group: Group, generation: int) -> np.ndarray:
            limit = self.rollout.max_new_tokens
            if generation >= generations:
                return np.full(limit, np.nan)
            return NoiseKey(self.seed + more_seed, purpose, step, group.prompt.index, generation).uniforms(limit)

        with torch.no_grad(), decoding(self.causal):
            return self.complete(groups, generations + greedy, noise)

    @abstractmethod
    def complete(self, groups: Sequence[Group], generations: int, noise: Noise) -> list[Completion]:
        """The same, in eval mode and without gradients."""

    def sampler(self) -> Sampler:
        return Sampler(self.rollout, tokenizer_size=len(self.tokenizer), dtype=self.causal.dtype)

    def completion(
        self, group: Group, generation: int, ids: Sequence[int], logps: Sequence[float], *, stopped: bool
    ) -> Completion:
        return Completion(
            group=group.group,
            generation=generation,
            prompt=group.prompt,
            ids=tuple(ids),
            sampling_logps=tuple(logps),
            finish="stop" if stopped else "length",
            text=str(self.tokenizer.decode(list(ids), skip_special_tokens=True)),
        )


class StopRules:
    """Whether the last token ends a row: a stop id, or the end of a stop string."""

    def __init__(self, decoder: Decoder) -> None:
        stop = list(decoder.rollout.stop)
        self.strings = StopStringCriteria(decoder.tokenizer, stop) if stop else None
        self.ids = torch.tensor(decoder.stop_ids, dtype=torch.long, device=decoder.causal.device)

    @property
    def reads(self) -> int:
        """Tokens before and with the last one that decide; a stop string may begin in the prompt."""
        return self.strings.maximum_token_len if self.strings is not None else 1

    def __call__(self, context: Tensor) -> Tensor:
        """(S, context) token ids, the newest last -> (S,) bool."""
        done = torch.isin(context[:, -1], self.ids)
        return done if self.strings is None else done | self.strings(context, None)


@contextmanager
def decoding(causal: PreTrainedModel) -> Iterator[None]:
    """Eval mode, and the mode of before afterwards. In train mode, under gradient checkpointing, transformers drops the
    cache, and decoding turns into nonsense or becomes 10 x slower."""
    training = causal.training
    causal.eval()
    try:
        yield
    finally:
        causal.train(training)
