"""A result that other tools load: written beside its place, loaded again and compared, and only then renamed."""

import os
import shutil
from pathlib import Path

import torch

from trainer.checkpoint import weights
from trainer.checkpoint.card import Records, card
from trainer.config import Model, RunConfig
from trainer.data.stops import stop_ids
from trainer.models import files
from trainer.models.policy import Policy, load_causal, load_config
from trainer.models.reload import Verified, verify


@torch.no_grad()
def deliver(policy: Policy, target: Path, config: RunConfig, records: Records, *, merged: bool = False) -> Verified:
    """Writes ``target`` on one process, with whole parameters. What lay there goes when the new one is verified.

    Raises Stopped where what was written is not the policy; it is left in ``<target>.unverified``.
    """
    staged = target.with_name(f"{target.name}.unverified")
    shutil.rmtree(staged, ignore_errors=True)
    weights.save(policy, staged)
    _add_around(policy, staged, target, config.model)
    verified = verify(policy, staged, config.model, config.quant)
    what = "merged" if merged else weights.kind(policy)
    (staged / "README.md").write_text(card(target.name, what, config, records, verified), encoding="utf-8")
    _place(staged, target)
    return verified


def _add_around(policy: Policy, staged: Path, target: Path, model: Model) -> None:
    """Tokenizer with template, generation config with every stop id, and what an adapter needs to find its base."""
    stops = stop_ids(policy.tokenizer, policy.generation_config).ids
    folders = [staged]
    if policy.peft is not None:
        base, revision = model.name_or_path, model.revision
        if model.gguf_file:
            base, revision = str(target.resolve() / "base"), ""
            folders.append(staged / "base")
            files.write_model(load_causal(model, load_config(model)[0], policy.dtype), staged / "base")
        elif model.rope.type:
            files.write_config(policy.causal.config, staged)
        files.name_base(staged, str(Path(base).resolve()) if Path(base).is_dir() else base, revision)
    for folder in folders:
        files.write_tokenizer(policy.tokenizer, folder)
        files.write_generation_config(policy.generation_config, stops, folder)


def _place(staged: Path, target: Path) -> None:
    """One rename; an older result at the same place is moved aside first and removed last."""
    older = target.with_name(f"{target.name}.older")
    shutil.rmtree(older, ignore_errors=True)
    if target.exists():
        os.rename(target, older)
    os.rename(staged, target)
    shutil.rmtree(older, ignore_errors=True)
