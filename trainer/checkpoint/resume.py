"""Going on from a checkpoint: which one, whether this run may, and all of it put back."""

import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.checkpoint import manifest, random_states
from trainer.checkpoint.manifest import Check, Facts
from trainer.checkpoint.save import PROGRESS, random_file
from trainer.checkpoint.shards import Shards, check_own
from trainer.checkpoint.store import Found, Store, step_of
from trainer.engine import ZeroEngine
from trainer.errors import NoCheckpoint, Refused, RunEnd
from trainer.record.memory import asked_of_memory
from trainer.record.run_dir import RunDirectory
from trainer.world import World, failed_collective

FREE = ("run.steps", "run.epochs", "run.dir", "run.grace_seconds", "log.", "eval.", "checkpoint.", "watch.")
"""Settings that a resumed run may change. The length of a run enters an update by the schedules that end with it."""


def find(asked: str, run_dir: Path, check: Check = "full") -> Found | None:
    """The checkpoint that ``--resume ASKED`` means, verified. None: "auto", and this run has committed none yet.

    A path is a checkpoint, or a run directory, of which the newest valid one is taken. NoCheckpoint where what was
    asked for cannot be used.
    """
    if asked == "auto":
        return Store(run_dir, check).newest()
    folder = Path(asked)
    if (folder / manifest.NAME).exists() or not (folder / "checkpoints").is_dir():
        try:
            return Found(folder, manifest.verify(folder, check), [])
        except NoCheckpoint as damaged:
            raise NoCheckpoint(
                f"--resume {asked}: {damaged}.\nFix: name another checkpoint, or take --resume auto, which finds the "
                "newest valid one of run.dir."
            ) from damaged
    found = Store(folder, check).newest()
    if found is None:
        raise NoCheckpoint(f"--resume {asked}: no checkpoint was committed there yet (looked for checkpoints/step-*).")
    return found


def locate(asked: str, run_dir: Path, check: Check = "full") -> tuple[Found | None, bool]:
    """``find``, and whether the run goes on in the directory where it was. Changes nothing there.

    Refused where newer valid checkpoints would be mixed with what follows, or where run.dir holds another run.
    """
    try:
        return _located(asked, run_dir, check)
    except OSError as error:  # a name that is too long, a folder that is another user's
        raise NoCheckpoint(
            f"--resume {asked}: {error.filename or run_dir}: cannot be read ({error.strerror}). Fix: a path that this "
            "user can read."
        ) from error


def _located(asked: str, run_dir: Path, check: Check) -> tuple[Found | None, bool]:
    found = find(asked, run_dir, check)
    directory, store = RunDirectory(run_dir), Store(run_dir)
    if found is None:
        if result := directory.result():
            raise NoCheckpoint(
                f"--resume {asked}: {run_dir} has no checkpoint, and holds the result of a run that is done, {result}: "
                "it cannot go on, and starting anew would replace it. Fix: a new run.dir; "
                f'lora.start_adapter = "{result}" (or model.name_or_path) begins with its weights.'
            )
        return None, directory.holds_a_run()
    # Of the folder it lies in: the checkpoint itself may be a link to another disk.
    if found.path.parent.resolve() != store.path.resolve():
        directory.check()
        return found, False
    directory.check_writable()
    for folder in store.folders():
        if step_of(folder) > found.manifest.step and _is_valid(folder, check):
            raise Refused(
                f"--resume {asked}: run.dir = {run_dir} has a newer checkpoint, {folder.name}. Going on from an "
                "older one would mix two runs in one directory. Fix: a new run.dir (--run.dir runs/other) for the run "
                "that goes on from here, or --resume auto."
            )
    return found, True


def differences(saved: Facts, now: Facts) -> dict[str, str]:
    """Key -> "was -> is", of everything that may not change without a word."""
    found = {}
    was, new = _flat(saved.config), _flat(now.config)
    for key in sorted({*was, *new}):
        if was.get(key) != new.get(key) and not key.startswith(FREE):
            found[key] = f"{_shown(was.get(key))} -> {_shown(new.get(key))}"
    for key in sorted({*saved.sources, *now.sources}):
        if saved.sources.get(key) != now.sources.get(key) and key not in found:
            found[key] = "the name is the same, what it stands for has changed"
    if saved.dtype != now.dtype:
        found.setdefault("model.dtype", f"{saved.dtype} -> {now.dtype}")
    return dict(sorted(found.items()))


def check_run(found: Found, now: Facts, allowed: Collection[str]) -> list[str]:
    """Refused unless each difference was allowed by its key; otherwise what is worth a note."""
    notes = [f"going on from {found.path}, after step {found.manifest.step}"]
    notes += [f"passed over: {reason}" for reason in found.skipped]
    differing = differences(found.manifest.facts, now)
    notes += [f"--allow {key}: nothing of that name differs" for key in allowed if key not in differing]
    refused = {key: text for key, text in differing.items() if key not in allowed}
    if "optim.name" in differing:
        raise Refused(
            f"--resume: optim.name: {differing['optim.name']}, and {found.path} holds the former's state. Fix: set "
            "it back, or begin a new run from the weights: `zero-grpo export`."
        )
    if refused:
        lines = "\n".join(f"  {key}: {text}" for key, text in refused.items())
        flags = " ".join(f"--allow {key}" for key in refused)
        raise Refused(
            f"--resume: this run differs from {found.path}, so that it would not be the run that was begun:\n{lines}\n"
            f"Fix: set them back, or allow each: {flags}"
        )
    if found.manifest.facts.config.get("run") != now.config.get("run"):
        notes += _stretched(now.config)
    notes += [f"resumed with another {key} ({text}), as allowed" for key, text in differing.items()]
    was, new = found.manifest.facts.versions, now.versions
    changed = [f"{name} {was.get(name)} -> {new.get(name)}" for name in sorted(new) if was.get(name) != new.get(name)]
    if changed:
        notes.append(f"saved by other versions ({', '.join(changed)}): the resumed steps may differ in the last bits")
    _check_trained(found, now)
    return notes + _moved(found, now)


def _moved(found: Found, now: Facts) -> list[str]:
    """Notes on what lies elsewhere now. Refused where it cannot: blocks of 8-bit moments end with a rank's part."""
    saved = found.manifest.facts
    if _layout(saved) != _layout(now) and _in_8_bits(now):
        raise Refused(
            f'--resume: optim.name = "adamw8bit": its moments lie in blocks as {found.path} was saved: '
            f"{saved.world_size} rank(s), ZeRO stage {saved.zero_stage}, {saved.dtype}, {_shown(saved.layout)}; this "
            f"run has {now.world_size}, {now.zero_stage}, {now.dtype}, {_shown(now.layout)}. Fix: the same ranks, "
            "ZeRO stage, model.dtype and zero_optimization of engine.deepspeed."
        )
    notes = []
    if saved.zero_stage != now.zero_stage:
        notes.append(f"resumed in ZeRO stage {now.zero_stage}, saved in stage {saved.zero_stage}")
    if saved.world_size != now.world_size:
        notes.append(f"resumed on {now.world_size} rank(s), saved with {saved.world_size}")
    if saved.world_size < now.world_size:
        notes.append(
            f"the random generators of ranks from {saved.world_size} on begin anew, by run.seed, step and rank; "
            "samples do not depend on them, reward functions may"
        )
    return notes


def _check_trained(found: Found, now: Facts) -> None:
    """NoCheckpoint unless the checkpoint holds every weight that this run trains, and no other: a weight that is passed
    over would keep its random start."""
    saved = found.manifest.facts.trained
    differing = sorted(name for name in {*saved, *now.trained} if saved.get(name) != now.trained.get(name))
    if differing:
        one = differing[0]
        raise NoCheckpoint(
            f"{found.path}: it holds {len(saved)} trained weights, this run has {len(now.trained)}, and "
            f"{len(differing)} differ (first: {one}, saved {saved.get(one, 'absent')}, here "
            f"{now.trained.get(one, 'absent')}). Fix: the model and lora settings that it was saved with."
        )


def restore(folder: Path, engine: ZeroEngine, world: World, now: Facts) -> dict[str, Any]:
    """Weights, optimizer and random generators of every rank, from a verified checkpoint. Returns what ``save`` was
    given as ``progress``. A collective; before it puts anything back, every rank has been able to read its part."""
    error: NoCheckpoint | None = None
    read: _Read | None = None
    try:
        read = _read(folder, engine, world, now)
    except NoCheckpoint as unreadable:
        error = unreadable
    world.agree(error)
    assert read is not None
    with as_written(folder / "deepspeed"):
        if read.shards is not None:
            engine.put(read.shards.moments, read.shards.steps, read.shards.read)
        elif not engine.load(folder / "deepspeed"):
            raise NoCheckpoint(f"{folder}: DeepSpeed found nothing to load in deepspeed/. Fix: another checkpoint.")
    if read.random_states is None:
        random_states.seed_anew(now.config["run"]["seed"], step=read.step, rank=world.rank)
    else:
        with as_written(folder / random_file(world.rank)):
            random_states.restore(read.random_states, world.device)
    return read.progress


@dataclass(frozen=True)
class _Read:
    """What a rank has opened of a checkpoint."""

    step: int
    progress: dict[str, Any]
    random_states: dict[str, Any] | None
    """None: this rank was not saved."""
    shards: Shards | None
    """None: DeepSpeed loads, as the ranks are the same."""


def _read(folder: Path, engine: ZeroEngine, world: World, now: Facts) -> _Read:
    found = manifest.read(folder)
    saved, rank, inside = found.facts, world.rank, folder / "deepspeed"
    shards, random = None, None
    with as_written(inside):
        if _layout(saved) == _layout(now):
            check_own(inside, stage=saved.zero_stage, rank=rank)
        else:
            names = list(engine.trained())
            shards = Shards(inside, stage=saved.zero_stage, ranks=saved.world_size, names=names)
    if rank < saved.world_size:
        with as_written(folder / random_file(rank)):
            random = _read_json(folder / random_file(rank))
    with as_written(folder / PROGRESS):
        return _Read(found.step, _read_json(folder / PROGRESS), random, shards)


@contextmanager
def as_written(path: Path) -> Iterator[None]:
    """NoCheckpoint where what is read or put back from ``path`` is not what this version writes, whoever has signed it,
    or cannot be read on this host. Another rank that has gone, and want of memory, are what they are."""
    try:
        yield
    except Exception as error:  # of a damaged pickle or record, anything
        if isinstance(error, RunEnd) or asked_of_memory(error) or failed_collective(error):
            raise
        raise NoCheckpoint(
            f"{path}: it does not hold what this version writes, or cannot be read here "
            f"({type(error).__name__}: {error}). Fix: another checkpoint."
        ) from error


def _layout(facts: Facts) -> tuple[object, ...]:
    """What DeepSpeed's own loading wants unchanged. 8-bit moments have no other, and so no more than what cuts them."""
    file = None if _in_8_bits(facts) else facts.sources.get("engine.deepspeed")
    return facts.world_size, facts.zero_stage, facts.dtype, facts.layout, file


def _in_8_bits(facts: Facts) -> bool:
    return bool(facts.config.get("optim", {}).get("name") == "adamw8bit")


def _stretched(config: dict[str, Any]) -> list[str]:
    """Schedules that another number of steps changes from here on."""
    schedules = {
        "optim.schedule": config.get("optim", {}).get("schedule", "constant"),
        "grpo.kl.schedule": config.get("grpo", {}).get("kl", {}).get("schedule", "constant"),
    }
    ending = [f'{key} = "{name}"' for key, name in schedules.items() if name in ("linear", "cosine", "warmup_decay")]
    if not ending:
        return []
    return [f"[run] differs, and {' and '.join(ending)} follow the number of steps: they go on from another value"]


def _is_valid(folder: Path, check: Check) -> bool:
    try:
        manifest.verify(folder, check)
    except NoCheckpoint:
        return False
    return True


def _read_json(path: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value; the rewards by their names."""
    if isinstance(tree, dict):
        items = tree.items()
    elif isinstance(tree, list) and tree and all(isinstance(one, dict) and "name" in one for one in tree):
        items = {one["name"]: one for one in tree}.items()
    else:
        return {prefix: tree}
    flat: dict[str, Any] = {}
    for key, value in items:
        flat |= _flat(value, f"{prefix}.{key}" if prefix else str(key))
    return flat


def _shown(value: Any) -> str:
    return "absent" if value is None else json.dumps(value, ensure_ascii=False)
