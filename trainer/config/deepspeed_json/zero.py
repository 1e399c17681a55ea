"""The zero_optimization block: stage, offload and communication."""

import difflib
from collections.abc import Iterable, Iterator

from trainer.config.deepspeed_json.mistakes import Block, Mistake, shown
from trainer.config.schema import RunConfig

SWITCHES = {
    "allgather_partitions", "contiguous_gradients", "elastic_checkpoint", "enable_sanity_checks",
    "ignore_unused_parameters", "load_from_fp32_weights", "log_trace_cache_warnings", "memory_efficient_linear",
    "overlap_comm", "override_module_apply", "parameter_alignment", "pipeline_loading_checkpoint", "reduce_scatter",
    "round_robin_gradients",
    "save_muon_momentum_buffer_in_memory", "stage3_allgather_sequential", "stage3_gather_16bit_weights_on_model_save",
    "stage3_use_all_reduce_for_fetch_params", "use_multi_rank_bucket_allreduce",
}  # fmt: skip
COUNTS = {
    "allgather_bucket_size", "reduce_bucket_size", "stage3_max_live_parameters", "stage3_max_reuse_distance",
    "stage3_model_persistence_threshold", "stage3_module_granularity_threshold", "stage3_param_persistence_threshold",
    "stage3_prefetch_bucket_size", "sub_group_size", "zero_hpz_partition_size",
}  # fmt: skip
BLOCKS = {"leaf_module", "offload_optimizer", "offload_param"}
KEYS = {"stage"} | SWITCHES | COUNTS | BLOCKS
OFFLOAD_KEYS = {
    "offload_optimizer": {
        "device", "nvme_path", "buffer_count", "pin_memory", "pipeline_read", "pipeline_write", "fast_init", "ratio",
        "super_offload", "cpuadam_cores_perc",
    },
    "offload_param": {"device", "nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pin_memory"},
}  # fmt: skip

# Key -> (the value that changes nothing, why another is refused).
NEUTRAL: dict[str, tuple[object, str]] = {
    "zenflow": (None, "updates some weights later than others, so an update is no longer the gradient of the step"),
    "zero_quantized_gradients": (False, "rounds gradients to 4 bits on the wire"),
    "zero_quantized_weights": (False, "rounds the weights that are trained to 8 bits for every forward pass"),
    "zero_quantized_nontrainable_weights": (False, "rounds the frozen weights; 4-bit base weights are quant.bits = 4"),
    "legacy_stage1": (False, "is another engine, which is not supported"),
    "compute_grad_norm": (True, "clipping needs the norm"),
}
DEPRECATED = {
    "cpu_offload": 'Write "offload_optimizer": {"device": "cpu"}.',
    "cpu_offload_param": 'Write "offload_param": {"device": "cpu"}.',
    "cpu_offload_use_pin_memory": 'Write "pin_memory" inside "offload_optimizer".',
    "stage3_gather_fp16_weights_on_model_save": "Write stage3_gather_16bit_weights_on_model_save.",
    "mics_shard_size": "DeepSpeed has removed MiCS.",
    "mics_hierarchical_params_gather": "DeepSpeed has removed MiCS.",
    "zeropp_loco_param": "DeepSpeed has removed LoCo.",
}
# What the Hugging Face Trainer makes of "auto", as multiples of hidden_size.
SIZES = {
    "reduce_bucket_size": lambda hidden: hidden * hidden,
    "stage3_prefetch_bucket_size": lambda hidden: int(0.9 * hidden * hidden),
    "stage3_param_persistence_threshold": lambda hidden: 10 * hidden,
}


def mistakes(zero: Block, config: RunConfig) -> Iterator[Mistake]:
    """Everything that is wrong with the block; "auto" is left to `resolved`."""
    stage = zero.get("stage", 0)
    if type(stage) is not int or stage not in (0, 1, 2, 3):
        yield Mistake("zero_optimization.stage", f"is {shown(stage)}, expected 0, 1, 2 or 3.", 2)
        stage = 3  # says nothing more about what follows
    elif stage == 3 and config.watch.checksum_every:
        yield Mistake(
            "zero_optimization.stage",
            f"is 3, and the run file has watch.checksum_every = {config.watch.checksum_every}: stage 3 has each weight"
            " once, in shards, so that there is nothing to compare. Use watch.checksum_every = 0, or stage 2.",
            2,
        )
    for key, value in zero.items():
        path = f"zero_optimization.{key}"
        if key in NEUTRAL:
            neutral, reason = NEUTRAL[key]
            if value != neutral:
                yield Mistake(path, f"is {shown(value)}: it {reason}. Remove it.")
        elif key in DEPRECATED:
            yield Mistake(path, f"is an old key. {DEPRECATED[key]}")
        elif key not in KEYS:
            yield Mistake(path, f"is not a key of DeepSpeed. {_close(key, KEYS)}")
        elif value not in ("auto", None):
            yield from _wrong_type(path, key, value)
    if zero.get("stage3_use_all_reduce_for_fetch_params") is True and config.quant.bits:
        reason = "it adds up shards, which changes packed 4-bit weights (quant.bits = 4)"
        yield Mistake("zero_optimization.stage3_use_all_reduce_for_fetch_params", f"is true: {reason}. Remove it.")
    yield from _offload(zero, stage, config)


def _wrong_type(path: str, key: str, value: object) -> Iterator[Mistake]:
    # DeepSpeed takes 5e8 for a count, as its own documentation writes it.
    if key in SWITCHES and not isinstance(value, bool):
        yield Mistake(path, f"is {shown(value)}, expected true or false.")
    if key in COUNTS and not (
        isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 and value == int(value)
    ):
        yield Mistake(path, f"is {shown(value)}, expected a whole number of elements, without quotes.")


def _close(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    return f"Did you mean {close[0]}?" if close else "Remove it."


def _offload(zero: Block, stage: int, config: RunConfig) -> Iterator[Mistake]:
    for key, lowest in (("offload_optimizer", 1), ("offload_param", 3)):
        block = zero.get(key)
        path = f"zero_optimization.{key}"
        if block in (None, "auto"):
            continue
        if not isinstance(block, dict):
            yield Mistake(
                path, f'is {shown(block)}, expected an object such as {{"device": "cpu"}}.', {"device": "cpu"}
            )
            continue
        for name in block.keys() - OFFLOAD_KEYS[key]:
            yield Mistake(f"{path}.{name}", f"is not a key of DeepSpeed. {_close(name, OFFLOAD_KEYS[key])}")
        device = block.get("device", "none")
        if device not in ("none", "cpu"):
            yield Mistake(
                f"{path}.device",
                f'is {shown(device)}, expected "cpu" or "none"; other devices are not supported.',
                "cpu",
            )
        if device == "none":
            continue
        if stage < lowest:
            yield Mistake(
                path,
                f"needs ZeRO stage {lowest} or higher, zero_optimization.stage is {stage}. Raise the stage, or"
                " remove it.",
            )
        for name, neutral in (("ratio", 1), ("super_offload", False)):
            if block.get(name, neutral) not in (neutral, "auto"):
                yield Mistake(
                    f"{path}.{name}",
                    f"is {shown(block[name])}: an optimizer that is offloaded in part is not supported. Remove it.",
                )
        if key == "offload_optimizer" and config.optim.name != "adamw":
            yield Mistake(
                path,
                f'the run file has optim.name = "{config.optim.name}", and an offloaded optimizer is DeepSpeed\'s CPU'
                ' Adam. Use optim.name = "adamw", or remove the offload.',
            )


def resolved(zero: Block, hidden_size: int) -> tuple[Block, list[Mistake]]:
    """The block with its sizes worked out, and the ones that cannot be."""
    result = {key: value for key, value in zero.items() if key not in NEUTRAL and value is not None}
    unknown = []
    for key, size in SIZES.items():
        if result.get(key) == "auto":
            result[key] = size(hidden_size)
            if hidden_size <= 0:
                unknown.append(
                    Mistake(
                        f"zero_optimization.{key}",
                        'is "auto", which needs the hidden size of the model. Write a number.',
                    )
                )
    # DeepSpeed's own default is true for stage 3. Overlapped reduction is suspected of races (DeepSpeed#4298, #5294).
    if result.get("overlap_comm") is None or result["overlap_comm"] == "auto":
        result["overlap_comm"] = False
    return result, unknown
