"""What a run's checkpoints are to it: which it goes on from, keeps and goes back to, and a disk that refuses."""

import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.tiny_run import run_config
from tests.unit.test_checkpoints import FACTS, flip_a_bit
from trainer.__main__ import main
from trainer.checkpoint import manifest, resume
from trainer.checkpoint.save import Checkpoints
from trainer.checkpoint.store import Found, Store
from trainer.checkpoint.trained import find
from trainer.errors import NoCheckpoint, Stopped, refused_by_disk
from trainer.world import World


class Engine:
    def save(self, folder: Path) -> None:
        torch.save({"weight": torch.arange(9.0)}, folder / "states.pt")


@pytest.fixture
def checkpoints(tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> Checkpoints:
    """Of a run without a model."""
    monkeypatch.setattr("trainer.checkpoint.save.write_weights", lambda *_: None)
    return checkpoints_in(tmp_path, world)


def checkpoints_in(run_dir: Path, world: World, keep: int = 1) -> Checkpoints:
    config = run_config(run_dir, {"run.dir": str(run_dir), "checkpoint.keep": keep})
    policy: Any = SimpleNamespace(dtype=torch.float32)
    engine: Any = Engine()
    return Checkpoints(config, policy, engine, world, FACTS, "run")


def save(checkpoints: Checkpoints, step: int, best: int | None = None) -> Path:
    progress = {"step": step, "best": None if best is None else {"metric": "reward", "step": best, "value": 1.0}}
    return checkpoints.save(step, progress, {})


def in_it(run_dir: Path) -> set[str]:
    return {path.name for path in (run_dir / "checkpoints").iterdir()}


def test_the_best_one_outlives_a_resume_and_a_rollback(tmp_path: Path, checkpoints: Checkpoints, world: World) -> None:
    """Step 1 was the best when 2 was saved, the last good one; 3 is the best now. After a rollback 1 is it again."""
    checkpoints.keep_best(save(checkpoints, 1, best=1))
    save(checkpoints, 2, best=1)
    checkpoints.keep_good(2)
    checkpoints.keep_best(save(checkpoints, 3, best=3))
    resumed = checkpoints_in(tmp_path, world)
    found = resume.find("auto", tmp_path)
    assert found is not None and found.manifest.step == 3
    resumed.resumed(found, {"step": 3}, 2, in_place=True)
    assert resumed.tidy(3, found.path, {"step": 3}) == {"step": 3}
    save(resumed, 4, best=3)
    save(resumed, 5, best=3)
    assert in_it(tmp_path) == {*(f"step-00000{step}" for step in (1, 2, 3, 5)), "latest", "best"}
    assert resumed.go_back() == Store(tmp_path).folder(2)
    then = {"metric": "reward", "step": 1, "value": 1.0}
    assert resumed.still_best(then) == then
    assert (tmp_path / "checkpoints/best").read_text() == "step-000001\n"


def test_a_good_one_that_cannot_be_read_does_not_keep_a_run_from_going_on(
    tmp_path: Path, checkpoints: Checkpoints, world: World
) -> None:
    (save(checkpoints, 2, best=1) / "progress.json").write_text("[")
    found = Found(save(checkpoints, 3), manifest.read(Store(tmp_path).folder(3)), [])
    for good in (1, 2):
        resumed = checkpoints_in(tmp_path, world)
        resumed.resumed(found, None, good, in_place=True)
        assert resumed.good == Store(tmp_path).folder(good) and resumed.best_of_good is None


def test_a_run_that_goes_on_from_a_copy_saves_in_its_own_place(
    tmp_path: Path, checkpoints: Checkpoints, world: World
) -> None:
    """What bears the copy's step may be another, or damaged."""
    copy, other = tmp_path / "checkpoints/mine", save(checkpoints, 6)
    shutil.copytree(other, copy)
    flip_a_bit(other / "deepspeed/states.pt")
    found, goes_on = resume.locate(str(copy), tmp_path)
    assert found is not None and goes_on
    resumed = checkpoints_in(tmp_path, world)
    resumed.resumed(found, None, None, in_place=True)
    assert resumed.saved_step is None
    resumed.tidy(6, found.path, None)
    assert in_it(tmp_path) == {"mine", "aside.step-000006", "latest"}
    assert (tmp_path / "checkpoints/latest").read_text() == "mine\n"
    assert manifest.verify(save(resumed, 6)).step == 6
    resumed = checkpoints_in(tmp_path, world)
    resumed.resumed(Found(other, found.manifest, []), None, None, in_place=True)
    assert resumed.saved_step == 6


def test_names_for_people_name_what_is_there(tmp_path: Path, checkpoints: Checkpoints, world: World) -> None:
    """The newest one, which was the best, is damaged; the run goes on from the one before it."""
    checkpoints.config = run_config(tmp_path, {"checkpoint.keep": 3})
    save(checkpoints, 3)
    checkpoints.keep_best(save(checkpoints, 4, best=4))
    flip_a_bit(Store(tmp_path).folder(4) / "deepspeed/states.pt")
    found = resume.find("auto", tmp_path)
    assert found is not None and found.manifest.step == 3
    resumed = checkpoints_in(tmp_path, world)
    resumed.resumed(found, None, None, in_place=True)
    assert resumed.tidy(3, found.path, None) is None
    assert in_it(tmp_path) == {"step-000003", "aside.step-000004", "latest"}
    assert (tmp_path / "checkpoints/latest").read_text() == "step-000003\n"


def refuse(*_: Any) -> None:
    raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize("fails", ["point", "prune", "settle"])
def test_what_fails_after_the_rename_costs_no_checkpoint(
    fails: str, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints.store, fails, refuse)
    checkpoints.keep_best(folder := save(checkpoints, 2))
    assert manifest.verify(folder).step == checkpoints.saved_step == 2
    assert "Input/output error" in checkpoints.notes[0] and "the checkpoints are whole" in checkpoints.notes[0]


def test_what_cannot_be_set_aside_ends_all_ranks_alike(
    tmp_path: Path, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints.store, "tidy", refuse)
    with pytest.raises(Stopped, match=r"cannot be set aside: .*Input/output error.* Fix: see to the disk"):
        checkpoints.tidy(3, tmp_path, None)


@pytest.mark.parametrize(
    ("number", "fix"),
    [
        (errno.ENOSPC, "make room"),
        (errno.EDQUOT, "make room"),
        (errno.EROFS, "make it writable"),
        (errno.EACCES, "make it writable"),
        (errno.ESTALE, "see to the disk, its room and its mount"),
    ],
)
def test_f12_f13_the_fix_is_that_of_the_disk(
    number: int, fix: str, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    save(checkpoints, 1)
    monkeypatch.setattr(checkpoints.store, "begin", refused)
    with pytest.raises(Stopped, match=rf"{os.strerror(number)} .* free\). Fix: {fix}\."):
        save(checkpoints, 2)


def test_f13_a_disk_that_does_not_say_what_is_free_is_no_traceback(
    tmp_path: Path, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(*_: Any) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr("shutil.disk_usage", stale)
    with pytest.raises(Stopped, match=r"Stale file handle \(how much is free it does not say: Stale"):
        save(checkpoints, 1)
    assert "see to the disk" in str(refused_by_disk(tmp_path, OSError(errno.ESTALE, "Stale file handle")))


def test_a_run_keeps_what_a_fallback_needs(checkpoints: Checkpoints) -> None:
    """Up to the oldest of checkpoint.keep, however old the best one is."""
    checkpoints.config = run_config(checkpoints.store.path.parent, {"checkpoint.keep": 2})
    checkpoints.keep_best(save(checkpoints, 1))
    assert checkpoints.oldest == 1
    for step in (2, 3, 4):
        save(checkpoints, step)
    assert checkpoints.oldest == 3


@pytest.fixture
def locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run whose checkpoints another user may not list, also where root is asked."""
    (tmp_path / "out/checkpoints").mkdir(parents=True)
    real = Path.iterdir

    def iterdir(path: Path) -> Any:
        if path.name == "checkpoints":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    yield tmp_path / "out"


def test_b70_a_path_that_cannot_be_looked_at_is_an_error(locked: Path) -> None:
    long = "n" * 300
    for asked in ("auto", str(locked)):
        with pytest.raises(NoCheckpoint, match=r"checkpoints: cannot be read \(Permission denied\)"):
            resume.locate(asked, locked)
    with pytest.raises(NoCheckpoint, match=rf"--resume {long}: .*cannot be read \(File name too long\)"):
        resume.locate(long, locked)
    with pytest.raises(NoCheckpoint, match=r"eval: .*cannot be read \(File name too long\)"):
        find(Path(long), "eval")


@pytest.mark.parametrize(
    "change",
    [
        lambda progress: [1],
        lambda progress: progress | {"best": {"metric": "x"}},
        lambda progress: progress | {"output": progress["output"] | {"run_id": "../../x"}},
        lambda progress: (
            progress | {"output": progress["output"] | {"alarms": progress["output"]["alarms"] | {"good_step": "abc"}}}
        ),
    ],
    ids=["list", "best", "run id", "good step"],
)
def test_k1_signed_progress_of_another_shape_ends_with_5(
    change: Any, trained_here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = trained_here / "out/checkpoints/step-000002"
    file = folder / "progress.json"
    resign(folder, file, json.dumps(change(json.loads(file.read_text()))).encode())
    assert main(["train", "run.toml", "--resume", "auto"]) == 5
    assert "progress.json: it does not hold what this version writes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "stage"), [("mp_rank_00_model", "zero2"), ("*_optim", "zero2"), ("*_optim", "zero3")], ids=str
)
def test_k1_a_signed_shard_of_another_shape_ends_with_5(
    name: str, stage: str, trained_here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Loaded by DeepSpeed, and read by us for another stage."""
    folder = trained_here / "out/checkpoints/step-000002"
    torch.save({"x": 1}, trained_here / "other.pt")
    (file,) = folder.glob(f"deepspeed/{name}_states.pt")
    resign(folder, file, (trained_here / "other.pt").read_bytes())
    asked = ["train", "run.toml", "--resume", "auto", "--engine.deepspeed", stage, "--allow", "engine.deepspeed"]
    assert main(asked) == 5
    said = capsys.readouterr().out
    assert "out/checkpoints/step-000002/deepspeed" in said and "Traceback" not in said


def resign(folder: Path, file: Path, content: bytes) -> None:
    """The file changed by somebody who then puts every hash right."""
    file.write_bytes(content)
    record = json.loads((folder / manifest.NAME).read_text())
    record["files"][file.relative_to(folder).as_posix()] = list(
        manifest.measured(folder, str(file.relative_to(folder)))
    )
    del record["sha256"]
    (folder / manifest.NAME).write_text(json.dumps(record | {"sha256": manifest._own_hash(record)}))


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trained") / "run"


@pytest.fixture
def trained_here(trained_once: Path, run_here: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A folder with a run of two steps in it, where the command runs."""
    if not trained_once.exists():
        assert main(["train", "run.toml"]) == 0
        shutil.copytree(run_here, trained_once)
    shutil.copytree(trained_once, run_here, dirs_exist_ok=True)
    capsys.readouterr()
    return run_here
