"""Worker: runs cells of the invariance matrix in one launch and compares each update with plain torch. Rank 0 writes
JSON.

Usage, under a launcher: invariance.py FOLDER CELLS.json RESULTS.json
"""

import copy
import gc
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import trainer.train
from tests.dist.plain import Update, plain_update
from tests.dist.recorded import move_away, run_config
from trainer.engine import ZeroEngine
from trainer.interrupts import leave
from trainer.models import quantised
from trainer.models.policy import adapter_off
from trainer.preflight.prepare import Models, check, load_models, start_engine
from trainer.record.rollout_rows import read_rollouts
from trainer.train import grpo_step
from trainer.world import World, connect, disconnect


def run_cell(cell: dict[str, Any], folder: Path, world: World, plain: dict[str, Update]) -> dict[str, Any]:
    """Relative distance of the update, and of loss, KL and gradient norm, from plain torch."""
    config = run_config(folder, **cell)
    checked = check(config, folder, world)
    models = load_models(checked, world)
    move_away(models.policy)
    key = json.dumps(
        {name: value for name, value in cell.items() if name not in ("stage", "micro", "control")}, sort_keys=True
    )
    if key not in plain:
        plain[key] = expected(models, folder, config, cell)
    state = start_engine(checked, models, world)
    named = {name: parameter for name, parameter in models.policy.causal.named_parameters() if parameter.requires_grad}

    def weights() -> dict[str, torch.Tensor]:
        with state.engine.whole(list(named.values())):
            return {name: parameter.detach().double().clone() for name, parameter in named.items()}

    before = weights()
    with control(cell.get("control", ""), world):
        metrics, _ = grpo_step(state, [])
    after = weights()
    state.engine.close()
    gc.collect()
    target = plain[key]
    error = sum(float(((before[name] - after[name]) - target.gradient[name]).square().sum()) for name in named) ** 0.5
    update = {name: before[name] - after[name] for name in named}
    return cell | {
        "update": error / target.grad_norm,
        "loss": abs(metrics["loss"] - target.loss) / max(abs(target.loss), 0.1),
        "kl": abs(metrics["kl"] - target.kl) / max(abs(target.kl), 0.1),
        "grad_norm": abs(metrics["grad_norm"] - target.grad_norm) / target.grad_norm,
        "norm": target.grad_norm,
        "fingerprint": [float(update[name].sum()) for name in sorted(update)][:6],
    }


def expected(models: Models, folder: Path, config: Any, cell: dict[str, Any]) -> Update:
    assert models.reference is not None
    if models.reference.copy is None:
        peft = copy.deepcopy(models.policy.peft)
        assert peft is not None
        for name, layer in quantised.layers(peft).items():
            plain = torch.nn.Linear(layer.in_features, layer.out_features)
            plain.weight, plain.bias = torch.nn.Parameter(quantised.unpacked(layer), False), layer.bias
            peft.set_submodule(name, plain)
        peft.double()
        causal = peft.get_base_model()
        reference, as_reference = causal, lambda: adapter_off(peft)
    else:
        causal = copy.deepcopy(models.policy.causal).double()
        reference, as_reference = copy.deepcopy(models.reference.copy.causal).double(), nullcontext
    return plain_update(
        causal,
        reference,
        as_reference,
        read_rollouts(Path(config.rollout.replay), 1),
        loss_type=cell["loss_type"],
        estimator=cell["estimator"],
        placement=cell["placement"],
        coef=config.grpo.kl.coef,
        ratio_weighted=config.grpo.kl.ratio_weighted,
        temperature=config.rollout.temperature,
        max_new_tokens=config.rollout.max_new_tokens,
        mask_truncated=config.grpo.mask_truncated,
    )


def control(name: str, world: World) -> Any:
    """The mistakes that the matrix must catch."""
    real_count, real_backward, real_coefficient = (
        trainer.train.global_count,
        ZeroEngine.backward_sum,
        trainer.train.set_kl_coefficient,
    )

    def rank_means(state: Any, completions: Any) -> float:
        real_count(state, completions)
        return world.size * sum(len(c.ids) for c in completions)

    def divided(self: ZeroEngine, loss_sum: torch.Tensor, global_count: float, *, last: bool) -> None:
        real_backward(self, loss_sum, global_count * world.size, last=last)

    def summed(state: Any) -> None:
        real_coefficient(state)
        state.kl_coefficient *= world.size

    if name == "mean of rank means":
        return patch.object(trainer.train, "global_count", rank_means)
    if name == "gradient / world size":
        return patch.object(ZeroEngine, "backward_sum", divided)
    if name == "KL summed over ranks":
        return patch.object(trainer.train, "set_kl_coefficient", summed)
    return nullcontext()


def main() -> None:
    folder, cells, results = (Path(argument) for argument in sys.argv[1:4])
    world = connect("cpu", timeout_seconds=120)
    plain: dict[str, Update] = {}
    found = [run_cell(cell, folder, world, plain) for cell in json.loads(cells.read_text())]
    if world.is_main:
        results.write_text(json.dumps(found, indent=1))
    disconnect()


if __name__ == "__main__":
    main()
    leave(0)
