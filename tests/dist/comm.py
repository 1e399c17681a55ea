"""Worker: the collectives of one step under every stage, with LoRA and all weights, counted.

Usage, under a launcher: comm.py FOLDER RESULTS.json [quick]
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch.nn import Module

from tests.tiny_run import start, step
from tools.comm import counted
from trainer.interrupts import leave
from trainer.world import connect, disconnect

MICRO = 2
ALL = [(stage, r, dtype, "off") for stage in range(4) for r in (0, 4) for dtype in ("fp32", "bf16")]
ALL += [(3, 0, "fp32", "on"), (3, 0, "bf16", "on"), (3, 4, "bf16", "on")]
QUICK = [(2, 0, "bf16", "off"), (3, 4, "fp32", "off"), (3, 0, "bf16", "on")]
"""Stage, rank of the adapter, dtype, gradient checkpointing."""


def size_of(modules: Iterable[Module]) -> int:
    return sum(one.ds_numel for module in modules for one in module.parameters())


def modules_of(modules: Iterable[Module]) -> int:
    """Those inside that hold weights themselves."""
    inner = (one for module in modules for one in module.modules())
    return sum(any(True for _ in one.parameters(recurse=False)) for one in inner)


def main() -> None:
    folder, results = (Path(argument) for argument in sys.argv[1:3])
    found: dict[str, Any] = {}
    with counted() as counter:
        world = connect("cpu", timeout_seconds=60)
        for stage, r, dtype, checkpointing in QUICK if sys.argv[3:] == ["quick"] else ALL:
            if (stage, dtype) == (0, "bf16"):  # cannot sum in fp32, and is refused
                continue
            # As many passes on every number of ranks: 2 prompts a rank, a group a pass.
            settings = {"engine.deepspeed": f"zero{stage}", "lora.r": r, "model.dtype": dtype, "optim.name": "adamw"}
            more = {"rollout.prompts_per_step": MICRO * world.size, "engine.micro_batch": 4}
            more |= {"engine.gradient_checkpointing": checkpointing}
            state = start(folder, world, settings | more)
            step(state)  # with what happens at the first alone
            counter.clear()
            _, completions = step(state)
            sizes = [(one.ds_numel if stage == 3 else one.numel(), one) for one in state.policy.causal.parameters()]
            layers = state.policy.causal.model.layers if checkpointing == "on" else []
            # Of all weights, the last projection of a layer is still there when its backward pass begins.
            kept = [layer.mlp.down_proj for layer in layers if not r]
            found[f"{stage} {r} {dtype}{' recomputed' if layers else ''}"] = {
                "collectives": counter.told(),
                "weights": sum(size for size, _ in sizes),
                "trained": sum(size for size, one in sizes if one.requires_grad),
                "persistent": sum(size for size, one in sizes if stage == 3 and one.ds_persist),
                "head": state.policy.causal.get_output_embeddings().weight.ds_numel if stage == 3 else 0,
                "modules": modules_of([state.policy.causal]),
                "recomputed": size_of(layers) - size_of(kept),
                "recomputed_modules": modules_of(layers) - modules_of(kept),
                "completions": len(completions) * world.size,
                "tokens": int(world.all_reduce_sum([sum(len(one.ids) for one in completions)])[0]),
            }
            state.engine.close()
    if world.is_main:
        results.write_text(json.dumps(found, indent=1))
    disconnect()


if __name__ == "__main__":
    main()
    leave(0)
