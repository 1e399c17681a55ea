"""What is allowed and worth a second thought: one sentence each, with the reason."""

from collections.abc import Callable, Iterator

from trainer.config.schema import RunConfig

# Learning rates above which runs of 0.5B to 7B models are known to fall apart.
HIGH_LR_FULL = 5e-6
HIGH_LR_LORA = 5e-5
LOW_TEMPERATURE = 0.8
# Up to the first, a short answer is what is wanted; up to the second, an answer in sentences is cut.
LABEL_TOKENS, SHORT_TOKENS = 32, 128
STRONG_KL = 0.1
DAY, YEAR = 86400.0, 365.25 * 86400


def warnings(config: RunConfig) -> list[str]:
    """Advice on a config that is not refused, in the order of the run file."""
    return [sentence for ask in ADVICE for sentence in ask(config)]


def short_completions(config: RunConfig) -> Iterator[str]:
    if LABEL_TOKENS < config.rollout.max_new_tokens <= SHORT_TOKENS and not config.grpo.mask_truncated:
        yield (
            f"rollout.max_new_tokens = {config.rollout.max_new_tokens}: a longer answer is cut off, scored unfinished,"
            " and trained on (grpo.mask_truncated = false). Watch truncated_fraction; 512 holds most answers."
        )


def temperature(config: RunConfig) -> Iterator[str]:
    rollout = config.rollout
    if rollout.temperature < LOW_TEMPERATURE:
        yield (
            f"rollout.temperature = {rollout.temperature:g}: the rollout.num_generations = {rollout.num_generations}"
            " completions of a prompt come out alike, and a group of equal rewards teaches nothing"
            " (zero_std_fraction). 1 is usual."
        )


def sampled_is_not_scored(config: RunConfig) -> Iterator[str]:
    rollout = config.rollout
    changed = [
        f"rollout.{name} = {getattr(rollout, name):g}"
        for name, off in (("top_p", 1), ("top_k", 0), ("min_p", 0))
        if getattr(rollout, name) != off
    ]
    if changed:
        yield (
            f"{', '.join(changed)}: completions are sampled from another distribution than the one that is scored and"
            " trained, so importance ratios and KL are biased. The defaults (top_p 1, top_k 0, min_p 0) sample what is"
            " scored."
        )


def repetition_penalty(config: RunConfig) -> Iterator[str]:
    penalty = config.rollout.repetition_penalty
    if penalty != 1:
        yield (
            f"rollout.repetition_penalty = {penalty:g}: completions are sampled from another distribution than the one"
            " that is scored and trained, another one after each token, and the loops that the policy itself would"
            " write stay unseen. 1 is off."
        )


def dropout(config: RunConfig) -> Iterator[str]:
    if config.lora.dropout:
        yield (
            f"lora.dropout = {config.lora.dropout:g} has no effect: dropout is off in every pass, or the ratio to the"
            " sampled log-probs and the KL would be noise from the first update on. Fix: lora.dropout = 0."
        )


def learning_rate(config: RunConfig) -> Iterator[str]:
    lr, kl = config.optim.lr, config.grpo.kl.coef
    limit, what = (HIGH_LR_LORA, "LoRA") if config.is_lora else (HIGH_LR_FULL, "full fine-tuning (lora.r = 0)")
    if config.optim.name != "sgd" and lr > limit:
        usual = 2e-5 if config.is_lora else 1e-6
        yield (
            f"optim.lr = {lr:g} is high for {what}: above {limit:g} runs tend to collapse. {usual:g} is a common start."
        )
    if kl > STRONG_KL and lr > 1e-5:
        yield (
            f"grpo.kl.coef = {kl:g} with optim.lr = {lr:g}: a strong pull to the reference and a high rate make the"
            " policy swing around it. Lower one of them."
        )


def warmup(config: RunConfig) -> Iterator[str]:
    updates = config.run.steps * config.grpo.updates_per_rollout
    if updates and config.optim.schedule == "constant" and config.optim.warmup_steps >= updates:
        yield (
            f"optim.warmup_steps = {config.optim.warmup_steps} with {updates} updates in all: the run ends before"
            " optim.lr is reached. Lower optim.warmup_steps, or raise run.steps."
        )
    kl = config.grpo.kl
    if kl.schedule == "warmup_constant" and config.run.steps and kl.warmup_steps >= config.run.steps:
        yield (
            f"grpo.kl.warmup_steps = {kl.warmup_steps} with run.steps = {config.run.steps}: the run ends before"
            " grpo.kl.coef is reached. Lower grpo.kl.warmup_steps, or raise run.steps."
        )


def growing_pull(config: RunConfig) -> Iterator[str]:
    kl = config.grpo.kl
    if kl.schedule in ("warmup_constant", "warmup_decay") and kl.coef > STRONG_KL and kl.start < kl.coef / 10:
        yield (
            f"grpo.kl.start = {kl.start:g} grows to grpo.kl.coef = {kl.coef:g} within grpo.kl.warmup_steps ="
            f" {kl.warmup_steps}: the policy leaves the reference while the pull is weak, and is drawn back later. The"
            ' paper holds it: grpo.kl.schedule = "constant", grpo.kl.coef = 0.04.'
        )


def masked_truncation(config: RunConfig) -> Iterator[str]:
    if config.grpo.mask_truncated:
        yield (
            "grpo.mask_truncated = true: a completion that is cut off teaches nothing, not even to be shorter. Watch"
            " truncated_fraction."
        )


def kl_in_reward(config: RunConfig) -> Iterator[str]:
    kl = config.grpo.kl
    if kl.coef and kl.placement == "reward" and kl.estimator != "k1":
        yield (
            f'grpo.kl.placement = "reward" with grpo.kl.estimator = "{kl.estimator}": only "k1" gives an unbiased'
            " gradient of the KL there."
        )


def sequence_clip(config: RunConfig) -> Iterator[str]:
    grpo = config.grpo
    if grpo.loss_type == "gspo" and grpo.updates_per_rollout > 1 and grpo.eps_high >= 0.01:
        yield (
            f'grpo.eps_high = {grpo.eps_high:g} with grpo.loss_type = "gspo": a sequence ratio moves by thousandths, so'
            " nothing is ever clipped. The paper uses eps_low = 3e-4, eps_high = 4e-4."
        )


def accumulation_precision(config: RunConfig) -> Iterator[str]:
    if config.model.dtype == "bf16" and config.engine.deepspeed == "zero0":
        yield (
            'engine.deepspeed = "zero0" with model.dtype = "bf16": ZeRO-0 sums gradients in bf16 and loses small ones.'
            ' "zero1" sums in fp32.'
        )


def patience(config: RunConfig) -> Iterator[str]:
    seconds = config.watch.hang_timeout
    if seconds > DAY:
        length = f"{seconds / YEAR:.1f} years" if seconds > YEAR else f"{seconds / DAY:.1f} days"
        yield (
            f"watch.hang_timeout = {seconds:.0f} s are {length}: when one rank hangs, the others wait that long, and"
            " the cards with them. 1800 is the default."
        )


def dashcope(config: RunConfig) -> Iterator[str]:
    for entry in config.reward:
        if entry.kind == "dashcope":
            yield f'reward.{entry.name}.kind = "dashcope" is read as "dashscope", as the service spells itself.'


ADVICE: tuple[Callable[[RunConfig], Iterator[str]], ...] = (
    short_completions,
    temperature,
    sampled_is_not_scored,
    repetition_penalty,
    dropout,
    learning_rate,
    warmup,
    growing_pull,
    masked_truncation,
    kl_in_reward,
    sequence_clip,
    accumulation_precision,
    patience,
    dashcope,
)
