"""4-bit base weights under adapters (QLoRA, arXiv 2305.14314): bitsandbytes' NF4, blocks of 64 with a scale each."""

from importlib.util import find_spec
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from transformers import BitsAndBytesConfig, PretrainedConfig, PreTrainedModel

from trainer.config.sections import Model, Quant
from trainer.errors import Refused

if TYPE_CHECKING:
    from bitsandbytes.nn import Linear4bit

NOT_QUANTISED = Quant()
STORAGE = torch.bfloat16
"""What the packed bytes, two weights each, are called: ZeRO partitions and gathers tensors of floats."""


def check_backend(quant: Quant, device: torch.device) -> None:
    """Refused where bitsandbytes is missing or cannot compute on this device: one small layer is tried."""
    if not quant.bits:
        return
    fix = f"Fix: pip install -U bitsandbytes (a build for {device.type}); or quant.bits = 0"
    if find_spec("bitsandbytes") is None:
        raise Refused(f"quant.bits = 4 needs the package bitsandbytes, which is not installed. {fix}.")
    try:
        layer = _packed(nn.Linear(64, 64, bias=False), quant, torch.float32)
        layer.to(device)(torch.ones(1, 64, device=device))
    except Exception as error:  # a library that is missing, or was built for other devices, fails in many ways
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise Refused(f"quant.bits = 4: bitsandbytes cannot compute on {device.type}: {reason}. {fix}.") from error


def is_stored(config: PretrainedConfig) -> bool:
    """The model's files hold quantised weights."""
    return bool(config.to_dict().get("quantization_config"))


def check_stored(config: PretrainedConfig, model: Model, quant: Quant) -> list[str]:
    """What the user should know of a model whose files are quantised. Refused unless they are bitsandbytes' NF4."""
    stored = config.to_dict().get("quantization_config")
    if not stored:
        return []
    method, kind = stored.get("quant_method", "bitsandbytes"), stored.get("bnb_4bit_quant_type", "fp4")
    where = f"model.name_or_path = {model.name_or_path}: its files hold weights quantised by"
    plain = "the model as it was before, often under the same name without a suffix"
    if (method, bool(stored.get("load_in_4bit")), kind) != ("bitsandbytes", True, "nf4"):
        raise Refused(
            f"{where} {method}{f' ({kind})' if stored.get('load_in_4bit') else ''}, which cannot be trained on here. "
            f"Fix: {plain}, with quant.bits = 4."
        )
    if not quant.bits:
        raise Refused(f"{where} {method}, 4 bits each, quant.bits = 0. Fix: quant.bits = 4; or {plain}.")
    return ["the base weights are 4-bit in the model's files, and are taken as they are (quant.double_quant too)"]


def loading(config: PretrainedConfig, quant: Quant, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments of ``from_pretrained``.

    On the CPU, each weight as it is read: what is packed does not depend on the card, and no rank holds the whole
    model unpacked.
    """
    if not quant.bits:
        return {}
    packing = {} if is_stored(config) else {"quantization_config": bits_and_bytes(quant, dtype)}
    return {"device_map": {"": "cpu"}, **packing}


def bits_and_bytes(quant: Quant, dtype: torch.dtype) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quant.type,
        bnb_4bit_use_double_quant=quant.double_quant,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=STORAGE,
    )


def pack(causal: PreTrainedModel, quant: Quant, dtype: torch.dtype) -> None:
    """Packs the linear layers of a model in memory, all but the head, as transformers does with those that it reads."""
    head = causal.get_output_embeddings()
    for name, linear in list(causal.named_modules()):
        if type(linear) is nn.Linear and linear is not head:
            causal.set_submodule(name, _packed(linear, quant, dtype))
    vars(causal)["is_loaded_in_4bit"] = True  # PEFT asks for it


def settle(causal: PreTrainedModel, dtype: torch.dtype) -> None:
    """One compute dtype, one storage, and weights that stay as they are. Called once, before any forward pass."""
    for layer in layers(causal).values():
        # With it, bitsandbytes' own forward pass re-packs the weights in place, on CPUs with AVX512-BF16 in eval mode
        # without gradients, their scales rounded to 8 bits. Training would go on with other weights, or fail.
        layer.support_avx512bf16_for_cpu = False
        vars(layer)["forward"] = MethodType(_Product.apply_to, layer)
        compute_in(layer, dtype)
        weight: Any = layer.weight
        if weight.dtype != STORAGE:  # a view: a cast would change the bytes
            weight.data = weight.data.flatten().view(STORAGE)[:, None]
        weight.quant_storage = layer.quant_storage = STORAGE


def compute_in(layer: "Linear4bit", dtype: torch.dtype) -> None:
    """Forward and backward pass unpack the weights to ``dtype``."""
    layer.compute_dtype, layer.compute_type_is_set = dtype, True
    vars(layer.weight)["quant_state"].dtype = dtype


def layers(module: nn.Module) -> dict[str, "Linear4bit"]:
    """The 4-bit layers by name; with adapters, the layers below them."""
    if find_spec("bitsandbytes") is None:
        return {}
    from bitsandbytes.nn import Linear4bit

    return {name: part for name, part in module.named_modules() if isinstance(part, Linear4bit)}


def parts(parameter: nn.Parameter) -> list[Tensor]:
    """What a parameter's values are made of: itself, or packed bytes, scales, and the scales of scales."""
    if not is_packed(parameter):
        return [parameter.detach()]
    state = vars(parameter)["quant_state"]
    scales = [state.absmax, *([state.state2.absmax, state.offset] if state.nested else [])]
    return [parameter.detach().view(torch.uint8), *scales]


def is_packed(parameter: nn.Parameter) -> bool:
    return vars(parameter).get("quant_state") is not None


def unpacked(layer: "Linear4bit") -> Tensor:
    """(out, in) weights in the compute dtype: the numbers that the layer computes with."""
    from bitsandbytes.functional import dequantize_4bit

    weight: Any = layer.weight
    return dequantize_4bit(weight.data, weight.quant_state)


def unmarked(causal: PreTrainedModel) -> None:
    """Takes off what transformers remembers of the packing, by which it would write and reload the model."""
    if quantizer := vars(causal).get("hf_quantizer"):
        quantizer.remove_quantization_config(causal)
    vars(causal).pop("_weight_conversions", None)  # back into a packed form, which transformers cannot do


class _Product(Function):
    """x W' + b. bitsandbytes' own keeps W itself for the backward pass, so that under ZeRO-3 every weight that was
    gathered once stays whole until then, checkpointing or not. This one keeps the layer, whose weight ZeRO-3 takes away
    after the forward pass and brings back for the backward pass."""

    @staticmethod
    def apply_to(layer: "Linear4bit", hidden: Tensor) -> Tensor:
        return _Product.apply(hidden, layer)

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, layer: "Linear4bit") -> Tensor:
        from bitsandbytes import matmul_4bit

        ctx.layer = layer
        weight: Any = layer.weight
        return matmul_4bit(hidden, weight, bias=layer.bias, quant_state=weight.quant_state)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ unpacked(ctx.layer), None


def _packed(linear: nn.Linear, quant: Quant, dtype: torch.dtype) -> "Linear4bit":
    from bitsandbytes.nn import Linear4bit, Params4bit

    layer = Linear4bit(linear.in_features, linear.out_features, bias=False, compute_dtype=dtype, device="meta")
    weight: Any = Params4bit(
        linear.weight.data,
        quant_type=quant.type,
        compress_statistics=quant.double_quant,
        quant_storage=STORAGE,
        module=layer,
    )
    layer.weight, layer.bias = weight.to("cpu"), linear.bias  # which packs it
    return layer
