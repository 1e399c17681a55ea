"""``zero-grpo export``: a checkpoint, or a finished run, as an adapter or a model that other tools load."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from trainer.checkpoint.card import lm_eval_line, load_line, read_records
from trainer.checkpoint.deliver import deliver
from trainer.checkpoint.gguf import convert
from trainer.checkpoint.ollama import write_modelfile
from trainer.checkpoint.trained import Source, check_base, find, load_source, stored_dtype
from trainer.checkpoint.weights import kind
from trainer.config import RunConfig, load, load_foreign
from trainer.config.fields import literal
from trainer.config.sections import Quant
from trainer.errors import Refused, Stopped
from trainer.launcher import say
from trainer.models import quantised
from trainer.models.merge import merge
from trainer.models.policy import Policy
from trainer.models.reload import logits, probes, relative_gap
from trainer.record.run_dir import check_can_write


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
    source = find(asked, "export")
    config, trained = load_foreign(str(source.config_file), overrides), load(str(source.config_file)).quant
    _check_options(source, config, trained, options)
    say(f"exporting {source.weights} ...")
    policy = load_source(source, config, stored_dtype(source.weights), trained, own_code=config.model.trust_remote_code)
    check_base(source, config, policy)
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
    if benchmark := lm_eval_line(str(out), config.model, kind(policy)):
        say(f"public benchmarks, with EleutherAI's lm-eval: {benchmark}")
    if options.ollama or options.gguf_converter:
        _for_ollama(policy, out, config, options.gguf_converter)


def _check_options(source: Source, config: RunConfig, trained: Quant, options: Options) -> None:
    whole = not source.is_adapter
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


def _merged(source: Source, config: RunConfig, policy: Policy) -> Policy:
    """The adapter in its base weights, and which those are. Consumes ``policy``, which is as it was trained."""
    packed = bool(quantised.layers(policy.causal))
    sequences = probes(policy.causal)
    trained = logits(policy.causal, sequences) if packed else []
    if packed and not config.quant.bits:
        policy = load_source(source, config, stored_dtype(source.weights), config.quant)
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


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
