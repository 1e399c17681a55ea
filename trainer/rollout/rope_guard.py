"""The built-in before-rollout hook: the RoPE window must hold prompt and completion, and be what the config says."""

import math

from trainer.errors import Refused
from trainer.models.rope import ASKABLE, Window, window
from trainer.models.rope_built import check_built, same_rope
from trainer.rollout.hooks import HookContext

# Static scalings serve short texts with other angles than those they were trained with.
STATIC = ("linear", "yarn")
# These choose their frequencies by the longest sequence they have seen.
BY_LENGTH = ("dynamic", "longrope")


def rope_guard(context: HookContext) -> list[str]:
    """Refuses a rollout that policy or reference cannot hold or would rotate wrongly; notes at step 0.

    All of it at every call: comparing some dozen frequencies costs about as much as a checksum of them.
    """
    need = context.longest_prompt + context.max_new_tokens
    models = {"policy": context.policy}
    if context.reference is not None:
        models["reference"] = context.reference
    for what, model in models.items():
        limits = window(model.config)
        if need > limits.limit:
            raise Refused(_too_long(context, limits, what))
        if limits.rope_type in BY_LENGTH and need > limits.unscaled:
            raise Refused(_by_length(context, limits, what))
        check_built(model, what)
    if context.reference is not None:
        same_rope(context.policy, context.reference)
    return _notes(context, window(context.policy.config)) if context.step == 0 else []


def _too_long(context: HookContext, limits: Window, what: str) -> str:
    fixes = [*_shorter(context, limits.limit), *_static_scaling(context, limits)]
    return (
        f"The {what}'s context window does not hold the longest completion: {_need(context)} > {limits.limit} tokens.\n"
        f"Limit: {limits.rule}.\nFix: {'; or '.join(fixes)}."
    )


def _by_length(context: HookContext, limits: Window, what: str) -> str:
    return (
        f"The {what}'s {limits.rope_type} RoPE scaling cannot be used beyond its unscaled window: {_need(context)} > "
        f"{limits.unscaled} tokens.\nIts frequencies depend on the longest sequence so far, so that keys cached while "
        "sampling and the training forward disagree, and one long row changes the log-probs of all the others.\n"
        f"Fix: {'; or '.join([*_static_scaling(context, limits), *_shorter(context, limits.unscaled)])}."
    )


def _need(context: HookContext) -> str:
    need = context.longest_prompt + context.max_new_tokens
    return f"longest prompt {context.longest_prompt} + rollout.max_new_tokens {context.max_new_tokens} = {need}"


def _shorter(context: HookContext, limit: int) -> list[str]:
    fixes = []
    if context.longest_prompt < limit:
        fixes.append(f"rollout.max_new_tokens = {limit - context.longest_prompt} or less")
    if context.max_new_tokens < limit:
        room = limit - context.max_new_tokens
        fixes.append(f'data.max_prompt_tokens = {room} or less with data.overlong = "drop" or "truncate_left"')
    return fixes or ["shorter prompts and a smaller rollout.max_new_tokens"]


def _static_scaling(context: HookContext, limits: Window) -> list[str]:
    if limits.rope_type not in ("default", *ASKABLE):
        return []
    factor = math.ceil((context.longest_prompt + context.max_new_tokens) / limits.unscaled)
    return [
        f'[model.rope] type = "yarn", factor = {factor}.0, original_max_position_embeddings = {limits.unscaled} '
        f'(or type = "linear", factor = {factor}.0)'
    ]


def _notes(context: HookContext, limits: Window) -> list[str]:
    need = context.longest_prompt + context.max_new_tokens
    if limits.rope_type not in (*STATIC, "dynamic") or need > limits.unscaled:
        return []
    effect = (
        "dynamic scaling changes nothing there"
        if limits.rope_type == "dynamic"
        else f"{limits.rope_type} is static and changes short texts too, unless the model was trained with it"
    )
    return [
        f"RoPE scaling is set but not needed: {_need(context)} <= {limits.unscaled} tokens, the unscaled window; "
        f"{effect} ({limits.rule}). Leave out [model.rope] or rope_parameters in config.json"
    ]
