"""Bytes of a rank by phase of a step and by part."""

from collections.abc import Callable
from dataclasses import dataclass

from trainer.plan import activations, state
from trainer.plan.settings import Settings

Parts = dict[str, float]

ROWS, PREFILL = 128, 8192
"""Rows that decode together, and prompt tokens of one pass at most: rollout/decoder.py and rollout/shared.py."""
FIRST_CAPACITY = 64
"""Tokens of a row's first cache: models/prefix_cache.py. tests/unit/test_plan.py compares all three."""
SAMPLER_COPIES = 24
"""Bytes a row and column: logits, log-probs, what is allowed and its probabilities in fp32, their sums in float64."""

CONTEXT = 0.6 * 2**30
"""Of CUDA and its libraries."""
COMMUNICATOR = 0.3 * 2**30
"""NCCL's buffers, with more than one rank."""
FRAGMENTATION = 0.1
"""Of the tensors that come and go: what the allocator cannot hand out again, and workspaces of kernels."""


def context(settings: Settings) -> float:
    """What a process takes of a card before it makes a tensor."""
    return CONTEXT + (COMMUNICATOR if settings.ranks > 1 else 0) if settings.cuda else 0.0


def resident(settings: Settings) -> Parts:
    """Through the whole step."""
    on_host = state.on_host(settings)
    optimizer = 0.0 if on_host else state.master(settings) + state.moments(settings)
    return {
        "weights": state.weights(settings),
        "gradients": state.gradients_for_good(settings),
        "optimizer": optimizer,
        "reference": state.reference(settings),
        "reward models": 0.0 if settings.cuda else state.networks(settings),
        "DeepSpeed buckets": state.buckets_for_good(settings),
    }


def cache(settings: Settings) -> float:
    """Keys and values of a rollout: of each prompt once and of each row what it decodes, whose room doubles from 64
    tokens on; of one layer the old ones too, while it grows. Half the groups may be waiting for a last row."""
    shape, groups, generations = settings.shape, settings.groups, settings.generations
    rows = min(max(ROWS, 2 * generations), groups * generations)
    if not settings.decodes_shared:
        return 2 * settings.itemsize * shape.keys * rows * (settings.prompt + settings.new) * (shape.layers + 1)
    prompts = min(groups, 2 * max(1, rows // generations)) * settings.prompt
    capacity = FIRST_CAPACITY
    while capacity < settings.new:
        capacity *= 2
    tokens = prompts + rows * min(capacity, settings.new)
    return 2 * settings.itemsize * shape.keys * tokens * (shape.layers + 1)


def rollout(settings: Settings) -> Parts:
    """The prefill keeps nothing for a backward pass; sampling copies all logits; stage 3 gathers all weights; a CPU
    arranges those of the linear layers anew (models/blocked_weights.py). Optimizer and gradients may be elsewhere."""
    shape = settings.shape
    rows = min(max(ROWS, 2 * settings.generations), settings.groups * settings.generations)
    tokens = min(settings.groups * settings.prompt, max(PREFILL, settings.prompt))
    if not settings.decodes_shared:
        tokens = rows * settings.prompt
    whole = state.gathered(settings, whole=True)
    if not settings.cuda and settings.decodes_shared:
        adapter = settings.trained if settings.rank else 0
        whole += settings.itemsize * (shape.matrix + adapter + (0 if settings.bits else shape.block_weights))
    at_rest = {"optimizer": 0.0, "gradients": 0.0} if settings.rests else {}
    return (
        resident(settings)
        | at_rest
        | {
            "weights": state.weights(settings) + whole,
            "KV cache": cache(settings),
            "activations": activations.without_backward(settings, tokens),
            "head chunks": float(SAMPLER_COPIES * rows * shape.vocab),
        }
    )


def reward(settings: Settings) -> Parts:
    """Rewards are asked together."""
    tokens = settings.groups * settings.generations * settings.least_budget
    return resident(settings) | {
        "reward models": state.networks(settings),
        "activations": sum(one.activations(tokens) for one in settings.networks),
    }


def kept_reference(settings: Settings) -> float:
    """Hidden states of all completions of the step, for the exact KL."""
    states = settings.groups * settings.generations * settings.new * settings.shape.hidden
    return float(settings.itemsize * states) if settings.exact and settings.reference != "none" else 0.0


def visiting_head(settings: Settings) -> float:
    """The exact KL also needs the reference's head: that of a copy that is not on the device comes for each pass."""
    comes = settings.exact and settings.reference in ("streamed", "sharded")
    return float(settings.itemsize * settings.shape.matrix) if comes else 0.0


def reference(settings: Settings) -> Parts:
    one = settings.largest_pass()
    return resident(settings) | {
        "weights": state.weights(settings) + state.gathered(settings),
        "reference": state.reference(settings) + state.reference_on_visit(settings) + kept_reference(settings),
        "activations": activations.without_backward(settings, one.tokens)
        + settings.itemsize * settings.shape.hidden * one.scored,
        "head chunks": activations.chunks(settings, one),
    }


def training(settings: Settings) -> Parts:
    """The fullest of five moments: in the head, in the backward pass of the last block and of the one with which the
    first bucket is full, at the embedding, and in the optimizer's step."""
    one, several = settings.largest_pass(), settings.passes()[0] > 1
    base = resident(settings) | {
        "weights": state.weights(settings) + state.gathered(settings),
        "reference": state.reference(settings) + kept_reference(settings) + visiting_head(settings),
    }
    if several:
        base["gradients"] = state.gradients_before(settings)
    kept = activations.blocks(settings, one) + activations.around(settings, one)
    left = kept * (1 - state.backward_before_gradients(settings))
    in_flight = activations.in_flight(settings, one)
    # A bucket is there from the first gradient of a weight on.
    bucket = {"DeepSpeed buckets": state.buckets(settings)}
    moments: tuple[Parts, ...] = (
        {"activations": kept, "head chunks": activations.head(settings, one) + activations.chunks(settings, one)},
        bucket | {"activations": kept + in_flight},
        bucket | {"activations": left + in_flight, "gradients": state.gradients_before(settings)},
        bucket
        | {
            "activations": activations.embedding(settings, one),
            "gradients": state.gradients(settings, several=several),
        },
        {"gradients": state.gradients_of_step(settings)},
    )
    return max((base | moment for moment in moments), key=lambda parts: sum(parts.values()))


PHASES: dict[str, Callable[[Settings], Parts]] = {
    "rollout": rollout,
    "reference": reference,
    "reward": reward,
    "training": training,
}
PARTS = (
    "weights",
    "gradients",
    "optimizer",
    "reference",
    "reward models",
    "KV cache",
    "activations",
    "head chunks",
    "DeepSpeed buckets",
    "context and fragmentation",
)
"""In the order of the table."""


@dataclass(frozen=True)
class Plan:
    settings: Settings
    phases: dict[str, Parts]
    """Bytes of every part of every phase."""

    @property
    def totals(self) -> dict[str, float]:
        return {phase: sum(parts.values()) for phase, parts in self.phases.items()}

    @property
    def fullest(self) -> str:
        """The phase of the peak."""
        totals = self.totals
        return max(totals, key=lambda phase: totals[phase])

    @property
    def peak(self) -> float:
        return self.totals[self.fullest]


def plan(settings: Settings) -> Plan:
    """A phase that does not happen (no reference) is left out."""
    phases = {}
    stays = resident(settings)
    for phase, parts_of in PHASES.items():
        if phase == "reference" and settings.reference == "none":
            continue
        parts = dict.fromkeys(PARTS, 0.0) | parts_of(settings)
        comes = sum(max(0.0, size - stays.get(part, 0.0)) for part, size in parts.items())
        phases[phase] = parts | {"context and fragmentation": context(settings) + FRAGMENTATION * comes}
    return Plan(settings, phases)
