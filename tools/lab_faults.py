"""Ways to break a run: each puts one function in the place of one of the trainer's, or sets what no run should set.

Whatever has a number has two of them: thresholds were looked at on one, and the other (``held_out``) was kept for the
end. What takes several ranks is done to one: what it makes of the coefficient is the same.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import trainer.collect
import trainer.engine
import trainer.preflight.prepare
import trainer.preflight.survey
import trainer.rollout.decoder
import trainer.train
import trainer.update
from tools import lab_models
from tools.lab_run import Patch, Replace
from trainer.algorithm.loss import Objective
from trainer.batch import Completion
from trainer.engine import ZeroEngine
from trainer.minibatch import MicroBatch
from trainer.models.policy import Policy
from trainer.models.reference import Reference
from trainer.rollout.decoder import Decoder
from trainer.rollout.sampling import Sampler
from trainer.state import State


def named(patch: Patch, **parameters: float) -> Patch:
    """The same, whose name says its numbers, for the records."""
    patch.__name__ += f"({', '.join(f'{key}={value:g}' for key, value in parameters.items())})"
    return patch


def kl_sign(put: Replace) -> None:
    """In the loss alone; what is logged stays right."""
    real = trainer.update.weigh_by_ratio
    put(trainer.update, "weigh_by_ratio", lambda *arguments: -real(*arguments))


def loss_sign(put: Replace) -> None:
    real = trainer.update.policy_objective

    def inverted(*arguments: Any, **options: Any) -> Objective:
        objective = real(*arguments, **options)
        return objective._replace(loss=-objective.loss)

    put(trainer.update, "policy_objective", inverted)


def padding_scored(put: Replace) -> None:
    """Every completion of a pass is scored up to the length of its longest one: the mask is that of the batch."""
    real = trainer.update.make_micro_batches

    def padded(completions: Sequence[Completion], *, pad_id: int, **options: Any) -> list[MicroBatch]:
        longest = max((len(one.ids) for one in completions), default=0)
        longer = []
        for one in completions:
            more = longest - len(one.ids)
            ids, logps = one.ids + (pad_id,) * more, one.sampling_logps + (0.0,) * more
            longer.append(replace(one, ids=ids, sampling_logps=logps))
        return real(longer, pad_id=pad_id, **options)

    put(trainer.update, "make_micro_batches", padded)


def ends_masked(put: Replace) -> None:
    """``mask = ids != pad``, of a tokenizer whose pad and end are one."""
    real = trainer.update.make_micro_batches

    def masked(completions: Sequence[Completion], **options: Any) -> list[MicroBatch]:
        batches = real(completions, **options)
        ends = {one.ids[-1] for one in completions if one.finish == "stop"}
        for batch in batches:
            batch.weights[torch.isin(batch.rows.targets, torch.tensor(sorted(ends)))] = 0.0
        return batches

    put(trainer.update, "make_micro_batches", masked)


def coefficient_by_ranks(ranks: int) -> Patch:
    """The coefficient in use, as the document divides it; logged as it is used."""

    def coefficient_divided(put: Replace) -> None:
        real = trainer.update.kl_coefficient
        put(trainer.update, "kl_coefficient", lambda *arguments, **options: real(*arguments, **options) / ranks)

    return named(coefficient_divided, ranks=ranks)


def kl_over_ranks(ranks: float) -> Patch:
    """KL summed over ranks by an all_reduce inside of the graph, whose gradient is 1 / ranks of it."""

    def kl_gradient_divided(put: Replace) -> None:
        real = trainer.update.weigh_by_ratio
        put(trainer.update, "weigh_by_ratio", lambda *arguments: real(*arguments) / ranks)

    return named(kl_gradient_divided, ranks=ranks)


def dropout_of(share: float) -> Patch:
    def dropout(put: Replace) -> None:
        real = trainer.preflight.prepare.load_policy

        def with_dropout(*arguments: Any, **options: Any) -> Policy:
            policy = real(*arguments, **options)
            for layer in policy.causal.get_decoder().layers:
                layer.mlp.register_forward_hook(_drop(share))
            return policy

        put(trainer.preflight.prepare, "load_policy", with_dropout)

    return named(dropout, share=share)


def _drop(share: float) -> Any:
    def hook(module: nn.Module, given: Any, states: Tensor) -> Tensor:
        return functional.dropout(states, share, module.training)

    return hook


def trained_at_theta(base: float) -> Patch:
    """Decoding rotates as the model was taught, the training engine by another base: two engines, two configs."""

    def theta_in_training(put: Replace) -> None:
        real = trainer.engine.ZeroEngine.__call__

        def rotated(engine: ZeroEngine, *arguments: Any, **options: Any) -> dict[str, Tensor]:
            rotary = engine.module.causal.get_decoder().rotary_emb
            right = rotary.inv_freq
            rotary.inv_freq = _inv_freq(right, base)
            try:
                return real(engine, *arguments, **options)
            finally:
                rotary.inv_freq = right

        put(trainer.engine.ZeroEngine, "__call__", rotated)

    return named(theta_in_training, base=base)


def built_at_theta(base: float) -> Patch:
    """The whole model, in decoding and training."""

    def theta_built(put: Replace) -> None:
        real = trainer.preflight.prepare.load_policy

        def rotated(*arguments: Any, **options: Any) -> Policy:
            policy = real(*arguments, **options)
            rotary = policy.causal.get_decoder().rotary_emb
            rotary.inv_freq = _inv_freq(rotary.inv_freq, base)
            return policy

        put(trainer.preflight.prepare, "load_policy", rotated)

    return named(theta_built, base=base)


def _inv_freq(like: Tensor, base: float) -> Tensor:
    half = len(like)
    return base ** (-torch.arange(half, device=like.device) / half).to(like)


def no_rope_guard(put: Replace) -> None:
    """The hook that would refuse the run, before its weights are read and before each rollout."""
    for module in (trainer.preflight.survey, trainer.preflight.prepare):
        put(module, "rope_guard", lambda context: [])


def sampled_with(**settings: float) -> Patch:
    """The sampler alone has these: a second engine with settings of its own, or a generation_config that leaks in."""

    def sampler_settings(put: Replace) -> None:
        def sampler(self: Decoder) -> Sampler:
            rollout = self.rollout.model_copy(update=settings)
            return Sampler(rollout, tokenizer_size=len(self.tokenizer), dtype=self.causal.dtype)

        put(trainer.rollout.decoder.Decoder, "sampler", sampler)

    return named(sampler_settings, **settings)


def groups_tiled(put: Replace) -> None:
    """``repeat`` in the place of ``repeat_interleave``: a group holds one completion each of several prompts."""
    real = trainer.collect.group_advantages

    def tiled(rewards: Tensor, groups: Tensor, **options: Any) -> Tensor:
        prompts = len(groups.unique())
        return real(rewards, torch.arange(len(groups)) % prompts, **options)

    put(trainer.collect, "group_advantages", tiled)


def groups_shifted(put: Replace) -> None:
    """Rewards come back in another order than the completions went out."""
    real = trainer.collect.group_advantages
    put(trainer.collect, "group_advantages", lambda rewards, groups, **rest: real(rewards.roll(3), groups, **rest))


def k3_overflows(put: Replace) -> None:
    """e^d - 1 - d in fp16, which ends at e^11.09."""

    def naive(logps: Tensor, reference_logps: Tensor, estimator: str) -> Tensor:
        delta = (reference_logps - logps).half()
        return (delta.exp() - 1 - delta).float()

    put(trainer.update, "sampled_kl", naive)


def nan_after(updates: int) -> Patch:
    """One number of one weight, as a bad memory cell or a bad merge of shards leaves it."""

    def nan_weights(put: Replace) -> None:
        real = trainer.train.take_step

        def broken(state: State, *others: Any) -> None:
            real(state, *others)
            if state.updates == updates:
                with torch.no_grad():
                    next(one for one in state.policy.causal.parameters() if one.requires_grad).view(-1)[7] = torch.nan

        put(trainer.train, "take_step", broken)

    return named(nan_weights, updates=updates)


def decoded_by_another(put: Replace) -> None:
    real = trainer.preflight.prepare.make_decoder

    def other(*arguments: Any, **options: Any) -> Decoder:
        from transformers import AutoTokenizer

        return replace(real(*arguments, **options), tokenizer=AutoTokenizer.from_pretrained(lab_models.OTHER_TOKENIZER))

    put(trainer.preflight.prepare, "make_decoder", other)


def reference_of(noise: float) -> Patch:
    """Another checkpoint: every weight matrix off by ``noise`` of its own spread; from 1 on nothing is left of it."""

    def other_reference(put: Replace) -> None:
        real = trainer.preflight.prepare.make_reference

        def other(*arguments: Any, **options: Any) -> Reference:
            reference = real(*arguments, **options)
            generator = torch.Generator().manual_seed(3)
            assert reference.copy is not None
            with torch.no_grad():
                for weight in reference.copy.causal.parameters():
                    if weight.dim() > 1:
                        weight += noise * weight.std() * torch.randn(weight.shape, generator=generator)
            return reference

        put(trainer.preflight.prepare, "make_reference", other)

    return named(other_reference, noise=noise)


def gradients_in_fp16(scale: float) -> Patch:
    """Gradients are multiplied by a fixed loss scale and cast, as a half-precision backward pass holds them."""

    def fp16_gradients(put: Replace) -> None:
        real = trainer.preflight.prepare.load_policy

        def cast(*arguments: Any, **options: Any) -> Policy:
            policy = real(*arguments, **options)
            for weight in policy.causal.parameters():
                if weight.requires_grad:
                    weight.register_hook(lambda gradient: (gradient * scale).half().to(gradient) / scale)
            return policy

        put(trainer.preflight.prepare, "load_policy", cast)

    return named(fp16_gradients, scale=scale)
