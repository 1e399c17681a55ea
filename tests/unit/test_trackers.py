"""Trackers: what is missing is told at the start, rank 0 feeds the others, and none is ever the end of a run."""

import importlib.machinery
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from trainer.record.trackers import Trackers, unusable


def stub(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Any) -> None:
    """A package called ``name`` that has these functions."""
    module = ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    for key, value in functions.items():
        setattr(module, key, value)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture(autouse=True)
def logged_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "SWANLAB_API_KEY", "SWANLAB_MODE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "netrc").write_text("")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def test_b96_a_missing_package_is_named_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("trainer.record.trackers.find_spec", lambda name: None)
    names = ("wandb", "tensorboard", "trackio", "swanlab")
    notes = unusable(names)
    for name, note in zip(names, notes, strict=True):
        assert note.startswith(f'log.report_to: "{name}" needs a package') and "zero-grpo[track]" in note
    trackers = Trackers(names, tmp_path, "0123", {}, 0)
    assert trackers.logs == {} and trackers.log({"loss": 0.5}, 1) == []


def test_b96_a_key_that_would_be_asked_for_is_told_and_not_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[str] = []
    stub(monkeypatch, "wandb", init=lambda **words: asked.append("wandb"))
    (note,) = unusable(("wandb",))
    assert "would ask for a key" in note and "WANDB_MODE=offline" in note and "goes on without" in note
    Trackers(("wandb",), tmp_path, "0123", {}, 0)
    assert asked == []
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert unusable(("wandb",)) == []
    monkeypatch.delenv("WANDB_MODE")
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password key\n")
    assert unusable(("wandb",)) == []


@pytest.mark.parametrize(
    ("mode", "key", "usable"), [("online", None, False), ("online", "k", True), ("offline", None, True)]
)
def test_b96_swanlab_is_asked_whether_it_is_logged_in(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: str, key: str | None, usable: bool
) -> None:
    calls: list[tuple[Any, ...]] = []
    stub(
        monkeypatch,
        "swanlab",
        Settings=lambda: SimpleNamespace(mode=mode, api_key=key),
        init=lambda **words: calls.append((words["id"], words["resume"], words["log_dir"])),
        log=lambda metrics, step: calls.append((metrics, step)),
    )
    trackers = Trackers(("swanlab",), tmp_path, "0123", {}, 0)
    assert trackers.log({"loss": 0.5}, 7) == [] and bool(unusable(("swanlab",))) is not usable
    assert calls == ([("0123", "allow", str(tmp_path / "swanlab")), ({"loss": 0.5}, 7)] if usable else [])


def test_metrics_arrive_under_the_run_s_own_id(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[tuple[Any, ...]] = []
    stub(
        monkeypatch,
        "wandb",
        init=lambda **words: calls.append(("init", words["id"], words["resume"], words["config"]["a"])),
        log=lambda metrics, step: calls.append(("log", metrics, step)),
    )
    monkeypatch.setenv("WANDB_MODE", "offline")
    trackers = Trackers(("wandb",), tmp_path / "run", "0123", {"a": 1}, 0)
    assert trackers.log({"loss": 0.5}, 7) == []
    assert calls == [("init", "0123", "allow", 1), ("log", {"loss": 0.5}, 7)]


def test_b96_a_tracker_that_fails_is_left_out_and_said_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def lost(metrics: dict[str, float], step: int) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setenv("WANDB_MODE", "offline")
    kept: list[int] = []
    stub(monkeypatch, "wandb", init=lambda **words: None, log=lost)
    stub(monkeypatch, "trackio", init=lambda **words: None, log=lambda metrics, step: kept.append(step))
    trackers = Trackers(("wandb", "trackio"), tmp_path, "0123", {}, 0)
    (note,) = trackers.log({"loss": 0.5}, 1)
    assert "wandb failed" in note and "no route to host" in note and "metrics.jsonl" in note
    assert trackers.log({"loss": 0.5}, 2) == [] and kept == [1, 2]
