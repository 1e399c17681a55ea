"""Packed groups by FlexAttention, what a card takes: on a CPU in plain torch, its own way without a compiler."""

import copy
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import PreTrainedModel, set_seed

from tests.tiny import tiny_qwen2
from tests.unit.test_shared_prefix import CPU, FAMILIES, completions, logps_and_gradient
from trainer.batch import Groups
from trainer.models import flex_groups, shared_prefix
from trainer.models.packing import pack_groups
from trainer.models.shared_prefix import FLEX, NAME, layout, share_prompts, use_flex

ROWS: tuple[Groups, ...] = (
    ((300, (90, 0, 1, 170)), (40, (60, 60))),
    ((128, (128, 128)), (256, (128,))),
    ((1, (3,)),),
    ((5, (200, 90)),),
    ((600, ()), (77, ())),
)


@pytest.fixture
def backward_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The public function refuses a gradient on a CPU, for which it has no kernel; below it there is one in torch."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    kernel = flex_groups.kernel
    kernel.cache_clear()
    yield
    kernel.cache_clear()


@pytest.fixture
def uncompiled(backward_on_a_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


def flexing(model: PreTrainedModel) -> PreTrainedModel:
    flexed = copy.deepcopy(model)
    assert share_prompts(flexed) == ""
    flexed.set_attn_implementation(FLEX)
    return flexed


def sharing(model: PreTrainedModel) -> PreTrainedModel:
    shared = copy.deepcopy(model)
    assert share_prompts(shared) == ""
    return shared


def seen_by_each(groups: Groups) -> Tensor:
    """(L, L) bool, from what a group means."""
    length = sum(prompt + sum(own) for prompt, own in groups)
    seen = torch.zeros(length, length, dtype=torch.bool)
    at = 0
    for prompt, own in groups:
        start = at
        for size in (prompt, *own):
            seen[at : at + size, at : at + size] = torch.ones(size, size, dtype=torch.bool).tril()
            if at > start:
                seen[at : at + size, start : start + prompt] = True
            at += size
    return seen


@pytest.mark.parametrize("groups", ROWS)
def test_blocks_are_those_that_torch_finds_by_asking_every_pair(groups: Groups) -> None:
    mask = flex_groups.block_mask(groups, CPU)
    length = mask.shape[-1]
    assert torch.equal(torch_flex.create_mask(mask.mask_mod, 1, 1, length, length, "cpu")[0, 0], seen_by_each(groups))
    asked = torch_flex.create_block_mask(mask.mask_mod, 1, 1, length, length, device="cpu")
    for ours, theirs in zip(mask.as_tuple(), asked.as_tuple(), strict=True):
        if isinstance(ours, Tensor):
            assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
        elif not callable(ours):
            assert ours == theirs


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_gradients_are_those_of_sdpa(family: str, uncompiled: None) -> None:
    """Three groups of ragged completions in a row of more than two blocks."""
    set_seed(0)
    model = FAMILIES[family]().train()
    rows = pack_groups(completions(prompts=(30, 17, 1), generations=8, longest=24), device=CPU)
    assert rows.input_ids.shape[1] > 2 * flex_groups.BLOCK
    logps, gradient = logps_and_gradient(sharing(model), rows)
    ours, our_gradient = logps_and_gradient(flexing(model), rows)
    assert (logps - ours).abs().max() < 2e-6
    assert (gradient - our_gradient).norm() / gradient.norm() < 2e-6


def changed(kind: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    set_seed(0)
    model = tiny_qwen2().train()
    if kind == "lora":
        lora = LoraConfig(r=4, target_modules=["v_proj", "o_proj"], init_lora_weights=False)
        model = get_peft_model(model, lora).base_model.model
    if kind == "bf16":
        model = model.to(torch.bfloat16)
    pair = sharing(model), flexing(model)
    if kind == "checkpointing":
        for one in pair:
            one.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return pair


@pytest.mark.parametrize(
    ("kind", "bound"), [("checkpointing", 2e-6), ("lora", 2e-6), ("bf16", 3e-2), ("one completion", 2e-6)]
)
def test_so_they_are(kind: str, bound: float, uncompiled: None) -> None:
    sdpa, flex = changed(kind)
    shape = {"prompts": (120,), "generations": 1} if kind == "one completion" else {"prompts": (30, 17)}
    rows = pack_groups(completions(**{"generations": 6, "longest": 30} | shape), device=CPU)
    assert rows.input_ids.shape[1] > flex_groups.BLOCK
    for one, other in zip(logps_and_gradient(sdpa, rows), logps_and_gradient(flex, rows), strict=True):
        assert (one - other).float().norm() / one.float().norm() < bound


def programs_compiled() -> tuple[str, int, int]:
    """What ``use_flex`` said, how many programs there were after it, and how many after rows of other lengths."""
    programs = CompileCounterWithBackend("aot_eager")
    with (
        patch.object(torch_flex, "_validate_device", lambda *_: None),
        patch.object(torch, "compile", partial(torch.compile, backend=programs)),
        patch.object(shared_prefix, "FLEX_DEVICE", "cpu"),
    ):
        model = sharing(tiny_qwen2().train())
        said = use_flex(model)
        ready = programs.frame_count
        for prompts, longest in (((140, 30), 40), ((260,), 90), ((9, 8, 7), 50), ((129,), 2)):
            rows = pack_groups(completions(prompts=prompts, longest=longest), device=CPU)
            assert rows.input_ids.shape[1] > flex_groups.BLOCK
            logps_and_gradient(model, rows)
            with torch.no_grad():
                shared_prefix._states(model, rows)
    return said, ready, programs.frame_count


def test_it_is_compiled_for_any_length_once_a_kind_of_pass() -> None:
    """Programs of the first length, then of any: with a gradient, with one of the values alone, and without: a new one
    a row would take seconds each, and after eight of them training would end. In a process of its own: what is compiled
    leaves tensors without memory behind, which tests of memory would count."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as alone:
        said, ready, after = alone.submit(programs_compiled).result()
    assert "FlexAttention; its states" in said
    assert after == ready == 5


def test_it_is_taken_where_it_gives_what_sdpa_gives(uncompiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = sharing(tiny_qwen2())
    assert use_flex(model) == "" and model.config._attn_implementation == NAME, "a CPU has no kernel with a gradient"
    monkeypatch.setattr(shared_prefix, "FLEX_DEVICE", "cpu")
    assert "within" in use_flex(model)
    assert model.config._attn_implementation == model.get_decoder().config._attn_implementation == FLEX


def of_one_more_key(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel whose completions see a token beyond themselves."""

    def wrong(query: Tensor, key: Tensor, value: Tensor, mask: torch_flex.BlockMask) -> Tensor:
        sees = mask.mask_mod
        mask.mask_mod = lambda b, h, at, one: sees(b, h, at, one) | (one == at + 1)
        return kernel(query, key, value, mask)

    return wrong


def half_a_gradient(kernel: Callable[..., Any]) -> Callable[..., Any]:
    return lambda query, *given: kernel(query, *given) / 2 + kernel(query.detach(), *given) / 2


def no_compiler(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def fails(*_: Any) -> Tensor:
        raise OSError("Failed to find C compiler.\nPlease specify via CC.")

    return fails


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (of_one_more_key, "from SDPA's"),
        (half_a_gradient, "from SDPA's"),
        (no_compiler, "OSError: Failed to find C compiler. Please specify via CC."),
    ],
)
def test_where_it_does_not_sdpa_stays_and_one_line_says_so(
    fault: Callable[..., Any], said: str, uncompiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = sharing(tiny_qwen2())
    monkeypatch.setattr(shared_prefix, "FLEX_DEVICE", "cpu")
    kernel = flex_groups.kernel
    monkeypatch.setattr(flex_groups, "kernel", lambda scaling: fault(kernel(scaling)))
    note = use_flex(model)
    assert said in note and "\n" not in note
    assert model.config._attn_implementation == NAME


def test_a_row_of_one_block_is_left_to_sdpa() -> None:
    config = flexing(tiny_qwen2()).config
    for own, kind in ((28, dict), (29, torch_flex.BlockMask)):
        assert isinstance(layout(((100, (own,)),), config, torch.float32, CPU)["masks"], kind)
