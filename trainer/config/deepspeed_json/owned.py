"""Numbers of a DeepSpeed JSON that the run file owns: absent, "auto", or the same there."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from trainer.config.deepspeed_json.mistakes import Block, Mistake, shown
from trainer.config.schema import RunConfig

BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


class Owned(NamedTuple):
    """What the run file says of a key: a value, or none that a number could agree with."""

    value: Any
    source: str
    """The run file's key and value, for the message."""


def batch(block: Block, config: RunConfig, world_size: int) -> Iterator[Mistake]:
    """train_batch_size = micro x accumulation x ranks, against the run's own numbers."""
    micro, total = config.engine.micro_batch, config.completions_per_step
    source = (
        f"rollout.prompts_per_step = {config.rollout.prompts_per_step} x rollout.num_generations ="
        f" {config.rollout.num_generations}"
    )
    owned = {BATCH[0]: Owned(total, f"{total} completions ({source})")}
    passes, left = divmod(total, micro * world_size) if micro else (0, 1)
    ranks = f"{world_size} rank{'s' if world_size > 1 else ''}"
    if not micro:
        owned |= dict.fromkeys(BATCH[1:], Owned(None, "engine.micro_batch = 0, which leaves it to engine.token_budget"))
    else:
        share = f"{total} completions / engine.micro_batch = {micro} / {ranks}"
        owned[BATCH[1]] = Owned(micro, f"engine.micro_batch = {micro}")
        owned[BATCH[2]] = Owned(None, f"{share}, no whole number") if left else Owned(passes, f"{passes} ({share})")
    given = {key: block[key] for key in BATCH if key in block and block[key] != "auto"}
    wrong = [
        Mistake(key, text)
        for key, value in given.items()
        # 1 is DeepSpeed's default, and what the engine is given: the trainer places the boundary itself.
        if not (key == BATCH[2] and _same(value, 1)) and (text := _disagrees(value, owned[key]))
    ]
    if wrong and len(given) == 3 and all(_is_count(value) for value in given.values()):
        hint = _triangle(given[BATCH[0]], given[BATCH[1]], given[BATCH[2]], world_size)
        wrong[-1] = wrong[-1]._replace(text=f"{wrong[-1].text} {hint}".rstrip())
    yield from wrong


def _triangle(total: int, micro: int, passes: int, world_size: int) -> str:
    """What the three numbers say about the ranks they were written for."""
    if total == micro * passes * world_size:
        return ""
    ranks, left = divmod(total, micro * passes)
    if left:
        return f"({total} is no multiple of {micro} x {passes}, on any number of ranks.)"
    launcher = (
        " Was the launcher used? zero-grpo train RUN.toml --gpus N, deepspeed --module trainer or torchrun -m trainer."
        if world_size == 1
        else ""
    )
    return f"({total} = {micro} x {passes} x {ranks} fits {ranks} ranks; this job has {world_size}.{launcher})"


def clipping(block: Block, config: RunConfig) -> Iterator[Mistake]:
    yield from _compare(
        block,
        "gradient_clipping",
        Owned(config.optim.max_grad_norm, f"optim.max_grad_norm = {config.optim.max_grad_norm:g}"),
    )


def optimizer(block: Block, config: RunConfig) -> Iterator[Mistake]:
    """The block may repeat the run file's optimizer; it is not handed on."""
    optim, name = config.optim, str(block.get("type", "auto")).lower()
    # DeepSpeed's "Adam" is AdamW unless adam_w_mode is switched off.
    same = {"adamw": ("adamw", "adam", "auto"), "sgd": ("sgd", "auto")}.get(optim.name, ("auto",))
    if name not in same:
        yield Mistake(
            "optimizer.type", f'is {shown(block["type"])}, the run file has optim.name = "{optim.name}". Remove one.'
        )
    known = {
        "lr": Owned(optim.lr, f"optim.lr = {optim.lr:g}"),
        "betas": Owned(list(optim.betas), f"optim.betas = {list(optim.betas)}"),
        "eps": Owned(optim.eps, f"optim.eps = {optim.eps:g}"),
        "weight_decay": Owned(optim.weight_decay, f"optim.weight_decay = {optim.weight_decay:g}"),
        "adam_w_mode": Owned(True, "decoupled weight decay"),
        "torch_adam": Owned(None, "the engine's own choice"),
        "bias_correction": Owned(True, "bias correction"),
    }
    yield from _block(block, "optimizer", known)


def scheduler(block: Block, config: RunConfig) -> Iterator[Mistake]:
    """The block may repeat the run file's schedule; it is not handed on."""
    optim = config.optim
    theirs = {"constant": "WarmupLR", "linear": "WarmupDecayLR", "cosine": "WarmupCosineLR"}[optim.schedule]
    if block.get("type", "auto") not in ("auto", theirs):
        yield Mistake(
            "scheduler.type",
            f'is {shown(block["type"])}, the run file has optim.schedule = "{optim.schedule}" (DeepSpeed: {theirs}).'
            " Remove one.",
        )
    updates = config.run.steps * config.grpo.updates_per_rollout
    known = {
        "warmup_num_steps": Owned(optim.warmup_steps, f"optim.warmup_steps = {optim.warmup_steps}"),
        "warmup_max_lr": Owned(optim.lr, f"optim.lr = {optim.lr:g}"),
        "warmup_min_lr": Owned(0, "a warm-up from 0"),
        "warmup_min_ratio": Owned(0, "a warm-up from 0"),
        "cos_min_ratio": Owned(0, "a cosine down to 0"),
        "warmup_type": Owned("linear", "a linear warm-up"),
        "last_batch_iteration": Owned(-1, "a start at the first step"),
    }
    length = (
        f"{updates} updates (run.steps x grpo.updates_per_rollout)" if updates else "run.epochs, so the data decides"
    )
    known["total_num_steps"] = Owned(updates or None, length)
    yield from _block(block, "scheduler", known)


def _block(block: Block, name: str, known: dict[str, Owned]) -> Iterator[Mistake]:
    parameters = block.get("params", {})
    if not isinstance(parameters, dict):
        yield Mistake(f"{name}.params", f"is {shown(parameters)}, expected an object.")
        return
    for key in block:
        if key not in ("type", "params", "legacy_fusion"):
            yield Mistake(f"{name}.{key}", f"is not a key of DeepSpeed's {name}. Keys: type, params.")
    for key, value in parameters.items():
        if key in known:
            yield from _compare(parameters, key, known[key], f"{name}.params.")
        else:
            yield Mistake(
                f"{name}.params.{key}", f"is {shown(value)}, but no key of the run file says that. Remove it."
            )


def _compare(block: Block, key: str, owned: Owned, prefix: str = "") -> Iterator[Mistake]:
    if key in block and block[key] != "auto":
        text = _disagrees(block[key], owned)
        if text:
            yield Mistake(prefix + key, text)


def _disagrees(value: Any, owned: Owned) -> str:
    if _same(value, owned.value):
        return ""
    return f'is {shown(value)}, the run file has {owned.source}. Change one of them; here it may be absent or "auto".'


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, bool) or isinstance(other, bool):
        return value is other  # true is not 1 here
    if isinstance(value, int | float) and isinstance(other, int | float):
        return math.isclose(value, other, rel_tol=1e-9)
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(_same(mine, theirs) for mine, theirs in zip(value, other, strict=True))
    return bool(value == other)


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0
