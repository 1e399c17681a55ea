"""The before-rollout hooks: the RoPE guard, and the loading and running of hooks."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM

from tests.tiny import TINY, tiny_tokenizer
from trainer.errors import Refused, Stopped
from trainer.models.rope import RopeRequest, apply
from trainer.rollout.hooks import HookContext, load_hooks, run_hooks
from trainer.rollout.rope_guard import rope_guard

TOKENIZER = tiny_tokenizer()
YARN, LINEAR, DYNAMIC = ({"rope_type": kind, "factor": 2.0} for kind in ("yarn", "linear", "dynamic"))


def qwen2(rope: dict[str, Any] | None = None) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**TINY, rope_parameters={"rope_theta": 1e6} | (rope or {}))).eval()


def gpt2(positions: int) -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=128, n_positions=positions))


def context(policy: Any, prompt: int, new: int, *, reference: Any = None, step: int = 0) -> HookContext:
    return HookContext(step, policy, reference, TOKENIZER, prompt, new, world_rank=0)


def test_b87_one_token_decides() -> None:
    assert rope_guard(context(qwen2(), 50, 14)) == []
    with pytest.raises(Refused) as refused:
        rope_guard(context(qwen2(), 50, 15))
    for part in (
        "The policy's context window",
        "longest prompt 50 + rollout.max_new_tokens 15 = 65 > 64 tokens",
        "Limit: max_position_embeddings 64 (no RoPE scaling)",
        "rollout.max_new_tokens = 14 or less",
        "data.max_prompt_tokens = 49 or less",
        'type = "yarn", factor = 2.0, original_max_position_embeddings = 64',
    ):
        assert part in str(refused.value)


@pytest.mark.parametrize("rope", [YARN, LINEAR], ids=["yarn", "linear"])
def test_b87_scaling_moves_the_limit(rope: dict[str, Any]) -> None:
    assert rope_guard(context(qwen2(rope), 100, 28)) == []
    with pytest.raises(Refused, match=r"= 129 > 128 tokens[\s\S]*x factor 2 = 128"):
        rope_guard(context(qwen2(rope), 100, 29))


def test_b87_the_suggested_keys_work() -> None:
    model = qwen2()
    with pytest.raises(Refused, match=r'"yarn", factor = 4.0, original_max_position_embeddings = 64'):
        rope_guard(context(model, 150, 50))
    apply(model.config, RopeRequest("yarn", 4.0, 64))
    assert rope_guard(context(Qwen2ForCausalLM(model.config), 150, 50)) == []


def test_b87_a_table_of_positions_gets_no_rope_advice() -> None:
    assert rope_guard(context(gpt2(64), 50, 14)) == []
    with pytest.raises(Refused, match=r"> 64 tokens\.\nLimit: n_positions 64") as refused:
        rope_guard(context(gpt2(64), 64, 64))
    assert "yarn" not in str(refused.value)


def test_b87_the_reference_must_hold_it_too() -> None:
    with pytest.raises(Refused, match=r"The reference's context window .*= 65 > 64"):
        rope_guard(context(gpt2(96), 50, 15, reference=gpt2(64)))


def test_b83_dynamic_is_refused_beyond_the_unscaled_window_alone() -> None:
    rope_guard(context(qwen2(DYNAMIC), 50, 14))
    with pytest.raises(Refused) as refused:
        rope_guard(context(qwen2(DYNAMIC), 50, 15))
    for part in ("policy's dynamic RoPE", "= 65 > 64 tokens", 'type = "yarn", factor = 2.0', 'type = "linear"'):
        assert part in str(refused.value)


@torch.no_grad()
@pytest.mark.parametrize(
    ("rope", "agree"), [(YARN, True), (LINEAR, True), (DYNAMIC, False)], ids=["yarn", "linear", "dynamic"]
)
def test_b83_cached_keys_and_the_full_forward(rope: dict[str, Any], agree: bool) -> None:
    """Why dynamic is refused and the others are not: token by token with a cache, against all at once."""
    model = qwen2(rope)
    for weight in model.parameters():
        weight.mul_(4)
    ids = torch.arange(80)[None] * 7 % 128
    cache, steps = None, []
    for position in range(80):
        out = model(input_ids=ids[:, position : position + 1], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        steps.append(out.logits[:, 0])
    full = qwen2(rope)
    full.load_state_dict(model.state_dict())
    gap = (
        (torch.stack(steps, 1).log_softmax(-1) - full(input_ids=ids, use_cache=False).logits.log_softmax(-1))
        .abs()
        .max()
    )
    assert (gap < 1e-3) == agree


@pytest.mark.parametrize(
    ("rope", "effect"), [(YARN, "changes short texts"), (LINEAR, "changes short texts"), (DYNAMIC, "changes nothing")]
)
def test_b88_scaling_that_is_not_needed_is_told_once(rope: dict[str, Any], effect: str) -> None:
    (note,) = rope_guard(context(qwen2(rope), 40, 24))
    assert "not needed" in note and "= 64 <= 64 tokens" in note and effect in note
    assert rope_guard(context(qwen2(rope), 40, 24, step=7)) == []
    assert rope_guard(context(qwen2(), 40, 24)) == []


def test_b88_the_built_module_of_both_models_is_checked() -> None:
    broken = qwen2()
    apply(broken.config, RopeRequest("linear", 2.0, None))
    with pytest.raises(Refused, match="The policy's RoPE is not what its config says"):
        rope_guard(context(broken, 10, 10))
    with pytest.raises(Refused, match="The reference's RoPE is not what its config says"):
        rope_guard(context(qwen2(), 10, 10, reference=broken))
    with pytest.raises(Refused, match="rotate positions differently"):
        rope_guard(context(qwen2(), 10, 10, reference=qwen2({"rope_theta": 1e4})))


def test_b88_a_module_that_changes_during_the_run_stops_it() -> None:
    policy = qwen2()
    run_hooks([rope_guard], context(policy, 10, 10, step=3))
    policy.model.rotary_emb.inv_freq.mul_(1.001)
    with pytest.raises(Stopped, match="The policy's RoPE is not what its config says"):
        run_hooks([rope_guard], context(policy, 10, 10, step=4))


def test_b88_adapters_do_not_hide_the_module() -> None:
    policy = get_peft_model(qwen2(), LoraConfig(r=2, target_modules="all-linear"))
    assert rope_guard(context(policy, 50, 14, reference=qwen2())) == []
    policy.get_base_model().model.rotary_emb.inv_freq.mul_(2)
    with pytest.raises(Refused, match="The policy's RoPE is not what its config says"):
        rope_guard(context(policy, 50, 14))


# A user's own hooks


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    source = (
        "SEEN = []\n"
        "def remember(context):\n    SEEN.append((context.step, context.longest_prompt))\n"
        "def note(context):\n    return ['four words from me']\n"
        "def fail(context):\n    return {}['missing']\n"
        "def refuse(context):\n    from trainer.errors import Refused\n    raise Refused('not today')\n"
        "def number(context):\n    return 3\n"
    )
    (tmp_path / "my_hooks.py").write_text(source)
    (tmp_path / "my_broken.py").write_text("import numpy\n1 / 0\n")
    (tmp_path / "my_syntax.py").write_text("def f(:\n")
    (tmp_path / "my_needy.py").write_text("import no_such_library\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "my_hooks"
    for name in ("my_hooks", "my_broken", "my_syntax", "my_needy"):
        sys.modules.pop(name, None)


def test_hooks_load_by_import_path_and_run_in_order(user_module: str) -> None:
    hooks = load_hooks([f"{user_module}:remember", f"{user_module}:note"])
    assert run_hooks(hooks, context(qwen2(), 9, 5, step=2)) == ["four words from me"]
    assert sys.modules[user_module].SEEN == [(2, 9)]


def test_every_path_that_leads_nowhere_is_named_with_its_reason(user_module: str) -> None:
    bad = {
        "my_hooks.remember": 'expected "package.module:function"',
        "my hooks:remember": 'expected "package.module:function"',
        "no_such_package.hooks:f": "no module 'no_such_package'",
        "my_hooks.deeper:f": "no module 'my_hooks.deeper'",
        "my_hooks:rememba": "has no 'rememba'; did you mean 'remember'?",
        "my_hooks:SEEN": "is a list, expected a function",
        "my_broken:f": "ZeroDivisionError: division by zero",
        "my_syntax:f": "SyntaxError: ",
        "my_needy:f": "importing it failed: ModuleNotFoundError: No module named 'no_such_library'",
    }
    with pytest.raises(Refused) as refused:
        load_hooks([f"{user_module}:note", *bad])
    lines = str(refused.value).splitlines()
    assert len(lines) == 1 + len(bad), lines
    for line, (path, reason) in zip(lines[1:], bad.items(), strict=True):
        assert repr(path) in line and reason in line
    assert "my_broken.py, line 2" in str(refused.value)


@pytest.mark.parametrize(("step", "end"), [(0, Refused), (5, Stopped)])
def test_a_hook_that_fails_ends_the_run_by_name(user_module: str, step: int, end: type[Exception]) -> None:
    where = context(qwen2(), 9, 5, step=step)
    with pytest.raises(
        end, match=rf"my_hooks:fail failed at step {step}: KeyError: 'missing' \(.*my_hooks.py, line 7\)"
    ):
        run_hooks(load_hooks([f"{user_module}:fail"]), where)
    with pytest.raises(end, match=r"^not today$"):
        run_hooks(load_hooks([f"{user_module}:refuse"]), where)
    with pytest.raises(end, match="my_hooks:number returned 3, expected None or a list of strings"):
        run_hooks(load_hooks([f"{user_module}:number"]), where)
