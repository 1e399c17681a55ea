"""Checkpoints on disk: what is damaged is found before it is loaded, and what may be resumed from is decided alike."""

import json
import os
import pickle
import random
import shutil
import zipfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from peft import LoraConfig, get_peft_model

from tests.tiny import tiny_qwen2
from trainer.checkpoint import manifest, random_states, resume
from trainer.checkpoint.manifest import Facts, Manifest
from trainer.checkpoint.shards import Shards
from trainer.checkpoint.store import Found, Store
from trainer.errors import Lost, NoCheckpoint, Refused
from trainer.models.fingerprint import fingerprint
from trainer.record.run_dir import RunDirectory

FACTS = Facts(
    world_size=2,
    zero_stage=2,
    dtype="float32",
    config={
        "run": {"dir": "runs/a", "steps": 10},
        "optim": {"lr": 1e-5},
        "reward": [{"name": "right", "weight": 1.0}],
        "checkpoint": {"every": 5},
    },
    sources={"model.name_or_path": "aa", "data.source": "bb", "rewards/mine.py": "cc"},
    trained={"layers.0.lora_A": [4, 32]},
    versions={"torch": "2.13.0"},
)


def checkpoint(run_dir: Path, step: int) -> Path:
    """A committed one with a tensor file and a JSON file."""
    store = Store(run_dir)
    folder = store.begin(step, "run")
    (folder / "deepspeed").mkdir()
    torch.save({"weight": torch.arange(1000.0) + step}, folder / "deepspeed/states.pt")
    (folder / "progress.json").write_text(json.dumps({"step": step}))
    files = {name: manifest.measured(folder, name) for name in manifest.listed(folder)}
    manifest.write(folder, Manifest(step, "run", FACTS, files))
    store.commit(folder, step)
    store.settle(step)
    return store.folder(step)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


class Runs:
    """Unpickled, it makes a file."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.canary),))


def test_a_whole_checkpoint_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    found = manifest.verify(checkpoint(tmp_path, 7))
    assert (found.step, found.run_id, found.facts) == (7, "run", FACTS)


@pytest.mark.parametrize("name", ["deepspeed/states.pt", "progress.json"])
@pytest.mark.parametrize(
    ("damage", "said"), [(flip_a_bit, "damaged"), (truncate, "bytes, saved were"), (Path.unlink, "missing")]
)
def test_damage_to_a_file_is_found_and_named(tmp_path: Path, name: str, damage: Any, said: str) -> None:
    folder = checkpoint(tmp_path, 7)
    damage(folder / name)
    with pytest.raises(NoCheckpoint, match=said) as refusal:
        manifest.verify(folder)
    assert str(folder / name) in str(refusal.value)


def test_sizes_alone_pass_a_flipped_bit_and_nothing_else(tmp_path: Path) -> None:
    """What ``checkpoint.verify = "size"`` gives up is the hashes."""
    folder = checkpoint(tmp_path, 7)
    flip_a_bit(folder / "deepspeed/states.pt")
    assert manifest.verify(folder, "size").step == 7
    for asked in ("auto", str(folder)):
        assert resume.find(asked, tmp_path, "size") is not None
        with pytest.raises(NoCheckpoint, match="damaged"):
            resume.find(asked, tmp_path)
    truncate(folder / "progress.json")
    with pytest.raises(NoCheckpoint, match="bytes, saved were"):
        manifest.verify(folder, "size")


def test_sizes_alone_pass_nothing_that_cannot_be_opened(tmp_path: Path) -> None:
    """A bit anywhere in the archive's head and tail, or in the pickle: where it shows, the older one is taken."""
    older, file = checkpoint(tmp_path, 6), checkpoint(tmp_path, 7) / "deepspeed/states.pt"
    whole, taken = file.read_bytes(), Counter[int]()
    dice = random.Random(0)
    for at in (*range(0, 400, 7), *range(len(whole) - 800, len(whole), 9), *dice.sample(range(len(whole)), 40)):
        content = bytearray(whole)
        content[at] ^= 1 << dice.randrange(8)
        file.write_bytes(content)
        found = resume.find("auto", tmp_path, "size")
        assert found is not None
        taken[found.manifest.step] += 1
        if found.path == older:
            assert (
                "cannot be read as torch.save writes it" in found.skipped[0] or "its pickle names" in found.skipped[0]
            )
    assert min(taken[6], taken[7]) > 30


def zip_without_pickle(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("states/version", "3")


@pytest.mark.parametrize(
    "write",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(pickle.dumps({"x": 1}, protocol=4)),
        lambda path: torch.save({"x": 1}, path, _use_new_zipfile_serialization=False),
        lambda path: torch.save({"x": 1}, path, pickle_protocol=4),
        zip_without_pickle,
    ],
    ids=["empty", "pickle", "legacy", "protocol 4", "zip"],
)
def test_a_file_that_torch_does_not_write_so_is_named(tmp_path: Path, write: Any) -> None:
    folder = checkpoint(tmp_path, 7)
    write(folder / "deepspeed/states.pt")
    entry = list(manifest.measured(folder, "deepspeed/states.pt"))
    resign(folder, lambda record: record["files"].update({"deepspeed/states.pt": entry}))
    with pytest.raises(NoCheckpoint, match=r"states\.pt: cannot be read as torch\.save writes it"):
        manifest.verify(folder)


def test_k4_pickles_are_looked_into_whatever_is_checked(tmp_path: Path) -> None:
    """Without their hashes too, and once more when they are read."""
    store = Store(tmp_path)
    folder = store.begin(7, "run")
    torch.save({"more": Runs(tmp_path / "canary")}, folder / "states.pt")
    manifest.write(folder, Manifest(7, "run", FACTS, {"states.pt": manifest.measured(folder, "states.pt")}))
    with pytest.raises(NoCheckpoint, match=r"its pickle names posix\.mkdir"):
        manifest.verify(store.commit(folder, 7), "size")
    with pytest.raises(NoCheckpoint, match=r"its pickle names posix\.mkdir"):
        (tmp_path / "checkpoints/step-000007/states.pt").rename(tmp_path / "mp_rank_00_model_states.pt")
        Shards(tmp_path, stage=0, ranks=1, names=["weight"])
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("linked", ["deepspeed", "deepspeed/states.pt", "deepspeed/more.pt", manifest.NAME])
def test_k4_a_link_in_a_checkpoint_is_not_followed(tmp_path: Path, linked: str) -> None:
    """Signed again without it: nothing of what DeepSpeed would load there is listed, hashed or looked into."""
    folder = checkpoint(tmp_path, 7)
    aside = tmp_path / "payload"
    if (folder / linked).exists():
        (folder / linked).rename(aside)
    else:
        torch.save({"more": Runs(tmp_path / "canary")}, aside)
    content = manifest.read(folder) if linked != manifest.NAME else manifest.read(checkpoint(tmp_path, 8))
    kept = {name: told for name, told in content.files.items() if not name.startswith(linked)}
    if linked != manifest.NAME:
        manifest.write(folder, replace(content, files=kept))
    (folder / linked).symlink_to(aside)
    with pytest.raises(NoCheckpoint, match=f"{linked}: a link or a device") as refusal:
        manifest.verify(folder)
    assert "Fix: " in str(refusal.value) and not (tmp_path / "canary").exists()


def test_k4_a_pipe_in_a_checkpoint_is_not_opened(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, 7)
    os.mkfifo(folder / "deepspeed/zero_pp_rank_0_mp_rank_00_optim_states.pt")
    with pytest.raises(NoCheckpoint, match="a link or a device"):
        manifest.verify(folder)


def test_a_file_that_was_added_is_found(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, 7)
    (folder / "deepspeed/more.pt").write_bytes(b"")
    with pytest.raises(NoCheckpoint, match=r"more\.pt: not a file of this checkpoint"):
        manifest.verify(folder)


@pytest.mark.parametrize(
    "damage", [truncate, Path.unlink, lambda path: path.write_text("[1]"), lambda path: path.write_bytes(b"\xff")]
)
def test_a_damaged_manifest_is_no_manifest(tmp_path: Path, damage: Any) -> None:
    folder = checkpoint(tmp_path, 7)
    damage(folder / manifest.NAME)
    with pytest.raises(NoCheckpoint, match="MANIFEST"):
        manifest.verify(folder)


def test_a_changed_manifest_is_found_by_its_own_hash(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, 7) / manifest.NAME
    path.write_text(path.read_text().replace('"step": 7', '"step": 8'))
    with pytest.raises(NoCheckpoint, match="does not have the sha256 that it states"):
        manifest.verify(path.parent)


def test_k1_a_manifest_of_a_newer_format_is_named(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, 7) / manifest.NAME
    path.write_text(path.read_text().replace('"format": 3', '"format": 4'))
    with pytest.raises(NoCheckpoint, match="format 4, this version reads 3"):
        manifest.verify(path.parent)


def resign(folder: Path, change: Any) -> None:
    """A manifest changed by somebody who then puts its own hash right."""
    record = json.loads((folder / manifest.NAME).read_text())
    del record["sha256"]
    change(record)
    (folder / manifest.NAME).write_text(json.dumps(record | {"sha256": manifest._own_hash(record)}))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda record: record.pop("run_id"), "run_id: Field required"),
        (lambda record: record["facts"].update(world_size="two"), "facts.world_size: "),
        (lambda record: record["files"].update({"progress.json": [1]}), "files.progress.json.1: "),
        (lambda record: record.update(files=[]), "files: "),
    ],
)
def test_k1_a_manifest_of_another_shape_is_named_though_its_hash_is_right(
    tmp_path: Path, change: Any, said: str
) -> None:
    folder = checkpoint(tmp_path, 5)
    resign(folder, change)
    with pytest.raises(NoCheckpoint, match=f"{manifest.NAME}: {said}.*not what this version writes"):
        manifest.verify(folder)


@pytest.mark.parametrize("name", ["../other.json", "/etc/hostname", "deepspeed/../../other.json"])
def test_k5_a_manifest_cannot_name_a_file_outside_of_its_folder(tmp_path: Path, name: str) -> None:
    folder = checkpoint(tmp_path, 5)
    other = folder.parent / "other.json"
    other.write_text("{}")
    entry = [other.stat().st_size, manifest.file_sha256(other)]
    resign(folder, lambda record: record["files"].update({name: entry}))
    with pytest.raises(NoCheckpoint, match=r"missing"):
        manifest.verify(folder)


@pytest.mark.parametrize(
    "error",
    [KeyError("a"), TypeError("b"), ValueError("c"), OverflowError("d"), EOFError(), OSError(116, "Stale file handle")],
)
def test_k1_what_is_put_back_is_what_this_version_writes(error: Exception, tmp_path: Path) -> None:
    said = r"progress\.json: it does not hold what this version writes"
    with pytest.raises(NoCheckpoint, match=said), resume.as_written(tmp_path / "progress.json"):
        raise error


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer"), Lost("it")]
)
def test_k1_a_lost_rank_and_want_of_memory_are_no_damage(error: Exception, tmp_path: Path) -> None:
    with pytest.raises(type(error)), resume.as_written(tmp_path / "progress.json"):
        raise error


def test_k4_a_pickle_with_a_foreign_global_is_found_and_not_run(tmp_path: Path) -> None:
    store = Store(tmp_path)
    folder = store.begin(7, "run")
    torch.save({"weight": torch.ones(2), "more": Runs(tmp_path / "canary")}, folder / "states.pt")
    manifest.write(folder, Manifest(7, "run", FACTS, {"states.pt": manifest.measured(folder, "states.pt")}))
    with pytest.raises(NoCheckpoint, match=r"its pickle names posix\.mkdir"):
        manifest.verify(store.commit(folder, 7))
    assert not (tmp_path / "canary").exists()
    pickle.loads(pickle.dumps(Runs(tmp_path / "canary")))
    assert (tmp_path / "canary").exists(), "the pickle of this test does nothing"


def test_the_newest_valid_one_is_found_whatever_latest_says(tmp_path: Path) -> None:
    kept = checkpoint(tmp_path, 9)
    flip_a_bit(checkpoint(tmp_path, 99) / "deepspeed/states.pt")
    truncate(checkpoint(tmp_path, 100) / "deepspeed/states.pt")
    (tmp_path / "checkpoints/tmp.step-000101.run").mkdir()
    (tmp_path / "checkpoints/removed.step-000102").mkdir()
    assert (tmp_path / "checkpoints/latest").read_text() == "step-000100\n"
    found = Store(tmp_path).newest()
    assert found is not None and found.path == kept and found.manifest.step == 9
    assert [text.split(":")[0].rsplit("/", 3)[1] for text in found.skipped] == ["step-000100", "step-000099"]


def test_b70_nothing_valid_is_an_error_and_nothing_at_all_a_start(tmp_path: Path) -> None:
    assert Store(tmp_path).newest() is None
    assert resume.find("auto", tmp_path) is None
    truncate(checkpoint(tmp_path, 5) / manifest.NAME)
    with pytest.raises(NoCheckpoint, match="none of its checkpoints can be used") as refusal:
        Store(tmp_path).newest()
    assert "step-000005" in str(refusal.value) and NoCheckpoint.exit_code == 5


def test_b70_latest_that_names_nothing_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/latest").write_text("step-000004\n")
    with pytest.raises(NoCheckpoint, match="latest names 'step-000004', which is not there"):
        resume.find("auto", tmp_path)


@pytest.mark.parametrize("asked", ["nowhere", "empty", "empty/checkpoints", "file"])
def test_b70_a_path_without_a_checkpoint_is_an_error(tmp_path: Path, asked: str) -> None:
    (tmp_path / "empty/checkpoints").mkdir(parents=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(NoCheckpoint) as refusal:
        resume.find(str(tmp_path / asked), tmp_path)
    assert str(tmp_path / asked) in str(refusal.value)


def test_a_checkpoint_under_another_step_s_name_is_passed_over(tmp_path: Path) -> None:
    shutil.copytree(checkpoint(tmp_path, 6), tmp_path / "checkpoints/step-000099")
    found = Store(tmp_path).newest()
    assert found is not None and found.path.name == "step-000006"
    assert found.skipped == [f"{tmp_path}/checkpoints/step-000099: its manifest is of step 6"]


def test_a_copy_under_a_name_of_its_own_is_a_checkpoint(tmp_path: Path) -> None:
    copy = tmp_path / "checkpoints/mine"
    shutil.copytree(checkpoint(tmp_path, 6), copy)
    found, goes_on = resume.locate(str(copy), tmp_path)
    assert found is not None and found.path == copy and goes_on


def test_a_checkpoint_on_another_disk_is_gone_on_from_by_its_link(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "run", 6)
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    found, goes_on = resume.locate("auto", tmp_path / "run")
    assert found is not None and found.manifest.step == 6 and goes_on


def test_a_finished_run_without_a_checkpoint_is_not_begun_anew(tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(NoCheckpoint, match=r"starting anew would replace it[\s\S]*lora\.start_adapter"):
        resume.locate("auto", tmp_path)


def test_what_cannot_be_read_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint(tmp_path, 6)

    def refused(path: Path) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(manifest, "file_sha256", refused)
    with pytest.raises(NoCheckpoint, match=r"states\.pt: cannot be read \(Permission denied\)"):
        manifest.verify(folder)


def test_pruning_never_takes_the_newest_nor_a_protected_one(tmp_path: Path) -> None:
    folders = [checkpoint(tmp_path, step) for step in range(1, 7)]
    Store(tmp_path).prune(2, {folders[1]})
    assert Store(tmp_path).folders() == [folders[5], folders[4], folders[1]]
    Store(tmp_path).prune(1, set())
    assert [path.name for path in (tmp_path / "checkpoints").iterdir() if path.is_dir()] == ["step-000006"]


def test_tidying_removes_rests_and_sets_damaged_ones_aside(tmp_path: Path) -> None:
    checkpoint(tmp_path, 3)
    damaged = checkpoint(tmp_path, 4)
    (tmp_path / "checkpoints/tmp.step-000005.run/deepspeed").mkdir(parents=True)
    (tmp_path / "checkpoints/removed.step-000001").mkdir()
    (tmp_path / "checkpoints/aside.step-000004").mkdir()
    flip_a_bit(damaged / "progress.json")
    Store(tmp_path).tidy(3, tmp_path / "checkpoints/step-000003")
    names = {path.name for path in (tmp_path / "checkpoints").iterdir() if path.is_dir()}
    assert names == {"step-000003", "aside.step-000004", "aside.step-000004.2"}
    assert (tmp_path / "checkpoints/latest").read_text() == "step-000003\n"


def test_an_older_checkpoint_is_not_gone_on_from_beside_newer_ones(tmp_path: Path) -> None:
    older, newer = checkpoint(tmp_path, 3), checkpoint(tmp_path, 4)
    with pytest.raises(Refused, match=r"a newer checkpoint, step-000004[\s\S]*--run\.dir"):
        resume.locate(str(older), tmp_path)
    found, goes_on = resume.locate(str(older), tmp_path / "elsewhere")
    assert found is not None and found.path == older and not goes_on
    flip_a_bit(newer / "progress.json")
    assert resume.locate(str(older), tmp_path)[1]


@pytest.mark.parametrize("spelling", ["{}", "{}/../one", "{}/checkpoints/step-000004", "{}/./checkpoints/step-000004"])
def test_a_run_is_the_same_by_every_spelling_of_its_path(
    tmp_path: Path, spelling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run file says `one`, the command line an absolute path, or the other way round."""
    monkeypatch.chdir(tmp_path)
    checkpoint(Path("one"), 3)
    checkpoint(Path("one"), 4)
    for asked, run_dir in (
        (spelling.format(tmp_path / "one"), Path("one")),
        (spelling.format("one"), tmp_path / "one"),
    ):
        found, goes_on = resume.locate(asked, run_dir)
        assert found is not None and goes_on
        Store(run_dir).tidy(found.manifest.step, found.path)
        assert [path.name for path in Store(run_dir).folders()] == ["step-000004", "step-000003"]


def test_another_run_is_not_overwritten_by_a_branch(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "one", 3)
    (tmp_path / "two").mkdir()
    (tmp_path / "two/metrics.jsonl").write_text("")
    with pytest.raises(Refused, match="already holds a run"):
        resume.locate(str(folder), tmp_path / "two")


def test_the_base_is_the_same_whatever_is_trained_on_it() -> None:
    """So that another rank is told by its own name, and not by a model that had changed."""
    full = fingerprint(tiny_qwen2())
    adapted = tiny_qwen2()
    get_peft_model(adapted, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    assert fingerprint(adapted) == full
    with torch.no_grad():
        adapted.model.layers[0].self_attn.q_proj.base_layer.weight[0, 0] += 1
    assert fingerprint(adapted) != full


def found_with(facts: Facts) -> Found:
    return Found(Path("ck"), Manifest(3, "run", facts, {}), [])


def test_b69_another_world_or_stage_is_said_with_both_numbers() -> None:
    """And what is not the same there."""
    moved = replace(FACTS, world_size=4, zero_stage=3)
    notes = resume.check_run(found_with(FACTS), moved, ())
    assert notes[1:3] == ["resumed in ZeRO stage 3, saved in stage 2", "resumed on 4 rank(s), saved with 2"]
    assert "generators of ranks from 2 on begin anew" in notes[3]
    assert resume.check_run(found_with(moved), FACTS, ())[2:] == ["resumed on 2 rank(s), saved with 4"]


@pytest.mark.parametrize("change", [{"world_size": 1}, {"zero_stage": 1}, {"layout": {"round_robin_gradients": True}}])
def test_b69_8_bit_moments_stay_where_they_are(change: dict[str, Any]) -> None:
    facts = replace(FACTS, config={"optim": {"name": "adamw8bit"}}, sources={"engine.deepspeed": "one"})
    spaced = replace(facts, sources={"engine.deepspeed": "other spacing, another bucket size"})
    assert resume.check_run(found_with(facts), spaced, ("engine.deepspeed",)) and resume._layout(facts) == (
        resume._layout(spaced)
    )
    with pytest.raises(Refused, match=r"adamw8bit[\s\S]*2 rank\(s\), ZeRO stage 2[\s\S]*Fix: the same ranks"):
        resume.check_run(found_with(facts), replace(facts, **change), ("engine.deepspeed",))


def test_a_rank_that_was_not_saved_draws_other_numbers_but_always_the_same() -> None:
    drawn = []
    for step, rank in ((3, 1), (3, 1), (3, 2), (4, 1)):
        random_states.seed_anew(7, step=step, rank=rank)
        drawn.append((random.random(), float(numpy.random.rand()), float(torch.rand(()))))
    assert drawn[0] == drawn[1] and len(set(drawn)) == 3


def test_free_settings_change_without_a_word() -> None:
    config = FACTS.config | {"run": {"dir": "b", "steps": 99}, "checkpoint": {"every": 1}, "log": {"every": 3}}
    assert resume.check_run(found_with(FACTS), replace(FACTS, config=config), ()) == ["going on from ck, after step 3"]


CHANGED = replace(
    FACTS,
    config=FACTS.config | {"optim": {"lr": 2e-5}, "reward": [{"name": "right", "weight": 0.5}]},
    sources=FACTS.sources | {"data.source": "other", "rewards/mine.py": "other"},
)


def test_k2_every_difference_is_listed_and_allowed_one_by_one() -> None:
    keys = ("data.source", "optim.lr", "reward.right.weight", "rewards/mine.py")
    with pytest.raises(Refused) as refusal:
        resume.check_run(found_with(FACTS), CHANGED, ())
    message = str(refusal.value)
    assert "optim.lr: 1e-05 -> 2e-05" in message and "reward.right.weight: 1.0 -> 0.5" in message
    assert message.endswith(" ".join(f"--allow {key}" for key in sorted(keys)))
    with pytest.raises(Refused) as refusal:
        resume.check_run(found_with(FACTS), CHANGED, keys[1:])
    assert str(refusal.value).endswith("allow each: --allow data.source")
    assert len(resume.check_run(found_with(FACTS), CHANGED, keys)) == 1 + len(keys)


def test_b67_a_trained_weight_that_the_checkpoint_lacks_is_an_error() -> None:
    now = replace(FACTS, trained={"layers.0.lora_A": [4, 32], "layers.1.lora_A": [4, 32]})
    with pytest.raises(NoCheckpoint, match=r"first: layers\.1\.lora_A, saved absent, here \[4, 32\]"):
        resume.check_run(found_with(FACTS), now, ())


def test_another_optimizer_cannot_take_over_the_state() -> None:
    now = replace(FACTS, config=FACTS.config | {"optim": {"lr": 1e-5, "name": "sgd"}})
    with pytest.raises(Refused, match="holds the former's state"):
        resume.check_run(found_with(FACTS), now, ("optim.name",))


def test_schedules_that_end_with_the_run_are_named_when_its_length_changes() -> None:
    config = FACTS.config | {"optim": {"lr": 1e-5, "schedule": "linear"}}
    longer = config | {"run": {"dir": "runs/a", "steps": 20}}
    notes = resume.check_run(found_with(replace(FACTS, config=config)), replace(FACTS, config=longer), ())
    assert 'optim.schedule = "linear" follow the number of steps' in notes[-1]


def test_f25_a_second_trainer_in_the_directory_is_refused(tmp_path: Path) -> None:
    RunDirectory(tmp_path).lock()
    with pytest.raises(Refused, match=rf"another process trains in it \(pid {os.getpid()} on "):
        RunDirectory(tmp_path).lock()


def test_other_versions_are_named() -> None:
    notes = resume.check_run(found_with(FACTS), replace(FACTS, versions={"torch": "2.14.0"}), ())
    assert "torch 2.13.0 -> 2.14.0" in notes[-1]


def test_records_after_the_checkpoint_are_taken_back(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.create()
    for step in (1, 2, 3):
        directory.append_metrics({"step": step, "loss": 0.5})
        (tmp_path / f"rollouts/step-{step:06d}.jsonl").write_text("")
        directory.write_samples(step, "", "")
        directory.write_histogram(step, {}).write_bytes(b"")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # what a kill leaves
    directory.cut_after(2)
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2]
    assert {path.name for path in (tmp_path / "rollouts").iterdir()} == {"step-000001.jsonl", "step-000002.jsonl"}
    assert {path.name for path in (tmp_path / "samples").iterdir()} == {
        f"step_{step}.{kind}" for step in (1, 2) for kind in ("txt", "jsonl")
    }
    assert {path.name for path in (tmp_path / "histograms").iterdir()} == {
        f"step-00000{step}.{kind}" for step in (1, 2) for kind in ("json", "png")
    }
