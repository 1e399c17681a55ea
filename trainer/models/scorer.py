"""The module that the engine trains: packed rows in, token scores out, so that every hook of the engine runs."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trainer.batch import PackedRows, TokenScores
from trainer.errors import Refused
from trainer.models.head import ChunkedHead
from trainer.models.shared_prefix import hidden_states


class TokenScorer(nn.Module):
    """A causal language model (with or without adapters inside) and its chunked head."""

    def __init__(self, causal: PreTrainedModel, temperature: float) -> None:
        super().__init__()
        self.causal = causal
        self.head = ChunkedHead(causal.get_output_embeddings(), temperature)

    def forward(
        self,
        rows: PackedRows,
        reference_hidden: Tensor | None = None,
        reference_weight: Tensor | None = None,
        *,
        return_hidden: bool = False,
    ) -> dict[str, Tensor]:
        """Scores of the N scored tokens: logps, entropy, exact_kl (zeros without a reference), hidden (N, H) on
        request.

        A dict of tensors: ZeRO-3's backward hooks do not look inside a dataclass.
        """
        hidden = hidden_states(self.causal, rows.input_ids, rows.attention_mask, rows.position_ids, rows.groups)
        scored = hidden.flatten(0, 1).index_select(0, rows.score_at)
        logps, entropy, exact_kl = self.head(scored, rows.targets, reference_hidden, reference_weight)
        scores = {"logps": logps, "entropy": entropy, "exact_kl": exact_kl}
        return scores | {"hidden": scored.detach()} if return_hidden else scores


def token_scores(scores: dict[str, Tensor], *, exact: bool) -> TokenScores:
    """The record of a forward's dict."""
    return TokenScores(scores["logps"], scores["entropy"], scores["exact_kl"] if exact else None)


@torch.no_grad()
def check_head(scorer: TokenScorer) -> None:
    """Refuses an architecture whose logits are more than ``lm_head(hidden)`` (scaled, capped, ...): ours would
    differ."""
    causal = scorer.causal
    ids = torch.arange(2, 10, device=scorer.head.weight.device)[None]
    ones = torch.ones_like(ids)
    rows = PackedRows(
        ids, ones, torch.arange(8, device=ids.device)[None], ones[0].cumsum(0)[:-1] - 1, ids[0, 1:], ones[0, :-1] * 0
    )
    expected = (causal(input_ids=ids, use_cache=False).logits.float() / scorer.head.temperature).log_softmax(-1)
    expected = expected[0, :-1].gather(-1, ids[0, 1:, None]).squeeze(-1)
    gap = (scorer(rows)["logps"] - expected).abs().max().item()
    if gap > 1e-3:
        raise Refused(
            f"{type(causal).__name__}: log-probs from its head's weight differ from its own logits by {gap:.3g} nats, "
            "so this architecture changes its logits after the head (scaling or soft-capping). "
            "Expected plain logits = lm_head(hidden), as in Llama, Qwen2, Qwen3, SmolLM, Mistral. Fix: use one of "
            "those."
        )
