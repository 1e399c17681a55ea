"""The RoPE that a model really computes, compared with what its config says and with another model's.

A config is only a wish: a class may ignore a scaling, a cast may round the frequencies, a base may be lost on the way.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from trainer.errors import Refused
from trainer.models.rope import rope_settings, theta
from trainer.models.rope_fields import ORIGINAL

# fp32 powers on different devices differ by about 1e-6; bf16 rounding by 4e-3, fp16 by 5e-4.
TOLERANCE = 1e-5


@dataclass(frozen=True)
class BuiltRope:
    """One rotary module as it stands in a model."""

    module: str
    """Its name in the model."""
    layer_type: str
    """"" where all layers share it."""
    rope_type: str
    inv_freq: Tensor
    """(D/2,) fp32 on the CPU, radians a token; D = rotated dimensions of a head."""
    dtype: torch.dtype
    """As the model holds inv_freq."""
    attention_scaling: float

    @property
    def theta(self) -> float:
        """The base, read off the first two frequencies, which no long-context scaling bends at real head sizes."""
        ratio = (self.inv_freq[0] / self.inv_freq[1]).item() if len(self.inv_freq) > 1 else math.nan
        return ratio ** len(self.inv_freq)


def inspect_built(model: PreTrainedModel) -> list[BuiltRope]:
    """The rotary modules of a model's decoder; empty where positions are learned or otherwise not rotary modules."""
    found = []
    decoder = model.get_decoder()
    for path, buffer in decoder.named_buffers():
        if not path.endswith("inv_freq") or path.endswith("original_inv_freq"):
            continue
        name, _, key = path.rpartition(".")
        module = decoder.get_submodule(name)
        layer_type = key.removesuffix("inv_freq").removesuffix("_")
        kind = module.rope_type if hasattr(module, "rope_type") else "default"
        scaling = f"{layer_type}_attention_scaling" if layer_type else "attention_scaling"
        found.append(
            BuiltRope(
                module=name,
                layer_type=layer_type,
                rope_type=kind[layer_type] if isinstance(kind, dict) else kind,
                inv_freq=buffer.detach().to("cpu", torch.float32),
                dtype=buffer.dtype,
                # Classes from before transformers 4.45 know no scaling of the attention.
                attention_scaling=float(getattr(module, scaling)) if hasattr(module, scaling) else 1.0,
            )
        )
    return found


def expected_inv_freq(config: PretrainedConfig, layer_type: str = "") -> tuple[Tensor, float] | None:
    """(D/2,) fp64 inverse frequencies and the attention factor that a config asks for, up to the unscaled window.

    Our own calculation, from the papers: RoPE (arXiv 2104.09864), position interpolation (2306.15595), YaRN
    (2309.00071), LongRoPE (2402.13753), Llama 3.1. None for a type that it does not know.
    """
    text = config.get_text_config(decoder=True)
    settings = rope_settings(config)[layer_type]
    # HunYuan scales the base with alpha in its own class; Gemma 4's head size differs from layer to layer.
    if "alpha" in settings or (hasattr(text, "is_heterogeneous") and text.is_heterogeneous):
        return None
    head_dim = text.head_dim if hasattr(text, "head_dim") else None
    head_dim = head_dim or text.hidden_size // text.num_attention_heads
    dim = int(head_dim * settings.get("partial_rotary_factor", 1.0))
    base = theta(config, layer_type)
    plain = base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    kind = settings["rope_type"]
    if kind in ("default", "dynamic"):
        return plain, 1.0
    if kind == "linear":
        return plain / settings["factor"], 1.0
    if kind == "yarn":
        return _yarn(plain, base, settings)
    if kind == "llama3":
        return _llama3(plain, settings), 1.0
    if kind == "longrope":
        factor = settings.get("factor") or text.max_position_embeddings / settings[ORIGINAL]
        grown = math.sqrt(1 + math.log(factor) / math.log(settings[ORIGINAL])) if factor > 1 else 1.0
        short = torch.tensor(settings["short_factor"], dtype=torch.float64)
        return plain / short, settings.get("attention_factor") or grown
    return None


def _yarn(plain: Tensor, base: float, settings: dict[str, Any]) -> tuple[Tensor, float]:
    """Fast dimensions keep their frequency, slow ones are divided by the factor, a ramp lies between."""
    half = len(plain)
    factor, original = settings["factor"], settings[ORIGINAL]

    def dimension_of(turns: float) -> float:
        """Index of the frequency that makes so many turns within the original window."""
        return half * math.log(original / (turns * 2 * math.pi)) / math.log(base)

    low = dimension_of(settings.get("beta_fast") or 32)
    high = dimension_of(settings.get("beta_slow") or 1)
    if settings.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    width = high - low or 0.001
    slow = ((torch.arange(half, dtype=torch.float64) - low) / width).clamp(0, 1)
    inv_freq = plain * (1 - slow) + plain / factor * slow

    def attention(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale, mscale_all = settings.get("mscale"), settings.get("mscale_all_dim")
    computed = attention(mscale) / attention(mscale_all) if mscale and mscale_all else attention(1.0)
    given = settings.get("attention_factor")
    return inv_freq, computed if given is None else given


def _llama3(plain: Tensor, settings: dict[str, Any]) -> Tensor:
    """By turns within the original window: many keep their frequency, few are divided by the factor, between blends."""
    turns = settings[ORIGINAL] * plain / (2 * math.pi)
    low, high = settings["low_freq_factor"], settings["high_freq_factor"]
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * keep + plain / settings["factor"] * (1 - keep)


def check_built(model: PreTrainedModel, what: str) -> None:
    """Refused where the rotary modules of ``what`` ("policy", "reference") are not what its config says."""
    settings = rope_settings(model.config)
    built = inspect_built(model)
    scaled = [part["rope_type"] for part in settings.values() if part["rope_type"] != "default"]
    if scaled and not built:
        raise Refused(
            f"The {what}'s config asks for RoPE scaling ({', '.join(scaled)}), but {type(model).__name__} has no "
            "rotary module that could apply it. Fix: remove it ([model.rope], or rope_parameters in config.json)."
        )
    for rope in built:
        expected = expected_inv_freq(model.config, rope.layer_type) if rope.layer_type in settings else None
        if expected is not None and not _equal((rope.inv_freq, rope.attention_scaling), expected):
            raise Refused(_difference(rope, settings[rope.layer_type], expected, what))


def same_rope(policy: PreTrainedModel, reference: PreTrainedModel) -> None:
    """Refused where the two models rotate differently: their KL would measure positions, not behaviour."""
    ours, theirs = inspect_built(policy), inspect_built(reference)
    for one, other in zip(ours, theirs, strict=False):
        if not _equal((one.inv_freq, one.attention_scaling), (other.inv_freq, other.attention_scaling)):
            raise Refused(
                f"Policy and reference rotate positions differently.\n  policy: {_words(one)}\n"
                f"  reference: {_words(other)}\n{SAME_BASE}"
            )
    if len(ours) != len(theirs):
        raise Refused(f"The policy has {len(ours)} rotary modules, the reference {len(theirs)}. {SAME_BASE}")


SAME_BASE = "Fix: give both the same config.json; [model.rope] applies to both alike."


def _equal(one: tuple[Tensor, float], other: tuple[Tensor, float]) -> bool:
    (freq, scaling), (freq_other, scaling_other) = one, other
    if freq.shape != freq_other.shape or not math.isclose(scaling, scaling_other, rel_tol=TOLERANCE):
        return False
    return torch.allclose(freq.double(), freq_other.double(), rtol=TOLERANCE, atol=0.0)


def _words(rope: BuiltRope) -> str:
    return (
        f"{rope.module} {rope.rope_type}, rope_theta about {rope.theta:.6g}, {len(rope.inv_freq)} frequencies "
        f"{rope.inv_freq[0]:.6g} .. {rope.inv_freq[-1]:.6g}, attention factor {rope.attention_scaling:.6g}"
    )


def _difference(rope: BuiltRope, settings: dict[str, Any], expected: tuple[Tensor, float], what: str) -> str:
    freq, scaling = expected
    if rope.dtype != torch.float32:
        why = f"inv_freq was rounded to {rope.dtype}. Fix: cast the parameters only, buffers stay float32."
    elif settings["rope_type"] == "dynamic":
        why = "a sequence beyond the unscaled window changed the base. Fix: use yarn or linear, or shorter sequences."
    else:
        why = (
            f"{what}'s class ignores what the config asks, or the config was changed after the model was built. "
            "Fix: remove the scaling, or set it before the model is built ([model.rope])."
        )
    return (
        f"The {what}'s RoPE is not what its config says.\n  config: {settings['rope_type']}, rope_theta "
        f"{settings['rope_theta']:g}, {len(freq)} frequencies {freq[0]:.6g} .. {freq[-1]:.6g}, attention factor "
        f"{scaling:.6g}\n  built: {_words(rope)}\n{why[0].upper()}{why[1:]}"
    )
