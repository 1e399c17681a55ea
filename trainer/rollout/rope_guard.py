"""The built-in before-rollout hook: the RoPE window must hold prompt and completion, and be what the config says."""

import math
from dataclasses import dataclass

from transformers import PretrainedConfig

from trainer.errors import Refused
from trainer.models.rope import ASKABLE, Window, window
from trainer.models.rope_built import check_built, same_rope
from trainer.rollout.hooks import HookContext

# Static scalings serve short texts with other angles than those they were trained with.
STATIC = ("linear", "yarn")
# These choose their frequencies by the longest sequence they have seen.
BY_LENGTH = ("dynamic", "longrope")


@dataclass(frozen=True)
class Lengths:
    """Tokens that the longest row of a rollout may take."""

    prompt: int
    new: int

    @property
    def need(self) -> int:
        return self.prompt + self.new

    def __str__(self) -> str:
        return f"longest prompt {self.prompt} + rollout.max_new_tokens {self.new} = {self.need}"


def rope_guard(context: HookContext) -> list[str]:
    """Refuses a rollout that policy or reference cannot hold or would rotate wrongly; notes at step 0.

    All of it at every call: comparing some dozen frequencies costs about as much as a checksum of them.
    """
    lengths = Lengths(context.longest_prompt, context.max_new_tokens)
    models = {"policy": context.policy}
    if context.reference is not None:
        models["reference"] = context.reference
    for what, model in models.items():
        check_window(model.config, lengths, what)
        check_built(model, what)
    if context.reference is not None:
        same_rope(context.policy, context.reference)
    return _notes(lengths, window(context.policy.config)) if context.step == 0 else []


def check_window(config: PretrainedConfig, lengths: Lengths, what: str) -> None:
    """The arithmetic, which needs no weights. Refused where a model of this config cannot hold the longest row."""
    limits = window(config)
    if lengths.need > limits.limit:
        raise Refused(_too_long(lengths, limits, what))
    if limits.rope_type in BY_LENGTH and lengths.need > limits.unscaled:
        raise Refused(_by_length(lengths, limits, what))


def _too_long(lengths: Lengths, limits: Window, what: str) -> str:
    fixes = [*_shorter(lengths, limits.limit), *_static_scaling(lengths, limits)]
    return (
        f"The {what}'s context window does not hold the longest completion: {lengths} > {limits.limit} tokens.\n"
        f"Limit: {limits.rule}.\nFix: {'; or '.join(fixes)}."
    )


def _by_length(lengths: Lengths, limits: Window, what: str) -> str:
    return (
        f"The {what}'s {limits.rope_type} RoPE scaling cannot be used beyond its unscaled window: {lengths} > "
        f"{limits.unscaled} tokens.\nIts frequencies depend on the longest sequence so far, so that keys cached while "
        "sampling and the training forward disagree, and one long row changes the log-probs of all the others.\n"
        f"Fix: {'; or '.join([*_static_scaling(lengths, limits), *_shorter(lengths, limits.unscaled)])}."
    )


def _shorter(lengths: Lengths, limit: int) -> list[str]:
    fixes = []
    if lengths.prompt < limit:
        fixes.append(f"rollout.max_new_tokens = {limit - lengths.prompt} or less")
    if lengths.new < limit:
        room = limit - lengths.new
        fixes.append(f'data.max_prompt_tokens = {room} or less with data.overlong = "drop" or "truncate_left"')
    return fixes or ["shorter prompts and a smaller rollout.max_new_tokens"]


def _static_scaling(lengths: Lengths, limits: Window) -> list[str]:
    if limits.rope_type not in ("default", *ASKABLE):
        return []
    factor = math.ceil(lengths.need / limits.unscaled)
    return [
        f'[model.rope] type = "yarn", factor = {factor}.0, original_max_position_embeddings = {limits.unscaled} '
        f'(or type = "linear", factor = {factor}.0)'
    ]


def _notes(lengths: Lengths, limits: Window) -> list[str]:
    if limits.rope_type not in (*STATIC, "dynamic") or lengths.need > limits.unscaled:
        return []
    effect = (
        "dynamic scaling changes nothing there"
        if limits.rope_type == "dynamic"
        else f"{limits.rope_type} is static and changes short texts too, unless the model was trained with it"
    )
    return [
        f"RoPE scaling is set but not needed: {lengths} <= {limits.unscaled} tokens, the unscaled window; "
        f"{effect} ({limits.rule}). Leave out [model.rope] or rope_parameters in config.json"
    ]
