"""One rank of test_resume.py: a cell trains 6 steps in one process (``straight``), and its last 3 once more after a
rollback there, or in another process (``resumed``)."""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

from tests.tiny_run import PROMPTS, repeatable, run_config, step, weights
from trainer.checkpoint import resume
from trainer.checkpoint.save import Checkpoints
from trainer.config import RunConfig
from trainer.interrupts import leave
from trainer.output import Output
from trainer.preflight.prepare import check, load_models, start_engine
from trainer.state import State
from trainer.train import roll_back, save
from trainer.watch.alarms import Alarm
from trainer.world import World, connect

STRAIGHT, SAVED = 6, 3
REWARDS = '''
import random
import numpy
import torch

def noisy(completion_ids, **_):
    """Draws from all three global generators, as a judge that samples does."""
    noise = random.random() + float(numpy.random.rand()) + float(torch.rand(()))
    return [noise + sum(ids) % 17 / 17 * random.random() for ids in completion_ids]
'''
KL = {"schedule": "adaptive", "coef": 0.05, "target": 1e-4, "horizon": 50}


def config_of(folder: Path, cell: dict[str, Any]) -> RunConfig:
    kind = "full" if cell["r"] == 0 else "lora"
    settings: dict[str, Any] = {
        "run.dir": str(folder / f"zero{cell['stage']}-{kind}-{cell.get('dtype', 'fp32')}-{cell.get('bits', 0)}"),
        "model.dtype": cell.get("dtype", "fp32"),
        "run.steps": STRAIGHT,
        "engine.deepspeed": f"zero{cell['stage']}",
        "lora.r": cell["r"],
        "quant.bits": cell.get("bits", 0),
        "optim.name": "adamw",
        "optim.lr": 1e-3,
        "optim.schedule": "linear",
        "optim.warmup_steps": 2,
        "rollout.prompts_per_step": 3,  # of 8 prompts: epochs end inside of steps
        **{f"grpo.kl.{key}": value for key, value in KL.items()},
    }
    return run_config(folder, settings, reward="noisy")


def begin(folder: Path, cell: dict[str, Any], world: World) -> tuple[State, Checkpoints]:
    config = config_of(folder, cell)
    checked = check(config, folder, world)
    state = start_engine(checked, load_models(checked, world), world)
    return state, Checkpoints(config, state.policy, state.engine, world, state.facts, "run")


def digest(state: State) -> str:
    """SHA-256 of every weight, trained or not."""
    found = weights(state, everything=True)
    sha256 = hashlib.sha256()
    for name in sorted(found):
        sha256.update(name.encode() + found[name].contiguous().view(torch.uint8).numpy().tobytes())
    return sha256.hexdigest()


def exact(metrics: dict[str, float]) -> dict[str, str]:
    """In hexadecimal: equal means bit for bit."""
    return {name: float(value).hex() for name, value in repeatable(metrics).items()}


def train(state: State, until: int, world: World) -> list[dict[str, Any]]:
    records = []
    while state.step < until:
        metrics, completions = step(state)
        mine = [(c.prompt.index, c.generation, list(c.ids), c.reward) for c in completions]
        records.append({"metrics": exact(metrics), "completions": world.gather_objects(mine)})
    return records


def straight(folder: Path, cell: dict[str, Any], world: World) -> dict[str, Any]:
    state, checkpoints = begin(folder, cell, world)
    output = Output(state)
    output.begin(goes_on=False)
    train(state, SAVED, world)
    save_now(state, output, checkpoints)
    found = until_the_end(state, world)
    alarm = Alarm("garble", "raised", STRAIGHT, STRAIGHT, 1, "garble_rate", 0.9, 0.4, 0.0, "update_too_large")
    roll_back(state, output, checkpoints, [alarm])
    assert (state.step, state.rollbacks) == (SAVED, 1)
    state.rollbacks = 0  # with the same samples everything must come again
    records = train(state, STRAIGHT - 1, world)
    save_now(state, output, checkpoints)
    found["rolled_back"] = until_the_end(state, world)
    found["rolled_back"]["records"][:0] = records
    save_now(state, output, checkpoints)
    state.engine.close()
    return found


def save_now(state: State, output: Output, checkpoints: Checkpoints) -> None:
    state.at_boundary()
    save(state, output, checkpoints)


def until_the_end(state: State, world: World) -> dict[str, Any]:
    records = train(state, STRAIGHT, world)
    return {"records": records, "weights": digest(state), "kl_coefficient": state.kl_coefficient.hex()}


def resumed(folder: Path, cell: dict[str, Any], world: World) -> dict[str, Any]:
    state, _ = begin(folder, cell, world)
    found = resume.find("auto", Path(state.config.run.dir))
    assert found is not None and found.manifest.step == SAVED and len(found.skipped) == 2
    resume.check_run(found, state.facts, ())
    progress = resume.restore(found.path, state.engine, world, state.facts)
    if cell.get("without") == "random states":
        import random

        random.seed(1)
    state.restore(progress)
    if cell.get("without") == "updates":
        state.updates = 0
    found_now = until_the_end(state, world)
    state.engine.close()
    return found_now


def main() -> None:
    phase, folder = sys.argv[1], Path(sys.argv[2])
    world = connect("cpu", timeout_seconds=120)
    cells = json.loads((folder / "cells.json").read_text())
    work = straight if phase == "straight" else resumed
    results = [work(folder, cell, world) for cell in cells if phase == "resumed" or "without" not in cell]
    if world.is_main:
        (folder / f"{phase}.json").write_text(json.dumps(results))


assert len(PROMPTS) % 3, "an epoch must end inside of a step"
if __name__ == "__main__":
    main()
    leave(0)
