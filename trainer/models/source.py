"""Where a model comes from: a folder, a hub name or a GGUF file, and what is said when it cannot be had."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from transformers.utils import cached_file

from trainer.config.sections import Lora, Model
from trainer.errors import Refused
from trainer.outside import NotJson, read
from trainer.record.memory import asked_of_memory

T = TypeVar("T")

OLLAMA_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?:[\w.-]+")
COMMIT = re.compile(r"[0-9a-f]{40}")
PICKLES, SAFE = re.compile(r"pytorch_model.*\.bin(\.index\.json)?"), re.compile(r"model.*\.safetensors(\.index\.json)?")
LFS_POINTER = b"version https://git-lfs"
MEGATRON = "megatron.core"
"""PEFT's own megatron_core, not imported without a megatron_config; it imports by no other key of an adapter."""
SECONDS_TO_REACH_THE_HUB = 10.0
A_PICKLE = "a pickle, which can hold code and is not read"
POLICY = "model.name_or_path"
"""The key of a run file that names a model, unless it is another's, as a reward's path."""


def arguments_of(model: Model) -> dict[str, Any]:
    """What every ``from_pretrained`` of this model gets beside its name."""
    arguments: dict[str, Any] = {"trust_remote_code": model.trust_remote_code}
    if model.revision:
        arguments["revision"] = model.revision
    if model.gguf_file:
        try:
            import gguf  # noqa: F401  (an extra; transformers' own message names no package of ours)
        except ImportError as error:
            raise Refused("model.gguf_file needs the package gguf. Fix: pip install 'zero-grpo[gguf]'.") from error
        arguments["gguf_file"] = model.gguf_file
    return arguments


def local_file(model: Model, name: str) -> Path | None:
    """A file of the model's folder; None for a hub name."""
    folder = Path(model.name_or_path)
    return folder / name if folder.is_dir() else None


def loaded(model: Model, load: Callable[[], T], key: str = POLICY, kind: str = "causal language model") -> T:
    """``load()``, with what is wrong with the path, the name or the files said in one message.

    ``key`` is what names the model in the run file, ``kind`` what it should be.
    """
    if Path(model.name_or_path).is_dir():
        _check_folder(model, Path(model.name_or_path), key)
        fix = "the folder needs config.json, weights and tokenizer, whole and of one model; copy it again"
    else:
        _check_name(model, key)
        fix = f"give the name of a {kind} on the hub, or the folder of one"
    try:
        if model.trust_remote_code:
            _check_own_code(model)
        return load()
    except Refused:
        raise
    except Exception as error:  # transformers, safetensors, tokenizers and gguf raise kinds of their own
        if asked_of_memory(error):
            raise
        reason = " ".join(str(error).split())[:400] or type(error).__name__
        if "trust_remote_code" in str(error) and not model.trust_remote_code:
            fix = "another model; or, of code that you have read, --model.trust_remote_code true on the command line"
        raise Refused(f"{key} = {model.name_or_path}: transformers cannot load it: {reason}\nFix: {fix}.") from error


def adapter_config(folder: Path, lora: Lora) -> dict[str, Any]:
    """adapter_config.json of the adapter that a run goes on from. Refused where it is not of a LoRA as the run's, or
    its weights are not there as safetensors."""
    where = f"lora.start_adapter = {folder}"
    try:
        saved = read(folder / "adapter_config.json")
    except (OSError, NotJson) as error:
        raise Refused(f"{where}: adapter_config.json: {error}. Expected a folder that PEFT saved.") from error
    if not isinstance(saved, dict) or not isinstance(saved.get("base_model_name_or_path"), str | None):
        raise Refused(
            f"{where}: adapter_config.json is not one that PEFT saved. Expected an object, with the name of the base "
            "as text in base_model_name_or_path. Fix: copy the whole folder again."
        )
    if (saved.get("r"), saved.get("lora_alpha")) != (lora.r, lora.alpha):
        raise Refused(
            f"{where}: its r and lora_alpha are {saved.get('r')} and {saved.get('lora_alpha')}, the run file's lora.r "
            f"and lora.alpha are {lora.r} and {lora.alpha}. Fix: set lora.r = {saved.get('r')} and "
            f"lora.alpha = {saved.get('lora_alpha')}."
        )
    if saved.get("peft_type") != "LORA":
        raise Refused(f"{where}: its peft_type is {saved.get('peft_type')}, expected LORA.")
    if saved.get("megatron_config") or saved.get("megatron_core", MEGATRON) not in (None, MEGATRON):
        raise Refused(
            f"{where}: adapter_config.json names {saved.get('megatron_core')!r} as megatron_core, which PEFT would "
            "import, whatever code it is. Expected an adapter of plain linear layers. Fix: take out megatron_config "
            "and megatron_core, or another adapter."
        )
    if not (folder / "adapter_model.safetensors").is_file():
        fix = "copy the whole folder"
        if (folder / "adapter_model.bin").is_file():
            fix = f"save it as safetensors; adapter_model.bin is {A_PICKLE}"
        raise Refused(f"{where}: no adapter_model.safetensors there. Fix: {fix}.")
    return saved


def refuse_pickles(model: Model) -> NoReturn:
    """Of a model whose weights are in pytorch_model.bin alone."""
    raise Refused(
        f"{POLICY} = {model.name_or_path}: its weights are in pytorch_model.bin, {A_PICKLE}. Expected "
        "model.safetensors. Fix: a revision with safetensors; or, of a file that you trust, load it once with "
        "transformers' from_pretrained and save it with save_pretrained."
    )


def refuse_shapes(model: Model, misfits: Sequence[tuple[str, Sequence[int], Sequence[int]]]) -> None:
    """``misfits``: name of a weight, its shape in the files and by config.json."""
    first = [f"{name} is {list(here)}, config.json wants {list(there)}" for name, here, there in misfits[:3]]
    raise Refused(
        f"{model.name_or_path}: {len(misfits)} weights do not have the shape of config.json "
        f"(first: {'; '.join(first)}). Fix: use config.json and weights of one model."
    )


def refuse_missing(model: Model, kind: str, missing: Sequence[str]) -> None:
    """``missing``: names of weights of a model of class ``kind``."""
    raise Refused(
        f"{model.name_or_path}: the files lack {len(missing)} weights of {kind} "
        f"(first: {', '.join(missing[:5])}), which would start at random. Fix: use a complete checkpoint."
    )


def _check_folder(model: Model, folder: Path, key: str) -> None:
    if model.gguf_file:
        if not (folder / model.gguf_file).is_file():
            present = ", ".join(sorted(file.name for file in folder.glob("*.gguf"))) or "no .gguf file"
            raise Refused(f"model.gguf_file = {model.gguf_file}: not in {folder}. Present: {present}.")
    elif not (folder / "config.json").is_file():
        raise Refused(f"{key} = {folder}: no config.json there. {_instead_of_a_config(folder, key)}")
    for file in (*folder.glob("*.safetensors"), *folder.glob("*.gguf"), *folder.glob("tokenizer.json")):
        with file.open("rb") as stream:
            if stream.read(len(LFS_POINTER)) == LFS_POINTER:
                raise Refused(f"{file} is a git-lfs pointer, not the file itself. Fix: git lfs pull, in {folder}.")


def _instead_of_a_config(folder: Path, key: str) -> str:
    if (folder / "adapter_config.json").is_file():
        alone = key != POLICY
        fix = "merge it into its base model" if alone else f"{key} = its base model, lora.start_adapter = {folder}"
        return f"It is an adapter. Fix: {fix}."
    if key == POLICY and (files := sorted(file.name for file in folder.glob("*.gguf"))):
        return f'Fix: model.gguf_file = "{files[0]}".'
    inside = sorted(file.parent for file in folder.glob("*/config.json"))
    if inside:
        return f"Did you mean {inside[0]}?"
    return "Fix: give the folder that holds config.json, weights and tokenizer."


def _check_own_code(model: Model) -> None:
    """Refused where the code would come from another repository: at whatever commit that has at the time."""
    for name in ("config.json", "tokenizer_config.json"):
        absent = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
        file = cached_file(model.name_or_path, name, revision=model.revision or None, **absent)
        found = read(Path(file)) if file else {}
        named = str(found.get("auto_map"))
        if "--" in named:
            raise Refused(
                f"model.trust_remote_code: {name} of {model.name_or_path} names code of another repository, which no "
                f"commit pins: auto_map = {named:.200}. Fix: a folder with that code in it, and auto_map without `--`."
            )


def _check_name(model: Model, key: str) -> None:
    name = model.name_or_path
    path = Path(name)
    if path.is_file():
        if path.suffix == ".gguf" and key == POLICY:
            raise Refused(
                f'model.name_or_path = {name} is a file. Fix: model.name_or_path = "{path.parent}", '
                f'model.gguf_file = "{path.name}".'
            )
        raise Refused(f"{key} = {name} is a file. Fix: give the folder of the model.")
    if OLLAMA_NAME.fullmatch(name) and key == POLICY:
        raise Refused(
            f"model.name_or_path = {name} reads like a name of ollama's, whose quantised files cannot be trained as "
            "they are. Fix: the hub name of the same model, such as Qwen/Qwen2.5-7B-Instruct; or a GGUF file of it, "
            "which is dequantised: its folder as model.name_or_path, its name as model.gguf_file."
        )
    if name.startswith(("/", ".", "~")) or name.count("/") > 1 or path.suffix == ".gguf":
        raise Refused(f"{key} = {name}: no such folder, seen from {Path.cwd()}. Fix: correct the path.")
    _check_hub(model, key)


def _check_hub(model: Model, key: str) -> None:
    """One plain request: the loaders would try for half a minute before they say less."""
    name, file = model.name_or_path, model.gguf_file or "config.json"
    if model.trust_remote_code and not COMMIT.fullmatch(model.revision):
        raise Refused(
            f"model.trust_remote_code = true would run whatever code {name} has at the time. Expected the commit whose "
            f"code you have read, got model.revision = {model.revision!r}. Fix: all 40 digits of it as model.revision."
        )
    try:
        if isinstance(try_to_load_from_cache(name, file, revision=model.revision or None), str):
            return
    except HFValidationError as error:
        raise Refused(
            f"{key} = {name!r}: no folder of that name in {Path.cwd()}, and no name that a model on the hub can have: "
            f"{error} Fix: give the model's folder, or its name on the hub as OWNER/MODEL."
        ) from None
    where = f"{key} = {name}: no folder of that name in {Path.cwd()}, and"
    try:
        found = HfApi().model_info(name, revision=model.revision or None, timeout=SECONDS_TO_REACH_THE_HUB)
        files = [one.rfilename for one in found.siblings or ()]
        if key == POLICY and any(PICKLES.fullmatch(one) for one in files) and not any(map(SAFE.fullmatch, files)):
            refuse_pickles(model)
    except Refused:
        raise
    except RevisionNotFoundError:
        raise Refused(f"model.revision = {model.revision}: {name} has no such branch, tag or commit.") from None
    except RepositoryNotFoundError:
        fix = "Fix: correct the name; a private model needs HF_TOKEN."
        raise Refused(f"{where} the hub has no such model. {fix}") from None
    except OfflineModeIsEnabled:
        raise Refused(f"{where} HF_HUB_OFFLINE forbids to ask the hub. Fix: give the model's folder.") from None
    except HfHubHTTPError:
        return  # a mirror without this request, a token that expired: the loaders say what they meet
    except Exception as error:  # what the HTTP client raises, whose name depends on the hub client's version
        raise Refused(
            f"{where} the hub cannot be reached: {error}. Fix: give a model's folder; or check the network "
            "(HF_ENDPOINT may name a mirror)."
        ) from None
