"""The micro-batches of one optimizer step: as many on every rank, whatever each rank has to train on."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.algorithm.loss import LossType, token_weights
from trainer.balance import balanced
from trainer.batch import Completion, PackedRows, ReferenceScores
from trainer.models.packing import filler, micro_batches, pack, pack_groups, tokens_of
from trainer.world import World


@dataclass
class MicroBatch:
    """One forward and backward pass. N scored tokens of C completions."""

    completions: list[Completion]
    """Empty in a filler, whose only token has weight 0."""
    rows: PackedRows
    weights: Tensor
    """(N,) fp32 weight of each token in the sum of the loss."""
    reference: ReferenceScores | None = None
    old_logps: Tensor | None = None
    """(N,) log-probs under the policy that sampled; None while that is the policy of this very pass."""
    gradient: Tensor | None = None
    """What ``ZeroEngine.backward_sum`` returned."""

    def advantages(self) -> Tensor:
        """(C,) fp32."""
        return torch.tensor(
            [completion.advantage for completion in self.completions] or [0.0], device=self.weights.device
        )


def make_micro_batches(
    completions: Sequence[Completion],
    *,
    loss_type: LossType,
    micro_batch: int,
    token_budget: int,
    pad_id: int,
    shared: bool,
    recorded_sampler: bool,
    world: World,
) -> list[MicroBatch]:
    """This rank's part of all ranks' ``completions`` in passes, filled up to the largest number of passes of any rank.

    The cost of a group is the tokens of its pass: P + sum C with a shared prompt, G (P + max C) without. What attention
    adds is left out: of a token's FLOPs it is about L / 6H at L tokens of context, 11 % at L = 1024, H = 1536.
    Every forward and backward is a collective under ZeRO, so a rank with less to do than the others would leave them
    waiting; with nothing to do on any rank one pass is left, which gives the optimizer its gradient of zeros.
    ``recorded_sampler``: the completions come from a recording, whose sampler is not the policy of the first pass.
    """
    batches = []
    completions = balanced(completions, lambda group: tokens_of(group, shared), world)
    for part in micro_batches(completions, micro_batch=micro_batch, token_budget=token_budget, shared=shared):
        device = world.device
        rows = pack_groups(part, device=device) if shared else pack(part, pad_id=pad_id, device=device)
        batch = MicroBatch(part, rows, token_weights(rows.completion, len(part), loss_type))
        if recorded_sampler:
            recorded = [logp for completion in part for logp in completion.sampling_logps]
            batch.old_logps = torch.tensor(recorded, device=world.device)
        batches.append(batch)
    most = int(world.all_reduce_max([len(batches)])[0])
    while len(batches) < max(1, most):
        rows = filler(token_id=pad_id, device=world.device)
        batches.append(MicroBatch([], rows, torch.zeros(1, device=world.device)))
    return batches
