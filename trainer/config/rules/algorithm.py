"""Rules about sampling, advantage, loss and KL."""

from collections.abc import Iterator

from trainer.config.problems import Problem
from trainer.config.rules.keys import problem, unused
from trainer.config.schema import RunConfig

SCHEDULE_KEYS = {
    "constant": (),
    "warmup_constant": ("start", "warmup_steps"),
    "warmup_decay": ("start", "warmup_steps", "min"),
    "adaptive": ("target", "horizon"),
}


def a_group_has_two(config: RunConfig) -> Iterator[Problem]:
    if config.rollout.num_generations == 1:
        yield problem(
            "rollout.num_generations grpo.baseline",
            "rollout.num_generations = 1: a completion alone is its own baseline (grpo.baseline), so every advantage is"
            " 0 and nothing is learned. Use at least 2; 8 is the default.",
        )


def dual_clip_above_clip(config: RunConfig) -> Iterator[Problem]:
    grpo = config.grpo
    if grpo.dual_clip and grpo.dual_clip <= 1 + grpo.eps_high:
        yield problem(
            "grpo.dual_clip grpo.eps_high",
            f"grpo.dual_clip = {grpo.dual_clip:g} is not above 1 + grpo.eps_high = {1 + grpo.eps_high:g}, so it would"
            " undo the upper clip. Use 3, or 0 for off.",
        )
    if grpo.loss_type == "cispo":
        yield from unused(
            "grpo", grpo, ["dual_clip"], 'grpo.loss_type = "cispo" clips weights, not the objective', "grpo.loss_type"
        )


def k1_has_no_gradient(config: RunConfig) -> Iterator[Problem]:
    kl = config.grpo.kl
    if kl.estimator == "k1" and kl.placement == "loss":
        yield problem(
            "grpo.kl.estimator grpo.kl.placement",
            'grpo.kl.estimator = "k1" with grpo.kl.placement = "loss" has no useful gradient: its expectation is 0,'
            ' whatever the policy is. Use grpo.kl.estimator = "k3", or grpo.kl.placement = "reward".',
        )


def schedule_has_its_keys(config: RunConfig) -> Iterator[Problem]:
    kl = config.grpo.kl
    used = SCHEDULE_KEYS[kl.schedule]
    others = [name for name in ("start", "warmup_steps", "min", "target", "horizon") if name not in used]
    yield from unused("grpo.kl", kl, others, f'grpo.kl.schedule = "{kl.schedule}" does not read it', "grpo.kl.schedule")
    for name, example in (("warmup_steps", "50"), ("target", "0.02"), ("horizon", "10000")):
        if name in used and not getattr(kl, name):
            yield problem(
                f"grpo.kl.schedule grpo.kl.{name}",
                f'grpo.kl.schedule = "{kl.schedule}" needs grpo.kl.{name}, more than 0, for example grpo.kl.{name} ='
                f" {example}.",
            )


def schedule_order(config: RunConfig) -> Iterator[Problem]:
    kl = config.grpo.kl
    for name, meaning in (("min", "the floor"), ("start", "where the warm-up begins")):
        if getattr(kl, name) > kl.coef and name in SCHEDULE_KEYS[kl.schedule]:
            yield problem(
                f"grpo.kl.{name} grpo.kl.coef",
                f"grpo.kl.{name} = {getattr(kl, name):g}, {meaning}, is above grpo.kl.coef = {kl.coef:g}, the peak."
                f" Lower grpo.kl.{name}, or raise grpo.kl.coef.",
            )


def schedule_of_nothing(config: RunConfig) -> Iterator[Problem]:
    kl = config.grpo.kl
    if kl.coef == 0 and kl.schedule != "constant":
        yield problem(
            "grpo.kl.coef grpo.kl.schedule",
            f'grpo.kl.coef = 0 stays 0 under grpo.kl.schedule = "{kl.schedule}". Give grpo.kl.coef, for example 0.04,'
            ' or use schedule = "constant".',
        )


def schedule_fits(config: RunConfig) -> Iterator[Problem]:
    kl, steps = config.grpo.kl, config.run.steps
    if kl.schedule == "warmup_decay" and steps and kl.warmup_steps >= steps:
        yield problem(
            "grpo.kl.warmup_steps run.steps",
            f"grpo.kl.warmup_steps = {kl.warmup_steps} leaves nothing of run.steps = {steps} for the decay of"
            ' grpo.kl.schedule = "warmup_decay". Lower it, or use grpo.kl.schedule = "warmup_constant".',
        )


def ratio_is_used(config: RunConfig) -> Iterator[Problem]:
    if config.grpo.kl.placement == "reward":
        yield from unused(
            "grpo.kl",
            config.grpo.kl,
            ["ratio_weighted"],
            'grpo.kl.placement = "reward" measures the KL at the rollout, where the ratio is 1',
            "grpo.kl.placement",
        )


def stop_strings_differ(config: RunConfig) -> Iterator[Problem]:
    stop = config.rollout.stop
    double = sorted({text for text in stop if stop.count(text) > 1})
    if double:
        yield problem("rollout.stop", f"rollout.stop names {', '.join(repr(text) for text in double)} more than once.")


RULES = (
    a_group_has_two,
    dual_clip_above_clip,
    k1_has_no_gradient,
    schedule_has_its_keys,
    schedule_order,
    schedule_of_nothing,
    schedule_fits,
    ratio_is_used,
    stop_strings_differ,
)
