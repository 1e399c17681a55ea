"""The RoPE window: the scaling a run asks for, and how many tokens a model can hold."""

from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from trainer.config.sections import Rope
from trainer.errors import Refused
from trainer.models.rope_fields import ORIGINAL, YARN_TUNING, factor_problems, original_problems, ratio_warnings

# These can be asked for with a factor alone. longrope and llama3 come trained into a model.
ASKABLE = ("linear", "dynamic", "yarn")


@dataclass(frozen=True)
class RopeRequest:
    """The scaling that [model.rope] asks for."""

    type: str
    factor: float
    original_max_position_embeddings: int | None
    """Tokens of the window before scaling; None takes the model's."""


@dataclass(frozen=True)
class Window:
    """How many tokens (prompt and completion together) a model can hold."""

    limit: int
    rule: str
    """How the limit was derived, in words with the numbers."""
    unscaled: int
    """The window before scaling: up to here dynamic scaling changes nothing, and yarn or linear are not needed."""
    rope_type: str
    """"default" without scaling, "none" without RoPE settings, "per layer" where they differ by layer type."""


def requested(section: Rope) -> RopeRequest | None:
    """The scaling that [model.rope] asks for, None when it asks for none. Raises Refused with all that is odd."""
    kind, factor, original = section.type, section.factor, section.original_max_position_embeddings
    if not kind and not factor and not original:
        return None
    problems = []
    if kind not in ASKABLE:
        got = f"got {kind!r}" if kind else "missing beside the other keys, which would be ignored"
        problems.append(f"model.rope.type: {got}; expected {', '.join(ASKABLE)}, or no [model.rope] at all")
    problems += factor_problems("model.rope.factor", factor)
    key = f"model.rope.{ORIGINAL}"
    if original != 0 or isinstance(original, bool | float):
        problems += original_problems(key, original, None)
        if kind in ("linear", "dynamic"):
            problems.append(f"{key}: got {original!r}, but {kind} starts from max_position_embeddings; remove it")
    if problems:
        raise Refused("[model.rope] cannot be used.\n  " + "\n  ".join(problems))
    return RopeRequest(kind, float(factor), original or None)


def rope_settings(config: PretrainedConfig) -> dict[str, dict[str, Any]]:
    """RoPE settings by layer type; the single key "" where all layers share them; empty for a model without any."""
    text = config.get_text_config(decoder=True)
    settings = text.rope_parameters if hasattr(text, "rope_parameters") else None
    if not settings:
        return {}
    layers = {key: value for key, value in settings.items() if isinstance(value, dict)}
    return layers or {"": settings}


def apply(config: PretrainedConfig, request: RopeRequest) -> list[str]:
    """Writes the scaling into ``config``, before a model is built from it; returns what the user should know.

    Merged, not assigned: transformers 5 keeps rope_theta in the same dict, and replacing the dict loses it.
    """
    text = config.get_text_config(decoder=True)
    settings = rope_settings(config)
    if "" not in settings:
        why = f"sets RoPE by layer type ({', '.join(settings)})" if settings else "has no RoPE settings to scale"
        raise Refused(f"model.rope.type = {request.type!r}: a {text.model_type} model {why}. Fix: remove [model.rope].")
    current = settings[""]
    theta(config)  # refuses a config that lost it already
    if current["rope_type"] not in ("default", *ASKABLE):
        raise Refused(
            f"model.rope.type = {request.type!r}: this model was trained with rope_type {current['rope_type']!r}, "
            "which a factor cannot replace. Fix: remove [model.rope]."
        )
    longest, unscaled = text.max_position_embeddings, window(config).unscaled
    original = request.original_max_position_embeddings or unscaled
    if problems := original_problems(f"model.rope.{ORIGINAL}", original, longest):
        raise Refused(problems[0])
    notes = ratio_warnings(request.factor, original, longest) if request.type == "yarn" else []
    if current["rope_type"] not in ("default", request.type):
        notes.append(
            f"[model.rope] {request.type} x{request.factor:g} replaces the {current['rope_type']} "
            f"x{current['factor']:g} of the model's config"
        )
        current = {key: value for key, value in current.items() if key not in YARN_TUNING}
    merged = {key: value for key, value in current.items() if key not in ("type", ORIGINAL)}
    merged |= {"rope_type": request.type, "factor": request.factor}
    text.max_position_embeddings = unscaled
    if request.type == "yarn":
        merged[ORIGINAL] = original
        # Some versions of transformers take max_position_embeddings / original instead of the factor: make them agree.
        text.max_position_embeddings = int(original * request.factor)
        if hasattr(text, ORIGINAL):  # Phi-3's own attribute goes before the dict
            setattr(text, ORIGINAL, original)
    text.rope_parameters = merged
    return notes


def theta(config: PretrainedConfig, layer_type: str = "") -> float:
    """The base of the rotation. Raises Refused where the config lost it."""
    value = rope_settings(config)[layer_type].get("rope_theta")
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise Refused(
            f"rope_theta is {value!r} in the model's config, expected a number such as 1000000.0. Assigning "
            "rope_scaling or rope_parameters replaces the dict that holds it. Fix: put rope_theta back into it."
        )
    return float(value)


def window(config: PretrainedConfig) -> Window:
    """The limit of a model, from its config alone. Raises Refused where the config states none."""
    text = config.get_text_config(decoder=True)
    longest = text.max_position_embeddings if hasattr(text, "max_position_embeddings") else None
    if not isinstance(longest, int) or longest <= 0:
        raise Refused(
            f"The config of this {text.model_type} model states no context window: max_position_embeddings is "
            f"{longest!r}. Fix: add max_position_embeddings, in tokens, to its config.json."
        )
    stated = f"{text.attribute_map.get('max_position_embeddings', 'max_position_embeddings')} {longest}"
    settings = rope_settings(config)
    if "" not in settings:
        why = f"RoPE differs by layer: {', '.join(settings)}" if settings else "no RoPE settings"
        return Window(longest, f"{stated} ({why})", longest, "per layer" if settings else "none")
    parameters = settings[""]
    kind = parameters["rope_type"]
    if kind in ("linear", "dynamic"):
        factor = parameters["factor"]
        limit = int(longest * factor)
        return Window(limit, f"{kind} scaling: {stated} x factor {factor:g} = {limit}", longest, kind)
    if kind in ("yarn", "longrope"):
        original = parameters[ORIGINAL]
        # Phi-3 states the scaled window instead of a factor.
        factor = parameters.get("factor") or longest / original
        limit = int(original * factor)
        return Window(limit, f"{kind} scaling: {ORIGINAL} {original} x factor {factor:g} = {limit}", original, kind)
    trained_in = "no RoPE scaling" if kind == "default" else f"{kind} scaling is part of it"
    return Window(longest, f"{stated} ({trained_in})", longest, kind)
