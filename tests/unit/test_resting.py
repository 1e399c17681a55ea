"""Optimizer and gradients are on the host while a rollout runs: where the plan says so, and with no bit moved."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import trainer.preflight.prepare
from tests.tiny import TINY, tiny_qwen2
from tests.tiny_run import distance, run_config, start, step, weights, write_run
from tests.unit.test_plan import run
from trainer.errors import Interrupted
from trainer.models.resting import ROLE, Resting
from trainer.models.streaming import Placement
from trainer.out_of_memory import ran_out
from trainer.plan import state
from trainer.plan.cards import CARDS, GIB
from trainer.plan.choose import choose
from trainer.plan.parts import plan
from trainer.plan.price import price
from trainer.plan.settings import Settings, zero_of
from trainer.plan.shape import shape_of
from trainer.preflight.memory import chosen, settings_of
from trainer.rollout.decoder import Decoder
from trainer.rollout.rope_guard import Lengths
from trainer.state import State
from trainer.world import World

CPU = torch.device("cpu")
SIZES: dict[str, float] = {"hidden_size": 128, "intermediate_size": 256}
FULL = {"lora.r": 0, "optim.name": "adamw", "optim.lr": 1e-3, "rollout.max_new_tokens": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"), tiny_qwen2(**SIZES))


@pytest.fixture
def begin(folder: Path, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., State]:
    """A run of a stage, as it starts where the plan says whether the optimizer rests."""
    decide = trainer.preflight.prepare.choose_at_start

    def begun(stage: int, dtype: str, *, rests: bool) -> State:
        chosen = lambda *words, **names: replace(decide(*words, **names), rests=rests)  # noqa: E731
        monkeypatch.setattr(trainer.preflight.prepare, "choose_at_start", chosen)
        (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": stage}}))
        settings = {"engine.deepspeed": str(tmp_path / "ds.json"), "model.dtype": dtype}
        return start(folder, world, FULL | settings)

    return begun


def planned(of: State, stage: int, dtype: str) -> Settings:
    shape = shape_of({"model_type": "qwen2", "tie_word_embeddings": True} | TINY | SIZES | {"vocab_size": 300})
    assert shape is not None
    size = 2 if dtype == "bf16" else 4
    return settings_of(
        of.config, shape, {"stage": stage}, ranks=1, cuda=True, itemsize=size, lengths=Lengths(8, 4), shared=True
    )


@pytest.mark.parametrize(("stage", "dtype"), [(1, "bf16"), (2, "fp32"), (3, "bf16")])
def test_a_rollout_has_the_device_for_itself_and_the_update_is_the_same(
    begin: Callable[..., State], stage: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without, resting = (begin(stage, dtype, rests=rests) for rests in (False, True))
    assert without.engine.away is None and isinstance(resting.engine.away, Resting)
    ledger, generate = resting.engine.away.placement, Decoder.generate
    seen: list[tuple[Any, ...]] = []

    def watched(decoder: Decoder, *words: Any, **names: Any) -> Any:
        if decoder is resting.decoder:
            kept, zeros = resting.engine._for_updates()
            there = sum(one.untyped_storage().nbytes() for one in (*kept, *zeros))
            seen.append((there, ledger.held[ROLE, "device"], ledger.held[ROLE, "host"]))
        return generate(decoder, *words, **names)

    monkeypatch.setattr(Decoder, "generate", watched)
    for one in (without, resting):
        step(one)
        step(one)
    assert distance(weights(without), weights(resting)) == 0
    settings = planned(resting, stage, dtype)
    first, second = seen  # Adam makes its moments in its first step
    assert first == (0, 0, pytest.approx(state.master(settings), rel=0.01))
    assert second == (0, 0, pytest.approx(state.master(settings) + state.moments(settings), rel=0.01))
    back = state.master(settings) + state.gradients_for_good(settings)  # as the last rollout took them away
    assert ledger.held[ROLE, "device"] == pytest.approx(back + state.moments(settings), rel=0.01)
    for one in (without, resting):
        one.engine.close()


@pytest.mark.parametrize(("error", "back"), [(Interrupted(""), True), (torch.OutOfMemoryError("out of memory"), False)])
def test_what_ends_a_rollout_finds_the_state_whole_unless_there_is_no_room(error: Exception, back: bool) -> None:
    """After a signal the state is saved. A card that is full has no room to come back to."""
    resting, moments, sums = Resting(Placement(CPU)), torch.arange(6.0), torch.zeros(4)
    view = moments[3:]
    with pytest.raises(type(error)), resting([moments, view], [sums]):
        raise error
    assert (moments.untyped_storage().nbytes() == 24) == (sums.untyped_storage().nbytes() == 16) == back
    if back:
        assert view.tolist() == [3, 4, 5] and sums.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("rests", [True, False])
def test_what_may_still_be_away_is_not_saved(begin: Callable[..., State], world: World, rests: bool) -> None:
    of = begin(2, "fp32", rests=rests)
    end = ran_out(torch.OutOfMemoryError("out of memory"), "1.00 GiB", of.config, world, of)
    assert end.whole != rests
    of.engine.close()


def test_copies_on_the_host_stay_and_follow_the_values() -> None:
    resting, moments = Resting(Placement(CPU)), torch.zeros(6)
    copies: list[Tensor] = []
    for value in (1.0, 2.0):
        moments.fill_(value)
        with resting([moments], []):
            copies += resting._copies.values()
        assert moments.tolist() == [value] * 6
    assert copies[0] is copies[1] and resting.placement.held[ROLE, "host"] == 24


def sharded(**others: Any) -> Settings:
    """7B, all weights, on two cards, ZeRO-3: a rollout gathers 15 GB beside 61 of optimizer and gradients."""
    return run("7B", "full", ranks=2, zero=zero_of({"stage": 3, "reduce_bucket_size": 10**7}), **others)


def test_it_rests_where_rollouts_alone_do_not_fit() -> None:
    room = CARDS["a100-80"].gib * GIB
    assert plan(sharded(checkpointing=True, token_budget=4608)).fullest == "rollout"
    found = choose(sharded(), room, budget=True, checkpointing=True)
    assert found is not None and found.rests and plan(found).peak <= room
    stays, rests = (plan(replace(found, rests=one)) for one in (False, True))
    assert stays.totals["rollout"] > room and state.host(rests.settings) > state.host(stays.settings)
    assert rests.phases["rollout"]["optimizer"] == rests.phases["rollout"]["gradients"] == 0
    less = stays.totals["rollout"] - rests.totals["rollout"]
    assert less == pytest.approx(16 * found.trained / 2), "master weight, two moments, gradient"
    for phase in ("reference", "reward", "training"):
        assert stays.phases[phase] == rests.phases[phase]
    more, told = price(stays.settings, rests.settings, CARDS["a100-80"])
    assert told.startswith("optimizer to the host and back +") and more == pytest.approx(24 * found.trained / 2 / 25e9)


@pytest.mark.parametrize("room", [100 * GIB, 60 * GIB], ids=["all fits", "nor does training"])
def test_and_nowhere_else(room: float) -> None:
    found = choose(sharded(), room, budget=True, checkpointing=True)
    assert found is None or not found.rests


def test_where_more_does_not_fit_the_plan_shows_what_would_rest() -> None:
    """And says of the rollout only what resting cannot cure."""
    config = run_config(Path(), {"lora.r": 0})
    for room, rests in ((60 * GIB, True), (20 * GIB, False)):
        found, fits = chosen(config, sharded(), room)
        assert not fits and found.rests == rests


def test_what_has_nothing_to_rest() -> None:
    """An optimizer on the host already; a CPU, where all is one memory; stage 0, whose master weights are the model."""
    offloaded = zero_of({"stage": 3, "offload_optimizer": {"device": "cpu"}})
    assert sharded().may_rest
    for changes in ({"zero": offloaded}, {"cuda": False}, {"zero": zero_of({"stage": 0})}):
        assert not replace(sharded(), **changes).may_rest
