"""The second half of a step: from scored completions to moved weights."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trainer import heartbeat
from trainer.algorithm.kl import sampled_kl, weigh_by_ratio
from trainer.algorithm.loss import normaliser, per_completion_sum, policy_objective
from trainer.algorithm.schedules import adapted_coefficient, kl_coefficient, learning_rate
from trainer.batch import Completion, TokenScores
from trainer.errors import Stopped
from trainer.minibatch import MicroBatch, make_micro_batches
from trainer.models.scorer import token_scores
from trainer.record.metrics import Sums
from trainer.rewards.answers import row_name
from trainer.state import State

MOST_NAMES = 4
"""Completions that the note of a refused step names, of each pass."""
KL_TAIL = 0.5
"""Nats from which on a token's KL counts as tail: where runs that fall apart grow a second hump."""


def kl_in_loss(state: State) -> bool:
    return state.reference is not None and state.config.grpo.kl.placement == "loss"


def kl_in_reward(state: State) -> bool:
    return state.reference is not None and state.config.grpo.kl.placement == "reward"


def global_count(state: State, completions: Sequence[Completion]) -> float:
    """N of the optimizer step: all that is trained, over all ranks, counted before anything is skipped or divided."""
    tokens, count = state.world.all_reduce_sum([sum(len(c.ids) for c in completions), len(completions)])
    return normaliser(int(tokens), int(count), state.config.rollout.max_new_tokens, state.config.grpo.loss_type)


def with_gradient(state: State, completions: Sequence[Completion]) -> Sequence[Completion]:
    """Those that the loss has a gradient of: without a KL term in it, the ones whose advantage is not 0.

    A group of equal rewards, say, has the gradient 0 exactly. The update is the same as with it: N has counted it, and
    the optimizer takes its step. (A schedule's coefficient of 0 skips nothing, since the KL is measured all the same.)
    """
    return completions if kl_in_loss(state) else [one for one in completions if one.advantage != 0]


def passes(state: State, completions: Sequence[Completion]) -> list[MicroBatch]:
    """Forward and backward passes over the completions of all ranks, as many on every rank."""
    return make_micro_batches(
        completions,
        loss_type=state.config.grpo.loss_type,
        micro_batch=state.config.engine.micro_batch,
        token_budget=state.token_budget,
        pad_id=state.decoder.tokenizer.pad_token_id,
        shared=state.shared_prompts,
        recorded_sampler=bool(state.config.rollout.replay),
        world=state.world,
    )


def measure_masks(batches: Sequence[MicroBatch], completions: Sequence[Completion], sums: Sums) -> None:
    """``scored_per_sampled``: tokens that the loss weighs, over those sampled to be weighed. 1, or the mask is wrong:
    more where prompts or padding are scored, fewer where ends are left out."""
    scored = sum(int((batch.weights > 0).sum()) for batch in batches)
    sums.add("scored_per_sampled", scored, sum(len(completion.ids) for completion in completions))


def ask_reference(state: State, batches: Sequence[MicroBatch]) -> None:
    """What the reference says of the same tokens, those of all micro-batches at once."""
    assert state.reference is not None
    exact = state.config.grpo.kl.estimator == "exact"
    scores = state.reference.score(state.engine, [batch.rows for batch in batches], exact=exact)
    for batch, its in zip(batches, scores, strict=True):
        batch.reference = its


def micro_batch_loss(state: State, batch: MicroBatch, sums: Sums, *, first: bool) -> Tensor:
    """The summed loss of one micro-batch: policy objective plus coefficient times KL, each token by its weight."""
    grpo = state.config.grpo
    scores = forward(state, batch)
    # On-policy the old policy is this one: a ratio of 1 whose gradient is not 0, and no second forward pass.
    old_logps = scores.logps.detach() if batch.old_logps is None else batch.old_logps
    objective = policy_objective(
        scores.logps,
        old_logps,
        batch.advantages(),
        batch.rows.completion,
        loss_type=grpo.loss_type,
        eps_low=grpo.eps_low,
        eps_high=grpo.eps_high,
        dual_clip=grpo.dual_clip,
    )
    loss = objective.loss
    if kl_in_loss(state):
        kl = kl_of(state, batch, scores)
        if grpo.kl.ratio_weighted:
            kl = weigh_by_ratio(kl, objective.ratio, grpo.kl.estimator)
        loss = loss + state.kl_coefficient * kl
    loss_sum = (batch.weights * loss).sum()
    if batch.completions:
        measure_pass(state, batch, objective.clipped, loss, sums, first=first)
        # Measured before the update, so that step 1 shows a KL of 0; by charge_kl_to_rewards where that has come first.
        if first and not kl_in_reward(state):
            measure_policy(state, batch, scores, sums)
    if state.config.grpo.updates_per_rollout > 1 and batch.old_logps is None:
        batch.old_logps = scores.logps.detach()
    return loss_sum


def forward(state: State, batch: MicroBatch) -> TokenScores:
    """The policy's scores; with the exact estimator, of the reference's hidden states too."""
    exact = batch.reference is not None and batch.reference.hidden is not None
    if not exact:
        return token_scores(state.engine(batch.rows), exact=False)
    assert batch.reference is not None and state.reference is not None
    hidden, weight = batch.reference.hidden, state.reference.head_weight()
    return token_scores(state.engine(batch.rows, hidden, weight), exact=True)


def kl_of(state: State, batch: MicroBatch, scores: TokenScores) -> Tensor:
    """(N,) the configured estimate of each token, not weighted."""
    if scores.exact_kl is not None:
        return scores.exact_kl
    assert batch.reference is not None
    return sampled_kl(scores.logps, batch.reference.logps, state.config.grpo.kl.estimator)


@torch.no_grad()
def charge_kl_to_rewards(state: State, completions: Sequence[Completion], sums: Sums) -> None:
    """``placement = "reward"``: coefficient * sum of a completion's KL, by the policy before its update.

    Of cut ones that the loss leaves out, too: uncharged they would lift the mean that the others are compared with.
    """
    charges: dict[tuple[int, int], float] = {}
    batches = passes(state, completions)
    ask_reference(state, batches)
    for batch in batches:
        scores = forward(state, batch)
        if batch.completions:
            measure_policy(state, batch, scores, sums)
            kl = per_completion_sum(kl_of(state, batch, scores), batch.rows.completion, len(batch.completions))
            keys = [(completion.group, completion.generation) for completion in batch.completions]
            charges |= dict(zip(keys, (state.kl_coefficient * kl).tolist(), strict=True))
    # The rank that passed over a completion need not be the one that sampled it.
    everyones = {key: charge for part in state.world.gather_objects(charges) for key, charge in part.items()}
    for completion in completions:
        completion.kl_penalty = everyones[completion.group, completion.generation]


def take_step(state: State, batches: Sequence[MicroBatch], sums: Sums) -> None:
    """One optimizer step, or none on every rank when the gradient is not finite; K refusals in a row end the run."""
    optim = state.config.optim
    rate = learning_rate(
        state.updates,
        schedule=optim.schedule,
        peak=optim.lr,
        warmup=optim.warmup_steps,
        total=state.steps * state.config.grpo.updates_per_rollout,
    )
    heartbeat.enter("update")
    outcome = state.engine.step(rate)
    state.updates += 1
    state.nonfinite_in_a_row = 0 if outcome.applied else state.nonfinite_in_a_row + 1
    sums.maximum("lr", rate)
    losses, state.nonfinite_losses = state.nonfinite_losses, []
    if outcome.applied:
        state.boundary = None
        sums.maximum("grad_norm", outcome.grad_norm)
        return
    losses = [loss for part in state.world.gather_objects(losses) for loss in part]
    gradients = [one for part in state.world.gather_objects(nonfinite_gradients(state, batches)) for one in part]
    arose = "every loss was finite, so it arose in the backward pass"
    cause = ", ".join(losses[:8]) or f"{arose}{': ' if gradients else ''}{', '.join(gradients[:8])}"
    message = f"step {state.step + 1}: the gradient norm is {outcome.grad_norm} ({cause}); no rank updated"
    state.notes.append(message)
    if state.nonfinite_in_a_row >= state.config.watch.max_nonfinite_steps:
        raise Stopped(
            f"{message}, for the {state.nonfinite_in_a_row}. time in a row (watch.max_nonfinite_steps). The weights "
            "are those "
            "of the last finite step. Fix: lower optim.lr, set optim.max_grad_norm, or look at the rewards of this "
            "step."
        )


def nonfinite_gradients(state: State, batches: Sequence[MicroBatch]) -> list[str]:
    """Of this rank, in words."""
    largest = [(float(batch.gradient), batch) for batch in batches if batch.gradient is not None]
    rank = state.world.rank
    return [
        f"rank {rank}: gradient {one}{whose(batch.completions)}" for one, batch in largest if not math.isfinite(one)
    ]


def whose(completions: Sequence[Completion]) -> str:
    names = ", ".join(map(row_name, completions[:MOST_NAMES]))
    more = f" and {len(completions) - MOST_NAMES} more" if len(completions) > MOST_NAMES else ""
    return f" of {names}{more}" if names else ""


def note_unmoved_adapters(state: State) -> None:
    """A note where some adapters have moved and others still are the zeros that they began as. A collective.

    Inputs of a checkpointed block that do not require a gradient, say, leave all but the last layers untrained.
    """
    adapters = {name: weight for name, weight in state.policy.causal.named_parameters() if "lora_B.default" in name}
    with state.engine.whole(list(adapters.values())):
        unmoved = [name for name, weight in adapters.items() if not weight.any()]
    if unmoved and len(unmoved) < len(adapters):
        state.notes.append(
            f"{len(unmoved)} of {len(adapters)} adapters have not moved in {state.step} steps (first: {unmoved[0]}). "
            "They get no gradient: look at lora.targets, and at engine.gradient_checkpointing."
        )


def set_kl_coefficient(state: State) -> None:
    """The coefficient of the coming step, for the schedules that are functions of the step."""
    kl = state.config.grpo.kl
    if kl.schedule == "adaptive":
        state.kl_coefficient = state.kl_coefficient if state.step else kl.coef
        return
    state.kl_coefficient = kl_coefficient(
        state.step,
        schedule=kl.schedule,
        peak=kl.coef,
        start=kl.start,
        minimum=kl.min,
        warmup=kl.warmup_steps,
        total=state.steps,
    )


def control_kl(state: State, measured_kl: float | None) -> None:
    """The adaptive controller. It sees the KL over all ranks, so that every rank holds the same coefficient."""
    kl = state.config.grpo.kl
    if kl.schedule == "adaptive" and measured_kl is not None:
        state.kl_coefficient = adapted_coefficient(
            state.kl_coefficient,
            measured_kl,
            target=kl.target,
            horizon=kl.horizon,
            completions=state.config.completions_per_step,
        )


@torch.no_grad()
def measure_pass(state: State, batch: MicroBatch, clipped: Tensor, loss: Tensor, sums: Sums, *, first: bool) -> None:
    """Sums and counts of one pass, as Python floats: a tensor kept for the log would keep its graph alive."""
    weighted = batch.weights * loss
    total = float(weighted.sum())
    if not math.isfinite(total):
        places = batch.rows.completion[~torch.isfinite(weighted)].unique().tolist()
        # None where finite ones have an infinite sum.
        named = whose([batch.completions[place] for place in places])
        state.nonfinite_losses.append(f"rank {state.world.rank}: loss {total}{named}")
    sums.add("clip_fraction", float(clipped.sum()), len(batch.rows.targets))
    if first:
        sums.add("loss", total, 0)


@torch.no_grad()
def measure_policy(state: State, batch: MicroBatch, scores: TokenScores, sums: Sums) -> None:
    """What the policy says of the tokens of one pass, as Python floats too."""
    tokens = len(batch.rows.targets)
    sums.add("entropy", float(scores.entropy.double().sum()), tokens)
    if batch.reference is not None:
        kl = kl_of(state, batch, scores).double()
        sums.add("kl", float(kl.sum()), tokens)
        sums.add("kl_square", float(kl.square().sum()), tokens)
        sums.maximum("kl_max", float(kl.max()))
        sums.add("kl_tail_fraction", float((kl.abs() > KL_TAIL).sum()), tokens)
        # Recorded completions may have ended by other stop ids.
        stop_ids = () if state.config.rollout.replay else state.decoder.stop_ids
        sums.add("kl_outside_response", float(kl[outside_response(batch, stop_ids)].abs().sum()), tokens)
        if (every := state.config.log.histogram_every) and (state.step + 1) % every == 0:
            state.kl_histogram.add(kl)
    sampled = torch.tensor([logp for c in batch.completions for logp in c.sampling_logps], device=scores.logps.device)
    gap = (scores.logps - sampled).abs().double()
    sums.add("surprise", -float(sampled.double().sum()), tokens)
    sums.add("sampling_logp_gap", float(gap.sum()), tokens)
    sums.maximum("sampling_logp_gap_max", float(gap.max()))


def outside_response(batch: MicroBatch, stop_ids: Sequence[int]) -> Tensor:
    """(N,) bool: scored tokens that nobody sampled, of a prompt, or of padding behind the end of a completion.

    None, however rows are packed: the k-th scored token of a completion is its k-th id, and a stop id is its last one.
    """
    targets, completion = batch.rows.targets, batch.rows.completion
    sampled = [torch.tensor(one.ids) for one in batch.completions]
    ids = nn.utils.rnn.pad_sequence(sampled, batch_first=True, padding_value=-1)
    stops = torch.isin(ids, torch.tensor(stop_ids, dtype=torch.long)).int()
    ids = ids.masked_fill(stops.cumsum(1) > stops, -1).to(targets.device)
    first = torch.searchsorted(completion, torch.arange(len(sampled), device=targets.device))
    place = torch.arange(len(targets), device=targets.device) - first[completion]
    longest = ids.shape[1]
    return (place >= longest) | (ids[completion, place.clamp(max=longest - 1)] != targets)
