"""What ranks say to each other, and when they end together."""

import collections
import contextlib
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import trainer.world
from trainer import heartbeat
from trainer.batch import Completion, Prompt
from trainer.errors import Lost, NoCheckpoint, Refused, RunEnd
from trainer.launcher import probe
from trainer.world import World, _read


@dataclass(frozen=True)
class Told(World):
    """A world whose other ranks have told these (report, host) pairs."""

    others: tuple[Any, ...] = ()

    def gather_objects(self, value: Any) -> list[Any]:
        return [value, *self.others]


def ended(own: RunEnd | None, *others: tuple[Any, str]) -> pytest.ExceptionInfo[RunEnd]:
    world = Told(0, 1 + len(others), 0, torch.device("cpu"), others)
    with patch("trainer.world.socket.gethostname", lambda: "hosta"), pytest.raises(RunEnd) as end:
        world.agree(own)
    return end


def test_every_rank_ends_with_the_lowest_rank_s_message() -> None:
    end = ended(None, (("NoCheckpoint", "one"), "hosta"), (("Refused", "two"), "hosta"))
    assert (end.type, str(end.value)) == (NoCheckpoint, "one")


def test_a_host_that_alone_met_the_mistake_is_named() -> None:
    assert str(ended(None, (("Refused", "no such folder"), "hostb")).value) == "no such folder\n(on hostb alone)"
    assert str(ended(Refused("bad"), (("Refused", "bad"), "hostb")).value) == "bad"


TOLD = [
    None,
    {"a": [1, 2.5, "中\ud800", b"x", True], 3: ({4}, frozenset({5}))},
    collections.Counter("hello"),
    Path("/a/b"),
    Completion(0, 1, Prompt(0, "x", (1, 2), None, {"answer": "2"}), (5,), (-1.0,), "stop", "y"),
    "x" * 100_000,
]


@pytest.mark.parametrize("value", TOLD, ids=lambda value: type(value).__name__)
def test_what_ranks_tell_each_other_arrives(value: Any, world: World) -> None:
    assert world.gather_objects(value) == [value]


class Calls:
    """Unpickled, it calls ``function``."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.called = function, arguments

    def __reduce__(self) -> Any:
        return self.called


@pytest.mark.parametrize("function", [os.mkdir, eval, getattr, probe._said, torch.load])
def test_s9_what_another_program_tells_is_not_run(function: Any, world: World, tmp_path: Path) -> None:
    """Nor may it name a function of ours."""
    with pytest.raises(Lost, match="another program has joined"):
        world.gather_objects({"rewards": [Calls(function, str(tmp_path / "canary"))]})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ask", [lambda world: world.all_reduce_sum([1]), lambda world: world.gather_objects(1)])
def test_a_rank_is_known_to_have_come_before_it_can_wait(
    ask: Callable[[World], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the collective, and on a card, where that returns at once, in the first number that is read of it."""
    cells, waited = heartbeat._cells, []
    before = cells[heartbeat.MET]

    def wait(*_: Any, **__: Any) -> int:
        waited.append(cells[heartbeat.MET] - before)
        return 1

    monkeypatch.setattr(trainer.world.dist, "all_reduce", wait)
    monkeypatch.setattr(trainer.world.dist, "all_gather", wait)
    for read in ("tolist", "__int__"):
        monkeypatch.setattr(torch.Tensor, read, wait)
    monkeypatch.setattr(trainer.world.pickle, "dumps", lambda value: b"1")
    monkeypatch.setattr(trainer.world._Reader, "load", lambda reader: None)
    beats = cells[heartbeat.BEATS]
    ask(World(0, 1, 0, torch.device("cpu")))
    assert len(waited) >= 2 and set(waited) == {1}
    assert cells[heartbeat.BEATS] == beats + 2, "what comes after has all of its time"


def named(module: str, name: str) -> bytes:
    """The opcodes that find ``module.name``, and no end."""
    return b"\x80\x04" + b"".join(b"\x8c" + bytes([len(one)]) + one.encode() for one in (module, name)) + b"\x93"


def state(**changed: Any) -> bytes:
    """BUILD: what stands before it gets these attributes."""
    return pickle.dumps((None, changed), 2)[2:-1] + b"b"


STRANGE = {
    "a record of another library through a module of ours": named("trainer.world", "torch._guards.CompileId") + b".",
    "a record that a module has imported": named("trainer.run", "World") + b".",
    "an error": named("trainer.errors", "Lost") + b".",
    "garbage": b"garbage",
    "nothing": b"",
    "cut": pickle.dumps([1, 2, 3])[:-3],
    "too few fields": named("trainer.batch", "Completion") + b")R.",
    "no such name": named("trainer.batch", "Nothing") + b".",
    "no such module": named("trainer.nothing", "Nothing") + b".",
    "a persistent id": pickle.dumps("x", 2)[:-1] + b"Q.",
}


@pytest.mark.parametrize("told", STRANGE.values(), ids=STRANGE.keys())
def test_s9_what_is_no_record_is_lost(told: bytes) -> None:
    with pytest.raises(Lost, match="another program has joined"):
        _read(told)


@pytest.mark.parametrize("change", [{"barrier": "gone"}, {"__doc__": "gone"}, {"kind": "gone"}], ids=str)
def test_s9_nothing_of_ours_is_changed_by_what_is_told(change: dict[str, Any]) -> None:
    """A record's type is found, and its methods are overwritten: on the reader's own function at most."""
    before = dict(vars(World))
    with contextlib.suppress(Lost):
        _read(named("trainer.world", "World") + state(**change) + b".")
    assert dict(vars(World)) == before
    assert _read(pickle.dumps([1])) == [1]
