"""Trackers: refused before anything is loaded, fed from rank 0, and never the end of a run."""

import importlib.machinery
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from trainer.errors import Refused
from trainer.record.trackers import Trackers, check_trackers


def stub(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Any) -> None:
    """A package called ``name`` that has these functions."""
    module = ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    for key, value in functions.items():
        setattr(module, key, value)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture(autouse=True)
def logged_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "netrc").write_text("")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def test_b96_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.record.trackers.find_spec", lambda name: None)
    with pytest.raises(Refused) as refusal:
        check_trackers(("wandb", "tensorboard"))
    for name in ("wandb", "tensorboard"):
        assert f'log.report_to: "{name}" needs the package {name}' in str(refusal.value)
    assert str(refusal.value).count("zero-grpo[track]") == 2


def test_b96_a_key_that_would_be_asked_for_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stub(monkeypatch, "wandb")
    with pytest.raises(Refused, match=r"log\.report_to: \"wandb\" would ask for a key[\s\S]*WANDB_MODE=offline"):
        check_trackers(("wandb",))
    monkeypatch.setenv("WANDB_MODE", "offline")
    check_trackers(("wandb",))
    monkeypatch.delenv("WANDB_MODE")
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password key\n")
    check_trackers(("wandb",))


def test_metrics_arrive_under_the_run_s_own_id(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[tuple[Any, ...]] = []
    stub(
        monkeypatch,
        "wandb",
        init=lambda **words: calls.append(("init", words["id"], words["resume"], words["config"]["a"])),
        log=lambda metrics, step: calls.append(("log", metrics, step)),
    )
    trackers = Trackers(("wandb",), tmp_path / "run", "0123", {"a": 1}, 0)
    assert trackers.log({"loss": 0.5}, 7) == []
    assert calls == [("init", "0123", "allow", 1), ("log", {"loss": 0.5}, 7)]


def test_b96_a_tracker_that_fails_is_left_out_and_said_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def lost(metrics: dict[str, float], step: int) -> None:
        raise ConnectionError("no route to host")

    kept: list[int] = []
    stub(monkeypatch, "wandb", init=lambda **words: None, log=lost)
    stub(monkeypatch, "trackio", init=lambda **words: None, log=lambda metrics, step: kept.append(step))
    trackers = Trackers(("wandb", "trackio"), tmp_path, "0123", {}, 0)
    (note,) = trackers.log({"loss": 0.5}, 1)
    assert "wandb failed" in note and "no route to host" in note and "metrics.jsonl" in note
    assert trackers.log({"loss": 0.5}, 2) == [] and kept == [1, 2]
