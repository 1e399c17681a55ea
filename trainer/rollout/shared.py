"""Rollouts that compute each prompt once: G rows decode on its keys and values, finished rows leave, and waiting groups
take their place."""

from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.batch import Completion, Groups
from trainer.models.blocked_weights import blocked_weights
from trainer.models.prefix_cache import FixedLayout, PrefixCache
from trainer.models.shared_prefix import hidden_states
from trainer.rollout import decoder
from trainer.rollout.decoder import Decoder, Group, Noise, StopRules
from trainer.rollout.graphs import Graphs, TokenGraph, Unrecorded
from trainer.rollout.sampling import Sampler

PREFILL_TOKENS = 8192
"""Prompt tokens of one prefill pass at most, or one prompt."""


@dataclass
class _Row:
    """A completion in the making."""

    group: Group
    generation: int
    uniforms: np.ndarray
    """(max_new_tokens,); NaN decodes greedily."""
    ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class SharedDecoder(Decoder):
    """``rollout.engine = "shared"``. The model's attention is that of ``models.shared_prefix``."""

    graphs: Graphs = field(default_factory=Graphs)

    def complete(self, groups: Sequence[Group], generations: int, noise: Noise) -> list[Completion]:
        if not groups:  # a rank may have no share of a small evaluation
            return []
        with blocked_weights(self.causal):
            if self.graphs.on(self.causal.device):
                try:
                    return self._complete(groups, generations, noise, TokenGraph(self.graphs.capture, self._fixed_pass))
                except Unrecorded as error:
                    self.graphs.stop(str(error))
            # From the beginning, on a new cache: a wrong pass may have spoilt the old one. Samples hang on keys alone.
            return self._complete(groups, generations, noise, None)

    def _complete(
        self, groups: Sequence[Group], generations: int, noise: Noise, graph: TokenGraph | None
    ) -> list[Completion]:
        waiting = deque(groups)
        # Two groups at least, so that one enters while another ends.
        slots = min(max(self.most_rows or decoder.MAX_ROWS, 2 * generations), len(groups) * generations)
        # A prompt stays until its last row has ended: with none waiting for one, all slots are in use.
        most_prompts = self.most_prompts or 2 * max(1, slots // generations)
        longest = max(len(group.prompt.ids) for group in groups)
        cache = PrefixCache(slots, self.rollout.max_new_tokens, len(groups), longest, self.causal.device)
        rows: list[_Row] = []
        done: dict[tuple[int, int], Completion] = {}
        rules, draw = StopRules(self), self.sampler()
        while waiting or rows:
            self.between_tokens()
            room = min((slots - len(rows)) // generations, most_prompts - len(cache.groups))
            entering = self._next(waiting, room)
            # Tensors are counted in passes that may hold more than one before: counting costs as much as a token.
            more = bool(entering) or cache.append_rows()
            with nullcontext() if more else self.uncounted():
                first = len(rows) if entering else 0
                if entering:
                    rows += [
                        _Row(group, generation, noise(group, generation))
                        for group in entering
                        for generation in range(generations)
                    ]
                    scores = self._prefill(cache, entering, generations)
                else:
                    scores = self._decode(cache, rows, graph)
                ended = self._settle(rows[first:], scores, draw, rules)
            for at, stopped in ended.items():
                row = rows[first + at]
                key = (row.group.group, row.generation)
                done[key] = self.completion(row.group, row.generation, row.ids, row.logps, stopped=stopped)
            for last, free in cache.drop([first + at for at in ended]):
                rows[free] = rows[last]
            del rows[len(cache) :]
        return [done[group.group, generation] for group in groups for generation in range(generations)]

    def _next(self, waiting: deque[Group], room: int) -> list[Group]:
        """Groups for one prefill: as many as there is room for, while their prompts stay within its tokens."""
        entering: list[Group] = []
        tokens = 0
        while waiting and len(entering) < room:
            tokens += len(waiting[0].prompt.ids)
            if entering and tokens > PREFILL_TOKENS:
                break
            entering.append(waiting.popleft())
        return entering

    def _prefill(self, cache: PrefixCache, entering: Sequence[Group], generations: int) -> Tensor:
        """Logits of the first token of each row that enters, (R, V) fp32."""
        prompts = [group.prompt.ids for group in entering]
        cache.enter([group.group for group in entering], [len(prompt) for prompt in prompts], generations)
        hidden = self._forward(
            [[token for prompt in prompts for token in prompt]],
            [[position for prompt in prompts for position in range(len(prompt))]],
            cache,
            tuple((len(prompt), ()) for prompt in prompts),
        )
        last = torch.tensor([len(prompt) for prompt in prompts], device=hidden.device).cumsum(0) - 1
        return self._logits(hidden[0, last]).repeat_interleave(generations, 0)

    def _decode(self, cache: PrefixCache, rows: Sequence[_Row], graph: TokenGraph | None) -> Tensor:
        """Logits of the token after the last one of each row, (R, V) fp32."""
        ids = [row.ids[-1] for row in rows]
        positions = [len(row.group.prompt.ids) + len(row.ids) - 1 for row in rows]

        def launched() -> Tensor:
            cache.lay_out()
            hidden = self._forward([[one] for one in ids], [[position] for position in positions], cache)
            return self._logits(hidden[:, -1])

        return launched() if graph is None else graph(cache, ids, positions, launched)

    def _fixed_pass(self, cache: PrefixCache, layout: FixedLayout) -> Tensor:
        """The same of all rows of ``layout``, from tensors that stay where they are alone, so that it can be
        recorded."""
        cache.read_by(layout)
        ids, positions = layout.ids[:, None], layout.positions[:, None]
        hidden = hidden_states(self.causal, ids, layout.mask, positions, prefix_cache=cache)
        return self._logits(hidden[:, -1])

    def _forward(
        self, ids: list[list[int]], positions: list[list[int]], cache: PrefixCache, groups: Groups = ()
    ) -> Tensor:
        input_ids, position_ids = (torch.tensor(part, device=self.causal.device) for part in (ids, positions))
        return hidden_states(self.causal, input_ids, torch.ones_like(input_ids), position_ids, groups, cache)

    def _logits(self, hidden: Tensor) -> Tensor:
        head: Any = self.causal.get_output_embeddings()
        return head(hidden).float()

    def _settle(self, rows: Sequence[_Row], scores: Tensor, draw: Sampler, rules: StopRules) -> dict[int, bool]:
        """Draws the next token of each row; which of them end with it, and whether by a stop rather than by length."""
        at = [row.uniforms[len(row.ids)] for row in rows]
        uniforms = torch.tensor(at, dtype=torch.float64, device=scores.device)
        context = self._context(rows) if draw.reads_context else scores.new_empty(len(rows), 0, dtype=torch.long)
        drawn, logps = draw(scores, uniforms, context, position=len(rows[0].ids))
        for row, token, logp in zip(rows, drawn.tolist(), logps.tolist(), strict=True):
            row.ids.append(token)
            row.logps.append(logp)
        stops = rules(self._tails(rows, rules.reads) if rules.reads > 1 else drawn[:, None]).tolist()
        limit = self.rollout.max_new_tokens
        return {
            at: stop for at, (row, stop) in enumerate(zip(rows, stops, strict=True)) if stop or len(row.ids) == limit
        }

    def _context(self, rows: Sequence[_Row]) -> Tensor:
        """Prompts and completions; short ones begin with copies of their first token, which changes no penalty."""
        texts = [[*row.group.prompt.ids, *row.ids] for row in rows]
        longest = max(map(len, texts))
        return torch.tensor([text[:1] * (longest - len(text)) + text for text in texts], device=self.causal.device)

    def _tails(self, rows: Sequence[_Row], tokens: int) -> Tensor:
        """The last tokens of prompts and completions, after padding where there are fewer."""
        texts = [[*row.group.prompt.ids[-tokens:], *row.ids[-tokens:]][-tokens:] for row in rows]
        pad = [self.tokenizer.pad_token_id]
        return torch.tensor([pad * (tokens - len(text)) + text for text in texts], device=self.causal.device)
