"""Quantised GGUF files, trained on: their blocks dequantised, and packed again as NF4 where quant.bits = 4."""

import re
from pathlib import Path

import gguf
import pytest
import torch
from torch import nn

from tests.tiny import tiny_qwen2
from tests.tiny_gguf import NAMES, write_gguf
from tests.tiny_run import start, step, weights, write_run
from trainer.models import quantised
from trainer.world import World

SIZES: dict[str, float] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}


def name_there(ours: str) -> str:
    (found,) = (re.sub(f"^{pattern}$", name, ours) for pattern, name in NAMES.items() if re.fullmatch(pattern, ours))
    return f"{found}.weight"


@pytest.mark.parametrize("kind", ["q4_1", "q4_k_m"])
def test_a_quantised_gguf_file_is_trained_on(tmp_path: Path, world: World, kind: str) -> None:
    folder = write_run(tmp_path, tiny_qwen2(**SIZES))
    write_gguf(tiny_qwen2(**SIZES), folder / "m.gguf", kind)
    stored = {
        one.name: torch.tensor(gguf.quants.dequantize(one.data, one.tensor_type))
        for one in gguf.GGUFReader(folder / "m.gguf").tensors
    }
    types = {one.tensor_type.name for one in gguf.GGUFReader(folder / "m.gguf").tensors}
    assert types == {"q4_1": {"F32", "Q4_1"}, "q4_k_m": {"F32", "Q4_K", "Q6_K"}}[kind]
    settings = {"model.name_or_path": str(folder), "model.gguf_file": "m.gguf", "optim.name": "adamw"}
    for bits in (0, 4):
        state = start(folder, world, settings | {"quant.bits": bits})
        packed, seen = quantised.layers(state.policy.causal), 0
        for name, layer in state.policy.causal.named_modules():
            if not isinstance(layer, nn.Linear) or "lora" in name or "lm_head" in name:
                continue
            expected, seen = stored[name_there(name.removesuffix(".base_layer"))], seen + 1
            if bits:
                error = (quantised.unpacked(packed[name]).float() - expected).norm() / expected.norm()
                assert 0.01 < error < 0.12, "4 bits were rounded to 4 others"
            else:
                assert torch.equal(layer.weight, expected)
        assert seen == 7 and len(packed) == (7 if bits else 0)
        before = weights(state)
        first, second = step(state)[0], step(state)[0]
        assert first["kl"] == 0 and second["grad_norm"] > 0
        assert all(not torch.equal(before[name], one) for name, one in weights(state).items())
        state.engine.close()
