"""The flags of train_grpo.py: what each one is in a run file, and how they are read off a command line."""

import difflib
import json
from collections.abc import Sequence

from trainer.config import secrets
from trainer.config.names import ABSENT, PEERS, answer

# Flag -> key of the run file, and what is worth knowing of it.
SETTINGS: dict[str, tuple[str, str]] = {
    # the document's command
    "model_name_or_path": ("model.name_or_path", "a folder, or a name on the hub"),
    "dataset_name": (
        "data.source",
        "a file, a folder, or a name on the hub; {query, reference_answer} is read as it is",
    ),
    "output_dir": ("run.dir", "holds no run yet; the run file is saved beside it, as OUTPUT_DIR.toml"),
    "learning_rate": ("optim.lr", "constant after 10 steps of warm-up, unless --lr_scheduler_type says otherwise"),
    "num_train_epochs": ("run.epochs", "passes over the prompts"),
    "logging_steps": ("log.every", "steps"),
    "save_steps": ("checkpoint.every", "steps"),
    "eval_steps": ("eval.every", "steps; needs prompts to evaluate on"),
    "ddp_timeout": ("watch.hang_timeout", "seconds without progress after which the job ends"),
    "kl_loss_coef": ("grpo.kl.coef", "not divided by the number of ranks: their gradients are averaged already"),
    "max_new_tokens": ("rollout.max_new_tokens", "longest completion"),
    "rope_scaling_type": ("model.rope.type", "part of the model's config, for policy and reference alike"),
    "rope_scaling_factor": ("model.rope.factor", "by which the window grows"),
    "report_to": ("log.report_to", "none: metrics.jsonl alone"),
    "seed": ("run.seed", "of sampling and new weights; of the data's order too, without --data_seed"),
    # its rollout settings, and its schedule of the KL coefficient
    "temperature": ("rollout.temperature", "divides the logits, in sampling and in scoring alike"),
    "top_p": ("rollout.top_p", "1: sampled = scored"),
    "top_k": ("rollout.top_k", "0: sampled = scored"),
    "repetition_penalty": ("rollout.repetition_penalty", "1: sampled = scored"),
    "kl_loss_coef_schedule": (
        "grpo.kl.schedule",
        "the document's: warmup_decay --grpo.kl.start 0.01 --grpo.kl.min 0.1 --grpo.kl.warmup_steps 200",
    ),
    "kl_loss_type": ("grpo.kl.estimator", "k3; the document's sum over the vocabulary is exact"),
    # what it leaves open, under the names of TRL, PEFT and transformers
    "num_generations": ("rollout.num_generations", "completions a prompt; 8"),
    "max_prompt_length": ("data.max_prompt_tokens", "longest prompt"),
    "max_steps": ("run.steps", "instead of --num_train_epochs"),
    "model_revision": ("model.revision", "branch, tag or commit on the hub"),
    "attn_implementation": ("model.attn", "sdpa, eager, flash_attention_2"),
    "dataset_config": ("data.config", "configuration of a hub data set"),
    "dataset_train_split": ("data.split", "train"),
    "dataset_test_split": ("data.eval_split", "split to evaluate on"),
    "data_seed": ("data.seed", "of the order of the prompts"),
    "lora_r": ("lora.r", "without any LoRA flag all weights are trained"),
    "lora_alpha": ("lora.alpha", "the scale of the update is alpha / r"),
    "lora_dropout": ("lora.dropout", "0: sampled = scored"),
    "lora_target_modules": ("lora.targets", "names of modules, several words"),
    "lr_scheduler_type": ("optim.schedule", "constant, linear, cosine"),
    "warmup_steps": ("optim.warmup_steps", "of the learning rate"),
    "weight_decay": ("optim.weight_decay", "decoupled"),
    "max_grad_norm": ("optim.max_grad_norm", "0: off"),
    "deepspeed": ("engine.deepspeed", "zero0 to zero3, zero2-offload, zero3-offload, or a DeepSpeed JSON; zero2"),
    "save_total_limit": ("checkpoint.keep", "the newest ones"),
}
# Flag that stands alone, or with true or false -> what each sets; nothing where it is so anyway.
SWITCHES: dict[str, dict[str, tuple[str, str] | None]] = {
    "bf16": {"true": ("model.dtype", "bf16"), "false": ("model.dtype", "fp32")},
    "fp16": {"true": ("model.dtype", "fp16"), "false": None},
    "use_peft": {"true": ("lora.r", "16"), "false": ("lora.r", "0")},
    "load_in_4bit": {"true": ("quant.bits", "4"), "false": ("quant.bits", "0")},
    "gradient_checkpointing": {
        "true": ("engine.gradient_checkpointing", "on"),
        "false": ("engine.gradient_checkpointing", "off"),
    },
    "do_sample": {"true": None},
}
# Flags that make several keys, or none.
OTHERS = {
    "per_device_train_batch_size": "completions that a rank has in memory at a time: engine.micro_batch",
    "gradient_accumulation_steps": "times the above, times the ranks: completions a step",
    "reward_function": "a built-in reward, FILE.py:FUNCTION or MODULE:FUNCTION: a [[reward]] called score",
    "reward_model_name_or_path": "a sentence encoder, whose cosine with the reference answer is the reward, or a reward"
    " model (…ForSequenceClassification)",
    "resume_from_checkpoint": "auto, or a checkpoint: goes on with the run in --output_dir",
    "local_rank": "as launchers give it; LOCAL_RANK says the same",
}
# What a refusal of the trainer advises to write.
TRAINERS_OWN = {"run.dir": "output_dir", "resume": "resume_from_checkpoint"}
SEVERAL_WORDS = ("lora_target_modules", "report_to")
FLAGS = (*SETTINGS, *SWITCHES, *OTHERS)


def read(arguments: Sequence[str], wrong: list[str]) -> tuple[dict[str, str], list[str]]:
    """The text of each flag, by its name with underscores, and the ``--section.key VALUE`` arguments as they are.

    What is no flag, or lacks its value, goes to ``wrong``. The last of several values of a flag counts.
    """
    flags: dict[str, str] = {}
    keys: list[str] = []
    rest = list(arguments)
    while rest:
        flag, equals, text = rest.pop(0).partition("=")
        words = [text] if equals else []
        while not equals and rest and not rest[0].startswith("--"):
            words.append(rest.pop(0))
        name = flag.removeprefix("--").replace("-", "_")
        name = TRAINERS_OWN.get(name, name)
        if not flag.startswith("--"):
            wrong.append(f"{'a secret' if secrets.is_secret(flag) else flag}: expected a flag, --NAME VALUE.")
        elif "." in name:
            keys += [f"{flag}={words[0]}"] if len(words) == 1 else [flag, *words]
        elif name not in FLAGS:
            wrong.append(unknown(name))
        elif name in SEVERAL_WORDS and words:
            flags[name] = json.dumps([part for word in words for part in word.split(",")])
        elif name in (*SWITCHES, "resume_from_checkpoint") and not words:
            flags[name] = "true"
        elif len(words) == 1:
            flags[name] = words[0]
        else:
            wrong.append(f"--{name}: expected one value, got {len(words)}.")
    return flags, keys


def unknown(name: str) -> str:
    """A peer's name is answered with our key, a misspelt one with the flag that is nearest."""
    close = difflib.get_close_matches(name, FLAGS, n=1, cutoff=0.75)
    help_text = f"Did you mean --{close[0]}?" if close and name not in {**PEERS, **ABSENT} else answer([name])
    return f"--{name} is not a flag of this command. {help_text}".strip()


def usage() -> str:
    """What ``--help`` shows: every flag with its key and its meaning."""
    meanings = {name: f"{key}: {meaning}" for name, (key, meaning) in SETTINGS.items()}
    for name, choices in SWITCHES.items():
        said = [f"{setting[0]} = {setting[1]} where {value}" for value, setting in choices.items() if setting]
        meanings[name] = ", ".join(said) or "completions are always sampled"
    lines = [f"--{name:<30} {meaning}" for name, meaning in (meanings | OTHERS).items()]
    return (
        "torchrun --nproc_per_node=4 launch/train_grpo.py FLAGS, or deepspeed, or plain python for one rank.\n"
        "Makes a run file of its flags, shows it, saves it as OUTPUT_DIR.toml, and trains on it.\n\n  "
        + "\n  ".join(lines)
        + "\n\nHyphens or underscores; --flag VALUE or --flag=VALUE. Any other key of a run file is taken too:"
        " --section.key VALUE (`zero-grpo keys` lists them)."
    )
