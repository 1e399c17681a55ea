"""What a training pass keeps in memory: the estimate from two small passes against the counted peak of a large one."""

import dataclasses
import gc
import math
import socket
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, set_seed

import trainer.preflight.activations
from tests.tiny import TINY
from tests.tiny_run import distance, start, step, weights, write_run
from trainer.batch import Completion, PackedRows, Prompt
from trainer.models.head import peak_bytes
from trainer.models.packing import pack, pack_groups
from trainer.models.scorer import TokenScorer
from trainer.models.shared_prefix import share_prompts
from trainer.preflight.activations import (
    USABLE,
    Layout,
    Parameters,
    PassBytes,
    fits,
    free_bytes,
    measure,
    state_bytes,
)
from trainer.record.memory import PeakMemory
from trainer.world import World

CPU = torch.device("cpu")
GIB = 2**30
LAYOUT = Layout(prompt=40, new=20, generations=8, shared=True)


def llama(*, lora: bool, checkpointing: bool, shared: bool, vocabulary: int = 1000) -> TokenScorer:
    set_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
    )
    causal: PreTrainedModel = LlamaForCausalLM(config)
    if lora:
        causal = cast(
            PreTrainedModel, get_peft_model(causal, LoraConfig(r=4, target_modules="all-linear")).get_base_model()
        )
    if shared:
        assert share_prompts(causal) == ""
    if checkpointing:
        causal.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return TokenScorer(causal.train(), 1.0)


def wide_qwen2() -> Qwen2ForCausalLM:
    sizes = TINY | {"vocab_size": 300, "hidden_size": 256, "intermediate_size": 512}
    return Qwen2ForCausalLM(Qwen2Config(**sizes, tie_word_embeddings=True))


def rows(layout: Layout, tokens: int) -> PackedRows:
    """Whole groups of the layout, all scored, of at least so many tokens."""
    completions: list[Completion] = []
    packed = None
    for group in range(100):
        prompt = Prompt(group, "", tuple(range(layout.prompt)), None, {})
        ids = tuple(range(layout.new))
        completions += [
            Completion(group, i, prompt, ids, (0.0,) * len(ids), "stop", "") for i in range(layout.generations)
        ]
        packed = pack_groups(completions, device=CPU) if layout.shared else pack(completions, pad_id=0, device=CPU)
        if packed.input_ids.numel() >= tokens:
            return packed
    raise AssertionError("not so many")


def counted_peak(scorer: TokenScorer, packed: PackedRows, memory: PeakMemory) -> int:
    """Of a whole forward and backward pass, gradients of the weights left out."""
    for parameter in scorer.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    with memory:
        memory.take_peak()
        before = memory.take_peak()
        scorer(packed)["logps"].sum().backward()
        return memory.take_peak() - before


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "rows"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_the_estimate_is_the_counted_peak_of_four_times_the_tokens(
    lora: bool, checkpointing: bool, shared: bool
) -> None:
    scorer = llama(lora=lora, checkpointing=checkpointing, shared=shared)
    memory = PeakMemory(CPU)
    layout = dataclasses.replace(LAYOUT, shared=shared)
    found = measure(scorer, layout, memory, exact=False)
    packed = rows(layout, 4 * 128)
    tokens = packed.input_ids.numel()
    assert found.of(tokens, len(packed.targets)) == pytest.approx(counted_peak(scorer, packed, memory), rel=0.1)
    assert all(parameter.grad is not None or not parameter.requires_grad for parameter in scorer.parameters())


def test_the_head_counts_by_its_chunks() -> None:
    """What two small passes say of a real vocabulary, whose first chunk they do not fill, must not be drawn out."""
    found = measure(llama(lora=True, checkpointing=False, shared=True), LAYOUT, PeakMemory(CPU), exact=False)
    wide = dataclasses.replace(found, columns=151_936)

    def head(scored: int, exact: bool) -> int:
        return peak_bytes(151_936, scored, exact=exact)

    more = head(100, False) - head(50, False)
    assert more > 0 and wide.of(4000, 100) - wide.of(4000, 50) == pytest.approx(more + 2 * 50 * found.hidden)
    assert head(4000, False) == head(2000, False)
    assert wide.of(4000, 4000) - wide.of(4000, 2000) == 2 * 2000 * found.hidden
    exact = dataclasses.replace(wide, exact=True)
    more = head(4000, True) - head(4000, False)
    assert more > 0 and exact.of(4000, 4000) - wide.of(4000, 4000) == more + 4000 * found.hidden


def test_checkpointing_is_what_saves() -> None:
    kept = [
        measure(llama(lora=True, checkpointing=on, shared=True), LAYOUT, PeakMemory(CPU), exact=False).of(2000, 2000)
        for on in (False, True)
    ]
    assert kept[1] < 0.4 * kept[0]


@pytest.mark.parametrize(
    ("layout", "step", "expected"),
    [
        (Layout(100, 20, 8, True), {"prompts": 3, "micro_batch": 0, "token_budget": 4096}, 3 * (100 + 8 * 20)),
        (Layout(100, 20, 8, False), {"prompts": 3, "micro_batch": 0, "token_budget": 4096}, 3 * 8 * 120),
        (Layout(100, 20, 8, True), {"prompts": 64, "micro_batch": 0, "token_budget": 4096}, 4096),
        (Layout(100, 20, 8, True), {"prompts": 64, "micro_batch": 0, "token_budget": 50}, 120),
        (Layout(100, 20, 8, True), {"prompts": 64, "micro_batch": 4, "token_budget": 50}, 480),
        (Layout(100, 20, 8, True), {"prompts": 1, "micro_batch": 64, "token_budget": 50}, 8 * 120),
    ],
)
def test_the_largest_pass_of_a_step(layout: Layout, step: dict[str, int], expected: int) -> None:
    assert layout.largest_pass(**step) == expected


def test_small_passes_are_like_the_large_one() -> None:
    """The same share of prompts, whose keys and values are copied for each completion, and twice the tokens."""
    for layout in (
        Layout(512, 128, 8, True),
        Layout(512, 512, 16, True),
        Layout(64, 512, 4, True),
        Layout(512, 128, 8, False),
    ):
        one, two = (layout.small(scale, CPU) for scale in (1, 2))
        assert 32 <= one.input_ids.numel() <= 128 and two.input_ids.numel() == pytest.approx(
            2 * one.input_ids.numel(), rel=0.1
        )
        assert len(one.targets) == 1
        if layout.shared:
            ((prompt, lengths),) = two.groups
            assert len(lengths) == layout.generations
            assert prompt / lengths[0] == pytest.approx(layout.prompt / layout.new, rel=0.2)
        else:
            assert one.input_ids.shape[0] == layout.generations


@pytest.mark.parametrize("shared", [True, False])
def test_a_small_pass_stays_within_the_longest_row(shared: bool) -> None:
    """One of a run of short rows is longer than they are: positions beyond them change the base of a dynamic RoPE."""
    rows = Layout(31, 4, 4, shared).small(4, torch.device("cpu"))
    assert rows.input_ids.shape[1] > 35 and rows.position_ids.max() == 34


def test_state_of_the_first_step_by_stage() -> None:
    """Of a million trained parameters of three: bytes a trained parameter, on four ranks."""
    found = {}
    for stage in range(4):
        zero = {"stage": stage, "reduce_bucket_size": 1000, "stage3_max_live_parameters": 2_000_000}
        parameters = Parameters(total=3_000_000, trained=1_000_000, itemsize=2)
        found[stage] = state_bytes(parameters, zero, ranks=4, moments=8, elsewhere=False) / 1e6
        assert state_bytes(parameters, zero, ranks=4, moments=2, elsewhere=False) < found[stage] * 1e6
        assert state_bytes(parameters, zero, ranks=4, moments=8, elsewhere=True) < found[stage] * 1e6
    assert found == {0: 12, 1: 4 + 2 + 0.002, 2: 3 + 0.002, 3: 3 + 4}


@pytest.mark.parametrize("stage", ["zero0", "zero1", "zero3"])
def test_the_first_step_allocates_no_more_than_that(tmp_path: Path, world: World, stage: str) -> None:
    """All weights trained, on passes of a few tokens: what a step holds at its peak is state."""
    settings = {"lora.r": 0, "optim.name": "adamw", "engine.deepspeed": stage, "grpo.kl.coef": 0.0}
    few = {"rollout.prompts_per_step": 1, "rollout.num_generations": 2, "rollout.max_new_tokens": 2}
    state = start(write_run(tmp_path, wide_qwen2()), world, settings | few)
    trained = sum(math.prod(shape) for shape in state.facts.trained.values())
    zero = {"stage": int(stage[-1])} | ({"reduce_bucket_size": 5e7} if stage == "zero1" else {})
    expected = state_bytes(Parameters(trained, trained, 4), zero, ranks=1, moments=8, elsewhere=False)
    gc.collect()
    memory = PeakMemory(CPU)
    with memory:
        memory.take_peak()
        before = memory.take_peak()
        step(state)
        grown = memory.take_peak() - before
    state.engine.close()
    assert 0.6 * expected < grown < 1.3 * expected


class TwoRanks:
    """What the other rank brings to a maximum is known."""

    device, size = CPU, 2

    def __init__(self, other: list[float], hosts: list[str] | None = None) -> None:
        self.other, self.hosts = other, hosts

    def all_reduce_max(self, values: list[float]) -> list[float]:
        return [max(pair) for pair in zip(values, self.other, strict=True)]

    def gather_objects(self, value: str) -> list[str]:
        return self.hosts or [value, value]


LINEAR = PassBytes(kept=(0.0, 3 * 2**20), passing=(0.0, 1 * 2**20), hidden=0, columns=1, exact=False)
"""4 MiB a token: 4 GiB of 1024 tokens."""


def test_ranks_decide_alike_by_the_fullest() -> None:
    def decided(free: float, other: list[float]) -> tuple[bool, str]:
        return fits(LINEAR, 1024, least=256, state=1 * GIB, free=free * GIB, world=cast(Any, TwoRanks(other)))

    alone = [0.0, -1e15]
    assert decided(5 / USABLE + 0.01, alone)[0] and not decided(5 / USABLE - 0.01, alone)[0]
    assert not decided(100, [0.0, -5.0 * GIB])[0], "the other rank has 5 GiB"
    assert not decided(8, [7.0 * GIB, -1e15])[0], "the other rank needs 7 GiB"
    _, note = decided(5, alone)
    for part in (
        "is on",
        "1024 tokens",
        "4.00 GiB",
        "4 MiB a token",
        "take 1.00",
        "of the 5.00",
        "is 4.00",
        "768 tokens",
    ):
        assert part in note, note
    assert "engine.token_budget" not in decided(1, alone)[1] and "is off" in decided(10, alone)[1]


def test_ranks_of_a_host_share_its_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:       16000 kB\nMemFree:  100 kB\nMemAvailable:    8000 kB\n")
    monkeypatch.setattr(trainer.preflight.activations, "MEMINFO", tmp_path / "meminfo")
    mine = socket.gethostname()
    for hosts, ranks in (([mine], 1), ([mine, mine], 2), (["far", mine, "far", mine, mine], 3)):
        assert free_bytes(cast(Any, TwoRanks([], hosts))) == 8000 * 1024 / ranks


@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_auto_is_off_with_room_and_on_without(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """And what was measured leaves no trace: the first step is that of a run that was told "off"."""
    folder = write_run(tmp_path)
    found = {}
    for name, setting, free in (("off", "off", 0.0), ("room", "auto", 1e12), ("none", "auto", 1e5)):
        monkeypatch.setattr(trainer.preflight.activations, "free_bytes", lambda world, free=free: free)
        state = start(folder, world, {"engine.deepspeed": stage, "engine.gradient_checkpointing": setting})
        notes = [note for note in state.notes if note.startswith("gradient checkpointing")]
        recomputed = state.policy.causal.is_gradient_checkpointing
        assert not any(parameter.grad is not None for parameter in state.engine.module.parameters())
        step(state)
        found[name] = weights(state)
        state.engine.close()
        assert recomputed == (name == "none")
        assert [" is on" in note for note in notes] == ([] if name == "off" else [name == "none"])
    assert distance(found["off"], found["room"]) == 0
    assert distance(found["off"], found["none"]) == 0, "the same operations, run again"
