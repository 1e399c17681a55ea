"""When memory runs out: in which part of a step, how much was asked for, what was held, and the one thing to change."""

import gc
import resource
import socket
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

import torch

from trainer import run_status
from trainer.checkpoint.export import export
from trainer.collect import sample, score
from trainer.config import RunConfig
from trainer.engine import ZeroEngine
from trainer.errors import OutOfMemory
from trainer.preflight.memory import in_words
from trainer.preflight.prepare import load_models, start_engine
from trainer.rollout import decoder
from trainer.state import State
from trainer.train import evaluate_now, save
from trainer.update import ask_reference, charge_kl_to_rewards, micro_batch_loss, take_step
from trainer.world import World

PHASES: dict[CodeType, str] = {
    load_models.__code__: "while the model was loaded",
    start_engine.__code__: "while the engine started",
    evaluate_now.__code__: "in the evaluation",
    save.__code__: "while a checkpoint was written",
    export.__code__: "while the result was written",
    sample.__code__: "in the rollout",
    ZeroEngine.gathered.__wrapped__.__code__: "in the rollout",  # type: ignore[attr-defined]
    score.__code__: "in the rewards",
    charge_kl_to_rewards.__code__: "in the reference pass",
    ask_reference.__code__: "in the reference pass",
    micro_batch_loss.__code__: "in the training pass",
    ZeroEngine.backward_sum.__code__: "in the training pass",
    take_step.__code__: "in the optimizer step",
}
"""By function, of which the outermost one that was running says it."""

ALLOWED = ("engine.gradient_checkpointing", "engine.micro_batch", "engine.token_budget", "rollout.")
"""What a resumed run may change when it is allowed to. Another ZeRO configuration does not read this checkpoint."""


def phase_of(error: BaseException) -> str:
    """What was running, in words."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return next((PHASES[frame.f_code] for frame in frames if frame.f_code in PHASES), "between two parts")


def ran_out(error: BaseException, asked: str, config: RunConfig, world: World, state: State | None) -> OutOfMemory:
    """What ends the run of this rank, whose memory is let go. ``asked``: as `2.00 GiB`. ``state``: None before the
    first step."""
    phase = phase_of(error)
    step = f", step {state.step + 1}" if state is not None else ""
    lines = [
        f"out of memory {phase}{step}, on rank {world.rank} ({world.device}, host {socket.gethostname()}): "
        f"{asked} asked for.",
        f"Measured: {_measured(world, state)}.",
        *_planned(phase, state),
        f"Fix: {_fix(phase, config, world, state)}",
    ]
    if state is not None and (key := lines[-1].removeprefix("Fix: ").partition(" = ")[0]).startswith(ALLOWED):
        lines[-1] += f" A run that goes on with it takes --allow {key}."
    traceback.clear_frames(error.__traceback__)  # which hold the tensors of the step
    gc.collect()
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    # What is away may not have come back.
    stays = state is not None and state.engine.stage != 3 and state.engine.away is None
    whole = stays and phase != PHASES[take_step.__code__]
    return OutOfMemory("\n".join(lines), rank=world.rank, begun=state is not None, whole=whole)


def heard_of(run_dir: Path, world: World) -> OutOfMemory | None:
    """What another rank has recorded of its end for want of memory, which this rank knows as a failed collective."""
    status = run_status.read(run_dir)
    if (status.get("state"), status.get("exit_code")) != ("stopped", OutOfMemory.exit_code):
        return None
    if status.get("rank") == world.rank:
        return None
    return OutOfMemory(status["reason"], rank=status["rank"], begun=True, whole=False)


def _planned(phase: str, state: State | None) -> Iterator[str]:
    """The plan's numbers for the phase, beside the measured ones."""
    if state is not None and state.plan is not None:
        part = next((name for name in state.plan.phases if name in phase), None)
        if part is not None:
            yield f"Planned, by formulas: {_gib(state.plan.totals[part])} ({in_words(state.plan, part)})."


def _measured(world: World, state: State | None) -> str:
    if world.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(world.device)
        held = torch.cuda.max_memory_allocated(world.device)
        return f"{_gib(held)} of tensors at the peak, of the card's {_gib(total)}; {_gib(free)} are free"
    process = f"{_gib(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)} of the whole process at its peak"
    return process if state is None else f"{_gib(state.memory.take_peak())} of tensors at the step's peak, {process}"


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"


def _fix(phase: str, config: RunConfig, world: World, state: State | None) -> str:
    """One change, by what needs the memory of that phase."""
    if phase == "in the rewards":
        return "load the models of your reward functions on the CPU, or let a server answer for them."
    if phase == "while the model was loaded":
        return _smaller_model(config)
    if phase in ("in the rollout", "in the evaluation") and state is not None:
        return _smaller_rollout(phase, config, world)
    if phase in ("in the training pass", "in the reference pass") and state is not None:
        return _smaller_pass(phase, state)
    if phase in ("while a checkpoint was written", "while the result was written"):
        return "free memory of the host, where every rank holds its part while it is written."
    return _smaller_state(config, world)


def _smaller_rollout(phase: str, config: RunConfig, world: World) -> str:
    """Fewer prompts where all of a step decode together; of more rows than that, others only wait."""
    groups = -(-config.rollout.prompts_per_step // world.size)
    if phase == "in the rollout" and groups > 1 and groups * config.rollout.num_generations <= decoder.MAX_ROWS:
        fewer = max(world.size, config.rollout.prompts_per_step // 2)
        return f"rollout.prompts_per_step = {fewer}: half as many completions are decoded together."
    return f"rollout.max_new_tokens = {config.rollout.max_new_tokens // 2}: half the keys and values of a completion."


def _smaller_pass(phase: str, state: State) -> str:
    config, world = state.config, state.world
    checkpointing = any(part.__dict__.get("gradient_checkpointing") for part in state.policy.causal.modules())
    if phase == "in the training pass" and not checkpointing:
        return 'engine.gradient_checkpointing = "on": activations are computed again, for a third more compute.'
    if config.engine.micro_batch > 1:
        return f"engine.micro_batch = {config.engine.micro_batch // 2}: smaller passes, the same update."
    longest = max(len(prompt.ids) for prompt in state.prompts) + config.rollout.max_new_tokens
    if not config.engine.micro_batch and state.token_budget > longest:
        return f"engine.token_budget = {max(longest, state.token_budget // 2)}: smaller passes, the same update."
    return _smaller_state(config, world)


def _smaller_state(config: RunConfig, world: World) -> str:
    name = config.engine.deepspeed
    if world.size > 1 and name in ("zero0", "zero1"):
        return 'engine.deepspeed = "zero2": gradients and optimizer are sharded over the ranks.'
    if world.device.type == "cuda" and config.optim.name == "adamw" and name in ("zero0", "zero1", "zero2", "zero3"):
        offload = "zero3-offload" if name == "zero3" else "zero2-offload"
        return f'engine.deepspeed = "{offload}": the optimizer moves to the host\'s memory.'
    if not config.is_lora:
        return "lora.r = 16: adapters train instead of all weights."
    return _smaller_model(config)


def _smaller_model(config: RunConfig) -> str:
    if config.is_lora and not config.quant.bits:
        return "quant.bits = 4: the frozen weights take a quarter."
    return "a smaller model, or a card with more memory."
