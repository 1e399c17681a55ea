"""Rollouts with transformers' ``generate``: left-padded prompts, one a row, a KV cache, our own sampler."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from trainer.batch import Completion
from trainer.rollout import decoder
from trainer.rollout.decoder import Decoder, Group, Noise, StopRules
from trainer.rollout.sampling import KeyedSampler

NO_TOKEN = 2**31 - 1


@dataclass(frozen=True)
class HfDecoder(Decoder):
    """``rollout.engine = "hf"``."""

    def complete(self, groups: Sequence[Group], generations: int, noise: Noise) -> list[Completion]:
        rows = [(group, generation) for group in groups for generation in range(generations)]
        most = self.most_rows or decoder.MAX_ROWS
        parts = [rows[start : start + most] for start in range(0, len(rows), most)]
        return [completion for part in parts for completion in self._decode(part, [noise(*row) for row in part])]

    def _decode(self, rows: Sequence[tuple[Group, int]], noise: Sequence[np.ndarray]) -> list[Completion]:
        limit = self.rollout.max_new_tokens
        uniforms = torch.from_numpy(np.stack(noise)).to(self.causal.device)
        input_ids, attention_mask = self._left_padded([group.prompt.ids for group, _ in rows])
        sampler = KeyedSampler(self.sampler(), uniforms, attention_mask == 0)
        ends = _Ends(StopRules(self), self.between_tokens)
        generate: Any = self.causal.generate  # a mixin's method, which nn.Module's attribute type hides
        generate(
            input_ids=input_ids,
            attention_mask=attention_mask,
            generation_config=self._explicit(limit),
            logits_processor=[sampler],
            stopping_criteria=StoppingCriteriaList([ends]),
        )
        tokens = torch.stack(sampler.tokens, dim=1).tolist()
        logps = torch.stack(sampler.logps, dim=1).tolist()
        return [
            self.completion(group, generation, tokens[row][:length], logps[row][:length], stopped=row in ends.length)
            for row, (group, generation) in enumerate(rows)
            for length in [ends.length.get(row, limit)]
        ]

    def _explicit(self, limit: int) -> GenerationConfig:
        """Every field that could sample is set: what is left unset is filled from the checkpoint's own file."""
        return GenerationConfig(
            max_new_tokens=limit,
            do_sample=False,  # the sampler has drawn already
            num_beams=1,
            repetition_penalty=1.0,
            use_cache=True,
            eos_token_id=list(self.stop_ids) or [NO_TOKEN],  # unset, the checkpoint's own would end rows
            pad_token_id=self.tokenizer.pad_token_id,
            bos_token_id=self.tokenizer.bos_token_id,
            return_dict_in_generate=False,
        )

    def _left_padded(self, prompts: Sequence[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
        longest = max(map(len, prompts))
        pad, device = self.tokenizer.pad_token_id, self.causal.device
        ids = torch.tensor([[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        return ids.to(device), (torch.arange(longest) >= longest - lengths[:, None]).long().to(device)


class _Ends(StoppingCriteria):
    """Ends a row where the rules say so, and notes its length then."""

    def __init__(self, rules: StopRules, between_tokens: Callable[[], None]) -> None:
        self.rules = rules
        self.length: dict[int, int] = {}
        self.steps = 0
        self.between_tokens = between_tokens

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:
        self.between_tokens()
        self.steps += 1
        done = self.rules(input_ids)
        for row in done.nonzero().flatten().tolist():
            self.length.setdefault(row, self.steps)
        return done
