"""Rollouts with transformers' ``generate``: left-padded prompts, a KV cache, our own sampler."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation import StopStringCriteria

from trainer.batch import Completion, Prompt
from trainer.config.grpo import Rollout
from trainer.rollout.sampling import KeyedSampler, NoiseKey

MAX_ROWS = 128
"""Rows that decode together; more only adds memory. Samples do not depend on it."""


@dataclass(frozen=True)
class Group:
    """One prompt of a step and its place in it."""

    group: int
    prompt: Prompt


@dataclass(frozen=True)
class Decoder:
    """All that decoding needs, made once."""

    causal: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    rollout: Rollout
    stop_ids: tuple[int, ...]
    seed: int
    between_tokens: Callable[[], None] = lambda: None
    """Called at every position; what it raises ends the rollout. A rollout is the longest part of a step."""

    def generate(
        self,
        groups: Sequence[Group],
        *,
        step: int,
        generations: int,
        purpose: Literal["train", "eval"] = "train",
        greedy: bool = False,
    ) -> list[Completion]:
        """``generations`` completions of each prompt, in order of group and generation.

        The model decodes in eval mode with its cache; its modes are as before afterwards.
        """
        rows = [(group, generation) for group in groups for generation in range(generations)]
        completions: list[Completion] = []
        with decoding(self.causal):
            for start in range(0, len(rows), MAX_ROWS):
                part = rows[start : start + MAX_ROWS]
                keys = [
                    NoiseKey(self.seed, purpose, step, group.prompt.index, generation) for group, generation in part
                ]
                completions += self._decode(part, None if greedy else keys)
        return completions

    @torch.no_grad()
    def _decode(self, rows: Sequence[tuple[Group, int]], keys: Sequence[NoiseKey] | None) -> list[Completion]:
        limit = self.rollout.max_new_tokens
        device = self.causal.device
        uniforms = None
        if keys is not None:
            uniforms = torch.from_numpy(np.stack([key.uniforms(limit) for key in keys])).to(device)
        sampler = KeyedSampler(self.rollout, uniforms, tokenizer_size=len(self.tokenizer), dtype=self.causal.dtype)
        ends = _Ends(self.tokenizer, self.rollout.stop, self.stop_ids, len(rows), self.between_tokens)
        input_ids, attention_mask = self._left_padded([group.prompt.ids for group, _ in rows])
        generate: Any = self.causal.generate  # a mixin's method, which nn.Module's attribute type hides
        generate(
            input_ids=input_ids.to(device),
            attention_mask=attention_mask.to(device),
            generation_config=self._explicit(limit),
            logits_processor=[sampler],
            stopping_criteria=StoppingCriteriaList([ends]),
        )
        tokens = torch.stack(sampler.tokens, dim=1).tolist()
        logps = torch.stack(sampler.logps, dim=1).tolist()
        return [
            self._completion(group, generation, tokens[row], logps[row], ends.length[row])
            for row, (group, generation) in enumerate(rows)
        ]

    def _completion(
        self, group: Group, generation: int, tokens: list[int], logps: list[float], length: int
    ) -> Completion:
        stopped = length > 0
        ids = tuple(tokens[:length] if stopped else tokens)
        return Completion(
            group=group.group,
            generation=generation,
            prompt=group.prompt,
            ids=ids,
            sampling_logps=tuple(logps[: len(ids)]),
            finish="stop" if stopped else "length",
            text=str(self.tokenizer.decode(list(ids), skip_special_tokens=True)),
        )

    def _explicit(self, limit: int) -> GenerationConfig:
        """Every field that could sample is set: what is left unset is filled from the checkpoint's own file."""
        return GenerationConfig(
            max_new_tokens=limit,
            do_sample=False,  # the sampler has drawn already
            num_beams=1,
            repetition_penalty=1.0,
            use_cache=True,
            eos_token_id=list(self.stop_ids) or None,
            pad_token_id=self.tokenizer.pad_token_id,
            bos_token_id=self.tokenizer.bos_token_id,
            return_dict_in_generate=False,
        )

    def _left_padded(self, prompts: Sequence[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
        longest = max(map(len, prompts))
        pad = self.tokenizer.pad_token_id
        ids = torch.tensor([[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        return ids, (torch.arange(longest) >= longest - lengths[:, None]).long()


class _Ends(StoppingCriteria):
    """Ends a row at the first stop id or stop string, and notes its length then (0 while it runs)."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop: Sequence[str],
        stop_ids: Sequence[int],
        rows: int,
        between_tokens: Callable[[], None],
    ) -> None:
        self.strings = StopStringCriteria(tokenizer, list(stop)) if stop else None
        self.stop_ids = torch.tensor(list(stop_ids))
        self.length = [0] * rows
        self.steps = 0
        self.between_tokens = between_tokens

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:
        self.between_tokens()
        self.steps += 1
        done = torch.isin(input_ids[:, -1], self.stop_ids.to(input_ids.device))
        if self.strings is not None:
            done = done | self.strings(input_ids, scores)
        for row in done.nonzero().flatten().tolist():
            self.length[row] = self.length[row] or self.steps
        return done


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
