"""Faults of masks, padding, ends and sampling, through the real decoder and the real step. Rows: tests/FAULTS.md."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

import trainer.rollout.sampling
from tests.tiny import tiny_qwen2, tiny_tokenizer
from tests.tiny_run import distance, start, step, weights, write_run
from trainer.batch import Completion, Prompt
from trainer.collect import trained
from trainer.config.grpo import Rollout
from trainer.errors import Stopped
from trainer.minibatch import make_micro_batches
from trainer.models.packing import pack
from trainer.models.scorer import TokenScorer
from trainer.rollout.decoder import Group
from trainer.rollout.hf import HfDecoder
from trainer.rollout.sampling import NoiseKey
from trainer.state import State
from trainer.update import global_count
from trainer.world import World

CPU = torch.device("cpu")
TOKENIZER = tiny_tokenizer()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"))


def lively(model: PreTrainedModel) -> PreTrainedModel:
    """Weights large enough that a wrong position or mask moves the log-probs by far more than rounding does."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    return model.eval()


def prompt(index: int, length: int) -> Prompt:
    return Prompt(index, "", tuple((7 * index + 11 * place) % 256 for place in range(length)), None, {})


def decoder(
    model: PreTrainedModel, *, stop_ids: tuple[int, ...] = (), tokenizer: Any = TOKENIZER, **rollout: Any
) -> HfDecoder:
    return HfDecoder(model, tokenizer, Rollout(**{"max_new_tokens": 12} | rollout), stop_ids, seed=0)


def gpt2() -> PreTrainedModel:
    """Absolute positions: a wrong one is another embedding, where RoPE would cancel a common shift."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=300, n_positions=64))


MODELS = {"rotary": tiny_qwen2, "absolute": gpt2}


# Padding and positions


@pytest.mark.parametrize("kind", MODELS)
def test_b15_scores_do_not_depend_on_the_rows_beside_them(kind: str) -> None:
    scorer = TokenScorer(lively(MODELS[kind]()), 1.0)
    rows = [
        Completion(0, 0, prompt(0, 2), (5, 9, 7), (0.0,) * 3, "stop", ""),
        Completion(1, 0, prompt(1, 40), tuple(range(30, 42)), (0.0,) * 12, "length", ""),
        Completion(2, 0, prompt(2, 9), (8,), (0.0,), "stop", ""),
    ]
    with torch.no_grad():
        together = scorer(pack(rows, pad_id=297, device=CPU))
        alone = [scorer(pack([one], pad_id=0, device=CPU)) for one in rows]
    for name in ("logps", "entropy"):
        torch.testing.assert_close(together[name], torch.cat([one[name] for one in alone]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", MODELS)
def test_b16_rollouts_do_not_depend_on_the_padding_of_their_prompts(kind: str) -> None:
    model = lively(MODELS[kind]())
    prompts = [prompt(0, 10), prompt(1, 50), prompt(2, 3)]
    together = decoder(model).generate([Group(i, one) for i, one in enumerate(prompts)], step=0, generations=2)
    alone = [
        row for i, one in enumerate(prompts) for row in decoder(model).generate([Group(i, one)], step=0, generations=2)
    ]
    for one, other in zip(together, alone, strict=True):
        assert one.ids == other.ids
        assert one.sampling_logps == pytest.approx(other.sampling_logps, abs=1e-5)


@pytest.mark.parametrize("kind", MODELS)
def test_b16_sampled_and_scored_log_probs_are_the_same_numbers(kind: str) -> None:
    """Left-padded with a cache while sampling, right-padded without one while scoring."""
    model = lively(MODELS[kind]())
    groups = [Group(i, prompt(i, length)) for i, length in enumerate((10, 50, 3))]
    rows = decoder(model, temperature=0.7).generate(groups, step=0, generations=2)
    with torch.no_grad():
        scored = TokenScorer(model, 0.7)(pack(rows, pad_id=297, device=CPU))["logps"]
    sampled = torch.tensor([logp for one in rows for logp in one.sampling_logps])
    torch.testing.assert_close(scored, sampled, rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_b20_rows_that_attend_to_nothing_stay_finite(attention: str, dtype: torch.dtype) -> None:
    model = lively(tiny_qwen2()).to(dtype)
    model.set_attn_implementation(attention)
    seen: list[torch.Tensor] = []
    hook = model.model.register_forward_hook(lambda module, inputs, output: seen.append(output[0]))
    groups = [Group(0, prompt(0, 1)), Group(1, prompt(1, 30))]
    rows = decoder(model).generate(groups, step=0, generations=0, greedy=1)
    hook.remove()
    assert seen[0].shape[:2] == (2, 30), "the padded positions have to be among those looked at"
    assert all(torch.isfinite(hidden).all() for hidden in seen)
    if dtype == torch.float32:
        model.set_attn_implementation("eager")
        for group, row in zip(groups, rows, strict=True):
            assert decoder(model).generate([group], step=0, generations=0, greedy=1)[0].ids == row.ids


# Ends


def scripted(monkeypatch: pytest.MonkeyPatch, *rows: tuple[int, ...]) -> None:
    """The sampler draws these tokens, one row each: the noise of a completion is its text."""
    texts = iter(rows)
    monkeypatch.setattr(NoiseKey, "uniforms", lambda key, positions: np.array(next(texts), dtype=float))
    monkeypatch.setattr(trainer.rollout.sampling, "inverse_cdf", lambda probabilities, uniforms: uniforms.long())


def test_b17_the_first_end_token_is_trained_though_it_is_the_pad_token_too(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 299
    scripted(monkeypatch, (5, 6, 299, 299, 299), (7, 8, 9, 10, 11))
    groups = [Group(0, prompt(0, 3)), Group(1, prompt(1, 6))]
    made = decoder(tiny_qwen2(), stop_ids=(299,), tokenizer=tokenizer, max_new_tokens=5)
    ended, running = made.generate(groups, step=0, generations=1)
    assert (ended.ids, ended.finish) == ((5, 6, 299), "stop")
    assert (running.ids, running.finish) == ((7, 8, 9, 10, 11), "length")
    rows = pack([ended, running], pad_id=299, device=CPU)
    assert rows.targets.tolist() == [5, 6, 299, 7, 8, 9, 10, 11]
    assert rows.completion.tolist() == [0] * 3 + [1] * 5


def test_b17_a_prompt_that_holds_the_pad_token_keeps_it() -> None:
    one = Completion(0, 0, Prompt(0, "", (299, 5, 299), None, {}), (6, 299), (0.0, 0.0), "stop", "")
    rows = pack([one], pad_id=299, device=CPU)
    assert rows.attention_mask.tolist() == [[1, 1, 1, 1]]


def test_b19_any_declared_end_token_ends_a_completion(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer says 299; the checkpoint's generation config 3 and 5."""
    folder = write_run(tmp_path)
    (folder / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 5]}))
    state = start(folder, world)
    assert {3, 5, 299} <= set(state.decoder.stop_ids)
    scripted(monkeypatch, (8, 3, 8), (8, 8, 5), (299, 8, 8), (8, 8, 8))
    groups = [Group(number, state.prompts[number]) for number in range(4)]
    rows = replace(state.decoder, rollout=Rollout(max_new_tokens=3)).generate(groups, step=0, generations=1)
    assert [(row.ids, row.finish) for row in rows] == [
        ((8, 3), "stop"),
        ((8, 8, 5), "stop"),
        ((299,), "stop"),
        ((8, 8, 8), "length"),
    ]
    assert any("3" in note and "5" in note and "299" in note for note in state.notes)


def test_b21_what_is_masked_leaves_numerator_and_denominator(folder: Path, world: World) -> None:
    """Two of four completions have no end; the token mean is over the other two, lengths are over all."""
    rows = [
        Completion(0, number, prompt(0, 4), tuple(range(length)), (0.0,) * length, finish, "", reward=float(number))
        for number, (length, finish) in enumerate([(3, "stop"), (8, "length"), (5, "stop"), (8, "length")])
    ]
    for masked, tokens, count in ((True, 3 + 5, 2), (False, 24, 4)):
        for loss_type, expected in (("dapo", tokens), ("grpo", count), ("dr_grpo", count * 8)):
            state = start(folder, world, {"grpo.mask_truncated": masked, "grpo.loss_type": loss_type})
            batches = make_micro_batches(
                trained(rows, masked),
                loss_type=loss_type,
                micro_batch=3,
                token_budget=0,
                pad_id=297,
                shared=masked,
                recorded_sampler=False,
                world=world,
            )
            assert global_count(state, trained(rows, masked)) == expected
            weight = sum(float(batch.weights.sum()) for batch in batches)
            assert weight == pytest.approx(count if loss_type == "grpo" else tokens)


def test_b21_lengths_are_those_of_what_was_sampled(folder: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"grpo.mask_truncated": True, "rollout.prompts_per_step": 1, "rollout.max_new_tokens": 3}
    state = start(folder, world, settings)
    scripted(monkeypatch, (8, 299, 8), (8, 8, 8), (9, 8, 299), (9, 9, 9))
    metrics, completions = step(state)
    assert [len(one.ids) for one in completions] == [2, 3, 3, 3]
    assert metrics["completion_tokens_mean"] == 11 / 4
    assert metrics["truncated_fraction"] == 0.5


# Sampling


def first_gap(state: State) -> tuple[float, float]:
    """KL, and mean |log ratio| between sampler and scorer, of a first step."""
    metrics, _ = step(state)
    return metrics["kl"], metrics["sampling_logp_gap"]


@pytest.mark.parametrize("temperature", [0.6, 1.7])
def test_b25_the_temperature_divides_sampled_scored_and_reference_logits(
    folder: Path, world: World, temperature: float
) -> None:
    kl, gap = first_gap(start(folder, world, {"rollout.temperature": temperature}))
    assert kl < 1e-9 and gap < 1e-5


def test_b26_settings_of_the_checkpoint_do_not_reach_the_sampling(folder: Path, world: World, tmp_path: Path) -> None:
    leaky = tmp_path / "leaky"
    shutil.copytree(folder, leaky)
    settings = {"do_sample": True, "repetition_penalty": 1.5, "top_k": 1, "top_p": 0.1, "temperature": 0.1}
    others = {"no_repeat_ngram_size": 1, "min_new_tokens": 8, "suppress_tokens": list(range(200)), "num_beams": 3}
    (leaky / "model" / "generation_config.json").write_text(json.dumps(settings | others))
    for model_folder in (folder, leaky):
        state = start(model_folder, world, reward="spread")
        metrics, completions = step(state)
        if model_folder is folder:
            expected = [(one.ids, one.sampling_logps) for one in completions]
    assert [(one.ids, one.sampling_logps) for one in completions] == expected
    assert metrics["sampling_logp_gap"] < 1e-5


@pytest.mark.parametrize("engine", ["shared", "hf"])
@pytest.mark.parametrize("checkpointing", ["on", "off"])
def test_b29_decoding_is_the_same_in_every_mode_and_leaves_the_mode_alone(
    tmp_path: Path, world: World, checkpointing: str, engine: str
) -> None:
    folder = write_run(tmp_path, lively(tiny_qwen2()))
    state = start(folder, world, {"engine.gradient_checkpointing": checkpointing, "rollout.engine": engine})
    causal, groups = state.policy.causal, [Group(0, state.prompts[1]), Group(1, state.prompts[2])]
    assert causal.is_gradient_checkpointing == (checkpointing == "on")
    plain = decoder(lively(tiny_qwen2())).generate(groups, step=0, generations=0, greedy=1)
    passes = []
    mlp = causal.get_decoder().layers[0].mlp
    hook = mlp.register_forward_hook(lambda module, inputs, output: passes.append(output[..., 0].numel()))
    for training in (True, False):
        causal.train(training)
        rows = state.decoder.generate(groups, step=0, generations=0, greedy=1)
        assert [row.ids for row in rows] == [row.ids[:8] for row in plain]
        assert causal.training == training and causal.is_gradient_checkpointing == (checkpointing == "on")
    hook.remove()
    assert sum(tokens > len(groups) for tokens in passes) == 2, "prompts, then one new token a row: the cache is on"
    causal.train()
    with torch.no_grad():
        causal.model.norm.weight.fill_(torch.nan)
    with pytest.raises(Stopped):
        state.decoder.generate(groups, step=0, generations=1)
    assert causal.training


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_b40_weights_that_are_nan_end_the_run_before_any_token(folder: Path, world: World, dtype: str) -> None:
    state = start(folder, world, {"model.dtype": dtype})
    with torch.no_grad():
        next(iter(state.policy.causal.parameters()))[0, 0] = torch.nan
    before = weights(state)
    named = {"fp32": "torch.float32", "bf16": "torch.bfloat16"}[dtype]
    with pytest.raises(Stopped, match=rf"rollout: the logits of decoding position 0[\s\S]*{named}[\s\S]*model.dtype"):
        step(state)
    assert distance(before, weights(state)) == 0
