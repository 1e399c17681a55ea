"""``zero-grpo export``: a checkpoint, or a finished run, as an adapter or a model that other tools load."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from trainer.checkpoint import manifest
from trainer.checkpoint.card import load_line, read_records
from trainer.checkpoint.deliver import deliver
from trainer.checkpoint.gguf import convert
from trainer.checkpoint.ollama import write_modelfile
from trainer.checkpoint.store import STEP, Store
from trainer.checkpoint.weights import kind
from trainer.config import RunConfig, load
from trainer.config.fields import literal
from trainer.config.sections import Quant
from trainer.errors import NoCheckpoint, Refused, Stopped
from trainer.launcher import say
from trainer.models import quantised
from trainer.models.fingerprint import fingerprint
from trainer.models.merge import merge
from trainer.models.policy import REFERENCE_ADAPTER, Policy, load_config, load_policy, load_tokenizer
from trainer.models.reload import logits, probes, relative_gap
from trainer.record.run_dir import RunDirectory, check_can_write

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}
"""safetensors' names of the dtypes that a run computes in."""


@dataclass(frozen=True)
class Source:
    """What is exported."""

    weights: Path
    """An adapter/ or a model/."""
    run_dir: Path
    config_file: Path
    step: int | None
    """None: the end of the run."""
    base: str | None
    """Fingerprint of the base weights that the run began from, where it is known."""


@dataclass(frozen=True)
class Options:
    """The flags of the command."""

    merge: bool = False
    ollama: bool = False
    gguf_converter: str = ""


def export_checkpoint(asked: Path, out: Path, overrides: Sequence[str] = (), options: Options = Options()) -> None:
    """Exports what ``asked`` means into ``out``, verified, and says so. One process.

    Raises Refused for a command that cannot work, NoCheckpoint for a damaged checkpoint, Stopped where what was written
    is not what was trained.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise Refused(f"export: {out} exists and is not an empty folder; nothing is overwritten. Fix: another OUT.")
    check_can_write(out, "OUT of export")
    source = find(asked)
    config, trained = load(str(source.config_file), overrides), load(str(source.config_file)).quant
    _check_options(source, config, trained, options)
    say(f"exporting {source.weights} ...")
    policy = _load(source, config, trained)
    _check_base(source, config, policy)
    if options.merge:
        policy = _merged(source, config, policy)
    try:
        verified = deliver(policy, out, config, read_records(source.run_dir, source.step), merged=options.merge)
    except OSError as error:
        raise Stopped(f"export: {out} cannot be written: {error}. Fix: another OUT, or more room.") from error
    say(
        f"loaded again and compared: {verified.tensors} tensors equal bit for bit, logits within {verified.gap:.2g} of "
        f"the largest (allowed: {verified.allowed:g})"
    )
    say(f"load it: {load_line(str(out), config, kind(policy), policy.dtype)}")
    if options.ollama or options.gguf_converter:
        _for_ollama(policy, out, config, options.gguf_converter)


def _check_options(source: Source, config: RunConfig, trained: Quant, options: Options) -> None:
    whole = source.weights.name == "model"
    if config.quant != trained and not (options.merge and trained.bits and not config.quant.bits):
        raise Refused(
            f"export: the run had quant.bits = {trained.bits}, quant.double_quant = {literal(trained.double_quant)}: "
            "another base is another policy. Fix: leave them as they are; of 4-bit runs, --merge --quant.bits 0 merges "
            "into the unquantised weights."
        )
    if options.merge and whole:
        raise Refused(
            f"export --merge: {source.weights} is a whole model, with no adapter to merge. Leave --merge out."
        )
    if not options.gguf_converter:
        return
    if not Path(options.gguf_converter).is_file():
        raise Refused(
            f"--gguf-converter {options.gguf_converter}: no such file. Expected llama.cpp's convert_hf_to_gguf.py."
        )
    if not (whole or options.merge):
        raise Refused("--gguf-converter makes one file of a whole model, and this is an adapter. Fix: add --merge.")


def _for_ollama(policy: Policy, out: Path, config: RunConfig, converter: str) -> None:
    commands = write_modelfile(policy, out, config)
    say(f"for Ollama: {out / 'Modelfile'}")
    if converter:
        gap = convert(policy, out, Path(converter))
        say(f"converted, read by transformers and compared: logits within {gap:.2g} of the largest")
        commands = commands[1:]
    say("next:" if converter else "next, with llama.cpp's scripts:")
    for command in commands:
        say(f"  {command}")


def find(asked: Path) -> Source:
    """A checkpoint is taken as it is. Of a run directory, its newest valid checkpoint, whose files have hashes; where a
    finished run kept none of its end, what it ended with."""
    if (asked / manifest.NAME).is_file() or STEP.fullmatch(asked.name):
        return _checkpoint(asked)
    if not (asked / "config.toml").is_file():
        beside = f" Did you mean {asked.parent}?" if (asked.parent / "config.toml").is_file() else ""
        raise NoCheckpoint(
            f"export: {asked} is neither a checkpoint (no {manifest.NAME}) nor a run directory (no config.toml)."
            f"{beside}"
        )
    done, result = _done_at(asked), RunDirectory(asked).result()
    found = Store(asked).newest()
    if found and done in (None, found.manifest.step):
        for reason in found.skipped:
            say(f"passed over: {reason}")
        return _checkpoint(found.path)
    if done is None or result is None:
        raise NoCheckpoint(f"export: {asked} has no finished adapter or model, and no checkpoint.")
    return Source(result, asked, asked / "config.toml", None, None)


def _checkpoint(folder: Path) -> Source:
    content = manifest.verify(folder)
    weights = folder / ("adapter" if (folder / "adapter").is_dir() else "model")
    base = content.facts.sources["model.name_or_path"]
    return Source(weights, folder.resolve().parent.parent, folder / "config.toml", content.step, base)


def _done_at(run_dir: Path) -> int | None:
    """The step at which the run was done; None: it is not."""
    file = run_dir / "run_status.json"
    if not file.is_file():
        return None
    status = json.loads(file.read_text(encoding="utf-8"))
    return int(status["step"]) if status["state"] == "done" else None


def _merged(source: Source, config: RunConfig, policy: Policy) -> Policy:
    """The adapter in its base weights, and which those are. Consumes ``policy``, which is as it was trained."""
    packed = bool(quantised.layers(policy.causal))
    sequences = probes(policy.causal)
    trained = logits(policy.causal, sequences) if packed else []
    if packed and not config.quant.bits:
        policy = _load(source, config, config.quant)
    policy, gap = merge(policy)
    say(f"merged in fp32: logits within {gap:.2g} of the largest; written as {_name(policy.dtype)}")
    if packed and config.quant.bits:
        say(
            "  into dequantised weights, the numbers that the 4 bits stand for, as the adapter was trained on them. "
            "--quant.bits 0 takes the weights as they were before"
        )
    elif packed:
        apart = relative_gap(logits(policy.causal, sequences), trained)
        say(
            "  into the weights as they were before they were quantised, as asked: another model than was trained, "
            f"whose logits differ by up to {apart:.2g} of the largest"
        )
    return policy


def _load(source: Source, config: RunConfig, quant: Quant) -> Policy:
    """The policy as it was trained, in the dtype that it was trained in."""
    tokenizer = load_tokenizer(config.model)
    dtype = _dtype(source.weights)
    if source.weights.name == "model":
        here = {"name_or_path": str(source.weights), "revision": "", "gguf_file": ""}
        model = config.model.model_copy(update=here)
        return load_policy(model, load_config(model)[0], config.lora.model_copy(update={"r": 0}), tokenizer, dtype)
    lora = config.lora.model_copy(update={"start_adapter": str(source.weights)})
    policy = load_policy(config.model, load_config(config.model)[0], lora, tokenizer, dtype, quant)
    assert policy.peft is not None
    policy.peft.delete_adapter(REFERENCE_ADAPTER)
    return policy


def _check_base(source: Source, config: RunConfig, policy: Policy) -> None:
    if policy.peft and source.base and not config.lora.start_adapter and fingerprint(policy.causal) != source.base:
        raise Refused(
            f"model.name_or_path = {config.model.name_or_path}: its weights are not those that the run began from, so "
            "that the adapter does not belong to them. Fix: bring the base model back as it was, or name it: "
            "--model.name_or_path PATH."
        )


def _dtype(weights: Path) -> torch.dtype:
    with safe_open(min(weights.glob("*.safetensors")), "pt") as file:
        name = file.get_slice(next(iter(file.keys()))).get_dtype()
    return DTYPES[name]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
