"""The model without its weights: class, shapes, RoPE and adapters as they will be, built in a second from its config;
and what the headers of its files say."""

import copy
from pathlib import Path

import torch
from accelerate import init_empty_weights
from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from trainer.config.sections import Lora, Model
from trainer.errors import Refused
from trainer.models.policy import add_adapter
from trainer.models.scorer import TokenScorer, check_head
from trainer.models.source import loaded, refuse_missing, refuse_pickles, refuse_shapes
from trainer.outside import read

Shapes = dict[str, tuple[int, ...]]
"""By name of a weight."""

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
MINIATURE_TOKENS = 64
LOGITS = 20.0
"""Standard deviation of the miniature's logits."""


def build(model: Model, config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Parameters on the meta device, which hold nothing; buffers, RoPE's frequencies among them, as they will be."""
    own = copy.deepcopy(config)
    make, remote = AutoModelForCausalLM.from_config, model.trust_remote_code
    with init_empty_weights(include_buffers=False):
        causal = loaded(model, lambda: make(own, dtype=dtype, trust_remote_code=remote))
    causal.tie_weights()
    return causal


def with_adapter(causal: PreTrainedModel, lora: Lora) -> tuple[int, int]:
    """Adds the adapter to a model without weights; returns how many of its parameters train, and how many there are.

    Refused where lora.targets or lora.start_adapter do not fit the model.
    """
    with init_empty_weights(include_buffers=False):
        peft = add_adapter(causal, lora)
    module = causal if peft is None else peft
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in module.parameters()]
    return sum(size for size, trained in sizes if trained), sum(size for size, _ in sizes)


def miniature(config: PretrainedConfig) -> PreTrainedModel:
    """A random model of the same class without layers, for 64 tokens: what happens between hidden state and logits is
    that of the whole one."""
    own = copy.deepcopy(config)
    text = own.get_text_config(decoder=True)
    text.num_hidden_layers, text.vocab_size = 0, MINIATURE_TOKENS
    if "layer_types" in vars(text):
        text.layer_types = []
    text.pad_token_id = text.bos_token_id = text.eos_token_id = None
    causal = AutoModelForCausalLM.from_config(own, dtype=torch.float32, trust_remote_code=False).eval()
    head = causal.get_output_embeddings().weight
    with torch.no_grad():  # logits as large as a trained model's: capping leaves small ones as they are
        head *= LOGITS / (head.std() * head.shape[1] ** 0.5)
    return causal


def check_head_of(config: PretrainedConfig, temperature: float) -> None:
    """`check_head`, of a miniature. A class that cannot be made so small is checked when it is loaded, as all are."""
    try:
        small = miniature(config)
    except Exception:  # a class may want layers, or say so in any way
        return
    check_head(TokenScorer(small, temperature))


def check_files(model: Model, causal: PreTrainedModel) -> str:
    """Refused where the safetensors files lack weights of ``causal``, or hold them in other shapes; their headers are
    read, not the weights. Where that cannot be told, returns why; the weights are then checked as they are loaded."""
    if model.gguf_file:
        return "a GGUF file is checked as it is loaded"
    if causal.config.to_dict().get("quantization_config"):
        return "quantised files are checked as they are loaded"
    files = _files(model)
    if isinstance(files, str):
        return files
    found: Shapes = {}
    for file in files:
        found |= _header(model, file)
    if get_model_conversion_mapping(causal, add_legacy=False) or any(
        name.endswith((".gamma", ".beta")) for name in found
    ):
        return f"weights of {type(causal).__name__} are stored under other names: they are checked as they are loaded"
    _compare(model, causal, found)
    return ""


def is_here(model: Model) -> bool:
    """The weights lie on this machine, in a folder or in the hub's cache."""
    return Path(model.name_or_path).is_dir() or any(_cached(model, name) for name in (WEIGHTS, INDEX))


def _compare(model: Model, causal: PreTrainedModel, found: Shapes) -> None:
    wanted: Shapes = {name: tuple(tensor.shape) for name, tensor in causal.state_dict().items()}
    if not found.keys() & wanted.keys():  # of the bare model, whose names lack the first part
        found = {f"{causal.base_model_prefix}.{name}": shape for name, shape in found.items()}
    # Of weights that are one tensor, any may be in the files.
    for one, other in causal.all_tied_weights_keys.items():
        if {one, other} & found.keys():
            for name in {one, other} - found.keys():
                wanted.pop(name, None)
    if misfits := [(name, found[name], shape) for name, shape in wanted.items() if found.get(name, shape) != shape]:
        refuse_shapes(model, sorted(misfits))
    if missing := sorted(wanted.keys() - found.keys()):
        refuse_missing(model, type(causal).__name__, missing)


def _files(model: Model) -> list[Path] | str:
    """The safetensors files, or why they cannot be looked at. Refused where there are no weights, or a part is
    missing."""
    folder = Path(model.name_or_path)
    if not folder.is_dir():
        cached = [_cached(model, name) for name in (WEIGHTS, INDEX)]
        if not any(cached):
            return f"the weights of {model.name_or_path} are not on this machine yet: they are checked once they are"
        folder = next(path for path in cached if path is not None).parent
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        if any(folder.glob("pytorch_model*.bin*")):
            refuse_pickles(model)
        raise Refused(
            f"model.name_or_path = {model.name_or_path}: no weights there, neither {WEIGHTS} nor {INDEX}. Fix: copy "
            "the whole folder; for a GGUF file give model.gguf_file."
        )
    try:
        names = set(read(folder / INDEX)["weight_map"].values())
        parts = sorted(folder / name for name in names if Path(name).name == name)
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise Refused(f"{folder / INDEX}: damaged ({type(error).__name__}: {error}). Fix: copy it again.") from error
    if len(parts) < len(names):
        raise Refused(f"{folder / INDEX}: it names files outside of its folder. Fix: copy it again.")
    if absent := [part.name for part in parts if not part.is_file()]:
        raise Refused(
            f"{folder}: {len(absent)} of {len(parts)} files that {INDEX} names are missing "
            f"({', '.join(absent[:5])}). Fix: copy or download them again."
        )
    return parts


def _cached(model: Model, name: str) -> Path | None:
    found = try_to_load_from_cache(model.name_or_path, name, revision=model.revision or None)
    return Path(found) if isinstance(found, str) else None


def _header(model: Model, file: Path) -> Shapes:
    try:
        with safe_open(file, framework="pt") as tensors:
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise Refused(
            f"model.name_or_path = {model.name_or_path}: {file.name} is cut or damaged: {error}. Fix: copy it again."
        ) from error
