"""From a run file to a run that can start: every check first, the weights after, the engine last."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from trainer import interrupts
from trainer.checkpoint import random_states
from trainer.checkpoint.manifest import Facts
from trainer.config import RunConfig, warnings
from trainer.config.deepspeed_json import resolve
from trainer.data.prompts import PromptSets, load_prompts
from trainer.data.stops import StopIds, declared_eos, stop_ids
from trainer.engine import ZeroEngine
from trainer.errors import Refused
from trainer.launcher import say
from trainer.models.head import peak_bytes, whole_bytes
from trainer.models.policy import (
    Policy,
    load_config,
    load_generation_config,
    load_policy,
    load_tokenizer,
    resolve_dtype,
)
from trainer.models.reference import Reference, make_reference
from trainer.models.scorer import TokenScorer, check_head
from trainer.models.shared_prefix import share_prompts
from trainer.models.vocabulary import check_embedding_rows, start_adapter_base
from trainer.preflight.activations import room_for_activations
from trainer.preflight.facts import facts_of
from trainer.preflight.offload import check_offload
from trainer.preflight.replay import check_replay
from trainer.record.memory import PeakMemory
from trainer.record.trackers import check_trackers
from trainer.rewards.runtime import RewardRuntime
from trainer.rollout.decoder import Decoder
from trainer.rollout.hf import HfDecoder
from trainer.rollout.hooks import Hook, HookContext, load_hooks, run_hooks
from trainer.rollout.rope_guard import Lengths, check_window, rope_guard
from trainer.rollout.shared import SharedDecoder
from trainer.state import State
from trainer.world import World

AUTO_TOKENS = {"cuda": 16384, "cpu": 4096}
"""engine.token_budget = "auto": tokens of one pass, by device."""


@dataclass(frozen=True)
class Checked:
    """What could be checked without the weights."""

    config: RunConfig
    deepspeed: dict[str, Any]
    """The configuration of the engine, every "auto" resolved."""
    tokenizer: PreTrainedTokenizerBase
    model_config: PretrainedConfig
    prompts: PromptSets
    rewards: RewardRuntime
    hooks: list[Hook]
    dtype: torch.dtype
    steps: int
    notes: list[str]

    @property
    def lengths(self) -> Lengths:
        """Of the longest prompt, held-out ones included."""
        return Lengths(
            max(len(prompt.ids) for prompt in self.prompts.train + self.prompts.eval),
            self.config.rollout.max_new_tokens,
        )


def check(config: RunConfig, folder: Path, world: World) -> Checked:
    """Everything that can be refused before the weights are read. ``folder``: where the run file lies."""
    _tell(world, "checking configuration, rewards and data")
    notes = list(warnings(config))
    dtype, why = resolve_dtype(config.model.dtype, world.device)
    notes.append(f"device {world.device.type}, {world.size} rank(s), {str(dtype).removeprefix('torch.')} ({why})")
    check_trackers(config.log.report_to)
    rewards = RewardRuntime(config.reward, folder)
    hooks = load_hooks(config.hooks.before_rollout)
    model_config, model_notes = load_config(config.model)
    notes += model_notes
    deepspeed = resolve(
        config,
        world.size,
        dtype="bf16" if dtype == torch.bfloat16 else "fp32",
        hidden_size=model_config.get_text_config(decoder=True).hidden_size,
    )
    check_offload(deepspeed)
    tokenizer = load_tokenizer(config.model)
    if config.lora.start_adapter:
        _, adapter_notes = start_adapter_base(config.lora.start_adapter, config.model.name_or_path)
        notes += adapter_notes
    if config.rollout.replay:
        prompts, steps = check_replay(config, tokenizer)
    else:
        prompts = load_prompts(config, tokenizer, eos_ids=declared_eos(tokenizer, load_generation_config(config.model)))
        if problems := rewards.check(prompts.train + prompts.eval):
            raise Refused("rewards and data do not fit:\n" + "\n".join(problems))
        steps = _steps(config, len(prompts.train))
    rewards.max_steps = steps
    notes += prompts.notes
    rollout = config.rollout
    notes.append(
        f"{steps} steps of {rollout.prompts_per_step} prompts x {rollout.num_generations} completions = "
        f"{config.completions_per_step} completions, {config.grpo.updates_per_rollout} update(s) each"
    )
    checked = Checked(
        config, deepspeed, tokenizer, model_config, prompts, rewards, [rope_guard, *hooks], dtype, steps, notes
    )
    check_window(model_config, checked.lengths, "policy")
    return checked


@dataclass(frozen=True)
class Models:
    """The loaded models, before the engine takes hold of the policy."""

    policy: Policy
    scorer: TokenScorer
    reference: Reference | None
    stops: StopIds
    shared_prompts: bool
    facts: Facts


def load_models(checked: Checked, world: World) -> Models:
    """Loads the weights, makes the reference, and runs the hooks for the longest prompt of all."""
    config, tokenizer = checked.config, checked.tokenizer
    _tell(world, f"loading {config.model.name_or_path}")
    torch.manual_seed(config.run.seed)  # new LoRA weights: the same on every rank
    policy = load_policy(config.model, checked.model_config, config.lora, tokenizer, checked.dtype)
    scorer, stops, unshared = ready_to_decode(checked, policy, world)
    checked.notes.append(
        _head_note(scorer.head.weight.shape[0], _token_budget(config, world), config.grpo.kl.estimator)
    )
    checked.notes.append(_layout_note(unshared, config.rollout.engine))
    reference = None
    if config.grpo.kl.coef or config.grpo.kl.schedule == "adaptive":
        reference = make_reference(
            policy,
            config.reference.mode,
            temperature=config.rollout.temperature,
            device=world.device,
            continued=bool(config.lora.start_adapter),
        )
    checked.notes.append(f"reference: {reference.kind if reference else 'none, since grpo.kl.coef = 0'}")
    context = HookContext(
        step=0,
        policy=policy.causal,
        reference=reference.copy.causal if reference and reference.copy else None,
        tokenizer=tokenizer,
        longest_prompt=checked.lengths.prompt,
        max_new_tokens=checked.lengths.new,
        world_rank=world.rank,
    )
    checked.notes.extend(run_hooks(checked.hooks, context))
    facts = facts_of(config, checked.deepspeed, checked.prompts.train, checked.rewards, policy, world.size)
    return Models(policy, scorer, reference, stops, not unshared, facts)


def ready_to_decode(checked: Checked, policy: Policy, world: World) -> tuple[TokenScorer, StopIds, str]:
    """Checks a policy and takes it to its device. The last: why its prompts are not shared, or nothing."""
    tokenizer, rollout = checked.tokenizer, checked.config.rollout
    check_embedding_rows(policy.causal, tokenizer)
    stops = stop_ids(tokenizer, policy.generation_config)
    checked.notes.extend(stops.notes)
    named = ", ".join(f"{token_id} ({tokenizer.convert_ids_to_tokens(token_id)})" for token_id in stops.ids)
    checked.notes.append(f"a completion ends with token {named or 'none'}, or after {rollout.max_new_tokens} tokens")
    scorer = TokenScorer(policy.causal, rollout.temperature).to(world.device)
    check_head(scorer)
    return scorer, stops, share_prompts(policy.causal)


def make_decoder(
    checked: Checked, policy: Policy, stops: StopIds, memory: PeakMemory, *, shared_prompts: bool
) -> Decoder:
    """What decodes in rollouts and evaluations, of this run and of ``eval``."""
    config = checked.config
    decoder = SharedDecoder if shared_prompts and config.rollout.engine == "shared" else HfDecoder
    return decoder(
        policy.causal,
        checked.tokenizer,
        config.rollout,
        stops.ids,
        config.run.seed,
        interrupts.check,
        memory.uncounted,
    )


def start_engine(checked: Checked, models: Models, world: World) -> State:
    """Hands the policy to ZeRO and puts the run's parts together."""
    config, causal = checked.config, models.policy.causal
    _tell(world, f"starting the engine ({config.engine.deepspeed})")
    engine = ZeroEngine(models.scorer, config.optim, checked.deepspeed, world)
    # Train mode is what gradient checkpointing is tied to; there is no dropout left that it could switch on.
    engine.module.train()
    memory = PeakMemory(world.device)
    checkpointing = config.engine.gradient_checkpointing == "on"
    if config.engine.gradient_checkpointing == "auto":
        room, note = room_for_activations(
            config,
            engine,
            models.scorer,
            memory,
            lengths=checked.lengths,
            shared=models.shared_prompts,
            token_budget=_token_budget(config, world),
            zero=checked.deepspeed["zero_optimization"],
        )
        checkpointing = not room
        checked.notes.append(note)
    if checkpointing:
        causal.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    random_states.seed(config.run.seed + world.rank)
    return State(
        config=config,
        world=world,
        policy=models.policy,
        engine=engine,
        reference=models.reference,
        decoder=make_decoder(checked, models.policy, models.stops, memory, shared_prompts=models.shared_prompts),
        rewards=checked.rewards,
        hooks=checked.hooks,
        prompts=checked.prompts.train,
        eval_prompts=checked.prompts.eval,
        steps=checked.steps,
        token_budget=_token_budget(config, world),
        shared_prompts=models.shared_prompts,
        memory=memory,
        facts=models.facts,
        notes=checked.notes,
    )


def _tell(world: World, phase: str) -> None:
    """A line as a phase begins: each may take minutes with a large model."""
    if world.is_main:
        say(f"{phase} ...")


def _token_budget(config: RunConfig, world: World) -> int:
    budget = config.engine.token_budget
    return AUTO_TOKENS[world.device.type] if budget == "auto" else budget


def _layout_note(unshared: str, engine: str) -> str:
    """``unshared``: why prompts are not shared, or nothing."""
    if unshared:
        return f"one row a completion, each with its prompt, and rollouts by transformers' generate: {unshared}"
    return "each prompt is computed once" + (
        "" if engine == "shared" else ', but in rollouts: rollout.engine = "hf" is transformers\' generate'
    )


def _head_note(columns: int, tokens: int, estimator: str) -> str:
    chunked = peak_bytes(columns, tokens, exact=estimator == "exact") / 2**30
    whole = whole_bytes(columns, tokens) / 2**30
    return (
        f"a pass of {tokens} tokens scores {columns} columns in chunks: {chunked:.2f} GiB at its peak, where whole "
        f"logits would take {whole:.1f} (of an A10's 24 GB about 22 can be used)"
    )


def _steps(config: RunConfig, prompts: int) -> int:
    if prompts < config.rollout.prompts_per_step:
        raise Refused(
            f"rollout.prompts_per_step = {config.rollout.prompts_per_step}, but data.source = {config.data.source} has "
            f"{prompts} usable prompts, and a step never holds one twice. Fix: rollout.prompts_per_step = {prompts} "
            "or less."
        )
    return config.run.steps or math.ceil(config.run.epochs * prompts / config.rollout.prompts_per_step)
