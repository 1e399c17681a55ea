"""Rules about the model, its adapter, its quantisation and its reference."""

import os
from collections.abc import Iterator

from trainer.config.problems import Problem
from trainer.config.rules.keys import problem, unused
from trainer.config.schema import RunConfig


def half_precision(config: RunConfig) -> Iterator[Problem]:
    if config.model.dtype == "fp16":
        yield problem(
            "model.dtype",
            'model.dtype = "fp16" is refused: models trained in bf16, Qwen2 and Qwen2.5 among them, overflow in fp16,'
            ' and the loss scale runs out after hours. Use "bf16" (GPUs from Ampere on) or "fp32".',
        )


def flash_attention(config: RunConfig) -> Iterator[Problem]:
    if config.model.attn != "flash_attention_2":
        return
    if config.engine.device == "cpu":
        yield problem(
            "model.attn engine.device",
            'model.attn = "flash_attention_2" needs a GPU, engine.device = "cpu". Use model.attn = "sdpa".',
        )
    if config.model.dtype == "fp32":
        yield problem(
            "model.attn model.dtype",
            'model.attn = "flash_attention_2" has no fp32, model.dtype = "fp32". Use model.attn = "sdpa", or'
            ' model.dtype = "bf16".',
        )


def revision_of_a_folder(config: RunConfig) -> Iterator[Problem]:
    model = config.model
    if model.revision and os.path.isdir(model.name_or_path):
        yield problem(
            "model.revision model.name_or_path",
            f'model.revision = "{model.revision}" has no effect: model.name_or_path = "{model.name_or_path}" is a'
            " folder here. Remove it, or check the folder out at that revision.",
        )


def rope_scaling(config: RunConfig) -> Iterator[Problem]:
    rope = config.model.rope
    if not rope.type:
        yield from unused(
            "model.rope",
            rope,
            ["factor", "original_max_position_embeddings"],
            "no RoPE scaling is asked for",
            "model.rope.type",
        )
        return
    if not rope.factor:
        yield problem(
            "model.rope.type model.rope.factor",
            f'model.rope.type = "{rope.type}" needs model.rope.factor, at least 1, for example model.rope.factor ='
            " 4.0.",
        )
    elif rope.factor < 1:
        yield problem(
            "model.rope.factor model.rope.type",
            f'model.rope.factor = {rope.factor:g} with model.rope.type = "{rope.type}": expected a number >= 1, by'
            " which the window grows.",
        )
    if rope.type != "yarn":
        yield from unused(
            "model.rope",
            rope,
            ["original_max_position_embeddings"],
            f'model.rope.type = "{rope.type}" does not read it, yarn does',
            "model.rope.type",
        )


def adapter_keys(config: RunConfig) -> Iterator[Problem]:
    if not config.is_lora:
        yield from unused(
            "lora",
            config.lora,
            ["alpha", "dropout", "targets", "start_adapter"],
            "lora.r = 0 trains all weights",
            "lora.r",
        )


def adapter_targets(config: RunConfig) -> Iterator[Problem]:
    targets = config.lora.targets
    if "all-linear" in targets and len(targets) > 1:
        yield problem(
            "lora.targets",
            'lora.targets: "all-linear" already means every linear layer. Leave it alone in the list, or name the'
            " modules.",
        )
    double = sorted({name for name in targets if targets.count(name) > 1})
    if double:
        yield problem("lora.targets", f"lora.targets names {', '.join(double)} more than once.")


def quantised_weights_are_frozen(config: RunConfig) -> Iterator[Problem]:
    if config.quant.bits and not config.is_lora:
        yield problem(
            "quant.bits lora.r",
            f"quant.bits = {config.quant.bits} with lora.r = 0: quantised weights cannot be trained. Give lora.r, for"
            " example 16, or quant.bits = 0.",
        )
    if not config.quant.bits:
        yield from unused(
            "quant", config.quant, ["double_quant"], "nothing is quantised (quant.bits = 0)", "quant.bits"
        )


def reference_is_used(config: RunConfig) -> Iterator[Problem]:
    if config.grpo.kl.coef == 0 and config.grpo.kl.schedule == "constant":
        yield from unused(
            "reference", config.reference, ["mode"], "grpo.kl.coef = 0, so there is no reference model", "grpo.kl.coef"
        )
        yield from unused("log", config.log, ["histogram_every"], "grpo.kl.coef = 0 measures no KL", "grpo.kl.coef")


def reference_adapter(config: RunConfig) -> Iterator[Problem]:
    if config.reference.mode == "adapter" and not config.is_lora:
        yield problem(
            "reference.mode lora.r",
            'reference.mode = "adapter" is the policy with its adapter off; lora.r = 0 has none. Use reference.mode ='
            ' "auto", or give lora.r.',
        )


def reference_of_4_bit(config: RunConfig) -> Iterator[Problem]:
    if config.quant.bits and config.reference.mode in ("cpu", "gpu", "zero3"):
        yield problem(
            "reference.mode quant.bits",
            f'reference.mode = "{config.reference.mode}" with quant.bits = 4: a copy of the 4-bit base would be the'
            ' policy with its adapter off, and take memory. Use reference.mode = "auto".',
        )


def reference_device(config: RunConfig) -> Iterator[Problem]:
    if config.reference.mode == "gpu" and config.engine.device == "cpu":
        yield problem(
            "reference.mode engine.device",
            'reference.mode = "gpu" with engine.device = "cpu": there is no GPU to keep it on. Use reference.mode ='
            ' "auto".',
        )


RULES = (
    half_precision,
    flash_attention,
    revision_of_a_folder,
    rope_scaling,
    adapter_keys,
    adapter_targets,
    quantised_weights_are_frozen,
    reference_is_used,
    reference_adapter,
    reference_of_4_bit,
    reference_device,
)
