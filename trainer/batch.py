"""The records that cross a boundary. Shapes: R rows, L row length, N scored tokens, C completions, H hidden, V
vocabulary."""

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from torch import Tensor


@dataclass(frozen=True)
class Prompt:
    """One row of the data set, rendered and tokenised once, before the first rollout.

    For example ``Prompt(index=0, text="2 + 3 =", ids=(17, 488, 220, 18, 284), messages=None, columns={})``.
    """

    index: int
    """Row of the data set, from 0, in file order; the key of the sampling noise."""
    text: str
    """What the model reads, template included."""
    ids: tuple[int, ...]
    messages: tuple[dict[str, Any], ...] | None
    """The chat messages as the user gave them (system prompt included); None when the row's prompt is a string."""
    columns: dict[str, Any]
    """Every other column of the row, under the user's own names; the mapped answer also under "answer"."""
    asked: tuple[dict[str, Any], ...] | None = None
    """Where the row's prompt is a string that was rendered: the messages that it became."""


@dataclass
class Completion:
    """One sampled answer: what was sampled, then what was thought of it."""

    group: int
    """Place of its prompt in the step, in global order (0 .. prompts_per_step - 1)."""
    generation: int
    """0 .. G-1 within the group."""
    prompt: Prompt
    ids: tuple[int, ...]
    """Sampled tokens, up to and including the first stop token."""
    sampling_logps: tuple[float, ...]
    """Log-probability of each sampled token at the sampling temperature, before any top-k/top-p filter (nats)."""
    finish: Literal["stop", "length"]
    text: str
    """Decoded without special tokens."""
    rewards: dict[str, float | None] = field(default_factory=dict)
    """Each reward by name; None where that reward did not score the row."""
    reward: float | None = None
    """The weighted sum; None = unscored, which leaves the group statistics and the loss."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What reward functions logged of it with log_extra, by column."""
    kl_penalty: float = 0.0
    """coefficient * sum of the tokens' KL, taken off the reward where grpo.kl.placement = "reward"."""
    advantage: float = 0.0


Groups = tuple[tuple[int, tuple[int, ...]], ...]


class PackedRows(NamedTuple):
    """What one forward pass reads: rows of tokens, and which hidden states predict which target.

    The layout is the only thing that knows how completions lie in rows. The loss sees flat scored tokens.
    """

    input_ids: Tensor
    """(R, L) int64, right-padded."""
    attention_mask: Tensor
    """(R, L) int64, 1 on real tokens."""
    position_ids: Tensor
    """(R, L) int64, counted within each sequence; pads repeat the last position."""
    score_at: Tensor
    """(N,) int64, index into the flattened R*L of the hidden state that predicts the target."""
    targets: Tensor
    """(N,) int64, token ids."""
    completion: Tensor
    """(N,) int64, which completion of the micro-batch a scored token belongs to, 0 .. C-1, ascending."""
    groups: Groups = ()
    """How one row (R = 1) is packed: of each group the length of its prompt, then those of its completions that follow
    it. Empty: every row is a sequence of its own."""


class TokenScores(NamedTuple):
    """What the model says of each scored token, fp32, in nats."""

    logps: Tensor
    """(N,) log-probability of the target at the configured temperature."""
    entropy: Tensor
    """(N,) entropy of the distribution, detached."""
    exact_kl: Tensor | None
    """(N,) KL(policy || reference) over the full vocabulary; None unless the reference's hidden states were given."""


class ReferenceScores(NamedTuple):
    """What the reference says of the same tokens."""

    logps: Tensor
    """(N,) fp32."""
    hidden: Tensor | None
    """(N, H) last hidden states, only for the exact estimator."""
