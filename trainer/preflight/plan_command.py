"""``zero-grpo plan``: the memory plan of a run, for a card that may not be here, before any weight is read."""

import json
import math
from dataclasses import dataclass
from typing import Any, cast

import torch

from trainer.config import RunConfig, load
from trainer.config.deepspeed_json import resolve
from trainer.errors import Refused
from trainer.launcher import say
from trainer.models.policy import load_config
from trainer.plan import table
from trainer.plan.advice import Words, advise
from trainer.plan.cards import CARDS, GIB, Card, card_of
from trainer.plan.on_disk import DISK_BYTES_A_SECOND, Parameters, checkpoint_bytes, time_to_save
from trainer.plan.parts import Plan, plan
from trainer.plan.settings import Settings
from trainer.plan.shape import KNOWN, shape_of
from trainer.preflight.memory import chosen, may_share, settings_of, this_card, this_host
from trainer.preflight.networks import networks_of
from trainer.rollout.rope_guard import Lengths


@dataclass(frozen=True)
class Asked:
    """The words of `zero-grpo plan`."""

    run_file: str
    overrides: list[str]
    gpu: str
    memory_gib: float
    gpus: int


def plan_run(asked: Asked, *, as_json: bool) -> int:
    """Prints the plan; 2 when it does not fit."""
    config = load(asked.run_file, asked.overrides)
    card, cuda = _card(asked, config)
    model_config, _ = load_config(config.model)
    text_config = model_config.get_text_config(decoder=True).to_dict()
    shape = shape_of(text_config)
    if shape is None:
        raise Refused(
            f"{config.model.name_or_path}: model_type is {text_config.get('model_type')}, of which the planner has no "
            f"formulas. Expected {', '.join(KNOWN)}."
        )
    room = card.gib * GIB

    def settings(config: RunConfig) -> Settings:
        itemsize = 2 if config.model.dtype == "bf16" or (cuda and config.model.dtype == "auto") else 4
        dtype = "bf16" if itemsize == 2 else "fp32"
        block = resolve(config, asked.gpus, dtype=cast(Any, dtype), hidden_size=shape.hidden)
        return settings_of(
            config,
            shape,
            block["zero_optimization"],
            ranks=asked.gpus,
            cuda=cuda,
            itemsize=itemsize,
            lengths=Lengths(config.data.max_prompt_tokens, config.rollout.max_new_tokens),
            shared=may_share(config, model_config),
        )

    def fitted(words: Words) -> tuple[Settings, Plan] | None:
        try:
            other = load(asked.run_file, [*asked.overrides, *words])
            found, _ = chosen(other, settings(other), room)
        except Refused:
            return None
        return None if other == config else (found, plan(found))

    unlimited, _ = chosen(config, settings(config), float("inf"))
    found, fits = chosen(config, settings(config), room)
    advice = [] if fits else advise(unlimited, card, room, fitted)
    result, (_, uncounted) = plan(found), networks_of(config.reward)
    parameters = Parameters(found.shape.total, found.trained, found.itemsize)
    size = checkpoint_bytes(parameters, stage=found.zero.stage, optimizer=found.optimizer)
    if as_json:
        more = {"not_counted": uncounted, "checkpoint_bytes": size, "seconds_to_save": size / DISK_BYTES_A_SECOND}
        say(json.dumps(table.as_json(result, card, fits, advice) | more, indent=1))
    else:
        saving = time_to_save(size, config.run.grace_seconds)
        say("\n".join((table.text(result, card, fits, advice), saving, *uncounted)))
    return 0 if fits else 2


def _card(asked: Asked, config: RunConfig) -> tuple[Card, bool]:
    """What is planned for, and whether it is a card: as asked, or what is here."""
    if asked.gpus < 1:
        raise Refused(f"--gpus {asked.gpus}: expected the number of ranks, 1 or more.")
    if asked.gpu and asked.memory_gib:
        raise Refused("--gpu and --memory-gib: one of them.")
    if asked.gpu and asked.gpu not in CARDS:
        raise Refused(f"--gpu {asked.gpu}: expected one of {', '.join(CARDS)}. Any other: --memory-gib 48.")
    if asked.memory_gib and not 0 < asked.memory_gib < math.inf:
        raise Refused(f"--memory-gib {asked.memory_gib:g}: expected the GiB of a card, such as 24.")
    if asked.gpu:
        return CARDS[asked.gpu], True
    if asked.memory_gib:
        return card_of(asked.memory_gib), True
    if config.engine.device == "auto" and torch.cuda.is_available():
        return this_card(), True
    return this_host(asked.gpus), False
