"""The planner: shapes, what "auto" becomes, what does not fit and what would, and the command."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import trainer.preflight.memory
from tests.fake_pass import CONFIGS, Cell
from tests.tiny_run import distance, start, step, weights, write_run
from trainer.__main__ import main
from trainer.batch import Completion, Prompt
from trainer.config.grpo import Rollout
from trainer.models import head, prefix_cache
from trainer.models.packing import micro_batches, tokens_of
from trainer.plan import activations, networks, parts, state
from trainer.plan.cards import CARDS, GIB
from trainer.plan.choose import MOST_TOKENS, choose, cost
from trainer.plan.parts import plan
from trainer.plan.price import price, seconds
from trainer.plan.settings import Settings, zero_of
from trainer.plan.shape import KNOWN, Shape, shape_of
from trainer.preflight.memory import USABLE, free_bytes
from trainer.record.memory import PeakMemory
from trainer.rewards import frozen
from trainer.rollout import decoder, shared
from trainer.rollout.sampling import Sampler
from trainer.world import World

A10 = CARDS["a10"]
ROOM = A10.gib * GIB
SMALL = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def run(model: str = "1.5B", mode: str = "lora", **others: Any) -> Settings:
    """On a card, eight prompts of 512 tokens and eight completions of up to 512 each."""
    cell = Cell(model, mode, 512, 512, 8, shared=True, checkpointing=False, groups=8)
    usual = {"cuda": True, "token_budget": 16384, "reference": "streamed" if mode == "full" else "adapter"}
    return replace(cell.settings(), **usual | others)


@pytest.mark.parametrize("kind", KNOWN)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_parameters_are_those_of_the_model(kind: str, tied: bool, bias: bool) -> None:
    config = AutoConfig.for_model(kind, **SMALL, tie_word_embeddings=tied)
    if kind in ("llama", "qwen3"):
        config.attention_bias = bias
    if kind == "llama":
        config.mlp_bias = bias
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = shape_of(config.to_dict())
    assert shape is not None and shape.total == sum(one.numel() for one in model.parameters())
    linear = sum(
        part.weight.numel()
        for name, part in model.named_modules()
        if isinstance(part, torch.nn.Linear) and "lm_head" not in name
    )
    assert shape.block_weights == linear


@pytest.mark.parametrize("kind", ["streamed", "sharded"])
def test_the_head_of_a_copy_elsewhere_comes_for_the_exact_kl(kind: str) -> None:
    there = plan(run(mode="full", exact=True, reference="resident"))
    coming = plan(run(mode="full", exact=True, reference=kind))
    shape, kept = there.settings.shape, [one.phases["training"]["reference"] for one in (there, coming)]
    assert kept[0] - kept[1] == 2 * (shape.total - shape.matrix)
    assert there.phases["rollout"]["reference"] == 2 * shape.total and coming.phases["rollout"]["reference"] == 0


def test_what_decodes_on_a_cpu_reads_copies_of_the_weights() -> None:
    cpu, card = (plan(run("1.5B", cuda=cuda)) for cuda in (False, True))
    shape = cpu.settings.shape
    copies = cpu.phases["rollout"]["weights"] - card.phases["rollout"]["weights"]
    assert copies == 2 * (shape.block_weights + shape.matrix + cpu.settings.trained)


def test_a_rollout_by_generate_prefills_every_row() -> None:
    """rollout.engine = "hf", though training passes share their prompts."""
    ours, theirs = (plan(run(decodes_shared=shared)) for shared in (True, False))
    assert ours.phases["training"] == theirs.phases["training"]
    rows = 8 * 8
    a_token = 2 * 2 * ours.settings.shape.keys * (ours.settings.shape.layers + 1)
    assert theirs.phases["rollout"]["KV cache"] == a_token * rows * (512 + 512)
    assert ours.phases["rollout"]["KV cache"] == a_token * (8 * 512 + rows * 512)
    assert theirs.phases["rollout"]["activations"] == 8 * ours.phases["rollout"]["activations"]


def test_an_adapter_of_known_size() -> None:
    """Qwen2.5's 1.5B and 7B with r = 16 on all linear layers."""
    sizes = [cast(Shape, shape_of({"model_type": "qwen2"} | CONFIGS[name])) for name in ("1.5B", "7B")]
    assert [one.adapter(16, one.linears) for one in sizes] == [18_464_768, 40_370_176]
    assert sizes[0].adapter(16, {"q_proj"}) == 28 * 16 * 2 * 1536


def test_an_architecture_without_formulas_has_no_shape() -> None:
    assert shape_of(AutoConfig.for_model("mixtral").to_dict()) is None


def test_numbers_taken_over_are_those_of_the_code() -> None:
    assert (activations.CHUNK_ROWS, activations.CHUNK_COPIES) == (head.CHUNK_ROWS, head.COPIES)
    assert (parts.ROWS, parts.PREFILL) == (decoder.MAX_ROWS, shared.PREFILL_TOKENS)
    assert parts.FIRST_CAPACITY == prefix_cache.FIRST_CAPACITY
    assert networks.PASS_TOKENS == frozen.BATCH_TOKENS


def test_sampling_copies_the_logits_as_often_as_planned() -> None:
    rows, columns = 64, 2000
    sampler = Sampler(Rollout(), tokenizer_size=columns, dtype=torch.float32)
    with PeakMemory(torch.device("cpu")) as memory:
        base = memory.take_peak()
        scores = torch.randn(rows, columns)
        sampler(scores, torch.rand(rows, dtype=torch.float64), scores.new_empty(rows, 0), position=0)
        counted = memory.take_peak() - base
    assert counted == pytest.approx(parts.SAMPLER_COPIES * rows * columns, rel=0.05)


def completions(groups: int, generations: int, prompt: int, new: int) -> list[Completion]:
    found = []
    for group in range(groups):
        of = Prompt(group, "", (1,) * prompt, None, {})
        found += [Completion(group, i, of, (1,) * new, (0.0,) * new, "stop", "") for i in range(generations)]
    return found


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("budget", [100, 160, 300, 700, 5000])
@pytest.mark.parametrize("new", [1, 6, 20])
def test_no_pass_is_larger_than_the_largest(shared: bool, budget: int, new: int) -> None:
    """Of whatever length the completions are; and the passes of a step of the longest are about as many as planned."""
    settings = replace(run(), prompt=80, new=20, generations=6, prompts=7, shared=shared, token_budget=budget)
    largest = settings.largest_pass()
    passes = list(micro_batches(completions(7, 6, 80, new), micro_batch=0, token_budget=budget, shared=shared))
    assert max(tokens_of(one, shared) for one in passes) <= largest.tokens
    if shared:
        copied = max(sum(80 + len(one.ids) - 1 for one in part) for part in passes)
        assert copied <= largest.copied
    if new == 20:
        found = settings.passes()
        assert found == (len(passes), pytest.approx(sum(tokens_of(one, shared) for one in passes), rel=0.05))


def test_4_bit_weights_are_as_large_as_those_of_bitsandbytes() -> None:
    bnb = pytest.importorskip("bitsandbytes", reason="4-bit weights are made by bitsandbytes")
    layer = bnb.nn.Linear4bit(1024, 2048, bias=False, quant_type="nf4", compress_statistics=True)
    layer.weight = bnb.nn.Params4bit(torch.randn(2048, 1024), requires_grad=False, quant_type="nf4").to("cpu")
    quantised = layer.weight.quant_state
    held = [layer.weight.data, quantised.absmax, quantised.state2.absmax]
    counted = sum(one.numel() * one.element_size() for one in held)
    assert counted == pytest.approx(state.NF4 * 2048 * 1024, rel=0.001)


def test_auto_is_without_recomputation_where_that_is_quicker() -> None:
    """1.5B on 22 GiB: small passes without it. 7B in 16 bits: no pass of one group fits without it."""
    found = {model: choose(run(model), ROOM, budget=True, checkpointing=True) for model in ("1.5B", "7B")}
    small, large = found["1.5B"], found["7B"]
    assert small is not None and not small.checkpointing and small.token_budget < MOST_TOKENS["cuda"]
    assert large is not None and large.checkpointing
    more = choose(run("7B"), 80 * GIB, budget=True, checkpointing=True)
    assert more is not None and not more.checkpointing


def test_the_budget_is_the_largest_that_fits() -> None:
    found = choose(run(), ROOM, budget=True, checkpointing=False)
    assert found is not None and found.token_budget % 256 == 0
    assert plan(found).peak <= ROOM < plan(replace(found, token_budget=found.token_budget + 256)).peak
    roomy = choose(run(), 10 * ROOM, budget=True, checkpointing=False)
    assert roomy is not None and roomy.token_budget == MOST_TOKENS["cuda"]
    assert choose(run(mode="full"), ROOM, budget=True, checkpointing=True) is None


def test_what_is_given_stays() -> None:
    found = choose(run(token_budget=2048), ROOM, budget=False, checkpointing=True)
    assert found is not None and found.token_budget == 2048 and not found.checkpointing
    assert choose(run(token_budget=16384), ROOM, budget=False, checkpointing=False) is None


def test_sharing_and_larger_passes_cost_less() -> None:
    assert cost(run(token_budget=5000)) < cost(run(token_budget=1100))
    assert cost(run()) < cost(run(shared=False)) < cost(run(shared=False, checkpointing=True))


def test_each_setting_moves_its_part() -> None:
    """Bytes that a change takes away, on four cards."""
    before = plan(run(mode="full", ranks=4, reference="resident", zero=zero_of({"stage": 1}), checkpointing=True))

    def saved(part: str, **others: Any) -> float:
        after = plan(replace(before.settings, **others))
        return before.phases["training"][part] - after.phases["training"][part]

    trained = before.settings.trained
    assert saved("reference", reference="streamed") == 2 * trained
    assert saved("optimizer", optimizer="adamw8bit") == pytest.approx(6 * trained / 4, rel=0.01)
    assert saved("optimizer", zero=zero_of({"stage": 2, "offload_optimizer": {"device": "cpu"}})) == 3 * trained
    assert saved("gradients", zero=zero_of({"stage": 2})) == pytest.approx(3 * trained, rel=0.01)
    assert saved("activations", checkpointing=False) < 0
    sharded = plan(replace(before.settings, zero=zero_of({"stage": 3, "reduce_bucket_size": 10**6})))
    assert sharded.phases["reward"]["weights"] == before.phases["reward"]["weights"] / 4
    assert sharded.phases["rollout"]["weights"] > before.phases["rollout"]["weights"]


def test_a_card_has_copies_of_keys_for_every_head() -> None:
    """Its kernels take a mask only so; a CPU's copies are a sixth of them."""
    card, cpu = (replace(run(), cuda=cuda) for cuda in (True, False))
    one = card.largest_pass()
    more = activations.block(card, one) - activations.block(cpu, one)
    assert more == pytest.approx(4 * (1536 - 256) * (one.tokens + one.copied) + 2 * one.seen)


def test_prices_are_those_of_the_change() -> None:
    before = run(mode="full")
    more, told = price(before, replace(before, checkpointing=True), A10)
    assert told.startswith("training passes +") and more == pytest.approx(seconds(before, A10)["training passes"] / 3)
    offload = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    more, told = price(before, replace(before, zero=zero_of(offload)), A10)
    assert told.startswith("optimizer on the host +")
    assert more == pytest.approx(6 * 1.5437e9 / 25e9 + 28 * 1.5437e9 / 100e9, rel=0.01)


RUN = """
[run]
dir = "out"
steps = 2
[model]
name_or_path = "{model}"
[data]
source = "train.jsonl"
[rollout]
prompts_per_step = 8
num_generations = 8
max_new_tokens = 512
[[reward]]
name = "score"
kind = "python"
function = "rewards.py:spread"
"""

Planned = Callable[..., tuple[int, str]]


@pytest.fixture
def planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Planned:
    """`zero-grpo plan` of a run whose model is a config.json and nothing else: exit code and output."""
    config = {"model_type": "qwen2", "max_position_embeddings": 32768} | CONFIGS["1.5B"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "run.toml").write_text(RUN.format(model=tmp_path))

    def call(*words: str) -> tuple[int, str]:
        capsys.readouterr()
        code = main(["plan", str(tmp_path / "run.toml"), *words])
        return code, capsys.readouterr().out

    return call


def test_the_command_fits(planned: Planned) -> None:
    code, said = planned("--gpu", "a10", "--gpus", "2")
    assert code == 0 and "Fits: the peak is" in said and "2 x a10 with 22.0 GiB" in said
    assert "A checkpoint: 0.3 GB, written in 1 s at 0.5 GB/s; that much, and what a rank does in one piece (" in said
    assert "must fit into run.grace_seconds = 150, and the scheduler's." in said
    _, said = planned("--gpu", "a10", "--gpus", "2", "--run.grace_seconds", "0.5")
    assert "more than run.grace_seconds = 0.5, so that a SIGTERM would lose the steps since the last one. Fix: " in said
    for word in ("rollout", "reference", "reward", "training", "KV cache", "activations", "total"):
        assert word in said


def test_the_command_says_what_would_fit(planned: Planned) -> None:
    code, said = planned("--gpu", "a10", "--lora.r", "0", "--json")
    found = json.loads(said)
    assert code == 2 and not found["fits"] and found["peak_gib"] > 22
    # The fp32 copy, two moments, and bf16 values twice.
    assert found["checkpoint_bytes"] == pytest.approx((4 + 8 + 2 * 2) * 1.5437e9, rel=1e-3)
    assert found["seconds_to_save"] == found["checkpoint_bytes"] / 5e8
    assert sum(found["phases_gib"]["training"].values()) == pytest.approx(found["totals_gib"]["training"])
    first = found["advice"][0]
    assert first["peak_gib"] <= 22 and first["seconds_a_step"] > 0
    again, _ = planned("--gpu", "a10", "--lora.r", "0", *first["changes"])
    assert again == 0
    code, said = planned("--gpu", "a10", "--lora.r", "0")
    assert code == 2 and "Does not fit: beyond 22.00 GiB" in said and " ".join(first["changes"]) in said


def test_changes_that_are_legal_together_alone_are_found(planned: Planned) -> None:
    """4 bits want an adapter: neither of the two would be told for itself."""
    code, said = planned("--memory-gib", "4.5", "--lora.r", "0", "--json")
    assert code == 2 and json.loads(said)["advice"][0]["changes"] == ["--quant.bits", "4", "--lora.r", "16"]


def test_a_budget_that_is_too_large_is_what_is_named(planned: Planned) -> None:
    code, said = planned("--gpu", "a10", "--engine.gradient_checkpointing", "off", "--engine.token_budget", "16384")
    assert code == 2 and "  --engine.token_budget auto: peak " in said
    assert "  --engine.gradient_checkpointing auto: peak " in said


def test_words_that_make_no_plan(planned: Planned, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert planned("--gpu", "a11")[0] == 2 and planned("--gpu", "a10", "--memory-gib", "20")[0] == 2
    code, said = planned("--memory-gib", "3.5", "--engine.token_budget", "1024")
    assert code == 2 and "3.5" in said
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "mixtral"}))
    code, said = planned("--gpu", "a10")
    assert code == 2 and "mixtral, of which the planner has no formulas" in said


class TwoRanks:
    """Of which the hosts are known."""

    device = torch.device("cpu")

    def __init__(self, hosts: list[str]) -> None:
        self.hosts = hosts

    def gather_objects(self, value: str) -> list[str]:
        return [value if host == "mine" else host for host in self.hosts]


def test_ranks_of_a_host_share_its_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:       16000 kB\nMemFree:  100 kB\nMemAvailable:    8000 kB\n")
    monkeypatch.setattr(trainer.preflight.memory, "MEMINFO", tmp_path / "meminfo")
    for hosts, ranks in ((["mine"], 1), (["mine", "mine"], 2), (["far", "mine", "far", "mine", "mine"], 3)):
        assert free_bytes(cast(Any, TwoRanks(hosts))) == USABLE * 8000 * 1024 / ranks


def test_auto_at_the_start_of_training(tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Off with room and on without; and what is chosen leaves the first step what it is."""
    folder = write_run(tmp_path)
    found = {}
    for name, setting, free in (("off", "off", 1e12), ("room", "auto", 1e12), ("none", "auto", 1e5)):
        monkeypatch.setattr(trainer.preflight.memory, "free_bytes", lambda world, free=free: free)
        state = start(folder, world, {"engine.gradient_checkpointing": setting})
        (note,) = (note for note in state.notes if note.startswith("gradient checkpointing"))
        recomputed = state.policy.causal.is_gradient_checkpointing
        step(state)
        found[name] = weights(state)
        state.engine.close()
        assert recomputed == (name == "none") == (" is on" in note) == ("DOES NOT FIT" in note)
        assert state.token_budget == (MOST_TOKENS["cpu"] if name != "none" else 20 + 8)
    assert distance(found["off"], found["room"]) == 0
    assert distance(found["off"], found["none"]) < 1e-6


def test_ranks_decide_alike_by_the_one_that_has_least(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer.preflight.memory, "free_bytes", lambda world: 1e12)
    monkeypatch.setattr(type(world), "all_reduce_max", lambda self, values: [max(one, -1e5) for one in values])
    state = start(write_run(tmp_path), world, {})
    assert state.policy.causal.is_gradient_checkpointing
    state.engine.close()


def test_an_unknown_architecture_is_on_the_safe_side(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer.preflight.memory, "shape_of", lambda config: None)
    state = start(write_run(tmp_path), world, {})
    assert state.policy.causal.is_gradient_checkpointing and state.token_budget == MOST_TOKENS["cpu"]
    assert any("the memory of qwen2 is not known beforehand" in note for note in state.notes)
    state.engine.close()
