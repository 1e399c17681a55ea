"""The benchmark's own arithmetic, and what it forces on a real step."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from tests.tiny_run import PROMPTS, run_config, start, write_run
from tools.bench_inputs import CAP, Settings, token_ratio, tokenizer
from tools.bench_measure import CPU_KERNELS, Meter, cap_memory
from tools.bench_ours import ENGINES, as_engine, every_kernel_by_itself, forced_lengths, laps, step
from tools.bench_table import curve_points, markdown, summary
from trainer.models.blocked_weights import blocked_weights
from trainer.models.shared_prefix import FLEX, layout
from trainer.rollout.graphs import Graphs
from trainer.world import World

SETTINGS = Settings(
    shape="tiny",
    prompt=64,
    completion=8,
    group=4,
    prompts=len(PROMPTS),
    ragged=False,
    dtype="fp32",
    engine="shared",
    lora=4,
    device="cpu",
    threads=1,
    memory_gib=0.0,
)


def measured(seconds: float, peak: float = 1.0) -> dict[str, Any]:
    phases = {"rollout": seconds, "reference": 1.0, "forward_backward": 2 * seconds, "optimizer": 0.5, "other": 0.5}
    return {"seconds": {"cpu": phases, "wall": phases}, "peak_gib": peak}


def result(**parts: Any) -> dict[str, Any]:
    machine = {"processor": "a processor", "cores": 2, "memory_gib": 8.0, "system": ""}
    settings = {"shape": "tiny", "prompt": 512, "completion": 128, "group": 8, "prompts": 1, "ragged": False}
    settings |= {"dtype": "fp32", "lora": 0, "beta": 0.04, "threads": 1}
    shared = {"clock": "cpu", "repeats": 3, "versions": {"trl": "1.16.0"}, "load_average": [[0.5], [1.5]]}
    return {"settings": settings, "machine": machine, **shared, **parts}


def test_token_ratio_is_the_formula_and_counts_ragged_lengths() -> None:
    assert token_ratio(512, [[128] * 8]) == 8 * 640 / (512 + 8 * 128)
    assert token_ratio(512, [[128] * 8] * 5) == token_ratio(512, [[128] * 8])
    assert token_ratio(512, [[128]]) == 1
    assert token_ratio(10, [[1, 3], [2, 4]]) == (4 * 10 + 10) / (2 * 10 + 10)


def test_ragged_lengths_are_the_same_each_time_within_the_cap_and_of_that_mean() -> None:
    ragged = Settings(**vars(SETTINGS) | {"ragged": True, "completion": 64, "prompts": 200, "group": 8})
    lengths = [length for group in ragged.lengths for length in group]
    assert ragged.lengths == ragged.lengths and len(lengths) == 1600
    assert min(lengths) >= 1 and max(lengths) == CAP == ragged.limit
    assert 58 < sum(lengths) / len(lengths) < 66
    assert SETTINGS.lengths == [[8] * 4] * len(PROMPTS) and SETTINGS.limit == 8


def test_a_text_of_n_letters_is_n_tokens_and_every_id_of_the_head_is_a_token() -> None:
    letters = tokenizer(1000)
    assert len(letters("abcABC019")["input_ids"]) == 9
    assert len(letters) == 1000 and letters.eos_token_id == 999
    assert letters.decode(range(1000), skip_special_tokens=True).endswith("w741")


@pytest.mark.parametrize("engine", ENGINES)
def test_lengths_are_forced_and_every_phase_is_timed(engine: str, tmp_path: Path, world: World) -> None:
    state = start(write_run(tmp_path), world, {"rollout.prompts_per_step": len(PROMPTS)})
    state.decoder = as_engine(state.decoder, ENGINES[engine])
    wanted = [[1 + (prompt + generation) % 8 for generation in range(4)] for prompt in range(len(PROMPTS))]
    meter = Meter(world.device, 0)
    with forced_lengths(wanted, 8), laps(state, meter):
        found = step(state, meter, wanted, {"flops": True})  # which refuses other lengths
    assert all(found["seconds"]["wall"][phase] > 0 for phase in ("rollout", "reference", "forward_backward"))
    assert found["seconds"]["wall"]["optimizer"] > 0 and found["peak_gib"] > 0.05
    with forced_lengths([[8] * 4] * len(PROMPTS), 8), laps(state, meter):
        longer = step(state, meter, SETTINGS.lengths, {"flops": True})
    assert longer["flops"] > found["flops"] > 0
    with forced_lengths(wanted, 8), laps(state, meter), pytest.raises(RuntimeError, match="tokens, not"):
        step(state, meter, SETTINGS.lengths, {"flops": False})
    state.engine.close()


def test_on_a_card_a_side_is_held_to_its_memory_and_flops_are_counted_kernel_by_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    card, held = SimpleNamespace(total_memory=88 * 2**30), []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *given: held.append(given))
    device = torch.device("cuda", 0)
    for asked in (0.0, 22.0, 200.0):
        cap_memory(device, asked)
    cap_memory(torch.device("cpu"), 22.0)
    assert held == [(0.25, device), (1.0, device)]
    assert [Meter(device, asked).shares_card for asked in (0.0, 22.0, 60.0)] == [False, False, True]
    config = SimpleNamespace(_attn_implementation=FLEX)
    rows = ((100, (90,)),)
    with every_kernel_by_itself():
        assert not Graphs().on(device)
        assert isinstance(layout(rows, config, torch.float32, torch.device("cpu"))["masks"], dict)
    assert Graphs().on(device)
    assert isinstance(layout(rows, config, torch.float32, torch.device("cpu"))["masks"], BlockMask)


def test_a_smaller_group_and_shorter_prompts_on_demand(tmp_path: Path, world: World) -> None:
    state = start(write_run(tmp_path), world, {"rollout.prompts_per_step": len(PROMPTS)})
    meter = Meter(world.device, 0)
    with forced_lengths(SETTINGS.lengths, 8), laps(state, meter):
        whole = step(state, meter, SETTINGS.lengths, {"flops": True})
        part = step(state, meter, SETTINGS.lengths, {"flops": True, "group": 2, "prompt": 2})
    assert part["flops"] < 0.7 * whole["flops"]
    assert state.config.rollout.num_generations == 2 and run_config(tmp_path).rollout.num_generations == 4
    state.engine.close()


def test_attention_on_a_cpu_is_counted() -> None:
    query, key = torch.randn(1, 4, 8, 16, requires_grad=True), torch.randn(1, 2, 24, 16)
    with FlopCounterMode(display=False, custom_mapping=CPU_KERNELS) as counter:
        out = scaled_dot_product_attention(query, key, key, enable_gqa=True)
        forward = counter.get_total_flops()
        out.sum().backward()
    assert forward == 2 * 2 * 4 * 8 * 24 * 16
    assert counter.get_total_flops() == forward + 5 * forward // 2


def test_products_of_blocked_weights_are_counted() -> None:
    layer, hidden = nn.Linear(24, 40, bias=False), torch.randn(2, 3, 24)
    with FlopCounterMode(display=False, custom_mapping=CPU_KERNELS) as counter, torch.no_grad():
        plain = (layer(hidden), counter.get_total_flops())[1]
        with blocked_weights(layer):
            layer(hidden)
    assert plain == 2 * 2 * 3 * 24 * 40 and counter.get_total_flops() == 2 * plain


def test_medians_and_ratios_of_single_times() -> None:
    rows = {
        "ours": {"steps": [measured(3, 2.0), measured(1, 1.0), measured(2, 1.5)], "flops": 4e12},
        "trl": {"steps": [measured(6, 4.0)] * 3, "flops": 12e12},
        "unshared": {"steps": [measured(4)] * 3, "flops": 8e12},
        "trl-compact": {"steps": [], "failed": "out of memory: 22 GiB"},
    }
    equality = {"trl": {"logps": 1e-7, "gradient": 2e-7, "tensor": 3e-7}}
    whole = result(rows=rows, gemm=[{"cpu": 400.0}, {"cpu": 500.0}, {"cpu": 9000.0}], equality=equality)
    whole |= summary(whole)
    ratios = whole["ratios"]
    assert whole["medians"]["ours"]["step"] == 8 and whole["medians"]["ours"]["peak_gib"] == 2
    assert ratios["step: TRL as it comes"] == 20 / 8 and ratios["FLOPs: TRL as it comes"] == 3
    assert ratios["rollout: our own, with transformers' `generate`"] == 2
    assert ratios["our peak memory over TRL's"] == 0.5
    assert ratios["our step over its FLOPs at the GEMM rate"] == 8 / (4000 / 500)
    lines = markdown(whole).splitlines()
    assert "| zero-grpo | 2.0 | 1.0 | 4.0 | 0.5 | 8.0 | 8.0 | 2.00 | 4.00 |" in lines
    assert "| TRL 1.16.0 | 6.0 | 1.0 | 12.0 | 0.5 | 20.0 | 20.0 | 4.00 | 12.00 |" in lines
    assert "| step: TRL as it comes | 2.50 |" in lines and "step: TRL with compaction forced" not in markdown(whole)
    failed = next(line for line in lines if "forced" in line)
    assert failed.endswith("| out of memory: 22 GiB |") and failed.count("|") == lines[2].count("|")


def test_curves_stand_beside_what_tokens_predict() -> None:
    curves = [
        {"prompt": 512, "group": group, "steps": [measured(seconds)] * 3} for group, seconds in ((1, 2.0), (8, 4.5))
    ]
    one, eight = curve_points(result(curves=curves))
    assert one["predicted"] == one["measured"] == 1
    assert eight["measured"] == 8 * (2 * 2 + 1) / (2 * 4.5 + 1)
    assert f"| {eight['predicted']:.2f} | {eight['measured']:.2f} |" in markdown(result(curves=curves))
    assert eight["predicted"] == token_ratio(512, [[128] * 8])
