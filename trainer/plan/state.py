"""What a rank holds through a whole step, whatever its passes: weights, optimizer, gradients, buckets, reference.

Bytes a parameter were counted in DeepSpeed 0.19 engines of every stage (tests/unit/test_plan_state.py). The master
weights are fp32 copies, also of fp32 weights; n is the number of ranks, t the trained parameters.
"""

import math

from trainer.plan.settings import Settings

MOMENTS = {"adamw": 8.0, "adamw8bit": 2 * (1 + 4 / 256), "sgd": 0.0}
"""Two of 4 bytes; two of 1 byte with an fp32 scale for each block of 256; none."""

NF4 = 0.5 + (1 + 4 / 256) / 64
"""Bytes of a 4-bit weight: half a byte, and for each block of 64 a scale of 8 bits that is scaled by blocks of 256."""

STAGE_0_BUCKET = 5e8
"""Elements that DeepSpeed's plain data parallelism reduces at a time."""


def whole_weights(settings: Settings) -> float:
    """Of the policy on one device."""
    shape = settings.shape
    adapter = settings.trained if settings.rank else 0
    if not settings.bits:
        return settings.itemsize * (shape.total + adapter)
    return NF4 * shape.block_weights + settings.itemsize * (shape.total - shape.block_weights + adapter)


def weights(settings: Settings) -> float:
    """Between passes: stage 3 keeps a shard, on the host where parameters are offloaded."""
    if settings.zero.stage < 3:
        return whole_weights(settings)
    if settings.zero.offload_parameters and settings.cuda:
        return 0.0
    return whole_weights(settings) / settings.ranks


def gathered(settings: Settings, *, whole: bool = False) -> float:
    """Stage 3: weights of the layers at work, up to a limit, or whole. A single rank has nothing to gather, but from
    the host."""
    if settings.zero.stage < 3 or (settings.ranks == 1 and weights(settings)):
        return 0.0
    return whole_weights(settings) * (1.0 if whole else min(1.0, settings.zero.live / settings.shape.total))


def on_host(settings: Settings) -> bool:
    """Master weights and moments are not on the device."""
    return settings.cuda and settings.zero.offload_optimizer


def master(settings: Settings) -> float:
    stage = settings.zero.stage
    return 4 * settings.trained / settings.ranks if stage else 0.0


def moments(settings: Settings) -> float:
    return MOMENTS[settings.optimizer] * settings.trained / (settings.ranks if settings.zero.stage else 1)


def gradients(settings: Settings, *, several: bool) -> float:
    """At the end of a pass, on the device. ``several``: there was one before it in this step.

    Stage 0: fp32, whole. Stage 1: those of the pass, whole, and an fp32 sum of them: in bf16 of all, in fp32 a shard.
    Stage 2: an fp32 shard (in fp32, of the pass and of those before it); and what the bucket is too small for stays
    until the end of the pass. Stage 3: an fp32 shard, with the optimizer where that is offloaded.
    """
    zero, t, n = settings.zero, settings.trained, settings.ranks
    wide = settings.itemsize == 4
    if zero.stage == 0:
        return 4.0 * t
    if zero.stage == 1:
        return settings.itemsize * t + (4 * t / n if wide else 4 * t)
    if zero.stage == 2:
        return ((8 if wide and several else 4) * t + settings.itemsize * _oversized(settings)) / n
    return 0.0 if on_host(settings) else 4 * t / n


def gradients_before(settings: Settings) -> float:
    """Of earlier passes of the step, in the middle of one."""
    if settings.zero.stage < 2:
        return 4.0 * settings.trained
    return 0.0 if settings.zero.stage == 3 and on_host(settings) else 4 * settings.trained / settings.ranks


def backward_before_gradients(settings: Settings) -> float:
    """Share of a backward pass after which the sum of gradients is made, whole: stage 2 makes it with its first full
    bucket. Elsewhere gradients come as activations go."""
    if settings.zero.stage != 2:
        return 1.0
    return min(1.0, settings.zero.bucket / settings.trained)


def gradients_of_step(settings: Settings) -> float:
    """While the optimizer takes its step: in fp32, stages 1 and 2 put the shard together once more."""
    zero, t, n = settings.zero, settings.trained, settings.ranks
    if settings.itemsize == 4 and zero.stage in (1, 2):
        return 8 * t / n
    return settings.itemsize * t + 4 * t if zero.stage == 1 else gradients_before(settings)


def gradients_for_good(settings: Settings) -> float:
    """Of them, what is never given back between steps: the sum of stage 1 in bf16, and the shard of stage 3."""
    if settings.zero.stage == 3 or (settings.zero.stage == 1 and settings.itemsize == 2):
        return gradients_before(settings)
    return 0.0


def resting(settings: Settings) -> float:
    """Master weights and moments, which a rollout leaves to the host where it needs their room."""
    return master(settings) + moments(settings) if settings.rests else 0.0


def _oversized(settings: Settings) -> int:
    """Trained parameters of blocks, and of a head of its own, in tensors that are larger than a bucket."""
    shape, bucket = settings.shape, settings.zero.bucket
    if settings.rank:
        return 0
    sizes = [inputs * outputs for inputs, outputs in shape.linears.values()] * shape.layers
    return sum(size for size in (*sizes, 0 if shape.tied else shape.matrix) if size > bucket)


def buckets_for_good(settings: Settings) -> float:
    """Stage 3 keeps an fp32 bucket."""
    return 4.0 * settings.zero.bucket if settings.zero.stage == 3 else 0.0


def buckets(settings: Settings) -> float:
    """Stages 1 and 2: one of gradients, allocated whole, and its fp32 copy on the way. Stage 3: one in fp32, allocated
    whole, and twice what lies in it; a tensor that is larger goes alone. With an offloaded optimizer, the largest
    gradient once more."""
    zero, t, itemsize = settings.zero, settings.trained, settings.itemsize
    filled = min(t, zero.bucket)
    if zero.stage == 0:
        return 4 * min(t, STAGE_0_BUCKET)
    staging = itemsize * settings.shape.largest if on_host(settings) and not settings.rank else 0
    if zero.stage == 3:
        largest = 0 if settings.rank else settings.shape.largest
        return buckets_for_good(settings) + 8 * max(filled, largest)
    return itemsize * zero.bucket + (4 * filled if itemsize == 2 else 0) + staging


def reference(settings: Settings) -> float:
    """Resident: whole, the head included. Streamed and sharded: nothing between its passes; a CPU holds the shard."""
    whole = settings.itemsize * settings.shape.total
    if settings.reference == "sharded" and not settings.cuda:
        return whole / settings.ranks
    return whole if settings.reference == "resident" else 0.0


def reference_on_visit(settings: Settings) -> float:
    """Streamed or sharded: two layers, of which one computes while the next arrives, and the head."""
    if settings.reference not in ("streamed", "sharded"):
        return 0.0
    shape = settings.shape
    return settings.itemsize * (2 * shape.block_weights / shape.layers + shape.matrix)


def networks(settings: Settings) -> float:
    """Weights of reward models and encoders, on the host or while they score."""
    return sum(one.weights for one in settings.networks)


def host(settings: Settings) -> float:
    """Bytes of host memory that a rank on a card needs: what is offloaded, gradients and a pinned copy included."""
    if not settings.cuda:
        return 0.0
    share = settings.trained / settings.ranks
    away = master(settings) + moments(settings) + (4 + settings.itemsize) * share if on_host(settings) else 0.0
    away += _pinned(resting(settings), settings) + networks(settings)
    if settings.zero.offload_parameters:
        away += whole_weights(settings) / settings.ranks
    copies = {"streamed": 1.0, "sharded": 1 / settings.ranks}.get(settings.reference, 0.0)
    return away + copies * settings.itemsize * settings.shape.total


def _pinned(at_rest: float, settings: Settings) -> float:
    """What torch takes for it: blocks of a power of two. Stages 1 and 2 have three, stage 3 many that are nearly
    full."""
    if not at_rest or settings.zero.stage == 3:
        return at_rest
    return 3.0 * 2 ** math.ceil(math.log2(at_rest / 3))


def held_at_the_start(settings: Settings) -> float:
    """By an engine that has not trained yet: Adam makes its moments in the first step."""
    optimizer = 0.0 if on_host(settings) else master(settings)
    for_good = gradients_for_good(settings) + buckets_for_good(settings)
    rewards = 0.0 if settings.cuda else networks(settings)
    return weights(settings) + reference(settings) + optimizer + for_good + rewards
