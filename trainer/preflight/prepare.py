"""From a run file to a run that can start: every check first, the weights after, the engine last."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from trainer import interrupts
from trainer.checkpoint import random_states
from trainer.checkpoint.manifest import Facts
from trainer.config import RunConfig
from trainer.config.grpo import Rollout
from trainer.data.prompts import PromptSets
from trainer.data.stops import StopIds, stop_ids
from trainer.engine import ZeroEngine
from trainer.frozen_shards import FrozenShards
from trainer.launcher import say
from trainer.models.head import peak_bytes, whole_bytes
from trainer.models.policy import Policy, load_policy
from trainer.models.reference import Reference, make_reference
from trainer.models.resting import Resting
from trainer.models.scorer import TokenScorer, check_head
from trainer.models.shared_prefix import share_prompts, use_flex
from trainer.models.streaming import Placement
from trainer.models.vocabulary import check_embedding_rows
from trainer.preflight.facts import facts_of
from trainer.preflight.memory import choose_at_start
from trainer.preflight.survey import Survey, survey
from trainer.record.memory import PeakMemory
from trainer.rewards.runtime import RewardRuntime
from trainer.rollout.decoder import MAX_ROWS, Decoder
from trainer.rollout.hf import HfDecoder
from trainer.rollout.hooks import Hook, HookContext, run_hooks
from trainer.rollout.rope_guard import Lengths, rope_guard
from trainer.rollout.shared import SharedDecoder
from trainer.state import State
from trainer.world import World


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


def check(config: RunConfig, folder: Path, world: World, *, begins: bool = False) -> Checked:
    """Everything that can be refused before the weights are read, all of it in one message. ``folder``: where the run
    file lies. ``begins``: run.dir must not hold a run yet."""
    _tell(world, "checking configuration, rewards and data")
    found = survey(config, folder, world.device, ranks=world.size, begins=begins)
    found.refuse()
    return checked_of(found)


def checked_of(found: Survey) -> Checked:
    """What a survey without errors has found."""
    assert found.deepspeed is not None and found.tokenizer is not None and found.model_config is not None
    assert found.prompts is not None and found.rewards is not None and found.hooks is not None and found.dtype
    return Checked(
        config=found.config,
        deepspeed=found.deepspeed,
        tokenizer=found.tokenizer,
        model_config=found.model_config,
        prompts=found.prompts,
        rewards=found.rewards,
        hooks=[rope_guard, *found.hooks],
        dtype=found.dtype,
        steps=found.steps,
        notes=[*(f"warning: {warning}" for warning in found.warnings), *found.notes],
    )


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
    policy = load_policy(config.model, checked.model_config, config.lora, tokenizer, checked.dtype, config.quant)
    scorer, stops, unshared = ready_to_decode(checked, policy, world)
    checked.notes.append(_layout_note(unshared, config.rollout.engine))
    reference = None
    if config.grpo.kl.coef or config.grpo.kl.schedule == "adaptive":
        reference = make_reference(
            policy,
            config.reference.mode,
            temperature=config.rollout.temperature,
            placement=Placement(world.device),
            continued=bool(config.lora.start_adapter),
        )
    checked.notes.append(f"reference: {reference.where if reference else 'none, since grpo.kl.coef = 0'}")
    context = HookContext(
        step=0,
        policy=policy.causal,
        reference=reference.copy.causal if reference and reference.copy else None,
        tokenizer=tokenizer,
        longest_prompt=checked.lengths.prompt,
        max_new_tokens=checked.lengths.new,
        world_rank=world.rank,
    )
    told = run_hooks(checked.hooks, context)
    checked.notes.extend(note for note in told if f"warning: {note}" not in checked.notes)
    facts = facts_of(config, checked.deepspeed, checked.prompts.train, checked.rewards, policy, world.size)
    return Models(policy, scorer, reference, stops, not unshared, facts)


def ready_to_decode(checked: Checked, policy: Policy, world: World) -> tuple[TokenScorer, StopIds, str]:
    """Checks a policy and takes it to its device. The last: why its prompts are not shared, or nothing."""
    tokenizer, rollout = checked.tokenizer, checked.config.rollout
    check_embedding_rows(policy.causal, tokenizer)
    stops = stop_ids(tokenizer, policy.generation_config)
    if checked.config.model.gguf_file:  # of others the survey has said it
        checked.notes.extend(stops.notes)
    named = ", ".join(f"{token_id} ({tokenizer.convert_ids_to_tokens(token_id)})" for token_id in stops.ids)
    checked.notes.append(f"a completion ends with token {named or 'none'}, or after {rollout.max_new_tokens} tokens")
    scorer = TokenScorer(policy.causal, rollout.temperature).to(world.device)
    check_head(scorer)
    unshared = share_prompts(policy.causal)
    if not unshared and (note := use_flex(policy.causal)):
        checked.notes.append(note)
    return scorer, stops, unshared


def make_decoder(
    checked: Checked, policy: Policy, stops: StopIds, memory: PeakMemory, world: World, *, shared_prompts: bool
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
        *most_at_a_time(config.rollout, world),
    )


def most_at_a_time(rollout: Rollout, world: World) -> tuple[int | None, int | None]:
    """Rows and prompts of a rollout. On a card, whose memory is planned for them, an evaluation takes no more."""
    if world.device.type != "cuda":
        return None, None
    groups, generations = -(-rollout.prompts_per_step // world.size), rollout.num_generations
    rows = min(max(MAX_ROWS, 2 * generations), groups * generations)
    return rows, min(groups, 2 * max(1, rows // generations))


def start_engine(checked: Checked, models: Models, world: World) -> State:
    """Hands the policy to ZeRO and puts the run's parts together."""
    config, causal = checked.config, models.policy.causal
    _tell(world, f"starting the engine ({config.engine.deepspeed})")
    engine = ZeroEngine(models.scorer, config.optim, checked.deepspeed, world)
    if (reference := models.reference) and reference.kind == "sharded copy" and reference.copy:
        reference.shards = FrozenShards(reference.copy, world)
    # Train mode is what gradient checkpointing is tied to; there is no dropout left that it could switch on.
    engine.module.train()
    memory = PeakMemory(world.device)
    choice = choose_at_start(
        config,
        checked.model_config,
        checked.deepspeed["zero_optimization"],
        lengths=checked.lengths,
        itemsize=models.scorer.head.weight.element_size(),
        shared=models.shared_prompts,
        world=world,
    )
    checked.notes.extend((choice.note, _head_note(causal.config, choice.token_budget, config.grpo.kl.estimator)))
    if choice.checkpointing:
        causal.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if choice.rests:
        engine.away = Resting(Placement(world.device))
    random_states.seed(config.run.seed + world.rank)
    return State(
        config=config,
        world=world,
        policy=models.policy,
        engine=engine,
        reference=models.reference,
        decoder=make_decoder(checked, models.policy, models.stops, memory, world, shared_prompts=models.shared_prompts),
        rewards=checked.rewards,
        hooks=checked.hooks,
        prompts=checked.prompts.train,
        eval_prompts=checked.prompts.eval,
        steps=checked.steps,
        token_budget=choice.token_budget,
        plan=choice.plan,
        shared_prompts=models.shared_prompts,
        memory=memory,
        facts=models.facts,
        notes=checked.notes,
    )


def _tell(world: World, phase: str) -> None:
    """A line as a phase begins: each may take minutes with a large model."""
    if world.is_main:
        say(f"{phase} ...")


def _layout_note(unshared: str, engine: str) -> str:
    """``unshared``: why prompts are not shared, or nothing."""
    if unshared:
        return f"one row a completion, each with its prompt, and rollouts by transformers' generate: {unshared}"
    return "each prompt is computed once" + (
        "" if engine == "shared" else ', but in rollouts: rollout.engine = "hf" is transformers\' generate'
    )


def _head_note(config: PretrainedConfig, tokens: int, estimator: str) -> str:
    columns = config.get_text_config(decoder=True).vocab_size
    chunked = peak_bytes(columns, tokens, exact=estimator == "exact") / 2**30
    whole = whole_bytes(columns, tokens) / 2**30
    return (
        f"a pass of {tokens} tokens scores {columns} columns in chunks: {chunked:.2f} GiB at its peak, where whole "
        f"logits would take {whole:.1f} (of an A10's 24 GB about 22 can be used)"
    )
