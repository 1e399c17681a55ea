"""A DeepSpeed JSON and a RunConfig, made one: what DeepSpeed is given, or one message with every contradiction."""

import copy
from collections.abc import Iterator
from typing import Any

from trainer.config.deepspeed_json import others, owned, precision, read, zero
from trainer.config.deepspeed_json.mistakes import Block, Mistake, corrected, shown
from trainer.config.deepspeed_json.precision import Dtype
from trainer.config.schema import RunConfig
from trainer.errors import Refused

BLOCKS = ("optimizer", "scheduler", "fp16", "bf16", "data_types", "zero_optimization")
NEVER = 10**9
"""steps_per_print: the progress line is ours."""


def resolve(config: RunConfig, world_size: int, *, dtype: Dtype, hidden_size: int = 0) -> dict[str, Any]:
    """The configuration for `deepspeed.initialize`, with nothing left to guess.

    ``dtype``: what model.dtype is on this device. ``hidden_size``: the model's, for sizes that are "auto" (0: unknown).
    Raises `Refused` with everything that contradicts the run file, and the JSON as it would be accepted.
    """
    file = read.locate(config.engine.deepspeed)
    block = read.read(file)
    mistakes, sound = _blocks(block)
    stage = sound["zero_optimization"].get("stage", 0)
    mistakes += owned.batch(sound, config, world_size)
    mistakes += owned.clipping(sound, config)
    mistakes += owned.optimizer(sound["optimizer"], config)
    mistakes += owned.scheduler(sound["scheduler"], config)
    mistakes += precision.mistakes(sound, config, dtype, stage if isinstance(stage, int) else 0)
    mistakes += zero.mistakes(sound["zero_optimization"], config)
    mistakes += others.mistakes(sound)
    zero_block, unknown = zero.resolved(sound["zero_optimization"], hidden_size)
    mistakes += unknown
    result = others.passed(sound) | {"zero_optimization": zero_block}
    known = {mistake.path for mistake in mistakes}
    mistakes += [
        Mistake(path, 'is "auto", which only the Hugging Face Trainer fills in. Write a value, or remove it.')
        for path in _autos(result)
        if path not in known
    ]
    if mistakes:
        raise Refused(_message(str(file), block, mistakes))
    offloaded = zero_block.get("offload_optimizer", {}).get("device", "none") == "cpu"
    return result | precision.resolved(dtype, stage) | _arithmetic(config, world_size, offloaded=offloaded)


def _blocks(block: Block) -> tuple[list[Mistake], Block]:
    """A copy in which the blocks that are looked into are objects, and what was none of them."""
    sound = copy.deepcopy(block)
    mistakes = []
    for name in BLOCKS:
        inner = sound.setdefault(name, {})
        if not isinstance(inner, dict):
            mistakes.append(Mistake(name, f"is {shown(inner)}, expected an object."))
            sound[name] = {}
    return mistakes, sound


def _arithmetic(config: RunConfig, world_size: int, *, offloaded: bool) -> Block:
    """The numbers that DeepSpeed insists on.

    Nominal: one sample a rank and no accumulation, since the trainer sums, divides by its own global count and sets the
    boundary itself; whatever stood here would divide the gradient once more. Clipping is 1.0 in DeepSpeed when absent.
    """
    return {
        "train_batch_size": world_size,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": float(config.optim.max_grad_norm),
        "communication_data_type": "fp32",
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": offloaded,
        "steps_per_print": NEVER,
        "wall_clock_breakdown": False,
    }


def _autos(value: Any, prefix: str = "") -> Iterator[str]:
    """The dotted paths at which "auto" is left."""
    if value == "auto":
        yield prefix
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _autos(inner, f"{prefix}.{key}" if prefix else key)
    elif isinstance(value, list):
        for inner in value:
            yield from _autos(inner, prefix)


def _message(file: str, block: Block, mistakes: list[Mistake]) -> str:
    lines = [
        f"{file} (engine.deepspeed) cannot be used with this run file: {len(mistakes)}"
        f" problem{'s' if len(mistakes) > 1 else ''}."
    ]
    lines += [f"  {mistake.path} {mistake.text}" for mistake in mistakes]
    return "\n".join([*lines, "With these keys as the run file has them, the JSON is:", corrected(block, mistakes)])
