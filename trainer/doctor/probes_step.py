"""Probes of the update: they take steps of a known length, so they come last, in this order."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from trainer.collect import recorded, set_advantages, trained
from trainer.config import load
from trainer.doctor.finding import Finding
from trainer.doctor.parts import (
    Parts,
    accumulate,
    differing,
    gradient_norm,
    logps,
    of_kl_alone,
    one_pass_each,
    reference_logps,
)
from trainer.record.rollout_rows import rollout_file
from trainer.record.run_dir import read_metrics, read_object
from trainer.update import global_count, kl_in_loss, passes, set_kl_coefficient

GAIN = {torch.float32: 1e-3, torch.bfloat16: 2e-2}
"""Nats by which a step shall raise the mean of advantage x log-prob, by dtype: above its rounding, below curvature."""

FALL = 0.1
"""Share by which a step on the KL term shall lower the squared log-ratio."""


def passes_alike(parts: Parts) -> Finding | str:
    """The gradient of one pass over everything and of one pass a completion: |g| of the engine, by a step of length 0.

    Sums over tokens, divided once by a count of the whole step, do not know about passes.
    """
    state = replace(parts.state, kl_coefficient=0.0)
    completions = differing(parts.completions)
    whole, apart = gradient_norm(state, completions), gradient_norm(one_pass_each(state), completions)
    evidence = {"grad_norm_one_pass": whole, "grad_norm_split": apart}
    if not math.isfinite(whole + apart):
        return Finding("gradient_overflow", 0.9, evidence)  # weights and log-probs are finite, or it would not be asked
    if whole == apart == 0:
        return Finding("no_gradient", 0.9, evidence)
    if abs(whole - apart) > (2e-2 if parts.same < 0.01 else 0.1) * max(whole, apart):
        return Finding("normalisation", 0.85, evidence)
    return f"gradient norm {whole:.4g} in one pass, {apart:.4g} in {len(completions)}"


def recorded_step(parts: Parts) -> Finding | str:
    """The first step that this run has recorded on its ranks, from its rollouts, done again on this one: before any
    update the weights are the same, and so is the gradient."""
    run_dir = Path(parts.state.config.run.dir)
    row = next((one for one in read_metrics(run_dir) if one["step"] == 1), {})
    if not parts.state.config.run.dir or "grad_norm" not in row or not rollout_file(run_dir, 1).is_file():
        return ""
    config = load(str(run_dir / "config.toml"))
    same = all(getattr(config, name) == getattr(parts.state.config, name) for name in ("model", "lora", "quant"))
    if not same or config.grpo.updates_per_rollout > 1 or config.grpo.kl.placement == "reward":
        return ""
    rollout = config.rollout.model_copy(update={"replay": str(run_dir)})
    state = replace(parts.state, config=config.model_copy(update={"rollout": rollout}), step=0)
    set_kl_coefficient(state)
    completions = recorded(state)
    set_advantages(state, completions)
    here = gradient_norm(state, trained(completions, config.grpo.mask_truncated))
    ranks = len(read_object(run_dir / "environment.json").get("hosts", []))
    evidence = {"ranks": ranks, "grad_norm_recorded": row["grad_norm"], "grad_norm_on_one_rank": here}
    if abs(here - row["grad_norm"]) > (2e-2 if parts.same < 0.01 else 0.1) * max(here, row["grad_norm"]):
        return Finding("normalisation", 0.8, evidence)
    return f"recorded on {ranks} ranks {row['grad_norm']:.4g}, on one from the same rollouts {here:.4g}"


def direction(parts: Parts) -> Finding | str:
    """A step of plain descent, lr g, changes sum(w A ln p) / N by lr |g|^2, if g is the gradient of its negative.

    Advantages are made, +1 and -1 within each group. A wrong sign gives the negative; a gradient s times too large
    gives 1/s of it. The reference must not move with the policy.
    """
    state = replace(parts.state, kl_coefficient=0.0)
    completions = differing(parts.completions)
    norm = gradient_norm(state, completions)
    if not norm or not math.isfinite(norm):
        return ""  # passes_alike has said so
    wanted = GAIN[state.policy.dtype]
    before = logps(state, completions)
    stands = reference_logps(state, completions) if state.reference else before
    batches = accumulate(state, completions)
    weights = torch.cat([batch.weights * batch.advantages()[batch.rows.completion] for batch in batches]).cpu()
    state.engine.step(wanted / norm**2)
    parts.moved = wanted / norm
    moved = logps(state, completions) - before
    gain = float((weights * moved).sum()) / global_count(state, completions)
    evidence = {"expected_gain": wanted, "gain": gain, "grad_norm": norm}
    if (
        state.reference
        and (away := float((reference_logps(state, completions) - stands).abs().max())) > parts.same / 10
    ):
        return Finding(
            "reference_moves", 0.95, {"reference_moved_by": away, "policy_moved_by": float(moved.abs().max())}
        )
    if gain < -0.1 * wanted:
        return Finding("loss_sign", 0.97, evidence)
    if gain < 0.1 * wanted:
        return Finding("no_gradient", 0.7, evidence)
    if not 0.5 < gain / wanted < 2 and state.policy.dtype == torch.float32:
        return Finding("normalisation", 0.7, evidence)
    return f"a step raises advantage x log-prob by {gain:.2g}, expected {wanted:.2g}"


def kl_direction(parts: Parts) -> Finding | str:
    """From where the step before has led, a step on the KL term alone goes back towards the reference.

    Measured by D = sum(w (ln p - ln ref)^2) / N, whatever the estimator's code says. For small steps d of the weights
    KL = D / 2 = d'Fd / 2, its gradient g = Fd, so |g| >= D / |d| (Cauchy-Schwarz), and a step lr g lowers D by
    2 lr |g|^2.
    """
    state = replace(parts.state, kl_coefficient=1.0)
    if not kl_in_loss(state) or not parts.moved:
        return ""
    completions = of_kl_alone(parts.completions)
    stands, count = reference_logps(state, completions), global_count(state, completions)
    weights = torch.cat([batch.weights for batch in passes(state, completions)]).cpu()

    def distance() -> float:
        return float((weights * (logps(state, completions) - stands).square()).sum()) / count

    before, norm = distance(), gradient_norm(state, completions)
    if not before:  # a reference that moves along
        return ""
    evidence = {"squared_log_ratio": before, "grad_norm_of_the_kl_term": norm, "at_least": before / parts.moved}
    if not math.isfinite(norm):
        return Finding("non_finite", 0.9, evidence)
    if norm < 0.1 * before / parts.moved:
        return Finding("kl_no_gradient", 0.9, evidence)
    accumulate(state, completions)
    state.engine.step(FALL / 2 * before / norm**2)
    after = distance()
    evidence |= {"after_the_step": after, "expected_after": (1 - FALL) * before}
    if after > before:
        return Finding("kl_sign", 0.95, evidence)
    fell = (before - after) / (FALL * before)
    # The exact KL's gradient is that of all tokens, not of the sampled ones.
    if not 0.5 < fell < 2 and state.policy.dtype == torch.float32 and state.config.grpo.kl.estimator != "exact":
        return Finding("coefficient_scaled", 0.8, evidence | {"gradient_is_times_too_large": 1 / fell})
    return f"a step on the KL term lowers the squared log-ratio from {before:.3g} to {after:.3g}"


PROBES: tuple[Callable[[Parts], Finding | str], ...] = (passes_alike, recorded_step, direction, kl_direction)
