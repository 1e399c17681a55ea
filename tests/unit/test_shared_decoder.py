"""The decode engine: each prompt once, and the samples, ends and log-probs of transformers' ``generate``."""

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    set_seed,
)

import trainer.rollout.decoder
import trainer.rollout.sampling
from tests.tiny import TINY, tiny_qwen2, tiny_tokenizer
from trainer.batch import Completion, Prompt
from trainer.config.grpo import Rollout
from trainer.models import prefix_cache
from trainer.models.packing import pack, pack_groups
from trainer.models.prefix_cache import PrefixCache
from trainer.models.scorer import TokenScorer
from trainer.models.shared_prefix import share_prompts
from trainer.record.memory import PeakMemory
from trainer.rollout.decoder import Group
from trainer.rollout.hf import HfDecoder
from trainer.rollout.sampling import NoiseKey
from trainer.rollout.shared import SharedDecoder

TOKENIZER = tiny_tokenizer()
SHAPE = TINY | {"vocab_size": len(TOKENIZER) + 5, "num_hidden_layers": 3, "max_position_embeddings": 512}
FAMILIES = {
    "qwen2": tiny_qwen2,
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=8)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=4)),
}


def groups(*lengths: int) -> list[Group]:
    draw = random.Random(0)
    prompts = [tuple(draw.randrange(3, 290) for _ in range(length)) for length in lengths]
    return [Group(place, Prompt(place, "", ids, None, {})) for place, ids in enumerate(prompts)]


def sharing(model: PreTrainedModel) -> PreTrainedModel:
    shared = copy.deepcopy(model)
    assert share_prompts(shared) == ""
    return shared


def both(
    model: PreTrainedModel,
    prompts: list[Group],
    *,
    generations: int = 4,
    stop_ids: tuple[int, ...] = (),
    **rollout: Any,
) -> tuple[list[Completion], list[Completion]]:
    settings = Rollout(**{"max_new_tokens": 12} | rollout)
    theirs = HfDecoder(model, TOKENIZER, settings, stop_ids, seed=3)
    ours = SharedDecoder(sharing(model), TOKENIZER, settings, stop_ids, seed=3)
    made = [decoder.generate(prompts, step=2, generations=generations) for decoder in (theirs, ours)]
    return made[0], made[1]


def assert_same(theirs: list[Completion], ours: list[Completion]) -> None:
    for one, other in zip(theirs, ours, strict=True):
        assert (one.group, one.generation, one.ids, one.finish, one.text) == (
            other.group,
            other.generation,
            other.ids,
            other.finish,
            other.text,
        )
        torch.testing.assert_close(one.sampling_logps, other.sampling_logps, atol=2e-6, rtol=2e-6)


ENDS = tuple(range(0, 300, 12))
"""Stop ids that one token in twelve of an untrained model is: completions of all lengths."""
CASES: dict[str, dict[str, Any]] = {
    "ends by ids": {"stop_ids": ENDS},
    "never ends": {},
    "one completion": {"generations": 1, "stop_ids": ENDS},
    "filters": {"stop_ids": ENDS, "temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "penalty": {"stop_ids": ENDS, "repetition_penalty": 1.3},
    "ends by strings": {"stop": ("a", "ou", "7"), "stop_ids": ENDS[:3]},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_samples_are_those_of_generate(family: str, case: str) -> None:
    set_seed(0)
    assert_same(*both(FAMILIES[family]().eval(), groups(5, 17, 1, 9), **CASES[case]))


@pytest.mark.parametrize("slots", [1, 5, 9, 128])
def test_freed_slots_are_refilled_and_samples_stay_what_they_were(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups enter while others are in the middle: rows of all positions decode side by side."""
    set_seed(0)
    model, prompts = tiny_qwen2().eval(), groups(5, 17, 1, 9, 3, 30, 2)
    theirs, _ = both(model, prompts, stop_ids=ENDS, max_new_tokens=100)
    monkeypatch.setattr(trainer.rollout.decoder, "MAX_ROWS", slots)
    _, ours = both(model, prompts, stop_ids=ENDS, max_new_tokens=100)
    assert len({len(one.ids) for one in ours}) > 8
    assert_same(theirs, ours)


def test_no_more_rows_and_prompts_at_a_time_than_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an evaluation on a card. A prompt stays until its last row has ended, so that rows alone bound no prompts."""
    set_seed(0)
    model, prompts = tiny_qwen2().eval(), groups(5, 17, 1, 9, 3, 30, 2)
    held: list[tuple[int, int]] = []
    enter = PrefixCache.enter

    def entered(cache: PrefixCache, *arguments: Any) -> None:
        enter(cache, *arguments)
        held.append((len(cache), len(cache.groups)))

    monkeypatch.setattr(PrefixCache, "enter", entered)
    settings = Rollout(max_new_tokens=100)
    wide, narrow = (
        SharedDecoder(sharing(model), TOKENIZER, settings, ENDS, seed=0, most_rows=rows, most_prompts=most)
        for rows, most in ((None, None), (16, 3))
    )
    theirs = wide.generate(prompts, step=0, generations=4)
    assert max(held) == (28, 7)
    held.clear()
    assert_same(theirs, narrow.generate(prompts, step=0, generations=4))
    assert max(rows for rows, _ in held) <= 16 and max(most for _, most in held) == 3


def test_a_stop_string_may_begin_in_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = (TOKENIZER.convert_tokens_to_ids(letter) for letter in "xy")
    monkeypatch.setattr(NoiseKey, "uniforms", lambda key, positions: np.array([y, x, x]))
    monkeypatch.setattr(trainer.rollout.sampling, "inverse_cdf", lambda probabilities, uniforms: uniforms.long())
    prompts = [Group(0, Prompt(0, "", (5, x), None, {})), Group(1, Prompt(1, "", (5, y), None, {}))]
    theirs, ours = both(tiny_qwen2().eval(), prompts, generations=1, stop=("xy",), max_new_tokens=3)
    assert_same(theirs, ours)
    assert [(one.ids, one.finish) for one in ours] == [((y,), "stop"), ((y, x, x), "length")]


def test_greedy_is_the_argmax() -> None:
    set_seed(0)
    model, prompts = tiny_qwen2().eval(), groups(5, 17)
    settings = Rollout(max_new_tokens=12)
    theirs = HfDecoder(model, TOKENIZER, settings, ENDS, seed=0).generate(prompts, step=0, generations=0, greedy=1)
    ours = SharedDecoder(sharing(model), TOKENIZER, settings, ENDS, seed=0)
    assert_same(theirs, ours.generate(prompts, step=0, generations=0, greedy=1))


@pytest.mark.parametrize("kind", [HfDecoder, SharedDecoder])
def test_samples_and_a_greedy_answer_come_from_one_call(kind: type[HfDecoder | SharedDecoder]) -> None:
    """Of each prompt the greedy one last; all are what separate calls give."""
    set_seed(0)
    model, prompts = sharing(tiny_qwen2().eval()), groups(5, 17, 1)
    decoder = kind(model, TOKENIZER, Rollout(max_new_tokens=12), ENDS, seed=3)
    made = decoder.generate(prompts, step=2, generations=3, greedy=1)
    assert [one.generation for one in made] == [0, 1, 2, 3] * 3
    assert_same([one for one in made if one.generation < 3], decoder.generate(prompts, step=2, generations=3))
    alone = decoder.generate(prompts, step=2, generations=0, greedy=1)
    assert [one.ids for one in made[3::4]] == [one.ids for one in alone]
    assert decoder.generate([], step=2, generations=3) == [], "a rank without a share of a small evaluation"


def test_the_log_probs_are_those_of_the_training_pass() -> None:
    set_seed(0)
    model = tiny_qwen2().eval()
    _, ours = both(model, groups(5, 17, 1), stop_ids=ENDS, temperature=0.7)
    scored = TokenScorer(model, 0.7)(pack(ours, pad_id=0, device=torch.device("cpu")))["logps"]
    sampled = torch.tensor([logp for one in ours for logp in one.sampling_logps])
    torch.testing.assert_close(scored.detach(), sampled, atol=2e-6, rtol=2e-6)


def test_adapters_act_in_it() -> None:
    set_seed(0)
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    adapted = get_peft_model(tiny_qwen2(), lora).base_model.model.eval()
    plain, _ = both(tiny_qwen2().eval(), groups(5, 17), stop_ids=ENDS)
    theirs, ours = both(adapted, groups(5, 17), stop_ids=ENDS)
    assert [one.ids for one in ours] != [one.ids for one in plain]
    assert_same(theirs, ours)


def test_in_bf16_log_probs_are_those_of_the_training_pass_but_for_rounding() -> None:
    """Mean gap of 0.0002 nats, against 0.00004 of `generate`: the two parts of attention are rounded each."""
    set_seed(0)
    model = tiny_qwen2().to(torch.bfloat16).eval()
    _, ours = both(model, groups(5, 17, 30), generations=16, stop_ids=ENDS, max_new_tokens=40)
    scored = TokenScorer(sharing(model), 1.0)(pack_groups(ours, device=torch.device("cpu")))["logps"].detach()
    sampled = torch.tensor([logp for one in ours for logp in one.sampling_logps])
    assert (scored - sampled).abs().mean() < 5e-4


def test_each_prompt_is_computed_once_and_finished_rows_no_more() -> None:
    """Tokens through the body: P of each group, and every token of a completion but its last."""
    set_seed(0)
    model, prompts = sharing(tiny_qwen2().eval()), groups(5, 17, 1)
    tokens = 0

    def count(module: Any, inputs: Any, output: Any) -> None:
        nonlocal tokens
        tokens += output.shape[0] * output.shape[1]

    model.get_decoder().layers[0].mlp.register_forward_hook(count)
    decoder = SharedDecoder(model, TOKENIZER, Rollout(max_new_tokens=40), ENDS, seed=3)
    made = decoder.generate(prompts, step=0, generations=4)
    assert len({len(one.ids) for one in made}) > 4
    assert tokens == 5 + 17 + 1 + sum(len(one.ids) - 1 for one in made)


@pytest.mark.parametrize("slots", [5, 128])
def test_attention_of_other_devices_gives_the_same(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the fused kernel is taken; the same in plain torch is what a card runs."""
    set_seed(0)
    monkeypatch.setattr(trainer.rollout.decoder, "MAX_ROWS", slots)
    monkeypatch.setattr(prefix_cache, "_attention", prefix_cache.plain_attention)
    assert_same(*both(tiny_qwen2().eval(), groups(5, 17, 1, 9), stop_ids=ENDS))


def test_what_is_not_counted_has_been_counted_before() -> None:
    """The peak of a rollout in which buffers grow twice, with and without a look at every pass."""
    set_seed(0)
    model, settings = sharing(tiny_qwen2().eval()), Rollout(max_new_tokens=200)
    peaks, passes = [], []
    for whole in (True, False):
        with PeakMemory(torch.device("cpu")) as memory:
            uncounted = [0]

            @contextmanager
            def between(memory: PeakMemory = memory, uncounted: list[int] = uncounted) -> Iterator[None]:
                uncounted[0] += 1
                with memory.uncounted():
                    yield

            ours = SharedDecoder(model, TOKENIZER, settings, (), seed=3, uncounted=nullcontext if whole else between)
            base = memory.take_peak()
            ours.generate(groups(5, 17, 9), step=0, generations=4)
            peaks.append(memory.take_peak() - base)
            passes.append(uncounted[0])
    assert peaks[1] == pytest.approx(peaks[0], rel=0.02)
    assert passes == [0, 200 - 1 - 3], "all but the prompts and the passes before which the buffers grew: 64, 128, 256"


def test_the_number_of_groups_adds_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    set_seed(0)
    decoder, calls = SharedDecoder(sharing(tiny_qwen2().eval()), TOKENIZER, Rollout(max_new_tokens=5), (), seed=3), []
    attend = prefix_cache._attention
    monkeypatch.setattr(prefix_cache, "_attention", lambda *given: (calls.append(1), attend(*given))[1])
    found = []
    for lengths in ((5,), (5, 17, 1, 9, 3, 30, 2)):
        calls.clear()
        decoder.generate(groups(*lengths), step=0, generations=2)
        found.append(len(calls))
    assert found == [2 * 2 * 4] * 2, "own and shared part of two layers, in each of four passes over one token"


def test_a_prompt_leaves_with_the_last_of_its_rows() -> None:
    cache = PrefixCache(4, 64, 2, 3, torch.device("cpu"))
    cache.enter([7, 9], [3, 2], 2)
    cache.store_prompts(0, torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 5, 8))
    assert cache.drop([0]) == [(3, 0)] and cache.groups == [7, 9]
    assert cache.drop([1]) == [(2, 1)] and cache.groups == [9]
    assert cache.group_of == [9, 9]


def test_buffers_end_at_the_longest_completion() -> None:
    cache = PrefixCache(1, 100, 1, 3, torch.device("cpu"))
    cache.enter([0], [3], 1)
    grown = [cache.append_rows() for _ in range(99)]
    assert [at for at, more in enumerate(grown) if more] == [0, 64]
    token = torch.zeros(1, 2, 1, 8)
    assert cache._room(None, token)[0].shape == (1, 2, 100, 8)


def test_nothing_of_a_rollout_is_left_in_the_model() -> None:
    set_seed(0)
    model, prompts = sharing(tiny_qwen2().train()), groups(5, 17)
    decoder = SharedDecoder(model, TOKENIZER, Rollout(max_new_tokens=12), ENDS, seed=3)
    first = decoder.generate(prompts, step=0, generations=2)
    assert model.training
    assert_same(first, decoder.generate(prompts, step=0, generations=2))
