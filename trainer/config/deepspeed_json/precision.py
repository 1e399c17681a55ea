"""fp16, bf16 and data_types: the run file's model.dtype decides."""

from collections.abc import Iterator
from typing import Literal

from trainer.config.deepspeed_json.mistakes import Block, Mistake, shown
from trainer.config.schema import RunConfig

Dtype = Literal["bf16", "fp32"]
BF16_KEYS = (
    "enabled",
    "check_grad_overflow",
    "immediate_grad_update",
    "bf16_master_weights_and_grads",
    "bf16_optimizer_states",
)


def mistakes(block: Block, config: RunConfig, dtype: Dtype, stage: int) -> Iterator[Mistake]:
    """What disagrees with the precision that the run has."""
    asked = f'model.dtype = "{config.model.dtype}"'
    has = asked if config.model.dtype == dtype else f"{asked}, which is {dtype} on this device"
    bf16, fp16 = (block[name].get("enabled", "auto") for name in ("bf16", "fp16"))
    if bf16 is True and fp16 is True:
        yield Mistake(
            "bf16.enabled", f"and fp16.enabled are both true. The run file has {has}; one precision at a time.", "auto"
        )
    elif bf16 not in ("auto", dtype == "bf16"):
        yield Mistake(
            "bf16.enabled",
            f'is {shown(bf16)}, the run file has {has}. Change one of them; here it may be absent or "auto".',
            "auto",
        )
    if fp16 not in ("auto", False):
        yield Mistake(
            "fp16.enabled",
            f"is {shown(fp16)}: fp16 is refused, models trained in bf16 overflow in it. Use bf16 or fp32, by"
            " model.dtype.",
            False,
        )
    yield from _bf16_keys(block["bf16"], config.optim.lr)
    yield from _data_types(block["data_types"], dtype, stage)


def _bf16_keys(bf16: Block, lr: float) -> Iterator[Mistake]:
    for key, value in bf16.items():
        neutral = key == "check_grad_overflow"
        if key not in BF16_KEYS:
            yield Mistake(f"bf16.{key}", f"is not a key of DeepSpeed. Keys: {', '.join(BF16_KEYS)}.")
        elif key != "enabled" and value not in (neutral, "auto"):
            reason = "master weights and sums of gradients stay in fp32, or small updates are lost. Remove it."
            if neutral:
                reason = "a gradient that is not finite must never be applied. Remove it."
            elif key == "bf16_master_weights_and_grads":
                # The spacing of 8 significant bits in [2^-7, 2^-6) is 2^-14.
                reason = (
                    f"the run file has optim.lr = {lr:g}, about what AdamW moves a weight by. In bf16 the neighbours of"
                    " a weight of 0.01 are 6.1e-05 away, so steps under 3.1e-05 are rounded away, and of larger weights"
                    " larger ones; DeepSpeed does not round stochastically. Remove it: master weights in fp32 take 2"
                    ' bytes a parameter more, which ZeRO shards; optim.name = "adamw8bit" saves 6.'
                )
            yield Mistake(f"bf16.{key}", f"is {shown(value)}: {reason}")


def _data_types(types: Block, dtype: Dtype, stage: int) -> Iterator[Mistake]:
    exact = dtype == "fp32" or stage > 0
    # "auto" is DeepSpeed's own word for keep_in_fp32_modules; for the others it is resolved here.
    allowed: dict[str, tuple[object, ...]] = {
        "grad_accum_dtype": ("auto", None, "fp32") if exact else ("auto", None, "bf16"),
        "param_dtype": ("auto", None, dtype),
        "buffer_dtype": ("auto", None),
        "keep_in_fp32_modules": ("auto",),
    }
    for key, value in types.items():
        if key not in allowed:
            yield Mistake(f"data_types.{key}", f"is not a key of DeepSpeed. Keys: {', '.join(allowed)}.")
        elif value not in allowed[key]:
            why = "" if exact or key != "grad_accum_dtype" else " DeepSpeed cannot do it in stage 0: use stage 1."
            yield Mistake(f"data_types.{key}", f"is {shown(value)}, but it follows from model.dtype.{why} Remove it.")


def resolved(dtype: Dtype, stage: int) -> Block:
    """The blocks that DeepSpeed gets."""
    result: Block = {"fp16": {"enabled": False}, "bf16": {"enabled": dtype == "bf16"}}
    if dtype == "bf16":
        result["bf16"]["check_grad_overflow"] = True
        if stage > 0:
            # In stage 0 DeepSpeed raises NotImplementedError for bf16 weights with fp32 sums.
            result["data_types"] = {"grad_accum_dtype": "fp32"}
    return result
