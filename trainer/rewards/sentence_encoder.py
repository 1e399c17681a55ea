"""A sentence encoder's network as sentence-transformers lays it out in a folder: modules.json names a transformer, how
its states become one vector (1_Pooling), and what follows (2_Dense, 2_Normalize)."""

import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from trainer.errors import Refused
from trainer.outside import read

Features = dict[str, Tensor]
"""token_embeddings (B, L, H) and attention_mask (B, L), then sentence_embedding (B, D)."""

MODULES = "modules.json"
LEGACY_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
ACTIVATIONS: dict[str, type[nn.Module]] = {
    "torch.nn.modules.linear.Identity": nn.Identity,
    "torch.nn.modules.activation.Tanh": nn.Tanh,
    "torch.nn.modules.activation.ReLU": nn.ReLU,
    "torch.nn.modules.activation.GELU": nn.GELU,
}
MODULE = re.compile(
    r"sentence_transformers\.(models|(base|sentence_transformer)\.modules)(\.[a-z_]+)?"
    r"\.(Transformer|Pooling|Dense|Normalize|LayerNorm|Dropout|CNN|LSTM|WeightedLayerPooling)"
)
"""Those of sentence-transformers that load numbers alone. A Router, say, imports whatever its own file names."""
EXTRA = "pip install 'zero-grpo[embed]' reads it with sentence-transformers"


@dataclass(frozen=True)
class Stage:
    """A line of modules.json after the transformer."""

    type: str
    """Dotted name of its class in sentence-transformers."""
    folder: Path
    settings: dict[str, Any]

    @property
    def name(self) -> str:
        return self.type.rpartition(".")[2]


def read_stages(folder: Path, where: str) -> list[Stage]:
    """Refused where the folder does not say how token states become one vector, or names code of its own."""
    if not (folder / MODULES).is_file():
        raise Refused(
            f"{where}: no {MODULES} there, so it does not say how token states become one vector (CLS or mean). Fix: "
            'the whole folder of a sentence encoder; a reward model (…ForSequenceClassification) is kind = "model".'
        )
    listed = sorted(_json(folder / MODULES), key=lambda line: line["idx"])
    if foreign := [line["type"] for line in listed if not MODULE.fullmatch(line["type"])]:
        raise Refused(
            f"{where}: {MODULES} names {', '.join(foreign)}, none of the modules that load numbers alone; code "
            "of its own is never run."
        )
    first, *others = [line["type"].endswith(".Transformer") for line in listed] or [False]
    if not first or any(others) or listed[0]["path"]:
        raise Refused(f"{where}: {MODULES} does not name one Transformer, the first, in the folder itself.")
    stages = []
    for line in listed[1:]:
        inside = folder / line["path"]
        if not inside.resolve().is_relative_to(folder.resolve()):
            raise Refused(f"{where}: {MODULES} names {line['path']}, outside of its folder.")
        stages.append(Stage(line["type"], inside, _json(inside / "config.json")))
        activation = stages[-1].settings.get("activation_function", "torch.nn.modules.activation.Tanh")
        if not re.fullmatch(r"torch\.nn\.modules\.\w+\.\w+", str(activation)):
            raise Refused(f"{where}: {line['path']}/config.json names {activation}, code that is never run.")
    return stages


def pooling_of(stages: list[Stage]) -> str:
    """`cls`, `mean`, or several, joined by a plus."""
    modes = [mode for stage in stages if stage.name == "Pooling" for mode in _modes(stage.settings)]
    return "+".join(modes) or "no pooling"


class SentenceEncoder(nn.Module):
    """Tokens in, one vector of length 1 for each row out."""

    def __init__(self, transformer: nn.Module, stages: nn.ModuleList) -> None:
        super().__init__()
        self.transformer, self.stages = transformer, stages

    def forward(self, **tokens: Tensor) -> Tensor:
        """(B, D) fp32."""
        states = self.transformer(**tokens).last_hidden_state
        features = {"token_embeddings": states, "attention_mask": tokens["attention_mask"]}
        for stage in self.stages:
            features = stage(features)
        return nn.functional.normalize(features["sentence_embedding"].float(), dim=-1)


def build_stages(stages: list[Stage], dtype: torch.dtype, where: str) -> nn.ModuleList:
    """With weights from their files, never untrained. By sentence-transformers where it is installed, which has more of
    them than the three here; both give the same vectors within 1e-5."""
    if importlib.util.find_spec("sentence_transformers") is not None:
        from sentence_transformers.util import import_from_string

        built = [import_from_string(stage.type).load(str(stage.folder)) for stage in stages]
    else:
        built = [_own(stage, where) for stage in stages]
    return nn.ModuleList(built).to(dtype)


def _own(stage: Stage, where: str) -> nn.Module:
    made: dict[str, Callable[[Stage, str], nn.Module]] = {"Pooling": Pooling, "Dense": Dense, "Normalize": Normalize}
    if stage.name not in made:
        raise Refused(f"{where}: {MODULES} names {stage.name}, which is none of {', '.join(made)}. Fix: {EXTRA}.")
    return made[stage.name](stage, where)


class Pooling(nn.Module):
    def __init__(self, stage: Stage, where: str) -> None:
        super().__init__()
        modes = _modes(stage.settings)
        if modes not in (["cls"], ["mean"]):
            raise Refused(f"{where}: pooling {'+'.join(modes)}, which is neither cls nor mean. Fix: {EXTRA}.")
        self.cls = modes == ["cls"]

    def forward(self, features: Features) -> Features:
        states, mask = features["token_embeddings"], features["attention_mask"].unsqueeze(-1)
        # Rows are padded on the right, so that the first token is a real one.
        pooled = states[:, 0] if self.cls else (states * mask).sum(dim=1) / mask.sum(dim=1)
        return features | {"sentence_embedding": pooled}


class Dense(nn.Module):
    """A trained projection."""

    def __init__(self, stage: Stage, where: str) -> None:
        super().__init__()
        settings = stage.settings
        activation = settings.get("activation_function", "torch.nn.modules.activation.Tanh")
        other = {"module_input_name", "module_output_name", "use_residual"} & settings.keys()
        plain = all(settings[key] in (False, None, "sentence_embedding") for key in other)
        if activation not in ACTIVATIONS or not plain:
            raise Refused(f"{where}: {stage.folder.name}/config.json is no plain layer ({activation}). Fix: {EXTRA}.")
        self.linear = nn.Linear(settings["in_features"], settings["out_features"], bias=settings.get("bias", True))
        self.activation = ACTIVATIONS[activation]()
        self.load_state_dict(_weights(stage.folder, where))

    def forward(self, features: Features) -> Features:
        return features | {"sentence_embedding": self.activation(self.linear(features["sentence_embedding"]))}


class Normalize(nn.Module):
    def __init__(self, stage: Stage, where: str) -> None:
        super().__init__()

    def forward(self, features: Features) -> Features:
        return features | {"sentence_embedding": nn.functional.normalize(features["sentence_embedding"], dim=-1)}


def _modes(settings: dict[str, Any]) -> list[str]:
    """In the form of before sentence-transformers 5.3, a flag a mode, and since."""
    if "pooling_mode" in settings:
        modes = settings["pooling_mode"]
        return [modes] if isinstance(modes, str) else list(modes)
    return [mode for flag, mode in LEGACY_MODES.items() if settings.get(flag)] or ["mean"]


def _weights(folder: Path, where: str) -> dict[str, Tensor]:
    if (file := folder / "model.safetensors").is_file():
        return load_file(file)
    if (file := folder / "pytorch_model.bin").is_file():
        return torch.load(file, map_location="cpu", weights_only=True)
    raise Refused(
        f"{where}: {folder.name} has no weights, neither model.safetensors nor pytorch_model.bin. A projection that "
        "was never trained makes random rewards. Fix: copy the whole folder."
    )


def _json(file: Path) -> Any:
    return read(file) if file.is_file() else {}
