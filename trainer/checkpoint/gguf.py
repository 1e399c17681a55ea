"""A GGUF file of a whole model: llama.cpp's converter is run, and its file compared with the policy."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from trainer.config import Model
from trainer.errors import Refused, Stopped
from trainer.models.policy import Policy, load_causal, load_config
from trainer.models.reload import SAME_DEVICE, logits, probes, relative_gap
from trainer.models.rope import rope_settings, window
from trainer.models.rope_fields import ORIGINAL

MODEL = "model.gguf"


def outtype(policy: Policy) -> str:
    """The converter's name of the policy's dtype, which keeps every bit."""
    return "bf16" if policy.dtype == torch.bfloat16 else "f32"


def convert(policy: Policy, folder: Path, converter: Path) -> float:
    """Runs llama.cpp's convert_hf_to_gguf.py on the whole model in ``folder``, loads ``model.gguf`` with transformers,
    and returns how far its logits are from the policy's, relative to the largest. Consumes ``policy``.

    Refused where the converter fails, Stopped where the file is not the policy.
    """
    model = Model(name_or_path=str(folder), gguf_file=MODEL)
    target = folder / MODEL
    command = [sys.executable, str(converter), str(folder), "--outfile", str(target), "--outtype", outtype(policy)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode or not target.is_file():
        said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-3:])
        raise Refused(
            f"--gguf-converter: {' '.join(command)} failed (exit code {done.returncode}):\n{said}\n"
            f"{folder} is complete without it. Fix: install what the converter imports, or convert elsewhere."
        )
    settings = rope_settings(policy.causal.config).get("", {})
    config = load_config(model)[0]
    if settings.get("rope_type") in ("linear", "yarn"):
        _check_scaling(target, settings)
        config.rope_parameters = dict(settings)  # transformers leaves a GGUF file's scaling out
        _set_context_length(target, window(policy.causal.config).limit)
    # In fp32, where the 16 bits of the file are exact; the policy alike.
    found = load_causal(model, config, torch.float32).eval()
    policy.causal.float()
    sequences = probes(policy.causal)
    gap = relative_gap(logits(found, sequences), logits(policy.causal, sequences))
    if not gap <= SAME_DEVICE:
        raise Stopped(
            f"{target} is not the exported model: read by transformers, its logits differ by {gap:.3g} of the largest, "
            f"allowed are {SAME_DEVICE:g}. Do not use it; another llama.cpp may know this architecture better."
        )
    return gap


def _check_scaling(file: Path, settings: dict[str, Any]) -> None:
    """Stopped unless the file's RoPE scaling is the policy's. llama.cpp reads it there, transformers does not."""
    fields = _fields(file, "r")
    prefix = f"{fields['general.architecture'].contents()}.rope.scaling"
    expected = {"type": settings["rope_type"], "factor": settings["factor"]}
    if settings["rope_type"] == "yarn":
        expected["original_context_length"] = settings[ORIGINAL]
    found = {key: fields[f"{prefix}.{key}"].contents() for key in expected if f"{prefix}.{key}" in fields}
    if found != expected:
        raise Stopped(
            f"{file}: its RoPE scaling is {found}, the policy's {expected}. Do not use it; a newer llama.cpp may "
            "write it."
        )


def _set_context_length(file: Path, tokens: int) -> None:
    """In place. The converter writes the window before scaling, to which Ollama would cut num_ctx."""
    fields = _fields(file, "r+")
    field = fields[f"{fields['general.architecture'].contents()}.context_length"]
    field.parts[field.data[0]][0] = tokens


def _fields(file: Path, mode: Any) -> dict[str, Any]:
    try:
        import gguf
    except ImportError as error:
        raise Refused("--gguf-converter needs the package gguf. Fix: pip install 'zero-grpo[gguf]'.") from error
    return dict(gguf.GGUFReader(file, mode).fields)
