"""All that can be found wrong before weights are read, in one list; what needs a thing that is missing is named."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from trainer.config import RunConfig, warnings
from trainer.config.deepspeed_json import resolve
from trainer.data.prompts import PromptSets, check_sources, load_prompts
from trainer.data.stops import StopIds, declared_eos, stop_ids
from trainer.errors import Refused
from trainer.models import quantised, skeleton
from trainer.models.policy import (
    check_attention,
    load_config,
    load_generation_config,
    load_tokenizer,
    resolve_dtype,
)
from trainer.models.rope import Window, window
from trainer.models.vocabulary import check_embedding_rows, start_adapter_base
from trainer.plan.on_disk import Parameters, checkpoint_bytes
from trainer.preflight.batch import Batch, batch_of
from trainer.preflight.disk import Disk, room_for_checkpoints
from trainer.preflight.facts import stage_of
from trainer.preflight.memory import Planned, may_share, most_tokens, plan_here
from trainer.preflight.networks import networks_of
from trainer.preflight.optimizer import check_optimizer
from trainer.preflight.probe import Probes, probe_rewards
from trainer.preflight.replay import check_replay
from trainer.preflight.versions import out_of_range, versions
from trainer.record.run_dir import RunDirectory
from trainer.record.trackers import unusable
from trainer.rewards.runtime import RewardRuntime
from trainer.rollout.hooks import Hook, HookContext, load_hooks
from trainer.rollout.rope_guard import Lengths, rope_guard

T = TypeVar("T")

LONG_ANSWERS = 0.05
"""Share of reference answers beyond rollout.max_new_tokens above which completions will be cut, too."""


@dataclass
class Survey:
    """What was found; None where it could not be, or does not apply."""

    config: RunConfig
    ranks: int
    device: torch.device
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What was decided."""
    unasked: list[str] = field(default_factory=list)
    """Checks whose ground is missing."""
    hosts: dict[str, int] = field(default_factory=dict)
    """Ranks by host, of a hostfile."""
    versions: dict[str, str | None] = field(default_factory=versions)
    dtype: torch.dtype | None = None
    rewards: RewardRuntime | None = None
    hooks: list[Hook] | None = None
    model_config: PretrainedConfig | None = None
    deepspeed: dict[str, Any] | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    prompts: PromptSets | None = None
    stops: StopIds | None = None
    steps: int = 0
    causal: PreTrainedModel | None = None
    """Without weights."""
    window: Window | None = None
    parameters: Parameters | None = None
    unread: str = ""
    """Why the weights' files could not be checked by their headers."""
    probes: Probes | None = None
    batch: Batch | None = None
    memory: Planned | None = None
    disk: Disk | None = None

    @property
    def lengths(self) -> Lengths | None:
        """Of the longest prompt, held-out ones included."""
        if self.prompts is None:
            return None
        longest = max(len(prompt.ids) for prompt in self.prompts.train + self.prompts.eval)
        return Lengths(longest, self.config.rollout.max_new_tokens)

    def ask(self, work: Callable[[], T]) -> T | None:
        """``work()``, or None when it refuses; what it says is noted, once."""
        try:
            return work()
        except Refused as refusal:
            self.errors += [problem for problem in refusal.problems if problem not in self.errors]
            return None

    def refuse(self) -> None:
        """All errors in one Refused; nothing where there are none."""
        if self.errors:
            told = Refused(*self.errors)
            if self.unasked:
                told.args = (f"{told}\nNot checked, for want of these: {', '.join(self.unasked)}.",)
            raise told


def survey(config: RunConfig, folder: Path, device: torch.device, *, ranks: int, begins: bool) -> Survey:
    """Everything, by floors: what stands alone, the model, the data, then what needs several of them.

    ``folder``: where the run file lies. ``begins``: run.dir must not hold a run yet.
    """
    found = Survey(config, ranks, device, warnings=[*out_of_range(), *warnings(config)])
    _independent(found, folder, begins)
    _model(found)
    _data(found)
    _files(found)
    _rewards_on_data(found)
    _arithmetic(found)
    return found


def _independent(found: Survey, folder: Path, begins: bool) -> None:
    config = found.config
    if begins and config.run.dir:
        found.ask(lambda: RunDirectory(config.run.dir).check())
    if decided := found.ask(lambda: resolve_dtype(config.model.dtype, found.device)):
        found.dtype, why = decided
        name = str(found.dtype).removeprefix("torch.")
        found.notes.append(f"device {found.device.type}, {found.ranks} rank(s), {name} ({why})")
    found.warnings += [*unusable(config.log.report_to), *RunDirectory(config.run.dir).warnings()]
    found.rewards = found.ask(lambda: RewardRuntime(config.reward, folder, hang_timeout=config.watch.for_rewards()[0]))
    found.hooks = found.ask(lambda: load_hooks(config.hooks.before_rollout))
    found.ask(lambda: check_attention(config.model))
    found.ask(lambda: quantised.check_backend(config.quant, found.device))


def _model(found: Survey) -> None:
    config = found.config
    if loaded := found.ask(lambda: load_config(config.model)):
        found.model_config, told = loaded
        found.warnings += told
        found.warnings += found.ask(lambda: quantised.check_stored(loaded[0], config.model, config.quant)) or []
        found.window = found.ask(lambda: window(loaded[0]))
    else:
        found.unasked.append("DeepSpeed configuration, tokenizer, weights")
    if config.lora.start_adapter:
        based = found.ask(lambda: start_adapter_base(config.lora.start_adapter, config.model.name_or_path))
        found.warnings += based[1] if based else []
    if (model_config := found.model_config) is None:
        return
    hidden_size = model_config.get_text_config(decoder=True).hidden_size
    found.deepspeed = found.ask(
        lambda: resolve(
            config,
            found.ranks,
            dtype="bf16" if found.dtype == torch.bfloat16 else "fp32",
            hidden_size=hidden_size,
        )
    )
    if (deepspeed := found.deepspeed) is not None:
        found.ask(lambda: check_optimizer(config, deepspeed))
    found.tokenizer = found.ask(lambda: load_tokenizer(config.model))


def _data(found: Survey) -> None:
    config, tokenizer = found.config, found.tokenizer
    if tokenizer is None:
        found.unasked.append("rendered prompts, rewards on the data")
        if not config.rollout.replay:
            found.ask(lambda: check_sources(config))
        return
    if config.rollout.replay:
        replayed = found.ask(lambda: check_replay(config, tokenizer))
        found.prompts, found.steps = replayed or (None, 0)
    elif (generation := found.ask(lambda: load_generation_config(config.model))) is not None:
        ends = declared_eos(tokenizer, generation)
        found.prompts = found.ask(lambda: load_prompts(config, tokenizer, eos_ids=ends))
        if not config.model.gguf_file:  # whose generation config is read with the weights
            found.stops = stop_ids(tokenizer, generation)
            (found.notes if found.stops.ids else found.warnings).extend(found.stops.notes)
        if (prompts := found.prompts) is not None:
            found.steps = found.ask(lambda: _steps(config, len(prompts.train))) or 0
    if found.prompts is not None:
        found.notes += found.prompts.notes
        found.warnings += found.prompts.warnings


def _files(found: Survey) -> None:
    """The model's class, built without weights, and the headers of its files."""
    config, model_config, dtype = found.config, found.model_config, found.dtype
    if model_config is None or dtype is None:
        return
    causal = found.causal = found.ask(lambda: skeleton.build(config.model, model_config, dtype))
    if causal is None:
        return
    found.unread = found.ask(lambda: skeleton.check_files(config.model, causal)) or ""
    found.ask(lambda: skeleton.check_head_of(model_config, config.rollout.temperature))
    if (tokenizer := found.tokenizer) is not None:
        found.ask(lambda: check_embedding_rows(causal, tokenizer))
    if (lengths := found.lengths) is not None and tokenizer is not None:
        context = HookContext(0, causal, None, tokenizer, lengths.prompt, lengths.new, 0)
        found.warnings += found.ask(lambda: rope_guard(context)) or []
    if (sizes := found.ask(lambda: skeleton.with_adapter(causal, config.lora))) is not None:
        trained, total = sizes
        found.parameters = Parameters(total, trained, dtype.itemsize)


def _rewards_on_data(found: Survey) -> None:
    rewards, prompts, tokenizer = found.rewards, found.prompts, found.tokenizer
    if rewards is None or prompts is None or tokenizer is None:
        if "rendered prompts, rewards on the data" not in found.unasked:
            found.unasked.append("rewards on the data")
        return
    rewards.max_steps = found.steps
    if found.config.rollout.replay:
        return
    if problems := rewards.check(prompts.train + prompts.eval):
        found.errors += [f"rewards and data do not fit: {problem}" for problem in problems]
        return
    if (told := found.ask(lambda: rewards.load(found.device))) is None:
        return
    found.notes += told
    assert found.lengths is not None
    found.probes = probe_rewards(rewards, prompts.train, tokenizer, found.lengths)
    found.notes += found.probes.notes
    found.errors += found.probes.errors
    found.warnings += found.probes.warnings
    found.warnings += _cut_answers(found.config.rollout.max_new_tokens, prompts, tokenizer)


def _arithmetic(found: Survey) -> None:
    config, lengths = found.config, found.lengths
    if lengths is not None and found.steps and found.model_config is not None and found.prompts is not None:
        shared = may_share(config, found.model_config)
        tokens = most_tokens(config, cuda=found.device.type == "cuda")
        if found.deepspeed is not None and found.dtype is not None and found.parameters is not None:
            found.memory = plan_here(
                config,
                found.model_config,
                found.deepspeed["zero_optimization"],
                ranks=found.ranks,
                device=found.device,
                itemsize=found.dtype.itemsize,
                lengths=lengths,
                shared=shared,
            )
        if found.memory is not None:
            tokens = found.memory.plan.settings.token_budget
            found.warnings += networks_of(config.reward)[1]
            if not found.memory.fits:
                found.warnings.append(f"memory: {found.memory.line()}. `zero-grpo plan` says what would fit.")
        found.batch = batch_of(
            config,
            lengths,
            ranks=found.ranks,
            token_budget=tokens,
            shared=shared,
            steps=found.steps,
            rows=len(found.prompts.train),
        )
        rollout = config.rollout
        found.notes.append(
            f"{found.steps} steps of {rollout.prompts_per_step} prompts x {rollout.num_generations} completions = "
            f"{config.completions_per_step} completions, {config.grpo.updates_per_rollout} update(s) each"
        )
    if found.parameters is None or found.deepspeed is None or found.causal is None or not config.run.dir:
        return
    one = checkpoint_bytes(found.parameters, stage=stage_of(found.deepspeed), optimizer=config.optim.name)
    if room := found.ask(lambda: room_for_checkpoints(config, one)):
        found.disk, warning = room
        found.warnings += [warning] if warning else []


def _steps(config: RunConfig, prompts: int) -> int:
    if prompts < config.rollout.prompts_per_step:
        raise Refused(
            f"rollout.prompts_per_step = {config.rollout.prompts_per_step}, but data.source = {config.data.source} has "
            f"{prompts} usable prompts, and a step never holds one twice. Fix: rollout.prompts_per_step = {prompts} "
            "or less."
        )
    return config.run.steps or math.ceil(config.run.epochs * prompts / config.rollout.prompts_per_step)


def _cut_answers(limit: int, prompts: PromptSets, tokenizer: PreTrainedTokenizerBase, rows: int = 1000) -> list[str]:
    """Where reference answers themselves are longer than a completion may be."""
    answers = [prompt.columns.get("answer") for prompt in prompts.train[:rows]]
    texts = [answer for answer in answers if isinstance(answer, str) and answer]
    if not texts:
        return []
    lengths = [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    beyond = sum(length > limit for length in lengths)
    if beyond <= LONG_ANSWERS * len(texts):
        return []
    return [
        f"rollout.max_new_tokens = {limit}: {beyond} of {len(texts)} reference answers are longer (up to "
        f"{max(lengths)} tokens), so completions that are as good will be cut off. Raise it, or drop those rows."
    ]
