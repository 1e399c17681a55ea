"""Packed groups: the prompt once gives the log-probs and gradients of one row a completion."""

import copy
import random

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    set_seed,
)

from tests.tiny import TINY
from trainer.batch import Completion, PackedRows, Prompt
from trainer.models.packing import micro_batches, pack, pack_groups, tokens_of
from trainer.models.scorer import TokenScorer
from trainer.models.shared_prefix import share_prompts

CPU = torch.device("cpu")
SHAPE = TINY | {"vocab_size": 300}
FAMILIES = {
    "qwen2 tied": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=8)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "smollm3": lambda: SmolLM3ForCausalLM(SmolLM3Config(**SHAPE, pad_token_id=0)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, head_dim=8, sliding_window=None)),
}


def completions(prompts: tuple[int, ...] = (5, 17, 1), generations: int = 4, longest: int = 11) -> list[Completion]:
    """Groups of these prompt lengths, with ragged completions; some of a single token, which adds none to a row."""
    draw = random.Random(0)
    found = []
    for group, length in enumerate(prompts):
        prompt = Prompt(group, "", tuple(draw.randrange(300) for _ in range(length)), None, {})
        for generation in range(generations):
            ids = tuple(draw.randrange(300) for _ in range(1 if generation == 1 else draw.randint(2, longest)))
            found.append(Completion(group, generation, prompt, ids, (0.0,) * len(ids), "stop", ""))
    return found


def logps_and_gradient(model: PreTrainedModel, rows: PackedRows) -> tuple[Tensor, Tensor]:
    """Of a sum in which every token has a weight of its own."""
    weights = torch.randn(len(rows.targets), generator=torch.Generator().manual_seed(1))
    logps = TokenScorer(model, 0.7)(rows)["logps"]
    (logps * weights).sum().backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    return logps.detach(), gradient


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_prompt_once_gives_the_same_log_probs_and_gradients(family: str, checkpointing: bool) -> None:
    set_seed(0)
    plain = FAMILIES[family]().train()
    shared = copy.deepcopy(plain)
    assert share_prompts(shared) == ""
    if checkpointing:
        shared.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    rows = completions()
    logps, gradient = logps_and_gradient(plain, pack(rows, pad_id=0, device=CPU))
    ours, our_gradient = logps_and_gradient(shared, pack_groups(rows, device=CPU))
    assert (logps - ours).abs().max() < 2e-6
    assert (gradient - our_gradient).norm() / gradient.norm() < 2e-6


def test_experts_choose_token_by_token_so_prompts_are_shared_exactly() -> None:
    """No loss of ours balances experts, which is what would count the tokens of a prompt once or G times."""
    set_seed(0)
    plain = MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=4, output_router_logits=True)).train()
    shared = copy.deepcopy(plain)
    assert share_prompts(shared) == ""
    rows = completions()
    logps, gradient = logps_and_gradient(plain, pack(rows, pad_id=0, device=CPU))
    ours, our_gradient = logps_and_gradient(shared, pack_groups(rows, device=CPU))
    assert (logps - ours).abs().max() < 2e-6
    assert (gradient - our_gradient).norm() / gradient.norm() < 2e-6


def test_a_completion_sees_its_prompt_and_its_own_past_alone() -> None:
    set_seed(0)
    model = FAMILIES["qwen2 tied"]()
    share_prompts(model)
    scorer, rows = TokenScorer(model, 1.0), completions()
    before = scorer(pack_groups(rows, device=CPU))["logps"]
    changed = copy.deepcopy(rows)
    changed[2].ids = tuple(299 - token for token in changed[2].ids)
    after = scorer(pack_groups(changed, device=CPU))["logps"]
    start = sum(len(one.ids) for one in rows[:2])
    own = range(start, start + len(rows[2].ids))
    differing = {int(place) for place in (before != after).nonzero()}
    assert differing and differing <= set(own)


def test_one_completion_is_the_same_code() -> None:
    set_seed(0)
    model = FAMILIES["llama"]()
    rows = completions(prompts=(9,), generations=1)
    expected = TokenScorer(model, 1.0)(pack(rows, pad_id=0, device=CPU))["logps"]
    share_prompts(model)
    torch.testing.assert_close(TokenScorer(model, 1.0)(pack_groups(rows, device=CPU))["logps"], expected)


def test_a_group_that_a_cut_goes_through_has_the_same_sum() -> None:
    set_seed(0)
    model = FAMILIES["qwen3"]()
    share_prompts(model)
    rows = completions()
    _, whole = logps_and_gradient(model, pack_groups(rows, device=CPU))
    model.zero_grad()
    weights = torch.randn(sum(len(one.ids) for one in rows), generator=torch.Generator().manual_seed(1))
    parts = list(micro_batches(rows, micro_batch=0, token_budget=30, shared=True))
    assert len(parts) >= 3 and [one for part in parts for one in part] == rows
    assert all(tokens_of(part, shared=True) <= 30 or len(part) == 1 for part in parts)
    scorer = TokenScorer(model, 0.7)
    for part in parts:
        logps = scorer(pack_groups(part, device=CPU))["logps"]
        (logps * weights[: len(logps)]).sum().backward()
        weights = weights[len(logps) :]
    summed = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    assert (summed - whole).norm() / whole.norm() < 2e-6


def test_without_groups_the_model_is_what_it_was() -> None:
    """Decoding and one row a completion go on with plain SDPA, padding mask and all."""
    set_seed(0)
    model = FAMILIES["qwen2 tied"]().eval()
    rows = pack(completions(), pad_id=0, device=CPU)
    expected = TokenScorer(model, 1.0)(rows)["logps"]
    ids = torch.arange(1, 9)[None]
    decoded = model.generate(ids, max_new_tokens=5, do_sample=False)
    share_prompts(model)
    assert torch.equal(TokenScorer(model, 1.0)(rows)["logps"], expected)
    assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), decoded)


def test_windows_and_linear_attention_are_not_shared_and_say_so() -> None:
    model = MistralForCausalLM(MistralConfig(**SHAPE, head_dim=8, sliding_window=16))
    assert "do not see the whole context" in share_prompts(model)
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8}
    linear |= {"linear_value_head_dim": 8, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
    half = Qwen3NextConfig(**SHAPE, **linear, head_dim=8, layer_types=["linear_attention", "full_attention"])
    assert "do not see the whole context" in share_prompts(Qwen3NextForCausalLM(half))
    model = LlamaForCausalLM._from_config(LlamaConfig(**SHAPE), attn_implementation="eager")
    assert 'model.attn = "eager"' in share_prompts(model)


def test_attention_of_its_own_way_is_found_by_its_states() -> None:
    """A layer that does not hand the layout on would see other completions without a word."""
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    for layer in model.model.layers:
        forward = layer.self_attn.forward
        layer.self_attn.forward = lambda *arguments, forward=forward, groups=(), **keywords: forward(
            *arguments, **keywords
        )
    assert "a way of its own" in share_prompts(model)
    assert model.config._attn_implementation == "sdpa"


def test_the_cost_is_that_of_the_formula() -> None:
    """Tokens: G(P + C - 1) against P + G(C - 1); FLOPs of everything but attention and head follow them."""
    set_seed(0)
    rows = completions(prompts=(32,), generations=8, longest=2)
    for one in rows:
        one.ids = one.ids[:1] * 8
    assert tokens_of(rows, shared=False) == 8 * (32 + 7)
    assert tokens_of(rows, shared=True) == 32 + 8 * 7
    model = FAMILIES["llama"]()
    flops = {}
    for shared in (False, True):
        if shared:
            share_prompts(model)
        packed = pack_groups(rows, device=CPU) if shared else pack(rows, pad_id=0, device=CPU)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            TokenScorer(model, 1.0)(packed)
        flops[shared] = counter.get_flop_counts()["TokenScorer.causal.model.layers.0.mlp"][torch.ops.aten.mm]
    assert flops[False] / flops[True] == 8 * (32 + 7) / (32 + 8 * 7)
