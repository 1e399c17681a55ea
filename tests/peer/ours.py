"""Worker: one real step of every cell through ``grpo_step`` and the ZeRO engine. Writes loss, advantages and gradients.

Usage, under a launcher: ours.py FOLDER CELLS.json RESULTS.pt
"""

import gc
import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import trainer.update
from tests.dist.recorded import move_away
from tests.peer.cells import LR, cell_config
from trainer.preflight.prepare import check, load_models, start_engine
from trainer.train import grpo_step
from trainer.world import World, connect, disconnect


def run_cell(cell: dict[str, Any], folder: Path, world: World) -> dict[str, Any]:
    """``start`` holds the weights that the gradient is of; both by the name of the trained parameter."""
    checked = check(cell_config(folder, cell), folder, world)
    models = load_models(checked, world)
    move_away(models.policy)
    named = {name: parameter for name, parameter in models.policy.causal.named_parameters() if parameter.requires_grad}
    start = {name: parameter.detach().clone() for name, parameter in named.items()}
    state = start_engine(checked, models, world)
    make = trainer.update.make_micro_batches
    # A recorded sampler is never taken for the policy of the first pass; sampled completions are.
    on_policy = {} if cell["off_policy"] else {"recorded_sampler": False}
    with patch.object(trainer.update, "make_micro_batches", lambda *args, **named: make(*args, **(named | on_policy))):
        metrics, completions = grpo_step(state, [])
    gradient = {name: (start[name].double() - parameter.detach().double()) / LR for name, parameter in named.items()}
    state.engine.close()
    gc.collect()
    return {
        "loss": metrics["loss"],
        "advantages": [completion.advantage for completion in completions],
        "start": start,
        "gradient": gradient,
    }


def main() -> None:
    folder, cells, results = (Path(argument) for argument in sys.argv[1:4])
    world = connect("cpu", timeout_seconds=120)
    torch.save([run_cell(cell, folder, world) for cell in json.loads(cells.read_text())], results)
    disconnect()


if __name__ == "__main__":
    main()
