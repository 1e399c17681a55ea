"""The reference policy: who it is, where it lives, and its scores of packed rows. Nothing of it is ever trained."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from trainer import heartbeat
from trainer.batch import Completion, PackedRows, Prompt, ReferenceScores
from trainer.models.packing import pack, pack_groups
from trainer.models.policy import Policy, adapter_off, reference_adapter
from trainer.models.scorer import TokenScorer
from trainer.models.shared_prefix import FLEX, NAME, sees_whole_context
from trainer.models.streaming import Placement, StreamedScorer

Kind = Literal["adapter off", "start adapter", "resident copy", "streamed copy", "sharded copy"]

ROLE = "reference"


class Shards(Protocol):
    """A copy that an engine has taken hold of."""

    def __call__(self, rows: PackedRows, *, return_hidden: bool) -> dict[str, Tensor]: ...

    def whole(self, parameter: Tensor) -> Tensor: ...


@dataclass
class Reference:
    """``switch()`` makes the scorer that is passed the reference; a ``copy`` is a scorer of its own."""

    kind: Kind
    where: str
    """For the note at the start."""
    switch: Callable[[], AbstractContextManager[object]] = nullcontext
    copy: TokenScorer | None = None
    streamed: StreamedScorer | None = None
    """The way to use a copy that lies on the host."""
    shards: Shards | None = None
    """The way to use a sharded copy, once the engines have started."""

    @torch.no_grad()
    def score(
        self, policy: Callable[..., dict[str, Tensor]], batches: Sequence[PackedRows], *, exact: bool
    ) -> list[ReferenceScores]:
        """Of each micro-batch log-probs (N,) and, for the exact estimator, hidden states (N, H) of the scored tokens.

        All micro-batches of a rollout batch in one call, since a streamed copy then passes through the device once.
        ``policy`` is the engine's forward, used where the reference is the policy with other adapters.
        """
        if self.streamed is not None:
            found = self.streamed(batches)
        else:
            with self.switch():
                found = []
                for rows in batches:
                    heartbeat.beat()
                    found.append((self.shards or self.copy or policy)(rows, return_hidden=exact))
        return [ReferenceScores(scores["logps"], scores["hidden"] if exact else None) for scores in found]

    def head_weight(self) -> Tensor | None:
        """The head of a copy, on the device; None when the reference has the policy's frozen head."""
        if self.copy is None:
            return None
        weight = self.copy.head.weight
        if self.streamed is not None:
            return self.streamed.placement.copy(weight, ROLE, "device")
        return weight.detach() if self.shards is None else self.shards.whole(weight)


def make_reference(
    policy: Policy, mode: str, *, temperature: float, placement: Placement, continued: bool
) -> Reference:
    """``mode``: auto | adapter | cpu | gpu | zero3. LoRA: the policy with its adapter off, or with the frozen start
    adapter when training continues from one, so that KL is 0 at step 0. Full fine-tuning: a frozen copy, which a card
    streams from the CPU where the architecture allows it. On a CPU only "cpu" streams it, as a card would. "zero3": a
    copy for an engine to shard."""
    if policy.peft is not None and mode in ("auto", "adapter"):
        peft = policy.peft
        if continued:
            return Reference("start adapter", "start adapter", lambda: reference_adapter(peft))
        return Reference("adapter off", "adapter off", lambda: adapter_off(peft))
    if mode == "zero3":
        copy = TokenScorer(placement.frozen(policy.causal, ROLE, "host", pinned=False), temperature)
        return Reference("sharded copy", "a copy in ZeRO-3 shards in CPU memory, gathered layer by layer", copy=copy)
    device = "GPU" if placement.device.type == "cuda" else "CPU"
    where = f"a copy on the {device}"
    if mode == "cpu" or (mode == "auto" and device == "GPU"):
        copy = TokenScorer(placement.frozen(policy.causal, ROLE, "host"), temperature)
        if not (why := _unlike(copy, policy, placement)):
            where = f"a copy on the CPU, whose layers pass through the {device} two at a time, once a step"
            return Reference("streamed copy", where, copy=copy, streamed=StreamedScorer(copy, placement, ROLE))
        where += f", not streamed from the CPU: {why}"
    copy = TokenScorer(placement.frozen(policy.causal, ROLE, "device"), temperature)
    return Reference("resident copy", where, copy=copy)


@torch.no_grad()
def _unlike(copy: TokenScorer, policy: Policy, placement: Placement) -> str:
    """Why the scores of a streamed copy are not those of the policy that it was copied from, bit for bit; "" where they
    are. A small pass would not show layers that see a part of the context only, so those are told by the config."""
    name = type(policy.causal).__name__
    if not sees_whole_context(policy.causal.config):
        return f"layers of {name} do not see the whole context"
    prompt = Prompt(0, "", (2, 3, 4, 5, 6, 7), None, {})
    texts = ((2, 4, 6), (9, 8, 7, 6))
    group = [Completion(0, n, prompt, ids, (0.0,) * len(ids), "stop", "") for n, ids in enumerate(texts)]
    batches = [pack(group, pad_id=0, device=placement.device)]
    if policy.causal.config._attn_implementation in (NAME, FLEX):
        batches.append(pack_groups(group, device=placement.device))
    own = TokenScorer(policy.causal, copy.head.temperature)
    try:
        streamed = StreamedScorer(copy, placement, ROLE)(batches)
    except (AttributeError, TypeError, ValueError):  # parts of other names, or that take other arguments
        return f"the layers of {name} cannot be called one by one"
    for rows, scores in zip(batches, streamed, strict=True):
        expected = own(rows, return_hidden=True)
        if not all(torch.equal(scores[name], expected[name]) for name in ("logps", "hidden")):
            return f"{name} does more than call its layers one after the other"
    return ""
