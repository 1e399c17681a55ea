"""Decoding by replays. A CUDA graph runs kernels again, into the memory that they had, and nothing of the Python around
them; here a tape of operators does, on a CPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import trainer.rollout.decoder
from tests.tiny import tiny_qwen2
from tests.unit.test_shared_decoder import (
    CASES,
    ENDS,
    FAMILIES,
    TOKENIZER,
    assert_same,
    groups,
    sharing,
)
from trainer.config.grpo import Rollout
from trainer.models import prefix_cache
from trainer.models.prefix_cache import FixedLayout, PrefixCache
from trainer.rollout.graphs import Graphs
from trainer.rollout.hf import HfDecoder
from trainer.rollout.shared import SharedDecoder

CPU = torch.device("cpu")


class Tape(TorchDispatchMode):
    """What a CUDA graph is: the operators of one call with the tensors and numbers that they were given. What a capture
    refuses is refused: a tensor that the host reads, and numbers that it brings."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []
        self.replays = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits = bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags))
        if func in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default):  # by numbers: of a known shape
            waits = any(one is not None and one.dtype == torch.bool for one in args[1])
        if waits or func is torch.ops.aten.lift_fresh.default:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, result in self.calls:
            for then, now in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(then, Tensor) and then.data_ptr() != now.data_ptr():
                    then.copy_(now)

    def given(self) -> set[int]:
        """Addresses of all tensors that the calls read or write."""
        return {leaf.data_ptr() for _, *rest in self.calls for leaf in tree_leaves(rest) if has_address(leaf)}


def has_address(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not leaf.is_mkldnn


class Tapes:
    """A capture that keeps what it has recorded."""

    def __init__(self) -> None:
        self.made: list[Tape] = []

    def __call__(self, step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        with Tape() as tape:
            result = step()
        self.made.append(tape)
        return tape.replay, result


@pytest.fixture(autouse=True)
def attention_of_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "_attention", prefix_cache.plain_attention)


def recorded(model: Any, rollout: Rollout, stop_ids: tuple[int, ...], capture: Any) -> SharedDecoder:
    return SharedDecoder(model, TOKENIZER, rollout, stop_ids, seed=3, graphs=Graphs(capture, device="cpu"))


def both_replayed(model: Any, prompts: list[Any], stop_ids: tuple[int, ...] = ENDS, **rollout: Any) -> Tapes:
    """The samples of ``generate`` and those of replays are the same."""
    settings, tapes = Rollout(**{"max_new_tokens": 12} | rollout), Tapes()
    theirs = HfDecoder(model, TOKENIZER, settings, stop_ids, seed=3)
    ours = recorded(sharing(model), settings, stop_ids, tapes)
    assert_same(*(decoder.generate(prompts, step=2, generations=4) for decoder in (theirs, ours)))
    assert not ours.graphs.stopped
    return tapes


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"mixtral"}))
def test_replays_give_the_samples_of_generate(family: str) -> None:
    tapes = both_replayed(FAMILIES[family]().eval(), groups(5, 17, 1, 9), stop_ids=())
    assert [tape.replays for tape in tapes.made] == [10], "of 11 passes over a token the second records"


@pytest.mark.parametrize("case", ["filters", "penalty", "ends by strings"])
def test_so_they_do_with_other_samplers(case: str) -> None:
    settings = dict(CASES[case])
    both_replayed(tiny_qwen2().eval(), groups(5, 17, 1, 9), settings.pop("stop_ids"), **settings)


@pytest.mark.parametrize("slots", [5, 9, 128])
def test_they_do_while_rows_leave_groups_enter_and_buffers_grow(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer.rollout.decoder, "MAX_ROWS", slots)
    monkeypatch.setattr(prefix_cache, "PROMPT_STEP", 8)
    tapes = both_replayed(tiny_qwen2().eval(), groups(5, 17, 1, 9, 3, 30, 2), max_new_tokens=100)
    replays = [tape.replays for tape in tapes.made]
    assert len(replays) > 4 and sum(replays) > 3 * len(replays)


def test_adapters_act_in_them() -> None:
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    both_replayed(get_peft_model(tiny_qwen2(), lora).base_model.model.eval(), groups(5, 17))


def test_what_a_replay_reads_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Filled with the next token, the inputs keep shape and address, and what a tape was given is what the cache holds
    still when it is replayed."""
    tapes, fill = Tapes(), FixedLayout.fill
    seen: list[tuple[int, Any]] = []

    def watched(layout: FixedLayout, cache: PrefixCache, *given: Any) -> None:
        fill(layout, cache, *given)
        inputs = (layout.ids, layout.positions, layout.last, layout.place, layout.members, layout.rows, layout.mask)
        buffers = [part for pairs in (cache._own, cache._prompts) for pair in pairs.values() for part in pair]
        seen.append((len(tapes.made), tuple((one.data_ptr(), one.shape) for one in (*inputs, *buffers))))
        if tapes.made and seen.count(seen[-1]) > 1:  # a replay, not the pass that records next
            assert {one.data_ptr() for one in (layout.ids, layout.members, *buffers)} <= tapes.made[-1].given()

    monkeypatch.setattr(FixedLayout, "fill", watched)
    decoder = recorded(sharing(tiny_qwen2().eval()), Rollout(max_new_tokens=90), ENDS, tapes)
    decoder.generate(groups(5, 17, 1), step=0, generations=4)
    # Of each shape one fill before its tape is made, and then as many as there are replays, all alike.
    assert len(tapes.made) > 2
    for number, tape in enumerate(tapes.made, 1):
        while_replayed = [one for made, one in seen if made == number][: tape.replays - 1]
        assert len(set(while_replayed)) <= 1
    assert sum(tape.replays for tape in tapes.made) == len(seen)


def test_prompts_that_lie_elsewhere_are_another_shape() -> None:
    """A group may enter and leave between two tokens; what was recorded before it reads buffers that are gone."""
    cache, noise = PrefixCache(8, 64, 4, 3, CPU), torch.zeros(1, 2, 3, 8)
    cache.enter([0], [3], 2)
    cache.store_prompts(0, noise, noise)
    cache.append_rows()
    before, kept = cache.shape, cache._prompts[0][0]
    cache.enter([1], [3], 2)
    cache.store_prompts(0, noise, noise)
    cache.drop([2, 3])
    assert cache._prompts[0][0] is not kept
    assert cache.groups == [0] and cache.shape != before


def test_the_host_reads_nothing_and_brings_nothing() -> None:
    """A tape sees operators; a fake tensor has no numbers that a `tolist` could read."""
    decoder = SharedDecoder(sharing(tiny_qwen2().eval()), TOKENIZER, Rollout(max_new_tokens=12), ENDS, seed=3)
    cache = PrefixCache(8, 12, 2, 17, CPU)
    with torch.no_grad():
        decoder._prefill(cache, groups(5, 17), 4)
        cache.append_rows()
        cache.lay_out()
        decoder._forward([[4]] * 8, [[5]] * 4 + [[17]] * 4, cache)
        layout = FixedLayout(cache.shape, CPU)
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert decoder._fixed_pass(cache, layout).shape == (8, decoder.causal.config.vocab_size)
        with Tape() as tape:
            decoder._fixed_pass(cache, layout)
        assert len(tape.calls) > 50
        with pytest.raises(RuntimeError, match="lift_fresh"), Tape():  # a pass that is laid out anew for each token
            cache.lay_out()
        for read in (lambda: layout.last.max().item(), lambda: bool(layout.own.all()), lambda: layout.last.nonzero()):
            with pytest.raises(RuntimeError, match="not permitted"), Tape():
                read()


def failing(step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    step()
    raise RuntimeError("CUDA error: operation not permitted\nwhen stream is capturing")


def stale(step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """A replay that leaves the logits of one row as they were."""
    result = step().clone()
    result[1] += 0.3 * result[1].norm() / len(result[1]) ** 0.5
    return lambda: None, result


def spoiling(step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """A recording that writes into the keys of everybody before it fails."""
    cache = step.args[0]  # type: ignore[attr-defined]
    for pair in (*cache._own.values(), *cache._prompts.values()):
        for part in pair:
            part.fill_(7.0)
    return failing(step)


@pytest.mark.parametrize(
    ("capture", "said"),
    [
        (failing, "RuntimeError: CUDA error: operation not permitted when stream is capturing"),
        (stale, "gives logits 0.3 from"),
        (spoiling, "not permitted"),
    ],
)
def test_what_cannot_be_replayed_is_launched_for_the_rest_of_the_run(
    capture: Any, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model, prompts, settings = tiny_qwen2().eval(), groups(5, 17, 1), Rollout(max_new_tokens=12)
    attempts: list[int] = []
    ours = recorded(sharing(model), settings, (), lambda step: (attempts.append(1), capture(step))[1])
    theirs = HfDecoder(model, TOKENIZER, settings, (), seed=3)
    for step in (0, 1):
        assert_same(*(decoder.generate(prompts, step=step, generations=4) for decoder in (theirs, ours)))
    assert len(attempts) == 1 and ours.graphs.stopped
    (line,) = capsys.readouterr().out.splitlines()
    assert said in line and line.startswith("rank 0 decodes without CUDA graphs from here on: ")


def test_experts_that_the_host_chooses_are_launched() -> None:
    """Mixtral asks which experts have tokens; whether a card may go on without the answer is transformers' affair."""
    model = FAMILIES["mixtral"]().eval()
    settings = Rollout(max_new_tokens=12)
    ours = recorded(sharing(model), settings, ENDS, Tapes())
    theirs = HfDecoder(model, TOKENIZER, settings, ENDS, seed=3)
    assert_same(*(decoder.generate(groups(5, 17), step=0, generations=4) for decoder in (theirs, ours)))


def test_nothing_is_recorded_on_a_cpu() -> None:
    assert not Graphs().on(CPU) and Graphs().on(torch.device("cuda", 0))
