"""Whether gradient checkpointing can stay off: what a training pass keeps for its backward pass, measured on a small
one, beside the memory that is free."""

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.batch import Completion, PackedRows, Prompt
from trainer.config import RunConfig
from trainer.engine import ZeroEngine
from trainer.models.head import peak_bytes
from trainer.models.packing import pack, pack_groups
from trainer.models.scorer import TokenScorer
from trainer.record.memory import PeakMemory
from trainer.rollout.rope_guard import Lengths
from trainer.world import World

PROBE_TOKENS = 64
"""About as many has the smaller of the two passes that are measured; the other has twice as many."""

USABLE = 0.8
"""Of the free memory. The rest is for what is not counted: fragments, workspaces of kernels, attention masks."""

MEMINFO = Path("/proc/meminfo")

STEP = 256
"""Tokens by which a smaller pass is looked for."""


@dataclass(frozen=True)
class Layout:
    """What a pass is made of: completions of the longest kind."""

    prompt: int
    new: int
    generations: int
    shared: bool
    """A group's prompt lies in the pass once."""

    def largest_pass(self, *, prompts: int, micro_batch: int, token_budget: int) -> int:
        """Tokens that one pass of a step of so many prompts can have."""
        completion = self.prompt + self.new
        if micro_batch:
            return min(micro_batch, prompts * self.generations) * completion
        group = self.prompt + self.generations * self.new if self.shared else self.generations * completion
        return max(completion, min(token_budget, prompts * group))

    def small(self, scale: int, device: torch.device) -> PackedRows:
        """A group in the same proportions, ``scale`` times about ``PROBE_TOKENS`` tokens, of which one is scored.

        In proportion, since attention copies a shared prompt's keys and values for each of its completions.
        """
        per_new = self.prompt / self.new
        tokens = per_new + self.generations if self.shared else self.generations * (per_new + 1)
        new = scale * max(1, round(PROBE_TOKENS / tokens))
        prompt = Prompt(0, "", (1,) * max(1, round(per_new * new)), None, {})
        ids = (1,) * (new + 1)  # the last token of a completion is no input
        group = [Completion(0, i, prompt, ids, (0.0,) * len(ids), "stop", "") for i in range(self.generations)]
        rows = pack_groups(group, device=device) if self.shared else pack(group, pad_id=0, device=device)
        # Positions cost nothing, but those beyond the longest row would change a dynamic RoPE, or have no embedding.
        positions = rows.position_ids.clamp(max=self.prompt + self.new - 1)
        return rows._replace(
            position_ids=positions,
            score_at=rows.score_at[:1],
            targets=rows.targets[:1],
            completion=rows.completion[:1],
        )


@dataclass(frozen=True)
class PassBytes:
    """Bytes of a forward and backward pass beside the weights, their gradients and the optimizer's state."""

    kept: tuple[float, float]
    """At the end of the forward pass: a constant, and bytes a token."""
    passing: tuple[float, float]
    """Further ones at the peak of the backward pass: likewise."""
    hidden: int
    """Bytes of one hidden state."""
    columns: int
    """Of the head."""
    exact: bool
    """The KL is that over the whole vocabulary."""

    def of(self, tokens: int, scored: int) -> float:
        """The head's peak comes when the blocks have kept all that they keep and hold nothing else yet."""
        head = peak_bytes(self.columns, scored, exact=self.exact)
        # The scored states, and what the head keeps of each: its slopes, or the states again.
        states = (3 if self.exact else 2) * self.hidden * scored
        (kept, kept_a_token), (passing, passing_a_token) = self.kept, self.passing
        return kept + kept_a_token * tokens + states + passing + max(passing_a_token * tokens, head)


def measure(scorer: TokenScorer, layout: Layout, memory: PeakMemory, *, exact: bool) -> PassBytes:
    """Runs a small pass and one twice as large: memory is linear in the tokens, but for masks.

    Weights have to be whole, and get no gradient. The first pass is not counted: libraries make their workspaces in it.
    """
    weight = scorer.head.weight
    sizes = [layout.small(scale, weight.device) for scale in (1, 1, 2)]
    with memory:
        _, (kept, passing), (kept_by_more, passing_by_more) = (_probe(scorer, rows, memory) for rows in sizes)
    fewer, more = (rows.input_ids.numel() for rows in sizes[1:])

    def line(at_fewer: int, at_more: int) -> tuple[float, float]:
        slope = max(0.0, (at_more - at_fewer) / (more - fewer))
        return max(0.0, at_fewer - slope * fewer), slope

    return PassBytes(
        line(kept, kept_by_more),
        line(passing, passing_by_more),
        weight.shape[1] * weight.element_size(),
        weight.shape[0],
        exact,
    )


def _probe(scorer: TokenScorer, rows: PackedRows, memory: PeakMemory) -> tuple[int, int]:
    """Bytes kept by the forward pass, and held beyond them at the peak of the backward pass."""
    embedded: list[torch.Tensor] = []
    hook = scorer.causal.get_input_embeddings().register_forward_hook(lambda *call: embedded.append(call[-1]))
    before = _held(memory)
    logps = scorer(rows)["logps"]
    kept = _held(memory) - before
    hook.remove()
    # As far down as the backward pass of training goes, without the gradients of the weights where those are many.
    down_to = embedded if embedded[0].requires_grad else [p for p in scorer.parameters() if p.requires_grad]
    torch.autograd.grad(logps.sum(), down_to, allow_unused=True)
    return kept, memory.take_peak() - before - kept


def _held(memory: PeakMemory) -> int:
    memory.take_peak()  # which starts a measurement at what is held now
    return memory.take_peak()


@dataclass(frozen=True)
class Parameters:
    """Of the policy as the engine holds it."""

    total: int
    trained: int
    itemsize: int
    """Bytes of one in the forward pass."""


MOMENTS = {"adamw": 8, "adamw8bit": 2, "sgd": 0}
"""Bytes a trained parameter of the optimizer's state, by optim.name."""


def state_bytes(parameters: Parameters, zero: dict[str, Any], *, ranks: int, moments: int, elsewhere: bool) -> float:
    """What a rank allocates besides in its first step: with AdamW 12 bytes a trained parameter, or a shard of them.

    Gradients take 4, sharded from ZeRO stage 2 on. The ``moments`` are sharded from stage 1 on, and take nothing on a
    card whose optimizer is offloaded (``elsewhere``). Stages 1 and 2 fill a bucket with gradients; stage 3 gathers
    parameters, up to a limit. ``zero``: the table zero_optimization, whose absent keys are DeepSpeed's defaults.
    """
    stage = zero.get("stage", 0)
    gradients = 4 * parameters.trained / (ranks if stage >= 2 else 1)
    state = 0 if elsewhere else moments * parameters.trained / (ranks if stage >= 1 else 1)
    bucket = zero.get("reduce_bucket_size", 5e8) if stage in (1, 2) else 0
    gathered = min(parameters.total, zero.get("stage3_max_live_parameters", 1e9)) if stage == 3 else 0
    return gradients + state + parameters.itemsize * (bucket + gathered)


def free_bytes(world: World) -> float:
    """Free for this rank: on its card, or its share of the host's memory. A collective."""
    hosts = world.gather_objects(socket.gethostname())  # and every rank has done its allocations when it is through
    if world.device.type == "cpu":
        return _available() / hosts.count(socket.gethostname())
    free, total = torch.cuda.mem_get_info(world.device)
    allocated = torch.cuda.memory_allocated(world.device)
    unused = torch.cuda.memory_reserved(world.device) - allocated
    limit = torch.cuda.memory.get_per_process_memory_fraction(world.device) * total
    return min(free + unused, limit - allocated)


def _available() -> float:
    (line,) = (line for line in MEMINFO.read_text().splitlines() if line.startswith("MemAvailable:"))
    return float(line.split()[1]) * 1024


def fits(found: PassBytes, tokens: int, *, least: int, state: float, free: float, world: World) -> tuple[bool, str]:
    """Whether every rank has room for a pass of so many tokens without gradient checkpointing, and a note with the
    numbers. A collective: all ranks decide alike, by the one that needs most and the one that has least.

    ``least``: tokens of the smallest pass there can be.
    """
    needed, less = world.all_reduce_max([found.of(tokens, tokens) + state, -free])
    usable = USABLE * -less
    note = (
        f"gradient checkpointing is {'off' if needed <= usable else 'on'}: without it a pass of {tokens} tokens takes "
        f"{(needed - state) / 2**30:.2f} GiB ({(found.kept[1] + found.passing[1]) / 2**20:.3g} MiB a token, measured), "
        f"gradients and optimizer take {state / 2**30:.2f}; {USABLE:.0%} of the {-less / 2**30:.2f} that are free is "
        f"{usable / 2**30:.2f}"
    )
    fewer = max((n for n in range(least, tokens, STEP) if found.of(n, n) + state <= usable), default=0)
    if needed > usable and fewer:
        note += f". A pass of {fewer} tokens would do without (engine.token_budget, or engine.micro_batch)"
    return needed <= usable, note


def room_for_activations(
    config: RunConfig,
    engine: ZeroEngine,
    scorer: TokenScorer,
    memory: PeakMemory,
    *,
    lengths: Lengths,
    shared: bool,
    token_budget: int,
    zero: dict[str, Any],
    head_visits: bool,
) -> tuple[bool, str]:
    """``engine.gradient_checkpointing = "auto"``: whether it can stay off, and why. A collective of ranks that have
    started, before their first step. ``head_visits``: the reference's head is put on the device for each pass."""
    rollout, world = config.rollout, engine.world
    layout = Layout(lengths.prompt, lengths.new, rollout.num_generations, shared)
    with engine.gathered():
        found = measure(scorer, layout, memory, exact=config.grpo.kl.estimator == "exact")
        parameters = Parameters(
            sum(one.numel() for one in scorer.parameters()),
            sum(one.numel() for one in scorer.parameters() if one.requires_grad),
            scorer.head.weight.element_size(),
        )
        visiting = scorer.head.weight.nbytes if head_visits else 0
    offloaded = (zero.get("offload_optimizer") or {}).get("device", "none") != "none"
    state = state_bytes(
        parameters,
        zero,
        ranks=world.size,
        moments=MOMENTS[config.optim.name],
        elsewhere=offloaded and world.device.type != "cpu",
    )
    tokens = layout.largest_pass(
        prompts=rollout.prompts_per_step, micro_batch=config.engine.micro_batch, token_budget=token_budget
    )
    return fits(found, tokens, least=lengths.need, state=state + visiting, free=free_bytes(world), world=world)
