"""When a signal is worth an alarm: each rule reads one row of metrics beside the beginning of the run."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from trainer.watch.causes import reward_change

Numbers = Mapping[str, float]


@dataclass(frozen=True)
class Reading:
    """One signal at one step."""

    value: float
    limit: float
    baseline: float | None
    beyond: bool
    """Past the limit."""
    clear: bool
    """Back far enough that an alarm ends; between the two nothing changes."""


SAME_KL = 5e-3
"""Nats per token between two passes of one model: k3 of log-probs that are 0.1 apart, twice the rounding of bf16."""

USUAL_CLIP = 1.0
"""Default of optim.max_grad_norm."""

Read = Callable[[Numbers, Numbers, Numbers], Reading | None]


@dataclass(frozen=True)
class Rule:
    """An alarm by name, its signal by the metric's key."""

    alarm: str
    signal: str
    read: Read
    """(row, beginning, limits); None where the signal does not exist."""
    patience: int
    """Steps in a row past the limit that raise the alarm."""
    at_once: bool = False
    """Also during the first steps, before the beginning is known but for step 1."""
    relative: bool = False
    """Has no setting of its own, and is off at the level "quiet"."""


def above(
    signal: str, limit: Callable[[Numbers, Numbers], float], *, clear: float = 0.5
) -> Callable[..., Reading | None]:
    """Past ``limit(beginning, limits)``; clear below the point that lies ``clear`` of the way up from the beginning."""

    def read(row: Numbers, begin: Numbers, limits: Numbers) -> Reading | None:
        if signal not in row:
            return None
        value, top, base = row[signal], limit(begin, limits), begin.get(signal)
        return Reading(value, top, base, value > top, value <= between(base or 0.0, top, clear))

    return read


def between(low: float, high: float, share: float) -> float:
    return low + (high - low) * share if math.isfinite(high) else high


def against(signal: str, limit: Callable[[float], float], at_least: float = 0.0) -> Read:
    """``above`` with a limit that follows from the signal's own beginning."""
    return above(signal, lambda begin, _: max(at_least, limit(begin[signal])) if signal in begin else math.inf)


def garble(row: Numbers, begin: Numbers, limits: Numbers) -> Reading | None:
    """What training adds. A model that is garbled as it is loaded has another alarm, which never stops a run."""
    base = begin.get("garble_rate", 0.0)
    if "garble_rate" not in row or base >= limits["garble_entry"]:
        return None
    value = row["garble_rate"]
    entry, clear = max(limits["garble_entry"], base + 0.2), max(limits["garble_clear"], base + 0.05)
    return Reading(value, entry, base, value >= entry, value < clear)


def garble_rising(row: Numbers, begin: Numbers, limits: Numbers) -> Reading | None:
    if "garble_rate" not in row:
        return None
    base, value = begin.get("garble_rate", 0.0), row["garble_rate"]
    return Reading(value, base + limits["garble_rise"], base, value > base + limits["garble_rise"], value < base + 0.05)


def garbled_from_start(row: Numbers, begin: Numbers, limits: Numbers) -> Reading | None:
    if "garble_rate" not in begin:
        return None
    entry, value = limits["garble_entry"], row.get("garble_rate", begin["garble_rate"])
    return Reading(value, entry, begin["garble_rate"], min(value, begin["garble_rate"]) >= entry, value < entry / 2)


def exactly(signal: str, right: float, *, within: float = 0.0) -> Read:
    """An invariant of the trainer's own: at every step of any run."""

    def read(row: Numbers, begin: Numbers, limits: Numbers) -> Reading | None:
        if signal not in row:
            return None
        value = row[signal]
        off = abs(value - right) > within
        return Reading(value, right, None, off, not off)

    return read


def reward_failing(row: Numbers, begin: Numbers, limits: Numbers) -> Reading | None:
    shares = [value for key, value in row.items() if key.endswith("/failed_fraction")]
    value = max(shares, default=0.0)
    return Reading(value, 0.2, None, value > 0.2, value < 0.1) if shares else None


def kl_at_start(row: Numbers, begin: Numbers, limits: Numbers) -> Reading | None:
    """Before any update the policy is its reference; what stands between the two then stays for the whole run."""
    if (value := begin.get("kl_at_step_1")) is None:
        return None
    return Reading(value, SAME_KL, None, abs(value) > SAME_KL, False)


def kl(row: Numbers, begin: Numbers, limits: Numbers) -> Reading | None:
    """Far from the reference; or not so far, and the worse for it."""
    if "kl" not in row:
        return None
    limit = limits["kl"] / 10 if reward_change(row, begin) < -0.25 else limits["kl"]
    return Reading(row["kl"], limit, None, row["kl"] > limit, row["kl"] < limit / 2)


def collapse(row: Numbers, begin: Numbers, limits: Numbers) -> Reading | None:
    """Far from the reference with the reward gone: two signs at once need no patience."""
    if "kl" not in row:
        return None
    limit, lost = limits["kl"] / 2, reward_change(row, begin)
    return Reading(row["kl"], limit, None, row["kl"] > limit and lost < -0.5, row["kl"] < limit / 2 or lost > -0.25)


def below(signal: str, floor: Callable[[Numbers, Numbers], float]) -> Read:
    """Past the limit under ``floor(beginning, limits)``; clear half as much again above it."""

    def read(row: Numbers, begin: Numbers, limits: Numbers) -> Reading | None:
        if signal not in row:
            return None
        value, bottom = row[signal], floor(begin, limits)
        return Reading(value, bottom, begin.get(signal), value < bottom, value > 1.5 * bottom)

    return read


def entropy_collapse(row: Numbers, begin: Numbers, limits: Numbers) -> Reading | None:
    """A fifth of the beginning, and nothing gained: a policy that has learned its task is sure as well."""
    if "entropy" not in row or "entropy" not in begin:
        return None
    value, base, bottom = row["entropy"], begin["entropy"], begin["entropy"] / 5
    gained = reward_change(row, begin) > 0.25
    return Reading(value, bottom, base, value < bottom and not gained, value > 1.5 * bottom or gained)


def kl_outliers(row: Numbers, begin: Numbers, limits: Numbers) -> Reading | None:
    if row.get("kl", 0.0) < 1e-3 or "kl_std" not in row:
        return None
    ratio = row["kl_std"] / row["kl"]
    return Reading(ratio, limits["kl_cv"], None, ratio > limits["kl_cv"], ratio < 0.8 * limits["kl_cv"])


def gradient(row: Numbers, begin: Numbers, limits: Numbers) -> Reading | None:
    """Of a task too hard to be rewarded in its first steps there was no gradient to compare with. A norm that is
    commonly clipped to is none to be alarmed by."""
    if "grad_norm" not in row or not begin.get("grad_norm"):
        return None
    value, base = row["grad_norm"], begin["grad_norm"]
    limit = max(USUAL_CLIP, 20 * base)
    return Reading(value, limit, base, value > limit, value <= between(base, limit, 0.5))


def reward_fall(row: Numbers, begin: Numbers, limits: Numbers) -> Reading | None:
    if "reward_mean" not in row or not begin.get("reward_std"):
        return None
    base, spread = begin["reward_mean"], begin["reward_std"]
    value = row["reward_mean"]
    return Reading(value, base - spread / 2, base, value < base - spread / 2, value > base - spread / 4)


def one_token(begin: Numbers, limits: Numbers) -> float:
    return max(limits["top_token"], begin.get("top_token_share", 0.0) + 0.2)


def further(base: float) -> float:
    return base + 0.3


RULES = (
    Rule("garbled_from_start", "garble_rate", garbled_from_start, patience=1, at_once=True),
    Rule("garble", "garble_rate", garble, patience=2, at_once=True),
    Rule("garble_rising", "garble_rate", garble_rising, patience=3, at_once=True),
    Rule("sampling_gap", "sampling_logp_gap", above("sampling_logp_gap", lambda _, at: at["sampling_gap"]), 3, True),
    Rule("scored_tokens", "scored_per_sampled", exactly("scored_per_sampled", 1.0), patience=1, at_once=True),
    Rule("advantages", "advantage_bias", exactly("advantage_bias", 0.0, within=0.01), patience=1, at_once=True),
    Rule("decoded_text", "text_unlike_ids", exactly("text_unlike_ids", 0.0), patience=1, at_once=True),
    Rule("reward_failing", "rewards/*/failed_fraction", reward_failing, patience=3, at_once=True, relative=True),
    Rule("kl_at_start", "kl at step 1", kl_at_start, patience=1, at_once=True),
    Rule("collapse", "kl", collapse, patience=1, at_once=True),
    Rule("kl", "kl", kl, patience=3, at_once=True),
    Rule("kl_outliers", "kl_std / kl", kl_outliers, patience=3),
    Rule("entropy_floor", "entropy", below("entropy", lambda _, at: at["entropy_floor"]), patience=3),
    Rule("entropy_collapse", "entropy", entropy_collapse, patience=10, relative=True),
    Rule("entropy_rise", "entropy", against("entropy", lambda base: 2 * base + 0.5), patience=3, relative=True),
    Rule("one_token", "top_token_share", above("top_token_share", one_token), patience=3),
    Rule("repetition", "repetition", against("repetition", lambda base: base + 0.3), patience=5, relative=True),
    Rule("truncation", "truncated_fraction", against("truncated_fraction", further, 0.5), patience=5, relative=True),
    Rule("gradient", "grad_norm", gradient, patience=3, relative=True),
    Rule("clipping", "clip_fraction", against("clip_fraction", further, 0.5), patience=5, relative=True),
    Rule("reward_fall", "reward_mean", reward_fall, patience=10, relative=True),
    Rule("reward_kl_ratio", "reward_kl_ratio", below("reward_kl_ratio", lambda _, at: at["reward_kl_ratio"]), 3),
    Rule("memory", "held_memory_gib", against("held_memory_gib", lambda base: 1.2 * base + 0.1), 50, relative=True),
)
