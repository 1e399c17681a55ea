"""The memory plan of a run: for a card that may not be here, before any weight is read, and at the start of training,
where it picks what is "auto"."""

import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from trainer.config import RunConfig
from trainer.errors import Refused
from trainer.models.shared_prefix import sees_whole_context
from trainer.plan import state, table
from trainer.plan.cards import GIB, Card, card_of
from trainer.plan.choose import MOST_TOKENS, choose
from trainer.plan.parts import Plan, context, plan
from trainer.plan.settings import Settings, zero_of
from trainer.plan.shape import KNOWN, Shape, shape_of
from trainer.preflight.networks import networks_of
from trainer.rollout.rope_guard import Lengths
from trainer.world import World

USABLE = 0.8
"""Of a host's free memory: other processes want some."""

MEMINFO = Path("/proc/meminfo")


def settings_of(
    config: RunConfig,
    shape: Shape,
    zero: Mapping[str, Any],
    *,
    ranks: int,
    cuda: bool,
    itemsize: int,
    lengths: Lengths,
    shared: bool,
) -> Settings:
    """What is "auto" is as large and as quick as can be. ``zero``: the table zero_optimization, resolved.

    Raises Refused where lora.targets names no linear layer of a block.
    """
    targets = config.lora.targets
    named = set(shape.linears) & {name.rsplit(".", 1)[-1] for name in targets}
    if config.lora.r and targets != ("all-linear",) and not named:
        raise Refused(
            f"lora.targets = {list(targets)}: no linear layer of this model has such a name. Expected some of "
            f"{', '.join(shape.linears)}."
        )
    return Settings(
        shape=shape,
        rank=config.lora.r,
        targets=frozenset(shape.linears if targets == ("all-linear",) else named) if config.lora.r else frozenset(),
        bits=config.quant.bits,
        itemsize=itemsize,
        cuda=cuda,
        ranks=ranks,
        zero=zero_of(dict(zero)),
        optimizer=config.optim.name,
        reference=_reference(config, cuda),
        exact=config.grpo.kl.estimator == "exact",
        prompt=lengths.prompt,
        new=lengths.new,
        generations=config.rollout.num_generations,
        prompts=config.rollout.prompts_per_step,
        shared=shared,
        decodes_shared=shared and config.rollout.engine == "shared",
        micro_batch=config.engine.micro_batch,
        token_budget=most_tokens(config, cuda),
        checkpointing=config.engine.gradient_checkpointing == "on",
        networks=networks_of(config.reward)[0],
    )


def may_share(config: RunConfig, model_config: PretrainedConfig) -> bool:
    """Whether passes can hold a group's prompt once, as far as a config says it."""
    return config.model.attn == "sdpa" and sees_whole_context(model_config)


def most_tokens(config: RunConfig, cuda: bool) -> int:
    """The budget of the run file, or the largest that "auto" may become."""
    budget = config.engine.token_budget
    return MOST_TOKENS["cuda" if cuda else "cpu"] if budget == "auto" else budget


def _reference(config: RunConfig, cuda: bool) -> Any:
    if not config.grpo.kl.coef and config.grpo.kl.schedule != "adaptive":
        return "none"
    if config.is_lora and config.reference.mode in ("auto", "adapter"):
        return "adapter"
    if config.reference.mode == "zero3":
        return "sharded"
    return "resident" if config.reference.mode == "gpu" or not cuda else "streamed"


def chosen(config: RunConfig, settings: Settings, room: float) -> tuple[Settings, bool]:
    """``settings`` with what is "auto" chosen for ``room`` bytes, and whether it fits; at its smallest where not."""
    budget = config.engine.token_budget == "auto"
    checkpointing = config.engine.gradient_checkpointing == "auto"
    found = choose(settings, room, budget=budget, checkpointing=checkpointing)
    if found is not None:
        return found, True
    smallest = replace(settings, checkpointing=True) if checkpointing else settings
    if budget:
        smallest = replace(smallest, token_budget=smallest.least_budget)
    stays, rests = (plan(replace(smallest, rests=one)).totals["rollout"] for one in (False, True))
    return replace(smallest, rests=smallest.may_rest and rests <= room < stays), False


# At the start of training


@dataclass(frozen=True)
class Choice:
    checkpointing: bool
    token_budget: int
    rests: bool
    """Optimizer and gradients go to the host during rollouts."""
    note: str
    plan: Plan | None
    """None of an architecture without formulas."""


def choose_at_start(
    config: RunConfig,
    model_config: PretrainedConfig,
    zero: Mapping[str, Any],
    *,
    lengths: Lengths,
    itemsize: int,
    shared: bool,
    world: World,
) -> Choice:
    """What is "auto", for what every rank has free beside an engine that has started. A collective: all ranks decide
    alike, by the one that has least."""
    cuda = world.device.type == "cuda"
    (less,) = world.all_reduce_max([-free_bytes(world)])
    shape = shape_of(model_config.get_text_config(decoder=True).to_dict())
    if shape is None:
        on = config.engine.gradient_checkpointing != "off"
        return Choice(
            on,
            most_tokens(config, cuda),
            False,
            f"gradient checkpointing is {'on' if on else 'off'}, passes hold {most_tokens(config, cuda)} tokens: the "
            f"memory of {model_config.model_type} is not known beforehand, only that of {', '.join(KNOWN)}",
            None,
        )
    settings = settings_of(
        config, shape, zero, ranks=world.size, cuda=cuda, itemsize=itemsize, lengths=lengths, shared=shared
    )
    held = state.held_at_the_start(settings) + context(settings)
    room = held - less
    found, fits = chosen(config, settings, room)
    result = plan(found)
    return Choice(found.checkpointing, found.token_budget, found.rests, _note(result, held, -less, fits), result)


def in_words(found: Plan, phase: str) -> str:
    """The largest parts of a phase."""
    parts = sorted(found.phases[phase].items(), key=lambda part: -part[1])[:3]
    return ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts)


def _note(found: Plan, held: float, free: float, fits: bool) -> str:
    settings = found.settings
    resting = f"; {state.resting(settings) / GIB:.2f} GiB of optimizer are on the host in rollouts"
    return (
        f"gradient checkpointing is {'on' if settings.checkpointing else 'off'}, passes hold at most {settings.limit}; "
        f"by formulas the peak is {(found.peak - held) / GIB:.2f} GiB beyond what is loaded, in {found.fullest} "
        f"(largest of all parts: {in_words(found, found.fullest)}), and {free / GIB:.2f} can be used"
        + (resting if settings.rests else "")
        + ("" if fits else ". THAT DOES NOT FIT; `zero-grpo plan` says what would")
    )


def free_bytes(world: World) -> float:
    """Free for this rank: on its card, or its share of what the host can spare. A collective."""
    hosts = world.gather_objects(socket.gethostname())  # and every rank has done its allocations when it is through
    if world.device.type == "cpu":
        return USABLE * _available() / hosts.count(socket.gethostname())
    free, total = torch.cuda.mem_get_info(world.device)
    allocated = torch.cuda.memory_allocated(world.device)
    unused = torch.cuda.memory_reserved(world.device) - allocated
    limit = torch.cuda.memory.get_per_process_memory_fraction(world.device) * total
    return min(free + unused, limit - allocated)


def _available() -> float:
    (line,) = (line for line in MEMINFO.read_text().splitlines() if line.startswith("MemAvailable:"))
    return float(line.split()[1]) * 1024


# Before the weights are read


@dataclass(frozen=True)
class Planned:
    """On this machine."""

    plan: Plan
    card: Card
    fits: bool

    def record(self) -> dict[str, Any]:
        return table.as_json(self.plan, self.card, self.fits, [])

    def line(self) -> str:
        phase = self.plan.fullest
        return (
            f"by formulas a rank's peak is {self.plan.peak / GIB:.2f} of {self.card.gib:.2f} GiB, in {phase} "
            f"({in_words(self.plan, phase)})"
        )


def plan_here(
    config: RunConfig,
    model_config: PretrainedConfig,
    zero: Mapping[str, Any],
    *,
    ranks: int,
    device: torch.device,
    itemsize: int,
    lengths: Lengths,
    shared: bool,
) -> Planned | None:
    """With what is "auto" chosen for the whole card, or for what the host has free. None of an architecture without
    formulas."""
    shape = shape_of(model_config.get_text_config(decoder=True).to_dict())
    if shape is None:
        return None
    cuda = device.type == "cuda"
    card = this_card() if cuda else this_host(ranks)
    settings = settings_of(
        config, shape, zero, ranks=ranks, cuda=cuda, itemsize=itemsize, lengths=lengths, shared=shared
    )
    found, fits = chosen(config, settings, card.gib * GIB)
    return Planned(plan(found), card, fits)


def this_card() -> Card:
    return card_of(torch.cuda.mem_get_info()[1] / GIB)


def this_host(ranks: int) -> Card:
    """The share of a rank."""
    return replace(card_of(USABLE * _available() / ranks / GIB), name="the CPU")
