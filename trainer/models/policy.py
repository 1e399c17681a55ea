"""The policy: weights from a folder, a hub name or a GGUF file; full, LoRA or 4-bit LoRA; one dtype to compute in; no
dropout in any pass."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, load_peft_weights
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GgufConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from trainer.config.sections import Lora, Model, Quant
from trainer.errors import Refused
from trainer.models import quantised, rope
from trainer.models.rope_fields import check_config_json
from trainer.models.source import adapter_config, arguments_of, loaded, local_file, refuse_missing, refuse_shapes

REFERENCE_ADAPTER = "reference"
"""Name of the frozen copy of the start adapter, beside the trained "default"."""


@dataclass
class Policy:
    """What is trained, and what belongs to it. ``peft`` is None in full fine-tuning."""

    causal: PreTrainedModel
    """The transformers model; with LoRA, the adapters sit in its layers."""
    peft: PeftModel | None
    tokenizer: PreTrainedTokenizerBase
    generation_config: GenerationConfig
    """As the checkpoint has it: for its stop ids and for the export. The rollout never samples by it."""
    dtype: torch.dtype


def resolve_dtype(asked: str, device: torch.device) -> tuple[torch.dtype, str]:
    """The one compute dtype of the run, and why. "auto": bf16 on a card that has it, fp32 elsewhere."""
    if device.type == "cpu":
        return (
            (torch.bfloat16, "asked for") if asked == "bf16" else (torch.float32, "the CPU default; exact comparisons")
        )
    capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    name = torch.cuda.get_device_name(device)
    supported = torch.cuda.is_bf16_supported(including_emulation=False)
    if asked == "bf16" and not supported:
        raise Refused(
            f'model.dtype = "bf16": {name} (compute capability {capability}) has no bf16, which begins at 8.0. '
            'Fix: model.dtype = "fp32"; fp16 is no way out, since Qwen2/Qwen2.5 activations overflow in it.'
        )
    if asked == "fp32" or not supported:
        return (
            torch.float32,
            "asked for" if asked == "fp32" else f"{name} (compute capability {capability}) has no bf16",
        )
    return torch.bfloat16, f"{name} has it"


def load_tokenizer(model: Model) -> PreTrainedTokenizerBase:
    """The tokenizer of the model folder or GGUF file."""
    arguments = arguments_of(model)
    tokenizer = loaded(model, lambda: AutoTokenizer.from_pretrained(model.name_or_path, **arguments))
    if not loaded(
        model, lambda: tokenizer("1 a")["input_ids"]
    ):  # without its files transformers makes an empty one of the model's class
        raise Refused(
            f"model.name_or_path = {model.name_or_path}: there is no tokenizer. Fix: put tokenizer.json and "
            "tokenizer_config.json of this model beside its weights."
        )
    if tokenizer.pad_token_id is None:
        # Padding is masked by position, never by id, so that any id will do; the end token always exists.
        tokenizer.pad_token_id = tokenizer.eos_token_id
    return tokenizer


def load_generation_config(model: Model) -> GenerationConfig:
    """The checkpoint's own; an empty one where it has none. Refused when broken, since it may hold the stop ids."""
    if (file := local_file(model, "generation_config.json")) and file.is_file():
        return loaded(model, lambda: GenerationConfig.from_pretrained(model.name_or_path))
    try:
        return GenerationConfig.from_pretrained(model.name_or_path, revision=model.revision or "main")
    except OSError:
        return GenerationConfig()


def load_policy(
    model: Model,
    config: PretrainedConfig,
    lora: Lora,
    tokenizer: PreTrainedTokenizerBase,
    dtype: torch.dtype,
    quant: Quant = quantised.NOT_QUANTISED,
) -> Policy:
    """Loads the weights, refuses incomplete ones, adds or continues the adapter, and turns dropout off."""
    causal = load_causal(model, config, dtype, quant)
    generation_config = causal.generation_config or GenerationConfig()  # with a GGUF file, its stop ids are only here
    # A clean one in its place: fields left unset in a generate() call are filled from it, and Qwen's checkpoints
    # carry top_k and repetition_penalty, which would make the sampled distribution another than the scored one.
    causal.generation_config = GenerationConfig()
    peft = add_adapter(causal, lora)
    policy = Policy(causal, peft, tokenizer, generation_config, dtype)
    disable_dropout(peft or causal)
    return policy


def load_config(model: Model) -> tuple[PretrainedConfig, list[str]]:
    """The model's config with the RoPE scaling that was asked for, checked, and what the user should know of it."""
    notes: list[str] = []
    if not model.gguf_file:
        revision = {"revision": model.revision} if model.revision else {}
        raw, _ = loaded(model, lambda: PretrainedConfig.get_config_dict(model.name_or_path, **revision))
        notes += check_config_json(raw, f"{model.name_or_path}: config.json")
    config = loaded(model, lambda: AutoConfig.from_pretrained(model.name_or_path, **arguments_of(model)))
    if (request := rope.requested(model.rope)) is not None:
        notes += rope.apply(config, request)
    return config, notes


def load_causal(
    model: Model, config: PretrainedConfig, dtype: torch.dtype, quant: Quant = quantised.NOT_QUANTISED
) -> PreTrainedModel:
    """The bare model in ``dtype``, its inner linear layers in 4 bits where ``quant`` says so; weights that the files
    lack are an error, not a random start."""
    quantised.check_stored(config, model, quant)
    arguments = arguments_of(model) | quantised.loading(config, quant, dtype)
    if model.gguf_file:
        # Plain weights: left in GGUF blocks they could not be trained, nor saved.
        arguments["quantization_config"] = GgufConfig(dequantize=True)
    check_attention(model)
    # Weights of another shape are reported here and refused below, by name; transformers only logs their names.
    arguments |= {"output_loading_info": True, "ignore_mismatched_sizes": True, "attn_implementation": model.attn}
    if not model.gguf_file:
        arguments["use_safetensors"] = True  # a pickle can hold code
    load = AutoModelForCausalLM.from_pretrained
    result: Any = loaded(model, lambda: load(model.name_or_path, config=config, dtype=dtype, **arguments))
    causal, info = result
    if misfits := sorted(info["mismatched_keys"]):
        refuse_shapes(model, misfits)
    if missing := sorted(map(str, info["missing_keys"])):
        refuse_missing(model, type(causal).__name__, missing)
    if quant.bits:
        if model.gguf_file:
            quantised.pack(causal, quant, dtype)
        quantised.settle(causal, dtype)
        if not quantised.is_stored(config):
            quantised.unmarked(causal)  # an adapter's config.json is of the model, not of how a run held it
    return causal


def check_attention(model: Model) -> None:
    """Refused where the package that model.attn needs is missing."""
    if model.attn == "flash_attention_2" and find_spec("flash_attn") is None:
        raise Refused(
            'model.attn = "flash_attention_2" needs the package flash_attn, which is not installed. '
            'Fix: model.attn = "sdpa".'
        )


def disable_dropout(module: nn.Module) -> int:
    """Sets every dropout to 0 and returns how many there were.

    Scored with dropout, the policy's ratio and KL are noise from step 0 on. In train mode the model must stay, since
    gradient checkpointing is tied to it.
    """
    found = 0
    for part in module.modules():
        if isinstance(part, nn.Dropout) and part.p > 0:
            part.p, found = 0.0, found + 1
        attention = part.__dict__.get("attention_dropout")
        if isinstance(attention, float) and attention > 0:
            part.__dict__["attention_dropout"], found = 0.0, found + 1
    return found


@contextmanager
def adapter_off(peft: PeftModel) -> Iterator[None]:
    """The base model acts. PEFT's own ``disable_adapter`` also flips ``requires_grad``, which would part the parameters
    from the engine's gradient hooks; so does its ``set_adapter``."""
    layers = [layer for layer in peft.modules() if isinstance(layer, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


@contextmanager
def reference_adapter(peft: PeftModel) -> Iterator[None]:
    """The frozen start adapter acts instead of the trained one."""
    layers = [layer for layer in peft.modules() if isinstance(layer, BaseTunerLayer)]
    for layer in layers:
        layer._active_adapter = [REFERENCE_ADAPTER]
    try:
        yield
    finally:
        for layer in layers:
            layer._active_adapter = ["default"]


def adapter_weights(peft: PeftModel) -> dict[str, torch.Tensor]:
    """The trained adapter's tensors under the names that PEFT saves, without the frozen start adapter's."""
    return get_peft_model_state_dict(peft, adapter_name="default")


def add_adapter(causal: PreTrainedModel, lora: Lora) -> PeftModel | None:
    """The model with its new or continued adapter; None in full fine-tuning."""
    if not lora.r:
        return None
    return _continued(causal, lora) if lora.start_adapter else _fresh(causal, lora)


def _fresh(causal: PreTrainedModel, lora: Lora) -> PeftModel:
    targets: str | list[str] = "all-linear" if lora.targets == ("all-linear",) else list(lora.targets)
    if forbidden := {"lm_head", "embed_tokens"} & set(lora.targets):
        raise Refused(
            f"lora.targets holds {', '.join(sorted(forbidden))}: with tied embeddings an adapter there changes input "
            'and output alike, and exported adapters come apart. Fix: lora.targets = ["all-linear"], without them.'
        )
    # PEFT computes with a fraction too; a whole number is written as one, as other readers of the file expect it.
    alpha = int(lora.alpha) if lora.alpha.is_integer() else lora.alpha
    config = LoraConfig(
        r=lora.r, lora_alpha=cast(int, alpha), lora_dropout=lora.dropout, target_modules=targets, task_type="CAUSAL_LM"
    )
    try:
        return get_peft_model(causal, config, autocast_adapter_dtype=False)
    except ValueError as error:
        names = sorted(
            {name.rsplit(".", 1)[-1] for name, part in causal.named_modules() if isinstance(part, nn.Linear)}
        )
        raise Refused(
            f"lora.targets = {list(lora.targets)}: {str(error).rstrip('.')}. "
            f"This model's linear layers are {', '.join(names)}."
        ) from error


def _continued(causal: PreTrainedModel, lora: Lora) -> PeftModel:
    folder = Path(lora.start_adapter)
    saved = adapter_config(folder, lora)
    try:
        weights = load_peft_weights(str(folder), device="cpu")
        files = set(weights)
        _refuse_beyond_layers(folder, files)
        if spoilt := sorted(name for name in files if not weights[name].isfinite().all()):
            raise Refused(
                f"lora.start_adapter = {folder}: {len(spoilt)} of its {len(files)} weights are not finite (first: "
                f"{spoilt[0]}). Fix: take an adapter from before it diverged."
            )
        peft = PeftModel.from_pretrained(causal, str(folder), is_trainable=True, autocast_adapter_dtype=False)
        peft.load_adapter(str(folder), REFERENCE_ADAPTER, is_trainable=False, autocast_adapter_dtype=False)
    except Refused:
        raise
    except Exception as error:  # peft, safetensors and torch raise kinds of their own for a broken or foreign file
        raise Refused(
            f"lora.start_adapter = {folder}: PEFT cannot load it onto this model: {' '.join(str(error).split())[:400]} "
            f"Its base is {saved.get('base_model_name_or_path')}. Fix: train on that base, or copy the adapter again."
        ) from error
    # PEFT passes over names that it does not find, and leaves those adapters as they start: without effect.
    if differing := sorted(files ^ set(adapter_weights(peft))):
        raise Refused(
            f"lora.start_adapter = {folder}: its weights are not those of an adapter of this model: {len(differing)} "
            f"names differ (first: {', '.join(differing[:3])}). Its base is {saved.get('base_model_name_or_path')}. "
            "Fix: train on that base."
        )
    return peft


def _refuse_beyond_layers(folder: Path, names: set[str]) -> None:
    """``names``: of the adapter's weights. Refused where they hold more than low-rank updates of inner layers."""
    embeddings = ("embed_tokens", "lm_head")
    beyond = sorted(name for name in names if ".lora_" not in name or any(part in name for part in embeddings))
    if beyond:
        raise Refused(
            f"lora.start_adapter = {folder}: it holds {', '.join(beyond[:3])}, which are no low-rank updates of inner "
            "linear layers (modules_to_save, biases, or adapters on the embeddings). Switching the adapter off would "
            "not give the reference back, and tied embeddings would come apart in the export. Fix: merge it into its "
            "base and start from that model, or take an adapter of linear layers alone."
        )
