"""What the RoPE settings of a model's config.json may say, and its number of layers.

transformers logs a warning for most odd values and goes on, or fails later with a KeyError, so they are refused here,
before it reads them.
"""

import difflib
import math
from collections.abc import Mapping
from typing import Any, Literal

from trainer.errors import Refused

REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "proportional": (),
}
YARN_TUNING = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
ORIGINAL = "original_max_position_embeddings"
OPTIONAL: dict[str, tuple[str, ...]] = {
    "yarn": (ORIGINAL, *YARN_TUNING),
    "longrope": (ORIGINAL, "factor", "attention_factor"),
    "llama3": (ORIGINAL,),
    "proportional": ("factor",),
}
# Every type may carry these: the type, the base, and what single architectures add (transformers lists those as
# `ignore_keys_at_rope_validation`; HunYuan's own code reads `alpha`).
COMMON = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
OF_AN_ARCHITECTURE = (
    *("mrope_section", "mrope_interleaved", "interleaved", "llama_4_scaling_beta"),
    *("max_position_embeddings", "alpha"),
)
# Old names that the architecture's own config class translates.
TRANSLATED = ("su", "mrope", "axial")
# null means "left out" for these; transformers breaks on a null anywhere else.
NULLABLE = ("factor", *YARN_TUNING)
POSITIVE = (
    *("rope_theta", "partial_rotary_factor", "attention_factor", "beta_fast", "beta_slow"),
    *("low_freq_factor", "high_freq_factor"),
)
# Each takes a millisecond or more to build, also without weights.
LAYERS, MOST_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 1000


def factor_problems(key: str, value: object) -> list[str]:
    """Why ``value`` is no scaling factor; empty when it is one."""
    return _number_problems(key, value, ">= 1", lowest=1.0)


def original_problems(key: str, value: object, longest: object) -> list[str]:
    """Why ``value`` is not the window before scaling of a model whose max_position_embeddings is ``longest``."""
    if isinstance(value, bool) or not isinstance(value, int):
        return [f"{key}: got {value!r} ({type(value).__name__}), expected a whole number of tokens"]
    if value <= 0:
        return [f"{key}: got {value}, expected a number of tokens > 0; leave it out for max_position_embeddings"]
    if isinstance(longest, int) and value > longest:
        return [
            f"{key}: got {value}, expected at most max_position_embeddings {longest}, "
            "since scaling starts from the window that the model has"
        ]
    return []


def ratio_warnings(factor: float, original: int, longest: int) -> list[str]:
    """What to say when a yarn factor is not the ratio of the two windows that the model states."""
    if longest in (original, int(original * factor)):
        return []
    return [
        f"yarn factor {factor:g} is not max_position_embeddings {longest} / {ORIGINAL} {original} = "
        f"{longest / original:g}; the factor counts: the window is {int(original * factor)} tokens"
    ]


def check_config_json(raw: Mapping[str, Any], where: str) -> list[str]:
    """Checks depth and the RoPE part of a config.json as its file says it; returns what the user should know.

    ``where`` names the file in messages. Raises Refused with all problems at once.
    """
    text = raw["text_config"] if isinstance(raw.get("text_config"), dict) else raw
    deep = [name for name in LAYERS if type(text.get(name)) is int and text[name] > MOST_LAYERS]
    _refuse([f"{name}: got {text[name]}, expected {MOST_LAYERS} or fewer" for name in deep], where)
    problems = _number_problems("rope_theta", text["rope_theta"], "> 0") if "rope_theta" in text else []
    scaling, parameters = text.get("rope_scaling"), text.get("rope_parameters")
    # transformers 5 takes rope_scaling when a file has both.
    name, settings = ("rope_scaling", scaling) if scaling else ("rope_parameters", parameters)
    if settings is not None and not isinstance(settings, dict):
        got = f"got {settings!r} ({type(settings).__name__})"
        problems.append(f'{name}: {got}, expected an object such as {{"rope_type": "yarn", "factor": 4.0}}')
    _refuse(problems, where)
    if not settings:
        return []
    layers = {f"{name}.{key}": value for key, value in settings.items() if isinstance(value, dict)}
    parts = layers or {name: settings}
    problems = [problem for prefix, part in parts.items() for problem in _problems(prefix, part, text)]
    has_theta = "rope_theta" in text or all("rope_theta" in part for part in parts.values())
    if name == "rope_scaling" and not has_theta and isinstance(parameters, dict) and "rope_theta" in parameters:
        problems.append(
            f"rope_scaling: replaces rope_parameters, so that its rope_theta {parameters['rope_theta']!r} is lost; "
            "move the keys of rope_scaling into rope_parameters and remove rope_scaling"
        )
    _refuse(problems, where)
    notes = [f"{where}: {note}" for prefix, part in parts.items() for note in _yarn_notes(prefix, part, text)]
    if not has_theta:
        notes.append(f"{where}: no rope_theta; transformers takes the default of the architecture (mostly 10000)")
    return notes


def _problems(prefix: str, part: Mapping[str, Any], text: Mapping[str, Any]) -> list[str]:
    """What is wrong with one set of RoPE settings."""
    part = {key: value for key, value in part.items() if not (value is None and key in NULLABLE)}
    kind = part.get("rope_type", part.get("type"))
    if kind is None and set(part) <= {*COMMON, *OF_AN_ARCHITECTURE}:
        kind = "default"  # {"rope_theta": 1e6} alone asks for no scaling
    if kind in TRANSLATED:
        return []
    if not isinstance(kind, str) or kind not in REQUIRED:
        got = f"missing beside {', '.join(part)}, which would be ignored" if kind is None else f"got {kind!r}"
        return [f"{prefix}.rope_type: {got}; expected one of {', '.join(REQUIRED)}"]
    problems = [f"{prefix}.{key}: missing; rope_type {kind!r} needs it" for key in REQUIRED[kind] if key not in part]
    problems += _unknown_keys(prefix, part, kind)
    if kind != "default" and "factor" in part:
        problems += factor_problems(f"{prefix}.factor", part["factor"])
    if ORIGINAL in OPTIONAL.get(kind, ()) and ORIGINAL in part:
        problems += original_problems(f"{prefix}.{ORIGINAL}", part[ORIGINAL], text.get("max_position_embeddings"))
    for key in POSITIVE:
        if key in part:
            problems += _number_problems(f"{prefix}.{key}", part[key], "> 0")
    for key in ("short_factor", "long_factor"):
        if key in part and not (isinstance(part[key], list) and all(isinstance(x, int | float) for x in part[key])):
            problems.append(f"{prefix}.{key}: got {part[key]!r}, expected a list of numbers")
    return problems


def _unknown_keys(prefix: str, part: Mapping[str, Any], kind: str) -> list[str]:
    own = (*COMMON, *REQUIRED[kind], *OPTIONAL.get(kind, ()))
    problems = []
    for key in part:
        if key not in own and key not in OF_AN_ARCHITECTURE:
            close = difflib.get_close_matches(key, own, n=1)
            meant = f"did you mean {close[0]!r}? " if close else ""
            problems.append(
                f"{prefix}.{key}: unknown for rope_type {kind!r}, it would be ignored; {meant}Known: {', '.join(own)}"
            )
    return problems


def _yarn_notes(prefix: str, part: Mapping[str, Any], text: Mapping[str, Any]) -> list[str]:
    longest = text.get("max_position_embeddings")
    if part.get("rope_type", part.get("type")) != "yarn" or not isinstance(longest, int):
        return []
    if ORIGINAL not in part:
        return [f"{prefix} has no {ORIGINAL}; max_position_embeddings {longest} is taken"]
    return ratio_warnings(part["factor"], part[ORIGINAL], longest)


def _number_problems(key: str, value: object, expected: Literal["> 0", ">= 1"], lowest: float = 0.0) -> list[str]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return [f"{key}: got {value!r} ({type(value).__name__}), expected a number {expected}"]
    if not math.isfinite(value) or value < lowest or value <= 0:
        return [f"{key}: got {value!r}, expected a number {expected}"]
    return []


def _refuse(problems: list[str], where: str) -> None:
    if problems:
        listed = "\n  ".join(problems)
        raise Refused(f"{where}: settings that cannot be used.\n  {listed}\nFix: edit the file.")
