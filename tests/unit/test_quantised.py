"""4-bit base weights under adapters, on the CPU: the same training on every stage, and not a byte of the base moves."""

import gc
import hashlib
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from tests.tiny import tiny_qwen2, tiny_tokenizer
from tests.tiny_gguf import write_gguf
from tests.tiny_run import distance, ragged, start, step, weights, write_run
from trainer.batch import PackedRows
from trainer.config.sections import Lora, Model, Quant
from trainer.errors import Refused
from trainer.models import quantised
from trainer.models.fingerprint import fingerprint
from trainer.models.policy import Policy, load_config, load_policy
from trainer.rollout.decoder import Group
from trainer.state import State
from trainer.world import World

SIZES: dict[str, float] = {"hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.1}
QLORA: dict[str, Any] = {"quant.bits": 4, "optim.name": "adamw", "optim.lr": 1e-2}
IDS = torch.arange(3, 35)[None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield write_run(tmp_path_factory.mktemp("run"), tiny_qwen2(**SIZES))


def digest(causal: PreTrainedModel) -> str:
    """SHA-256 of all that is not trained: bytes, scales, and the scales of scales."""
    found = hashlib.sha256()
    for parameter in causal.parameters():
        for part in quantised.parts(parameter) if not parameter.requires_grad else ():
            found.update(part.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def base(state: State) -> str:
    with state.engine.whole(list(state.policy.causal.parameters())):
        return digest(state.policy.causal)


def policy(model: Model, quant: Quant, dtype: torch.dtype = torch.float32) -> Policy:
    return load_policy(model, load_config(model)[0], Lora(r=4), tiny_tokenizer(), dtype, quant)


def test_b57_five_steps_are_the_same_on_every_stage_and_leave_the_base_alone(folder: Path, world: World) -> None:
    """ZeRO-3 without and with gradient checkpointing; with each, rollouts in between. KL is 0 at the first step."""
    found = {}
    for stage, checkpointing in ((0, "on"), (1, "off"), (2, "off"), (3, "off"), (3, "on")):
        settings = {"engine.deepspeed": f"zero{stage}", "engine.gradient_checkpointing": checkpointing}
        state = start(folder, world, QLORA | settings)
        before, adapter = base(state), weights(state)
        records = [step(state)[0] for _ in range(5)]
        found[stage, checkpointing] = [(one["loss"], one["kl"], one["grad_norm"]) for one in records]
        assert base(state) == before, (stage, checkpointing)
        moved = weights(state)
        assert all(not torch.equal(adapter[name], moved[name]) for name in moved), "an adapter was not trained"
        state.engine.close()
    reference = found[2, "off"]
    assert reference[0][1] == 0 and reference[-1][1] > 1e-3
    for cell, losses in found.items():
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(reference), rtol=1e-5, atol=1e-7, msg=str(cell))


def gradient(state: State) -> list[Tensor]:
    """Of the adapter, for fixed rows."""
    ones = torch.ones_like(IDS)
    at = torch.arange(IDS.shape[1] - 1)
    scores = state.engine.module(PackedRows(IDS, ones, ones.cumsum(1) - 1, at, IDS[0, 1:], at * 0))
    trained = [p for p in state.policy.causal.parameters() if p.requires_grad]
    return list(torch.autograd.grad(scores["logps"].sum(), trained))


def roll_out(state: State) -> None:
    state.decoder.generate([Group(0, state.prompts[0])], step=0, generations=2)


def test_b57_a_rollout_leaves_weights_and_gradients_as_they_are(folder: Path, world: World) -> None:
    state = start(folder, world, QLORA, away=0.1)
    before, first = digest(state.policy.causal), gradient(state)
    roll_out(state)
    assert digest(state.policy.causal) == before
    assert all(torch.equal(one, other) for one, other in zip(first, gradient(state), strict=True))
    # The control: bitsandbytes' own forward pass, which re-packs in eval mode on CPUs with AVX512-BF16.
    for layer in quantised.layers(state.policy.causal).values():
        del vars(layer)["forward"]
        layer.support_avx512bf16_for_cpu = True
    with suppress(RuntimeError):  # a CPU that has the re-packing, but not the product
        roll_out(state)
    assert digest(state.policy.causal) != before, "the comparison does not see re-packed weights"
    try:
        after = gradient(state)
    except RuntimeError:
        return  # nor does training go on with them
    assert any(not torch.equal(one, other) for one, other in zip(first, after, strict=True))


@pytest.mark.parametrize("own", [True, False], ids=["ours", "bitsandbytes"])
def test_b57_between_forward_and_backward_pass_nobody_holds_a_weight(folder: Path, own: bool) -> None:
    """ZeRO-3 takes it away and brings it back; bitsandbytes' own product holds what it was given (the control)."""
    causal = policy(Model(name_or_path=str(folder / "model")), Quant(bits=4)).causal
    layer: Any = next(iter(quantised.layers(causal).values()))
    if not own:
        del vars(layer)["forward"]
    packed, gone = layer.weight.data.clone(), []
    layer.weight.data = gathered = packed.clone()
    weakref.finalize(gathered.untyped_storage(), gone.append, True)
    hidden = torch.randn(3, 64, requires_grad=True)
    out = layer(hidden)
    layer.weight.data = torch.empty(0, dtype=packed.dtype)
    del gathered
    gc.collect()
    assert bool(gone) == own
    layer.weight.data = packed
    out.sum().backward()
    torch.testing.assert_close(hidden.grad, quantised.unpacked(layer).sum(0).expand(3, 64))
    torch.testing.assert_close(out, nn.functional.linear(hidden, quantised.unpacked(layer), layer.bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_b56_the_base_is_loaded_in_one_dtype_and_packed_once(folder: Path, world: World, dtype: torch.dtype) -> None:
    """The engine casts its module; packed bytes that are cast are other weights."""
    name = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
    state = start(folder, world, QLORA | {"model.dtype": name, "engine.deepspeed": "zero1"})
    causal, packed = state.policy.causal, quantised.layers(state.policy.causal)
    assert digest(causal) == digest(policy(Model(name_or_path=str(folder / "model")), Quant(bits=4), dtype).causal)
    assert len(packed) == 14
    for layer in packed.values():
        assert layer.compute_dtype == layer.weight.quant_state.dtype == dtype
        assert layer.weight.dtype == torch.bfloat16 and not layer.support_avx512bf16_for_cpu
    plain = [p for p in causal.parameters() if not quantised.is_packed(p)]
    assert {p.dtype for p in plain} == {dtype}
    original = tiny_qwen2(**SIZES).model.layers[1].mlp.up_proj.weight
    (up,) = (layer for name, layer in packed.items() if "layers.1.mlp.up_proj" in name)
    assert (quantised.unpacked(up).float() - original).norm() < 0.12 * original.norm()
    step(state)
    state.engine.close()


def test_a_packed_weight_takes_half_a_byte_and_the_head_stays(folder: Path) -> None:
    def loaded(double_quant: bool) -> tuple[PreTrainedModel, float]:
        causal = policy(Model(name_or_path=str(folder / "model")), Quant(bits=4, double_quant=double_quant)).causal
        packed = quantised.layers(causal).values()
        taken = sum(part.nbytes for layer in packed for part in quantised.parts(layer.weight))
        return causal, taken / sum(layer.in_features * layer.out_features for layer in packed)

    assert loaded(double_quant=False)[1] == 0.5625
    causal, taken = loaded(double_quant=True)
    assert 0.515 < taken < 0.525
    assert type(causal.get_output_embeddings()) is nn.Linear
    assert causal.get_output_embeddings().weight is causal.get_input_embeddings().weight
    assert not [name for name, _ in causal.named_parameters() if "lora" in name and ("head" in name or "embed" in name)]


def test_prompts_are_shared_over_4_bit_weights_too(folder: Path, world: World) -> None:
    """In training as in rollouts: with and without, the same update and the same completions."""
    found = []
    each: tuple[dict[str, Any], ...] = ({}, {"model.attn": "eager"})
    for settings in each:
        settings |= QLORA | ragged(folder) | {"optim.name": "sgd", "optim.lr": 0.1}
        state = start(folder, world, settings, away=0.1)
        assert state.shared_prompts == ("model.attn" not in settings)
        metrics, _ = step(state)
        found.append((metrics, weights(state)))
        state.engine.close()
    (shared, one), (plain, other) = found
    for name in ("loss", "kl", "grad_norm"):
        assert shared[name] == pytest.approx(plain[name], rel=1e-5)
    assert distance(one, other) < 1e-6
    drawn = [step(start(folder, world, QLORA | {"rollout.engine": engine}, away=0.1))[1] for engine in ("shared", "hf")]
    assert [one.ids for one in drawn[0]] == [one.ids for one in drawn[1]]


def test_a_checkpoint_holds_no_base_weights_under_any_name(folder: Path, world: World, tmp_path: Path) -> None:
    """A tied head has three names, and the scales of packed weights are no parameters."""
    for bits in (0, 4):
        state = start(folder, world, QLORA | {"quant.bits": bits})
        state.engine.save(tmp_path / str(bits) / "deepspeed")
        state.engine.close()
        (file,) = (tmp_path / str(bits) / "deepspeed").glob("*model_states.pt")
        saved = set(torch.load(file, weights_only=False)["module"])
        assert saved and all(".lora_" in name for name in saved)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_b57_a_gguf_file_and_a_packed_folder_give_the_same_weights(
    folder: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    """A GGUF file is unpacked, then packed; files that hold NF4 are taken as they are, whatever they are called."""
    write_gguf(tiny_qwen2(**SIZES), tmp_path / "m.gguf")
    plain = policy(Model(name_or_path=str(folder / "model")), Quant(bits=4), dtype)
    from_gguf = policy(Model(name_or_path=str(tmp_path), gguf_file="m.gguf"), Quant(bits=4), dtype)
    how = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float16,
    )
    load: Any = AutoModelForCausalLM.from_pretrained
    load(folder / "model", dtype=dtype, quantization_config=how, device_map={"": "cpu"}).save_pretrained(tmp_path)
    stored = policy(Model(name_or_path=str(tmp_path)), Quant(bits=4), dtype)
    assert len({fingerprint(one.causal) for one in (plain, from_gguf, stored)}) == 1
    for one in (from_gguf, stored):
        assert digest(one.causal) == digest(plain.causal)
        assert {layer.compute_dtype for layer in quantised.layers(one.causal).values()} == {dtype}


def test_b62_the_fingerprint_sees_scales(folder: Path, tmp_path: Path) -> None:
    """All weights of a layer doubled have the bytes of before."""
    doubled = tiny_qwen2(**SIZES)
    doubled.model.layers[0].mlp.up_proj.weight.data *= 2
    doubled.save_pretrained(tmp_path)
    found = [policy(Model(name_or_path=str(where)), Quant(bits=4)).causal for where in (folder / "model", tmp_path)]
    one, other = (next(iter(layer for name, layer in quantised.layers(c).items() if "up_proj" in name)) for c in found)
    assert torch.equal(one.weight.view(torch.uint8), other.weight.view(torch.uint8))
    assert fingerprint(found[0]) != fingerprint(found[1])


def test_b65_without_bitsandbytes_or_its_library_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """No CUDA is needed, and a run without 4 bits needs no bitsandbytes."""
    cpu = torch.device("cpu")
    quantised.check_backend(Quant(bits=4), cpu)

    def broken(*_: Any) -> None:
        raise RuntimeError("libbitsandbytes_cpu.so: cannot open shared object file")

    with monkeypatch.context() as patch:
        patch.setattr(quantised, "_packed", broken)
        with pytest.raises(Refused, match=r"quant.bits = 4: .* on cpu: libbitsandbytes_cpu.so: .*\. Fix: .*bits = 0"):
            quantised.check_backend(Quant(bits=4), cpu)
        quantised.check_backend(Quant(bits=0), cpu)
    monkeypatch.setattr(quantised, "find_spec", lambda name: None)
    with pytest.raises(Refused, match=r"needs the package bitsandbytes, which is not installed\. Fix: pip install"):
        quantised.check_backend(Quant(bits=4), cpu)
    assert quantised.layers(tiny_qwen2()) == {}
