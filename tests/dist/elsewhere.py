"""One rank of test_resume_elsewhere.py: cells that train, save and train on, and cells that go on from what another
launch has saved."""

import hashlib
import itertools
import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_run import run_config, step, weights
from trainer.checkpoint import resume
from trainer.checkpoint.save import Checkpoints
from trainer.checkpoint.shards import Shards
from trainer.checkpoint.store import Found
from trainer.engine import Read, ZeroEngine
from trainer.errors import NoCheckpoint
from trainer.interrupts import leave
from trainer.output import Output
from trainer.preflight.prepare import check, load_models, start_engine
from trainer.state import State
from trainer.train import save
from trainer.world import World, connect

BEFORE, AFTER = 1, 5
SHOWN = ("loss", "grad_norm", "kl", "entropy")


def begin(folder: Path, cell: dict[str, Any], world: World) -> State:
    settings: dict[str, Any] = {
        "run.dir": str(folder / cell["name"]),
        "run.steps": BEFORE + AFTER,
        "model.dtype": cell["dtype"],
        "engine.deepspeed": f"zero{cell['stage']}",
        "lora.r": cell["r"],
        "quant.bits": cell["bits"],
        "optim.name": cell["optim"],
        "optim.lr": 1e-3 if cell["optim"] == "adamw" else 0.5,
        "optim.schedule": "linear",
        "optim.warmup_steps": 2,
        "optim.weight_decay": 0.1,
        "grpo.updates_per_rollout": 2,
        "grpo.kl.schedule": "adaptive",
        "grpo.kl.coef": 0.05,
        "grpo.kl.target": 1e-4,
        "grpo.kl.horizon": 50,
        "rollout.prompts_per_step": 3,
    }
    checked = check(run_config(folder, settings), folder, world)
    return start_engine(checked, load_models(checked, world), world)


def held(found: Found, names: list[str]) -> dict[str, str]:
    """SHA-256 of every master weight and moment of a checkpoint, whole; and the optimizer's steps."""
    facts = found.manifest.facts
    shards = Shards(found.path / "deepspeed", stage=facts.zero_stage, ranks=facts.world_size, names=names)
    hashes = {}
    for name in names:
        hashes[f"{name} steps"] = str(shards.steps)
        for key in ("", *shards.moments):
            value = shards.read(name, key, 0, sys.maxsize)
            hashes[f"{name} {key}"] = hashlib.sha256(value.numpy().tobytes()).hexdigest()
    return hashes


def digest(state: State) -> str:
    """Of the weights that a forward pass reads."""
    found = [one.contiguous().view(torch.uint8).numpy().tobytes() for _, one in sorted(weights(state).items())]
    return hashlib.sha256(b"".join(found)).hexdigest()


def saved_now(state: State, output: Output, checkpoints: Checkpoints, world: World) -> dict[str, Any]:
    """What the engine holds, by way of a checkpoint of it."""
    state.at_boundary()
    save(state, output, checkpoints)
    found = resume.find(str(checkpoints.store.folder(state.step)), Path("unused"))
    assert found is not None
    hashes = held(found, list(state.engine.trained())) if world.is_main else {}
    return {"held": hashes, "weights": digest(state)}


def until_the_end(state: State, world: World) -> list[dict[str, Any]]:
    records = []
    while state.step < BEFORE + AFTER:
        metrics, completions = step(state)
        ids = [(one.prompt.index, one.generation, list(one.ids)) for one in completions]
        shown = {name: value for name, value in metrics.items() if name in SHOWN}
        records.append({"metrics": shown, "samples": sorted(itertools.chain(*world.gather_objects(ids)))})
    return records


def refused_together(found: Found, state: State, world: World) -> None:
    """What one rank alone cannot read ends all, and leaves none waiting: the next collective is the same for all."""

    def stale(path: Path) -> Any:
        raise OSError(116, "Stale file handle", str(path))

    for name in ("shards.opened", "resume._read_json"):
        with pytest.MonkeyPatch.context() as patch:
            if world.rank == 1:
                patch.setattr(f"trainer.checkpoint.{name}", stale)
            with pytest.raises(NoCheckpoint, match="Stale file handle"):
                resume.restore(found.path, state.engine, world, state.facts)
        world.barrier()


def counted(patch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that this rank reads of shards."""
    real, found = Shards.read, []

    def read(self: Shards, *given: Any) -> torch.Tensor:
        value = real(self, *given)
        found.append(value.nbytes)
        return value

    patch.setattr(Shards, "read", read)
    return found


def put_back_all_but(moment: str, patch: pytest.MonkeyPatch) -> None:
    """Of the last parameter."""
    real = ZeroEngine._put_part

    def put(self: ZeroEngine, read: Read, name: str, parameter: Any, key: str, master: Any) -> None:
        if (name, key) != (list(self.trained())[-1], moment):
            real(self, read, name, parameter, key, master)

    patch.setattr(ZeroEngine, "_put_part", put)


def run(folder: Path, cell: dict[str, Any], world: World) -> dict[str, Any]:
    state = begin(folder, cell, world)
    output = Output(state)
    checkpoints = Checkpoints(state.config, state.policy, state.engine, world, state.facts, "run")
    notes: list[str] = []
    read: list[int] = []
    if source := cell["source"]:
        found = resume.find(str(folder / source), folder / cell["name"])
        assert found is not None
        notes = resume.check_run(found, state.facts, ("engine.deepspeed",))
        if cell["r"] == 0:
            step(state)  # as after a rollback: what the engine holds is replaced, and not only begun with
        if world.size > 1:
            refused_together(found, state, world)
        with pytest.MonkeyPatch.context() as patch:
            read = counted(patch)
            if cell["without"]:
                put_back_all_but(cell["without"], patch)
            state.restore(resume.restore(found.path, state.engine, world, state.facts))
    else:
        while state.step < BEFORE:
            step(state)
    at_once = saved_now(state, output, checkpoints, world)
    records = until_the_end(state, world)
    state.engine.close()
    world.barrier()
    if source and world.is_main:
        shutil.rmtree(folder / cell["name"])
    trained = sum(math.prod(shape) for shape in state.facts.trained.values())
    bytes_read = sum(itertools.chain(*world.gather_objects(read))) / trained
    return at_once | {"records": records, "notes": notes, "bytes_read": bytes_read}


def main() -> None:
    phase, folder = sys.argv[1], Path(sys.argv[2])
    world = connect("cpu", timeout_seconds=120)
    cells = json.loads((folder / f"{phase}.cells.json").read_text())
    results = [run(folder, cell, world) for cell in cells]
    if world.is_main:
        (folder / f"{phase}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
    leave(0)
