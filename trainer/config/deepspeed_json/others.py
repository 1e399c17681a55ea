"""Every other key of a DeepSpeed JSON: passed on, without effect, or refused as it changes the mathematics."""

import difflib
from collections.abc import Iterator

from trainer.config.deepspeed_json.mistakes import Block, Mistake, shown

# Read by `owned`, `precision` and `zero`.
HANDLED = {
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
    "optimizer", "scheduler", "fp16", "bf16", "data_types", "zero_optimization",
}  # fmt: skip
# About speed, memory and reports of the engine.
PASSED = {
    "aio", "checkpoint", "comms_logger", "disable_allgather", "disable_python_gc", "dump_state", "log_level",
    "memory_breakdown", "timers",
}  # fmt: skip
# The engine's own business, written by `resolve` whatever the file says.
REPLACED = {"steps_per_print", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "dataloader_drop_last"}

# Key -> (values that change nothing, why another is refused).
NEUTRAL: dict[str, tuple[tuple[object, ...], str]] = {
    "wall_clock_breakdown": (
        (False,),
        "it stops the GPU for timers nobody reads; metrics.jsonl has the seconds of each phase",
    ),
    "prescale_gradients": ((False,), "the gradient is averaged over the ranks in one place, with one factor"),
    "gradient_predivide_factor": ((1, None), "the gradient is averaged over the ranks in one place, with one factor"),
    "gradient_allreduce_op": (("mean", None), "the trainer undoes the engine's mean over the ranks, and no sum"),
    "managed_gradient_accumulation": ((True,), "the trainer places the boundary of an update"),
    "communication_data_type": (
        ("fp32", None),
        "gradients are summed over the ranks in fp32, so that the update does not depend on their number",
    ),
    "seq_parallel_communication_data_type": (("fp32", None), "there is no sequence parallelism here"),
    "sparse_gradients": ((False,), "DeepSpeed has removed it"),
    "amp": ((), "DeepSpeed has removed it; the precision is model.dtype"),
    "sequence_parallel_size": ((1,), "ranks are data-parallel"),
    "gradient_checkpointing": ((), "that is engine.gradient_checkpointing in the run file"),
}
# Blocks -> why they are refused when they are switched on.
BLOCKS: dict[str, str] = {
    "activation_checkpointing": "activations are recomputed by engine.gradient_checkpointing of the run file",
    "autotuning": "it restarts the job with other batch sizes",
    "comet": "metrics go to log.report_to of the run file",
    "compile": "compiled graphs are not supported",
    "compression_training": "it trains other weights",
    "csv_monitor": "metrics are in metrics.jsonl",
    "curriculum_learning": "it drops tokens or reorders prompts",
    "data_efficiency": "it drops tokens or reorders prompts",
    "datastates": "checkpoints are the trainer's own",
    "eigenvalue": "DeepSpeed has removed it",
    "elasticity": "DeepSpeed has removed it",
    "expert_parallel": "ranks are data-parallel",
    "flops_profiler": "it hooks every module and prints between the progress lines",
    "hybrid_engine": "decoding is rollout.engine of the run file",
    "nebula": "DeepSpeed has removed it",
    "pipeline": "ranks are data-parallel",
    "progressive_layer_drop": "it skips layers, so sampled and scored log-probs differ",
    "quantize_training": "it trains other weights",
    "sparse_attention": "DeepSpeed has removed it",
    "tensor_parallel": "ranks are data-parallel",
    "tensorboard": "metrics go to log.report_to of the run file",
    "torch_autocast": (
        "the precision is model.dtype, in every pass alike; autocast would score in another one than it samples in"
    ),
    "wandb": "metrics go to log.report_to of the run file",
    "weight_quantization": "it trains other weights; 4-bit base weights are quant.bits = 4",
}


def mistakes(block: Block) -> Iterator[Mistake]:
    """Keys that are unknown, and keys that would change what is computed."""
    for key, value in block.items():
        if key in NEUTRAL:
            neutral, reason = NEUTRAL[key]
            if value != "auto" and value not in neutral:
                yield Mistake(key, f"is {shown(value)}: {reason}. Remove it.")
        elif key in BLOCKS:
            if _is_on(value):
                yield Mistake(key, f"is refused: {BLOCKS[key]}. Remove it.")
        elif key not in HANDLED | PASSED | REPLACED:
            known = HANDLED | PASSED | REPLACED | NEUTRAL.keys() | BLOCKS.keys()
            close = difflib.get_close_matches(key, known, n=1)
            yield Mistake(key, f"is not a key of DeepSpeed. {f'Did you mean {close[0]}?' if close else 'Remove it.'}")


def passed(block: Block) -> Block:
    return {key: value for key, value in block.items() if key in PASSED}


def _is_on(value: object) -> bool:
    """Whether a block does anything: `{"enabled": false}` and switches that are all off or "auto" do not."""
    if not isinstance(value, dict):
        return value not in (False, None, "auto")
    if "enabled" in value:
        return value["enabled"] not in (False, "auto")
    return any(inner not in (False, None, "auto") for inner in value.values())
