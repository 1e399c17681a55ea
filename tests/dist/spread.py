"""Worker: recorded steps as they are, and with every group computed by the rank that sampled it.

Usage, under a launcher: spread.py FOLDER RESULTS.json. Rank 0 writes {cell: [what rank 0 found, rank 1]}.
"""

import json
import random
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import trainer.minibatch
import trainer.train
from tests.tiny_run import distance, start, step, weights
from trainer.engine import ZeroEngine
from trainer.interrupts import leave
from trainer.record.rollout_rows import row
from trainer.world import World, connect, disconnect

GROUPS, GENERATIONS, STEPS = 6, 4, 4
LOSSES = ("grpo", "dapo", "dr_grpo", "gspo", "cispo")
LR = 1e-2
BASE: dict[str, Any] = {
    "run.steps": STEPS,
    "lora.r": 0,
    "grpo.kl.coef": 0.0,
    "optim.name": "adamw",
    "optim.lr": LR,
    "optim.eps": 1e-5,
    "optim.weight_decay": 0.1,
    "engine.micro_batch": 4,
}
"""AdamW with weight decay: both act where the gradient is zero, the moments from the second step on."""

CELLS = {
    **{loss: {"grpo.loss_type": loss} for loss in LOSSES},
    "stage 3, by tokens": {"engine.deepspeed": "zero3", "engine.micro_batch": 0, "engine.token_budget": 40},
    "stage 0, cut masked": {"engine.deepspeed": "zero0", "grpo.mask_truncated": True},
    "two updates": {"grpo.updates_per_rollout": 2, "optim.lr": LR / 10},
    "KL in the reward, adaptive": {
        "grpo.kl.coef": 0.3,
        "grpo.kl.placement": "reward",
        "grpo.kl.estimator": "k1",
        "grpo.kl.schedule": "adaptive",
        "grpo.kl.target": 0.01,
        "grpo.kl.horizon": 100,
        "grpo.updates_per_rollout": 2,
        "optim.lr": LR / 10,
    },
    "KL in the loss": {"grpo.kl.coef": 0.3, "grpo.kl.estimator": "exact", "engine.micro_batch": 0},
}


def write_steps(folder: Path) -> None:
    """``folder/steps``: every group flat; three groups of six flat; every group flat; all but one flat.

    Ragged, so that dealing the groups out is uneven. Group 5 has a single scored row, so that no KL charged to the
    rewards gives it an advantage.
    """
    draw = random.Random(5)
    target = folder / "steps"
    target.mkdir()
    for number, flat in enumerate(((0, 1, 2, 3, 4, 5), (1, 4), (0, 1, 2, 3, 4, 5), (0, 1, 2, 4, 5)), start=1):
        rows = []
        for group in range(GROUPS):
            prompt = [draw.randrange(256) for _ in range(draw.randint(1, 8))]
            for index in range(GENERATIONS):
                cut = draw.random() < 0.2
                length = 8 if cut else draw.randint(1, 7) if group % 2 else 1
                score = 0.1 if group in flat else draw.random()
                rows.append(
                    {
                        "step": number,
                        "group": group,
                        "index": index,
                        "row": group,
                        "prompt_ids": prompt,
                        "completion_ids": [draw.randrange(256) for _ in range(length)],
                        "sampling_logps": [-5.7 + draw.gauss(0, 0.1) for _ in range(length)],
                        "rewards": {"score": None if group == 5 and index else score},
                        "finish": "length" if cut else "stop",
                    }
                )
        (target / f"step-{number:06d}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))


def trajectory(
    folder: Path, world: World, settings: dict[str, Any], *, skip: bool = True, balance: bool = True
) -> dict[str, Any]:
    """After each step: the weights, the metrics, this rank's rows, and the tokens of its passes with a gradient."""
    found: dict[str, Any] = {"weights": [], "metrics": [], "rows": [], "tokens": []}
    forward = ZeroEngine.__call__

    def counted(engine: ZeroEngine, rows: Any, *arguments: Any, **keywords: Any) -> Any:
        if torch.is_grad_enabled():
            found["tokens"][-1].append(rows.input_ids.numel())
        return forward(engine, rows, *arguments, **keywords)

    with ExitStack() as patched:
        patched.enter_context(patch.object(ZeroEngine, "__call__", counted))
        if not skip:
            patched.enter_context(patch.object(trainer.train, "with_gradient", lambda state, completions: completions))
        if not balance:
            patched.enter_context(
                patch.object(trainer.minibatch, "balanced", lambda completions, cost, world: completions)
            )
        state = start(folder, world, BASE | {"rollout.replay": str(folder / "steps")} | settings, away=0.05)
        found["weights"].append(weights(state))
        for _ in range(STEPS):
            found["tokens"].append([])
            metrics, completions = step(state)
            found["weights"].append(weights(state))
            found["metrics"].append(metrics)
            found["rows"].append([row(one, state.step) for one in completions])
        found["coefficient"] = state.kl_coefficient
        state.engine.close()
    return found


def apart(one: dict[str, Any], other: dict[str, Any]) -> list[float]:
    """Largest difference of any weight after each step."""
    return [distance(a, b) for a, b in zip(one["weights"], other["weights"], strict=True)]


def compared(folder: Path, world: World, settings: dict[str, Any]) -> dict[str, Any]:
    """``usual``, and ``plain`` without skip and balancing, in numbers that JSON can hold."""
    usual = trajectory(folder, world, settings)
    plain = trajectory(folder, world, settings, skip=False, balance=False)
    found = {
        "moved": [distance(a, b) for a, b in zip(usual["weights"], usual["weights"][1:], strict=False)],
        "apart": apart(usual, plain),
    }
    for one in (usual, plain):
        del one["weights"]
    return found | {"usual": usual, "plain": plain}


def main() -> None:
    folder, results = (Path(argument) for argument in sys.argv[1:3])
    world = connect("cpu", timeout_seconds=60)
    found = {name: world.gather_objects(compared(folder, world, settings)) for name, settings in CELLS.items()}
    if world.is_main:
        results.write_text(json.dumps(found))
    disconnect()


if __name__ == "__main__":
    main()
    leave(0)
