"""The model card of an export, README.md in its folder: what the run was, and how its result is loaded."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCardData

from trainer.config import RunConfig
from trainer.config.sections import Model
from trainer.models.reload import Verified
from trainer.record.environment import PACKAGES, installed_version
from trainer.record.rollout_rows import is_number
from trainer.record.run_dir import is_step, read_metrics, read_object

TOLD = ("reward_mean", "reward_std", "kl", "entropy", "completion_tokens_mean", "truncated_fraction", "grad_norm")
"""Metrics of the last step that the card shows, by their names in metrics.jsonl."""


@dataclass(frozen=True)
class Records:
    """What the run directory says of the steps up to the exported one."""

    step: int | None
    """None where nothing was recorded."""
    metrics: dict[str, float]
    evaluations: list[dict[str, Any]]
    """The first and the last, as eval/step-*.json has them."""


def read_records(run_dir: Path, step: int | None = None) -> Records:
    """Up to ``step``; None: all of them."""
    rows = [row for row in read_metrics(run_dir) if step is None or row["step"] <= step]
    last: dict[str, float] = rows[-1] if rows else {}
    evaluations = []
    for path in sorted((run_dir / "eval").glob("step-*.json")):
        one = read_object(path)
        whole = is_step(one.get("step")) and _is_score(one.get("sampled")) and _is_score(one.get("greedy"))
        if whole and (step is None or one["step"] <= step):
            evaluations.append(one)
    done = int(last["step"]) if last else step
    return Records(done, last, [evaluations[0], evaluations[-1]] if len(evaluations) > 1 else evaluations)


def load_line(folder: str, config: RunConfig, what: str, dtype: torch.dtype) -> str:
    """One expression that loads the result. ``what``: adapter | model; ``dtype``: of the policy."""
    if what == "model":
        return f'AutoModelForCausalLM.from_pretrained("{folder}")'
    return f'PeftModel.from_pretrained({_base(folder, config, dtype)}, "{folder}")'


def lm_eval_line(folder: str, model: Model, what: str) -> str:
    """The command that measures the result on a public benchmark; "" where lm-eval cannot load it: a base whose RoPE
    this run scaled."""
    if what == "model":
        arguments = f"pretrained={folder}"
    elif model.rope.type:
        return ""
    else:
        base = f"{folder}/base" if model.gguf_file else model.name_or_path
        revision = f",revision={model.revision}" if model.revision else ""
        arguments = f"pretrained={base}{revision},peft={folder},tokenizer={folder}"
    return f"lm_eval --model hf --model_args {arguments} --tasks gsm8k"


def _base(folder: str, config: RunConfig, dtype: torch.dtype) -> str:
    model, quant = config.model, config.quant
    packed = (
        f', quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="{quant.type}", '
        f'bnb_4bit_use_double_quant={quant.double_quant}, bnb_4bit_compute_dtype="{str(dtype).removeprefix("torch.")}")'
        if quant.bits
        else ""
    )
    if model.gguf_file:
        return f'AutoModelForCausalLM.from_pretrained("{folder}/base"{packed})'
    revision = f', revision="{model.revision}"' if model.revision else ""
    scaled = f', config=AutoConfig.from_pretrained("{folder}")' if model.rope.type else ""
    return f'AutoModelForCausalLM.from_pretrained("{model.name_or_path}"{revision}{scaled}{packed})'


def card(name: str, what: str, config: RunConfig, records: Records, verified: Verified) -> str:
    """README.md for the folder ``name``. ``what``: adapter | model | merged."""
    kind = "adapter" if what == "adapter" else "model"
    parts = [
        f"---\n{_header(kind, config).to_yaml()}\n---",
        f"# {name}\n\n{_introduction(what, config)}",
        f"## Load\n\n{_loading(name, kind, config, verified.dtype)}",
        "## Training\n\n" + "\n".join(f"- {line}" for line in _training(config, records)),
        f"## Checked\n\n{_checked(kind, verified)}",
        "## Licence\n\nNot stated here: add `license:` to the header. The licence of the base model and the terms of "
        "the data may bind you.",
    ]
    return "\n\n".join(parts) + "\n"


def _header(kind: str, config: RunConfig) -> ModelCardData:
    tags = ["grpo", "reinforcement-learning", "zero-grpo", *(["lora"] if kind == "adapter" else [])]
    library = "peft" if kind == "adapter" else "transformers"
    # The hub takes a name of its own here and nothing else.
    base = None if Path(config.model.name_or_path).is_dir() else config.model.name_or_path
    return ModelCardData(base_model=base, library_name=library, pipeline_tag="text-generation", tags=tags)


def _introduction(what: str, config: RunConfig) -> str:
    made = {
        "adapter": "A LoRA adapter (PEFT) trained",
        "merged": "A model with a LoRA adapter merged into it, trained",
        "model": "A model, all of its weights trained",
    }[what]
    model = config.model
    base = f"`{model.name_or_path}`"
    base += f", revision `{model.revision}`" if model.revision else ""
    base += f", file `{model.gguf_file}`, dequantised" if model.gguf_file else ""
    if config.quant.bits:
        base += ", its weights " + ("dequantised from 4 bits" if what == "merged" else "in 4 bits")
    return f"{made} with GRPO by zero-grpo, from {base}."


def _loading(name: str, kind: str, config: RunConfig, dtype: torch.dtype) -> str:
    adapter, scaled = kind == "adapter", bool(config.model.rope.type)
    classes = ["AutoModelForCausalLM", "AutoTokenizer"]
    if adapter and scaled and not config.model.gguf_file:
        classes.insert(0, "AutoConfig")
    if adapter and config.quant.bits:
        classes.append("BitsAndBytesConfig")
    lines = [
        *(["from peft import PeftModel"] if adapter else []),
        f"from transformers import {', '.join(classes)}",
        "",
        f"model = {load_line(name, config, kind, dtype)}",
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")',
    ]
    text = "```python\n" + "\n".join(lines) + "\n```"
    rope = config.model.rope
    if rope.type == "yarn" and not adapter:
        text += (
            "\n\n`max_position_embeddings` is the window before scaling: from it transformers before 4.52 computes the "
            "rotation. vLLM takes it for the longest sequence; to serve longer ones, give it the scaled window: "
            "`--hf-overrides '{\"max_position_embeddings\": TOKENS}'`."
        )
    if adapter and config.quant.bits:
        text += (
            "\n\nThe adapter was trained on 4-bit base weights, loaded as above. It also loads on the base without "
            "`quantization_config`: other weights than it was trained on, so other numbers than were checked."
        )
    if adapter and config.model.gguf_file:
        text += (
            "\n\nThe base model came from a GGUF file; its dequantised weights lie in `base/`. `adapter_config.json` "
            "names that folder where it was written: after moving it, load as above."
        )
    elif adapter and scaled:
        text += (
            f"\n\nThe run scaled RoPE ({rope.type}, factor {rope.factor:g}). An adapter cannot carry that: give the "
            "base model the `config.json` of this folder, as above. Without it positions are rotated otherwise than "
            "in training."
        )
    return text


def _training(config: RunConfig, records: Records) -> list[str]:
    rollout, grpo, optim, kl = config.rollout, config.grpo, config.optim, config.grpo.kl
    step = "steps not recorded" if records.step is None else f"{records.step} steps"
    lines = [
        f"data: `{config.data.source or rollout.replay}`",
        f"{step} of {rollout.prompts_per_step} prompts x {rollout.num_generations} completions, "
        f"{grpo.updates_per_rollout} update(s) each",
        "rewards: " + ", ".join(f"`{one.name}` ({one.kind}, weight {one.weight:g})" for one in config.reward),
        f"loss `{grpo.loss_type}`, clip {grpo.eps_low:g}/{grpo.eps_high:g}, rewards scaled by `{grpo.scale_rewards}`",
        f"KL to the base: coefficient {kl.coef:g}, estimator `{kl.estimator}`, in the {kl.placement}, "
        f"schedule `{kl.schedule}`",
        f"sampling: temperature {rollout.temperature:g}, top-p {rollout.top_p:g}, up to {rollout.max_new_tokens} "
        "tokens" + (f", also ended by {', '.join(map(repr, rollout.stop))}" if rollout.stop else ""),
        f"optimizer `{optim.name}`, lr {optim.lr:g} ({optim.schedule}), gradient norm at most {optim.max_grad_norm:g}",
    ]
    if config.is_lora:
        lora = config.lora
        started = f", continued from `{lora.start_adapter}`" if lora.start_adapter else ""
        lines.append(f"LoRA r {lora.r}, alpha {lora.alpha:g}, on {', '.join(lora.targets)}{started}")
    told = [f"{key} {records.metrics[key]:.4g}" for key in TOLD if key in records.metrics]
    if told:
        lines.append(f"step {records.step}: {', '.join(told)}")
    for one in records.evaluations:
        sampled, greedy = one["sampled"], one["greedy"]
        lines.append(f"held-out reward at step {one['step']}: {_score(sampled)} sampled, {_score(greedy)} greedy")
    installed = {package: installed_version(package) for package in PACKAGES}
    lines.append("versions: " + ", ".join(f"{package} {found}" for package, found in installed.items() if found))
    return lines


def _is_score(one: Any) -> bool:
    return isinstance(one, dict) and all(
        name in one and (one[name] is None or is_number(one[name])) for name in ("mean", "stderr")
    )


def _score(one: dict[str, Any]) -> str:
    """Mean and standard error; either may not exist, with no prompt scored, or a single one."""
    if one["mean"] is None:
        return "none scored"
    return f"{one['mean']:.4g}" + ("" if one["stderr"] is None else f" ± {one['stderr']:.2g}")


def _checked(kind: str, verified: Verified) -> str:
    library = "PEFT" if kind == "adapter" else "transformers"
    return (
        f"Loaded again by plain {library} after writing: {verified.tensors} tensors equal to the trained ones bit for "
        f"bit; logits of a few short sequences within {verified.gap:.2g} of the largest (allowed: "
        f"{verified.allowed:g})."
    )
