"""Worker: a trained policy of every kind is exported, and its logits in memory are kept for a comparison.

Usage, under a launcher: exports.py FOLDER RESULTS.json
"""

import json
import sys
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import trainer.checkpoint.deliver
from tests.tiny_run import start, step, weights
from trainer.checkpoint.export import export, write_weights
from trainer.engine import ZeroEngine
from trainer.errors import Stopped
from trainer.interrupts import leave
from trainer.world import World, connect, disconnect

Found = dict[str, Any]
STAGES, BASES, KINDS = ("zero2", "zero3"), ("tied", "untied"), ("full", "lora", "continued")
IDS = torch.arange(3, 43)[None]


def settings(folder: Path, stage: str, base: str, kind: str) -> dict[str, Any]:
    found: dict[str, Any] = {"engine.deepspeed": stage, "model.name_or_path": str(folder / base)}
    found |= {"lora.r": 0, "optim.lr": 0.5} if kind == "full" else {"optim.lr": 5.0}
    # The adapter that the cell before has exported.
    return found | ({"lora.start_adapter": str(folder / f"{stage}-{base}-lora/adapter")} if kind == "continued" else {})


def cell(folder: Path, world: World, stage: str, base: str, kind: str) -> Found:
    """Trains a step, exports, trains another; what PEFT or transformers should find again lies in expected.pt."""
    target = folder / f"{stage}-{base}-{kind}"
    state = start(folder, world, settings(folder, stage, base, kind))
    step(state)
    with state.engine.gathered(), torch.no_grad():
        logits = state.policy.causal(input_ids=IDS).logits
    trained = weights(state, everything=kind == "full")
    written = export(state.policy, state.engine, world, target, state.config)
    light = write_weights(state.policy, state.engine, world, target / "light")
    if world.is_main:
        torch.save({"logits": logits, "weights": trained}, target / "expected.pt")
    metrics, _ = step(state)
    state.engine.close()
    return {"written": str(written), "light": str(light), "next step": metrics["grad_norm"]}


def failures(folder: Path, world: World) -> Found:
    """What both ranks say when rank 0 alone finds that the export is not the policy, and when nothing is gathered."""
    found: Found = {}
    for kind in ("full", "lora"):
        state = start(folder, world, settings(folder, "zero3", "tied", kind))
        step(state)
        with patch.object(trainer.checkpoint.deliver, "verify", side_effect=Stopped("differs, on rank 0")):
            try:
                export(state.policy, state.engine, world, folder / "bad", state.config)
            except Stopped as end:
                found[f"{kind} verify"] = str(end)
        with patch.object(ZeroEngine, "whole", lambda engine, parameters: nullcontext()):
            try:
                write_weights(state.policy, state.engine, world, folder / "bad")
            except Stopped as end:
                found[f"{kind} gather"] = str(end)
        state.engine.close()
    return found


def main() -> None:
    folder, results = (Path(argument) for argument in sys.argv[1:3])
    world = connect("cpu", timeout_seconds=60)
    found: Found = {}
    for stage in STAGES:
        for base in BASES:
            for kind in ("lora", "continued", "full"):
                try:
                    mine = cell(folder, world, stage, base, kind)
                except Exception:  # the other cells are worth having all the same
                    mine = {"failed": traceback.format_exc()[-2000:]}
                found[f"{stage} {base} {kind}"] = world.gather_objects(mine)
    found["failures"] = world.gather_objects(failures(folder, world))
    if world.is_main:
        results.write_text(json.dumps(found, indent=1))
    disconnect()


if __name__ == "__main__":
    main()
    leave(0)
