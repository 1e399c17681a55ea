"""Trained weights, found: a checkpoint, or what a run ended with; and read again as the policy that they were."""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from trainer import run_status
from trainer.checkpoint import manifest
from trainer.checkpoint.manifest import Manifest
from trainer.checkpoint.store import STEP, Store
from trainer.config import RunConfig
from trainer.config.sections import Quant
from trainer.errors import NoCheckpoint, Refused
from trainer.launcher import say
from trainer.models.fingerprint import fingerprint
from trainer.models.policy import REFERENCE_ADAPTER, Policy, load_config, load_policy, load_tokenizer
from trainer.record.run_dir import RunDirectory, is_step

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}
"""safetensors' names of the dtypes that a run computes in."""


@dataclass(frozen=True)
class Source:
    """Weights that a run has left."""

    weights: Path
    """An adapter/ or a model/."""
    run_dir: Path
    config_file: Path
    """Of the run; it need not be there for an exported folder."""
    step: int | None
    """None: the end of the run."""
    base: str | None
    """Fingerprint of the base weights that the run began from, where it is known."""

    @property
    def is_adapter(self) -> bool:
        return (self.weights / "adapter_config.json").is_file()


def find(asked: Path, command: str) -> Source:
    """A checkpoint is taken as it is. Of a run directory, its newest valid checkpoint, whose files have hashes; where a
    finished run kept none of its end, what it ended with.

    ``command``: who asks, for the messages. Raises NoCheckpoint.
    """
    try:
        return _found(asked, command)
    except OSError as error:
        raise NoCheckpoint(f"{command}: {error.filename or asked}: cannot be read ({error.strerror}).") from error


def _found(asked: Path, command: str) -> Source:
    if (asked / manifest.NAME).is_file() or STEP.fullmatch(asked.name):
        return _of_checkpoint(asked, manifest.verify(asked))
    if not (asked / "config.toml").is_file():
        beside = f" Did you mean {asked.parent}?" if (asked.parent / "config.toml").is_file() else ""
        raise NoCheckpoint(
            f"{command}: {asked} is neither a checkpoint (no {manifest.NAME}) nor a run directory (no config.toml)."
            f"{beside}"
        )
    done, result = _done_at(asked), RunDirectory(asked).result()
    found = Store(asked).newest()
    if found and done in (None, found.manifest.step):
        for reason in found.skipped:
            say(f"passed over: {reason}")
        return _of_checkpoint(found.path, found.manifest)
    if done is None or result is None:
        raise NoCheckpoint(f"{command}: {asked} has no finished adapter or model, and no checkpoint.")
    return Source(result, asked, asked / "config.toml", None, None)


def _of_checkpoint(folder: Path, content: Manifest) -> Source:
    """``content``: of the verified folder."""
    weights = folder / ("adapter" if (folder / "adapter").is_dir() else "model")
    if (base := content.facts.sources.get("model.name_or_path")) is None:
        raise NoCheckpoint(f"{folder / manifest.NAME}: it does not say of which base weights it is.")
    return Source(weights, folder.resolve().parent.parent, folder / "config.toml", content.step, base)


def _done_at(run_dir: Path) -> int | None:
    """The step at which the run was done; None: it is not."""
    status = run_status.read(run_dir)
    return status["step"] if status.get("state") == "done" and is_step(status.get("step")) else None


def load_source(
    source: Source, config: RunConfig, dtype: torch.dtype, quant: Quant, *, own_code: bool = False
) -> Policy:
    """The policy as it was trained, on a base held as ``quant`` says. Raises Refused for an adapter of another.

    ``own_code``: of a whole model may run; ``config`` says so of the base alone.
    """
    tokenizer = load_tokenizer(config.model)
    if not source.is_adapter:
        here = {"name_or_path": str(source.weights), "revision": "", "gguf_file": "", "trust_remote_code": own_code}
        model = config.model.model_copy(update=here)
        return load_policy(model, load_config(model)[0], config.lora.model_copy(update={"r": 0}), tokenizer, dtype)
    if not config.lora.r:
        raise Refused(
            f"{source.weights} is an adapter, and the run file trains whole models: lora.r = 0. Fix: the run file that "
            "it was trained with, or --lora.r and --lora.alpha as its adapter_config.json says."
        )
    lora = config.lora.model_copy(update={"start_adapter": str(source.weights)})
    policy = load_policy(config.model, load_config(config.model)[0], lora, tokenizer, dtype, quant)
    assert policy.peft is not None
    policy.peft.delete_adapter(REFERENCE_ADAPTER)
    return policy


def check_base(source: Source, config: RunConfig, policy: Policy) -> None:
    """Refused where an adapter lies on other base weights than it was trained on."""
    if policy.peft and source.base and not config.lora.start_adapter and fingerprint(policy.causal) != source.base:
        raise Refused(
            f"model.name_or_path = {config.model.name_or_path}: its weights are not those that the run began from, so "
            "that the adapter does not belong to them. Fix: bring the base model back as it was, or name it: "
            "--model.name_or_path PATH."
        )


def stored_dtype(weights: Path) -> torch.dtype:
    """What the weights were trained in."""
    try:
        with safe_open(min(weights.glob("*.safetensors")), "pt") as file:
            return DTYPES[file.get_slice(min(file.keys())).get_dtype()]
    except (SafetensorError, OSError, ValueError, KeyError) as error:  # cut; no file or tensor; another dtype
        raise NoCheckpoint(
            f"{weights}: no weights that a run has written, safetensors in {' or '.join(DTYPES)}: "
            f"{type(error).__name__}: {error}. Fix: copy the whole folder again."
        ) from error
