"""The run file: read, checked whole, described. Imports no torch, no transformers, no deepspeed."""

from trainer.config.advice import warnings
from trainer.config.grpo import Grpo, Kl, Reward, Rollout
from trainer.config.keys import describe
from trainer.config.load import load, load_foreign
from trainer.config.schema import RunConfig
from trainer.config.sections import (
    Checkpoint,
    Data,
    Engine,
    Eval,
    Hooks,
    Log,
    Lora,
    Model,
    Optim,
    Quant,
    Reference,
    Rope,
    Run,
)
from trainer.config.toml import dump
from trainer.config.watch import Watch

__all__ = [
    "Checkpoint",
    "Data",
    "Engine",
    "Eval",
    "Grpo",
    "Hooks",
    "Kl",
    "Log",
    "Lora",
    "Model",
    "Optim",
    "Quant",
    "Reference",
    "Reward",
    "Rollout",
    "Rope",
    "Run",
    "RunConfig",
    "Watch",
    "describe",
    "dump",
    "load",
    "load_foreign",
    "warnings",
]
