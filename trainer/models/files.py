"""The files around the weights, in a form that transformers 4.45 and every later version read alike."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from trainer.models.rope import rope_settings
from trainer.models.rope_fields import ORIGINAL

OUTSIDE = ("rope_theta", "partial_rotary_factor")
"""Beside ``rope_scaling`` before transformers 5, inside ``rope_parameters`` since."""


def write_model(causal: PreTrainedModel, folder: Path) -> None:
    """Weights and config.json. One process, with whole parameters."""
    causal.save_pretrained(folder, state_dict=causal.state_dict())
    write_config(causal.config, folder)


def write_config(config: PretrainedConfig, folder: Path) -> None:
    """config.json with the RoPE settings in both forms."""
    config.save_pretrained(folder)
    settings = rope_settings(config).get("")
    if settings is not None:
        _edit(folder / "config.json", lambda content: content | _both_forms(settings))


def _both_forms(settings: dict[str, Any]) -> dict[str, Any]:
    """transformers 5 keeps all in ``rope_parameters``, where earlier readers find no base and rotate with 10000.

    yarn: where the window before scaling is stated in ``rope_scaling``, 4.45 to 4.51 take max_position_embeddings for
    it and 4.52 takes their ratio for the factor, so that no number suits both. Without it all take
    max_position_embeddings for the window and the factor for the factor. What reads ``rope_parameters`` finds both.
    """
    scaling = {key: value for key, value in settings.items() if key not in (*OUTSIDE, ORIGINAL)}
    legacy: dict[str, Any] = {key: settings[key] for key in OUTSIDE if key in settings}
    if settings["rope_type"] == "yarn" and ORIGINAL in settings:
        legacy["max_position_embeddings"] = settings[ORIGINAL]
    elif ORIGINAL in settings:
        scaling[ORIGINAL] = settings[ORIGINAL]
    return legacy | {
        "rope_parameters": settings,
        "rope_scaling": None if scaling["rope_type"] == "default" else scaling,
    }


def write_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """The tokenizer with its template inside tokenizer_config.json, where transformers before 4.56 alone looks.

    Its further special tokens go by the name of before transformers 5: a list under the new one stops 4.52 to 4.57.
    """
    tokenizer.save_pretrained(folder, save_jinja_files=False)

    def renamed(content: dict[str, Any]) -> dict[str, Any]:
        if isinstance(content.get("extra_special_tokens"), list):
            content["additional_special_tokens"] = content.pop("extra_special_tokens")
        return content

    _edit(folder / "tokenizer_config.json", renamed)


def write_generation_config(generation_config: GenerationConfig, stop_ids: Sequence[int], folder: Path) -> None:
    """The checkpoint's own settings, with every stop id, so that generate() ends where the rollouts ended.

    Not through save_pretrained, which refuses what some checkpoints hold (a temperature without sampling).
    """
    file = folder / "generation_config.json"
    generation_config.to_json_file(file)

    def completed(content: dict[str, Any]) -> dict[str, Any]:
        # With this mark generate() would go back to what config.json says.
        content.pop("_from_model_config", None)
        return content | ({"eos_token_id": list(stop_ids)} if stop_ids else {})

    _edit(file, completed)


def name_base(folder: Path, base: str, revision: str) -> None:
    """What adapter_config.json names as its base model."""
    named = {"base_model_name_or_path": base, "revision": revision or None}
    _edit(folder / "adapter_config.json", lambda content: content | named)


def _edit(file: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    content = change(json.loads(file.read_text(encoding="utf-8")))
    file.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
