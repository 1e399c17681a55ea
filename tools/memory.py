"""The plan of a run beside what its second step holds: on a CPU live storages, on a card max_memory_allocated.

python -m tools.memory [--device cuda] [--memory-gib 22] [CASE ...]
"""

import argparse
import gc
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tools import bench_inputs
from trainer.collect import share
from trainer.config import RunConfig
from trainer.data.order import prompts_for_step
from trainer.plan.parts import plan
from trainer.plan.shape import shape_of
from trainer.preflight.memory import settings_of
from trainer.preflight.prepare import check, load_models, start_engine
from trainer.record.memory import PeakMemory
from trainer.train import grpo_step
from trainer.world import World, connect, disconnect

GIB = 2**30
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "cpu-135m-full": ("smollm2-135m", {"lora": {"r": 0}, "engine": {"gradient_checkpointing": "off"}}),
    "cpu-135m-full-checkpointing": ("smollm2-135m", {"lora": {"r": 0}, "engine": {"gradient_checkpointing": "on"}}),
    "cpu-135m-lora": ("smollm2-135m", {"engine": {"gradient_checkpointing": "off"}}),
    "cpu-135m-lora-zero3": ("smollm2-135m", {"engine": {"gradient_checkpointing": "off", "deepspeed": "zero3"}}),
    "cuda-1.5b-lora": ("qwen2.5-1.5b", {"engine": {"gradient_checkpointing": "off"}}),
    "cuda-1.5b-lora-checkpointing": ("qwen2.5-1.5b", {"engine": {"gradient_checkpointing": "on"}}),
    "cuda-1.5b-full-offload": ("qwen2.5-1.5b", {"lora": {"r": 0}, "engine": {"deepspeed": "zero2-offload"}}),
}
"""By device: a shape, and sections of the run file."""


def run_config(device: str, sections: dict[str, Any], folder: Path) -> RunConfig:
    prompt, new = (256, 32) if device == "cpu" else (512, 128)
    usual: dict[str, Any] = {
        "run": {"steps": 2},
        "model": {"name_or_path": str(folder / "model")},
        "data": {"source": str(folder / "prompts.jsonl"), "chat_template": "off", "max_prompt_tokens": prompt},
        "rollout": {"prompts_per_step": 2, "num_generations": 8, "max_new_tokens": new},
        "reward": [{"name": "spread", "kind": "python", "function": "tools.bench_inputs:spread"}],
        "engine": {"device": "cpu" if device == "cpu" else "auto"},
    }
    merged = {
        name: usual.get(name, {}) | sections.get(name, {}) for name in usual.keys() | sections if name != "reward"
    }
    return RunConfig.model_validate(merged | {"reward": usual["reward"]})


def compare(case: str, folder: Path, world: World) -> dict[str, Any]:
    """Two steps of random weights. The second one has all that a step ever holds."""
    name, sections = CASES[case]
    device = case.split("-")[0]
    config = run_config(device, sections, folder)
    rollout, dtype = config.rollout, "fp32" if device == "cpu" else "bf16"
    inputs = bench_inputs.Settings(
        name,
        config.data.max_prompt_tokens,
        rollout.max_new_tokens,
        rollout.num_generations,
        rollout.prompts_per_step,
        False,
        dtype,
        "zero2",
        config.lora.r,
        device,
        1,
        0.0,
    )
    folder.mkdir(exist_ok=True)
    bench_inputs.write_inputs(inputs, folder)
    gc.collect()
    before = PeakMemory(world.device).take_peak()  # what this process held already
    checked = check(config, folder, world)
    models = load_models(checked, world)
    state = start_engine(checked, models, world)
    with state.memory:
        for _ in range(2):
            rows = prompts_for_step(len(state.prompts), rollout.prompts_per_step, state.step, config.data.seed)
            state.memory.take_peak()
            metrics, _ = grpo_step(state, share([state.prompts[row] for row in rows], world))
            state.step += 1
    measured = metrics["peak_memory_gib"] - before / GIB
    state.engine.close()
    shape = shape_of(checked.model_config.to_dict())
    assert shape is not None
    settings = settings_of(
        config,
        shape,
        checked.deepspeed["zero_optimization"],
        ranks=world.size,
        cuda=device == "cuda",
        itemsize=models.scorer.head.weight.element_size(),
        lengths=checked.lengths,
        shared=models.shared_prompts,
    )
    recomputed = models.policy.causal.is_gradient_checkpointing
    rests = state.engine.away is not None
    found = plan(replace(settings, token_budget=state.token_budget, checkpointing=recomputed, rests=rests))
    totals = {name: sum(parts.values()) - parts["context and fragmentation"] for name, parts in found.phases.items()}
    phase = max(totals, key=lambda name: totals[name])
    return {
        "case": case,
        "token_budget": state.token_budget,
        "phase": phase,
        "predicted_gib_by_part": {name: round(size / GIB, 3) for name, size in found.phases[phase].items()},
        "predicted_gib": round(totals[phase] / GIB, 3),
        "measured_gib": round(measured, 3),
        "off": round(totals[phase] / GIB / measured - 1, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--memory-gib", type=float, default=0.0, help="of the card, for this process")
    arguments = parser.parse_args()
    if len(arguments.cases) == 1:  # a process of its own, since DeepSpeed leaves traces
        world = connect("cpu" if arguments.device == "cpu" else "auto", timeout_seconds=600)
        if arguments.memory_gib:
            total = torch.cuda.get_device_properties(world.device).total_memory
            torch.cuda.set_per_process_memory_fraction(arguments.memory_gib * GIB / total, world.device)
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(compare(arguments.cases[0], Path(folder) / "run", world), indent=1))
        disconnect()
        return
    for case in arguments.cases or [name for name in CASES if name.startswith(arguments.device)]:
        words = [case, "--device", arguments.device, "--memory-gib", str(arguments.memory_gib)]
        subprocess.run([sys.executable, "-m", "tools.memory", *words], check=True)


if __name__ == "__main__":
    main()
