"""What is allowed and worth a second thought: one sentence each, with the reason."""

from collections.abc import Callable, Iterator

from trainer.config.schema import RunConfig

# Learning rates above which runs of 0.5B to 7B models are known to fall apart.
HIGH_LR_FULL = 5e-6
HIGH_LR_LORA = 5e-5


def warnings(config: RunConfig) -> list[str]:
    """Advice on a config that is not refused, in the order of the run file."""
    return [sentence for ask in ADVICE for sentence in ask(config)]


def sampled_is_not_scored(config: RunConfig) -> Iterator[str]:
    rollout = config.rollout
    changed = [
        f"rollout.{name} = {getattr(rollout, name):g}"
        for name, off in (("top_p", 1), ("top_k", 0), ("min_p", 0), ("repetition_penalty", 1))
        if getattr(rollout, name) != off
    ]
    if changed:
        yield (
            f"{', '.join(changed)}: completions are sampled from another distribution than the one that is scored and"
            " trained, so importance ratios and KL are biased. The defaults (top_p 1, top_k 0, min_p 0,"
            " repetition_penalty 1) sample what is scored."
        )


def dropout(config: RunConfig) -> Iterator[str]:
    if config.lora.dropout:
        yield (
            f"lora.dropout = {config.lora.dropout:g}: with dropout in training, the ratio to the sampled log-probs is"
            " noise around 1 from the first update on."
        )


def learning_rate(config: RunConfig) -> Iterator[str]:
    lr, kl = config.optim.lr, config.grpo.kl.coef
    limit, what = (HIGH_LR_LORA, "LoRA") if config.is_lora else (HIGH_LR_FULL, "full fine-tuning (lora.r = 0)")
    if config.optim.name != "sgd" and lr > limit:
        usual = 2e-5 if config.is_lora else 1e-6
        yield (
            f"optim.lr = {lr:g} is high for {what}: above {limit:g} runs tend to collapse. {usual:g} is a common start."
        )
    if kl > 0.1 and lr > 1e-5:
        yield (
            f"grpo.kl.coef = {kl:g} with optim.lr = {lr:g}: a strong pull to the reference and a high rate make the"
            " policy swing around it. Lower one of them."
        )


def warmup(config: RunConfig) -> Iterator[str]:
    updates = config.run.steps * config.grpo.updates_per_rollout
    if updates and config.optim.schedule == "constant" and config.optim.warmup_steps >= updates:
        yield (
            f"optim.warmup_steps = {config.optim.warmup_steps} with {updates} updates in all: the run ends before"
            " optim.lr is reached."
        )
    kl = config.grpo.kl
    if kl.schedule == "warmup_constant" and config.run.steps and kl.warmup_steps >= config.run.steps:
        yield (
            f"grpo.kl.warmup_steps = {kl.warmup_steps} with run.steps = {config.run.steps}: the run ends before"
            " grpo.kl.coef is reached."
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


ADVICE: tuple[Callable[[RunConfig], Iterator[str]], ...] = (
    sampled_is_not_scored,
    dropout,
    learning_rate,
    warmup,
    masked_truncation,
    kl_in_reward,
    sequence_clip,
    accumulation_precision,
)
