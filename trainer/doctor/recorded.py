"""What the records of a run say, during it or after it: functions over metrics and rollouts. No model is needed."""

import re
import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise

from trainer.algorithm.schedules import kl_coefficient
from trainer.doctor.finding import Diagnosis, Finding, ranked
from trainer.doctor.recorded_kl import KL_CHECKS
from trainer.doctor.recorded_rollouts import ROLLOUT_CHECKS
from trainer.doctor.records import ENOUGH, Recorded, Row, Verdict
from trainer.watch.alarms import Alarms

NEAR = 0.1
"""Nats per token of KL: a policy that can still do what it could."""
WRONG_SIGN = (
    "look at the sign of the loss (`zero-grpo doctor RUN.toml` takes a step and measures it), of the reward and of its "
    "weight: a higher number has to be better"
)
FINITE_LOSS = "every loss was finite"
NOT_FINITE = re.compile(
    r"the gradient norm is (nan|inf)|step of gradient norm (nan|inf)|logits of .* hold NaN or infinity"
)
"""Of the reasons for which a run is stopped (update.py: take_step; engine.py: step; rollout/sampling.py)."""
PARTS_OF_TOKENIZER = (
    "garble/word_marks",
    "garble/raw_bytes",
    "garble/beyond",
    "garble/replacement",
    "garble/respelled",
)
PARTS_OF_LOOPS = ("garble/token_loop", "garble/ngram_loop", "garble/repetition")


def diagnose_records(run: Recorded, target: str) -> Diagnosis:
    findings: list[Finding] = []
    fine: dict[str, str] = {}
    absent: dict[str, str] = {"damaged records": "; ".join(run.notes)} if run.notes else {}
    for check in (*CHECKS, *ROLLOUT_CHECKS):
        found = check(run)
        if isinstance(found, str):
            said, where = (found, fine) if found else ("the run has no records of it yet", absent)
            where[check.__name__] = said
        else:
            findings += found
    return Diagnosis(target, ranked(findings), fine, absent)


def end_of_run(run: Recorded) -> Verdict:
    """What ended it, in its own words, and steps whose gradient was refused: they have a rate and no norm; a step
    with nothing to train on has neither. A step whose loss was not finite has no loss either."""
    reason, state = run.status.get("reason", ""), run.status.get("state", "")
    refused = [row for row in run.metrics if "lr" in row and "grad_norm" not in row]
    lossless = sum("loss" not in row for row in refused)
    evidence = {"steps_without_gradient": len(refused), "of_them_without_loss": lossless}
    if state == "stopped" and reason.startswith("reward "):  # whatever it says behind that, nan, a path, a question
        return [Finding("reward_fails", 0.9, {"state": state, "reason": reason})]
    if state == "stopped" and NOT_FINITE.search(reason):
        by_gradient = "gradient norm" in reason
        cause = "non_finite" if not by_gradient else "gradient_overflow" if FINITE_LOSS in reason else "loss_overflow"
        return [Finding(cause, 0.95, {"reason": reason, **evidence})]
    if len(refused) >= ENOUGH and len(refused) > len(run.metrics) / 5:
        cause = "loss_overflow" if lossless > len(refused) / 2 else "gradient_overflow"
        return [Finding(cause, 0.8, {**evidence, "first": refused[0]["step"]})]
    if state in ("stopped", "lost"):
        return [Finding("stopped", 0.5, {"state": state, "reason": reason})]
    step = run.metrics[-1]["step"] if run.metrics else 0
    return f"{state or 'no status'}, {step} steps recorded, every gradient finite" if run.metrics else ""


def before_any_update(run: Recorded) -> Verdict:
    """At step 1 policy = reference = sampler, so KL and the gap between sampled and scored log-probs are rounding.

    Dropout acts in scoring alone, so it shows in both; another reference in the KL alone; another temperature in the
    gap alone, since policy and reference are scored at the same one.
    """
    kl, gap = run.first("kl"), run.first("sampling_logp_gap")
    if gap is None or run.config.rollout.replay:
        return ""
    # k3 of a log-ratio d is d^2 / 2.
    kl_off, gap_off = abs(kl or 0.0) > run.same**2, gap > 2 * run.same
    evidence = {"kl_at_step_1": kl, "sampling_logp_gap_at_step_1": gap, "equal_below": run.same}
    if kl_off and gap_off:
        return [Finding("dropout", 0.75, evidence), Finding("reference_differs", 0.4, evidence)]
    if kl_off:
        return [Finding("reference_differs", 0.9, evidence)]
    if gap_off:
        return [Finding("sampling_differs", 0.7, evidence)]
    return f"at step 1 KL {kl or 0.0:.2g} and sampled against scored log-probs {gap:.2g} nats apart: rounding"


def coefficient(run: Recorded) -> Verdict:
    """The KL coefficient of every step is a function of the step, but for the adaptive controller."""
    kl = run.config.grpo.kl
    if kl.schedule == "adaptive" or not run.metrics:
        return ""
    total = run.config.run.steps or run.metrics[-1]["step"]
    for row in run.metrics:
        wanted = kl_coefficient(
            row["step"] - 1,
            schedule=kl.schedule,
            peak=kl.coef,
            start=kl.start,
            minimum=kl.min,
            warmup=kl.warmup_steps,
            total=total,
        )
        got = row.get("kl_coef", wanted)
        if abs(got - wanted) > 1e-6 + 1e-3 * wanted and (kl.schedule == "constant" or run.config.run.steps):
            evidence = {"step": row["step"], "configured": wanted, "in_use": got}
            return [Finding("coefficient_scaled", 0.95, evidence)]
    return f"grpo.kl.coef as configured ({kl.schedule})"


def alarms(run: Recorded) -> Verdict:
    """What the alarms of the run's own settings say of its metrics; most sure of those that stand at the end."""
    machine = Alarms.of(run.config)
    said = [alarm for row in run.metrics for alarm in machine.look(row["step"], _numbers(row))]
    standing = {name for name, one in machine.standings.items() if one.active}
    found = []
    for alarm in said:
        # The first steps move every number of a run; an alarm that is over may have been one of them.
        sure = 0.75 if alarm.alarm in standing else 0.4
        sure = {"grown_sure": 0.2, "pull_too_strong": 0.4, "leak": 0.6}.get(alarm.cause, sure)
        if alarm.alarm in ("scored_tokens", "advantages", "decoded_text"):  # what one step has broken is broken
            sure = 0.9
        evidence = {"alarm": alarm.alarm, "since_step": alarm.since, alarm.signal: alarm.value, "limit": alarm.limit}
        if alarm.baseline is not None:
            evidence["at_the_beginning"] = alarm.baseline
        if alarm.event != "cleared":
            found.append(Finding(alarm.cause, sure, evidence))
    return found or (
        f"none in {len(run.metrics)} steps (watch.level = {run.config.watch.level})" if run.metrics else ""
    )


def garble(run: Recorded) -> Verdict:
    """Which part of the garble it is says where it comes from.

    Marks of words and bytes, ids beyond the tokenizer and characters that are no UTF-8 come from decoding or from
    loading when they are there at step 1, and from a policy far away when they come later. Loops are a collapse.
    """
    if run.last("garble_rate") is None:
        return ""

    def most(keys: Sequence[str], value: Callable[[str], float | None]) -> tuple[float, str]:
        return max((value(key) or 0.0, key) for key in keys)

    begun, part = most(PARTS_OF_TOKENIZER, run.first)
    if begun > 0.3:
        return [Finding("tokenizer_mismatch", 0.7, {f"{part}_at_step_1": begun})]
    loops, part = most(PARTS_OF_LOOPS, run.last)
    entropy = (run.first("entropy"), run.last("entropy"))
    if loops > 0.3 and loops > (run.first(part) or 0.0) + 0.2:
        fell = entropy[0] and entropy[1] is not None and entropy[1] < entropy[0] / 2
        evidence = {part: loops, "entropy_first": entropy[0], "entropy_last": entropy[1], "kl_last": run.last("kl")}
        return [Finding("nothing_to_choose" if fell else "update_too_large", 0.65, evidence)]
    salad, part = most((*PARTS_OF_TOKENIZER, "garble/scripts", "garble/control"), run.last)
    if salad > 0.3:
        near = (run.last("kl") or 0.0) < 0.05
        return [Finding("decoding" if near else "update_too_large", 0.6, {part: salad, "kl_last": run.last("kl")})]
    return f"{run.last('garble_rate'):.1%} of the completions garbled at the end"


def direction(run: Recorded) -> Verdict:
    """KL against steps. A policy that learns goes t^1 to t^2, or levels off; a KL term of the wrong sign, whose pull
    grows with the distance, takes it away by a factor a step: means of thirds that grow faster and faster."""
    kl = [row["kl"] for row in run.metrics if "kl" in row]
    moved = [row for row in run.metrics if row.get("grad_norm", 0.0) > 0 and row.get("lr", 0.0) > 0]
    if min(kl, default=0.0) < -1e-6 and run.config.grpo.kl.estimator != "k1":
        # e^d - 1 - d and d^2 are not negative, and neither is the sum over the vocabulary.
        return [Finding("kl_sign", 0.95, {"kl": min(kl), "estimator": run.config.grpo.kl.estimator})]
    if len(kl) < 2 * ENOUGH:
        return ""
    if len(moved) >= 2 * ENOUGH and not any(kl):
        return [Finding("reference_moves", 0.6, {"kl": 0.0, "steps_with_a_gradient": len(moved)})]
    third = len(kl) // 3
    early, middle, late = (statistics.fmean(part) for part in (kl[:third], kl[third:-third], kl[-third:]))
    steps = [row["lr"] for row in run.metrics if "lr" in row]
    evidence = {"kl_by_thirds": [early, middle, late], "kl_coef": run.last("kl_coef"), "lr": max(steps, default=0.0)}
    # From a third to the next t^2 grows 9 times, then 2.8 times.
    if late > 0.01 and early > 0 and late > 4 * middle and late / middle > 0.5 * middle / early:
        # Where the reward has risen on the way, it is the reward that pulls.
        pulled = run.last("kl_coef") and not _risen(run.first("reward_mean"), run.last("reward_mean"))
        return [Finding("kl_sign", 0.6 if pulled else 0.3, evidence)]
    if _within(kl, 10) > 0.5:
        return [Finding("update_too_large", 0.7, evidence | {"kl_within_10_steps": _within(kl, 10)})]
    return f"KL {kl[0]:.2g} at the first step, {late:.2g} over the last third"


def reward_trend(run: Recorded) -> Verdict:
    """A reward that falls while the policy is still near: too large a step would have taken it away first.

    Thirds of the steps below a KL of ``NEAR``, in units of the scatter from step to step (of a difference of two: its
    root mean square / sqrt(2)).
    """
    near = [row["reward_mean"] for row in run.metrics if "reward_mean" in row and row.get("kl", 0.0) < NEAR]
    third, spread = len(near) // 3, run.last("reward_std") or 0.0
    if third < ENOUGH - 2:
        return ""
    jumps = [later - earlier for earlier, later in pairwise(near)]
    scatter = (statistics.fmean(jump * jump for jump in jumps) / 2) ** 0.5
    rise = statistics.fmean(near[-third:]) - statistics.fmean(near[:third])
    sure = rise / (scatter * (2 / third) ** 0.5) if scatter else 0.0
    evidence = {"reward_change": rise, "standard_errors": sure, "while_kl_below": NEAR, "steps": len(near)}
    if sure < -4 and rise < -0.3 * (run.first("reward_std") or spread):
        return [Finding("wrong_direction", 0.85, evidence, WRONG_SIGN)]
    return f"reward {rise:+.3g} over the steps with a KL below {NEAR}"


def gradient(run: Recorded) -> Verdict:
    norms = [row["grad_norm"] for row in run.metrics if "grad_norm" in row]
    if not norms:
        return ""
    flat = (run.last("zero_std_fraction") or 0.0) == 1
    if len(norms) >= 3 and not any(norms) and not flat:
        return [Finding("no_gradient", 0.9, {"grad_norm": 0.0, "steps": len(norms)})]
    return f"gradient norm {norms[0]:.3g} at the first step, {run.last('grad_norm') or 0.0:.3g} at the end"


def rewards(run: Recorded) -> Verdict:
    """A spread of 0 over all steps, groups that are all equal, and completions that nobody scored."""
    unscored = run.last("unscored_fraction")
    if unscored is None:
        return ""
    found = []
    if unscored > 0.2:
        failed = {key: value for key, value in run.metrics[-1].items() if key.endswith("failed_fraction") and value}
        found.append(Finding("unscored", min(0.95, 0.5 + unscored / 2), {"unscored_fraction": unscored, **failed}))
    for section in run.config.reward:
        failed_share = run.last(f"rewards/{section.name}/failed_fraction") or 0.0
        if section.fallback is not None and failed_share > 0.1:
            evidence = {"reward": section.name, "fallback": section.fallback, "failed_fraction": failed_share}
            found.append(Finding("fallback_reward", 0.85, evidence))
    spread, flat = run.last("reward_std"), run.last("zero_std_fraction")
    first, mean = run.first("reward_mean"), run.last("reward_mean")
    if len(run.metrics) >= ENOUGH and spread == 0 and first == mean:
        found.append(Finding("reward_constant", 0.95, {"reward_std": spread, "reward_mean": mean}))
    elif len(run.metrics) >= ENOUGH and flat is not None and flat >= 0.95 and not _risen(first, mean):
        found.append(Finding("reward_constant", 0.6, {"zero_std_fraction": flat, "reward_mean": mean}))
    return found or f"mean {mean or 0.0:.3g}, {unscored:.0%} unscored, {flat or 0.0:.0%} of the groups equal"


def lengths(run: Recorded) -> Verdict:
    """Cut from the first step on: a limit or an end token. A change during the run is an alarm's."""
    cut, first = run.last("truncated_fraction"), run.first("truncated_fraction")
    if cut is None:
        return ""
    if cut > 0.5 and (first or 0.0) > 0.5:
        fix = "a larger rollout.max_new_tokens; or name the end of an answer in rollout.stop, if the samples run on"
        return [Finding("runs_on", 0.55, {"truncated_fraction": cut, "at_step_1": first}, fix)]
    return f"{cut:.0%} of the completions cut at rollout.max_new_tokens"


CHECKS: tuple[Callable[[Recorded], Verdict], ...] = (
    end_of_run,
    before_any_update,
    *KL_CHECKS,
    coefficient,
    garble,
    direction,
    reward_trend,
    gradient,
    rewards,
    lengths,
    alarms,
)


def _within(values: Sequence[float], steps: int) -> float:
    """The largest of the first steps' three-step medians."""
    return max((statistics.median(values[i : i + 3]) for i in range(min(steps, len(values)) - 2)), default=0.0)


def _risen(first: float | None, last: float | None) -> bool:
    return first is not None and last is not None and last > first


def _numbers(row: Row) -> dict[str, float]:
    return {key: float(value) for key, value in row.items()}
