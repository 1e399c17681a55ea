"""What two ranks export, loaded by plain PEFT and plain transformers: one launch runs the cells of exports.py."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.dist.exports import BASES, IDS, KINDS, STAGES
from tests.dist.launch import run_ranks
from tests.tiny import tiny_qwen2, tiny_tokenizer
from tests.tiny_run import write_run

Cells = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_run(tmp_path_factory.mktemp("run"))
    for base in BASES:
        tiny_qwen2(tied=base == "tied").save_pretrained(folder / base)
        tiny_tokenizer().save_pretrained(folder / base)
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> Cells:
    """What both ranks found, by cell."""
    worker, results = str(Path(__file__).with_name("exports.py")), folder / "results.json"
    for rank in run_ranks([worker, str(folder), str(results)], 2, 29731, TORCH_DISTRIBUTED_DEBUG="OFF"):
        assert rank.code == 0, rank.output[-3000:]
    return json.loads(results.read_text())


@torch.no_grad()
def gap(model: PreTrainedModel | PeftModel, expected: Tensor) -> float:
    """Largest difference of the logits, relative to the largest."""
    return float((model.eval()(input_ids=IDS).logits - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("stage", STAGES)
def test_i4_what_two_ranks_export_is_the_policy(found: Cells, folder: Path, stage: str, base: str, kind: str) -> None:
    """Also B62 (PEFT's own names), B61 and B73 (a tied head is stored once, and comes back), B63, B66 (all whole)."""
    one, other = found[f"{stage} {base} {kind}"]
    assert "failed" not in one, one["failed"]
    assert one == other and one["next step"] > 0
    written = Path(one["written"])
    expected = torch.load(written.parent / "expected.pt")
    stored = load_file(written / f"{'adapter_model' if kind != 'full' else 'model'}.safetensors")
    assert all(tensor.numel() for tensor in stored.values())
    assert not [path for path in written.iterdir() if path.is_dir()], "the frozen start adapter is no part of it"
    untrained = AutoModelForCausalLM.from_pretrained(folder / base)
    assert gap(untrained, expected["logits"]) > 1e-3, "an export without effect proves nothing"
    if kind == "full":
        model, info = AutoModelForCausalLM.from_pretrained(written, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
        assert set(stored) == set(expected["weights"]) == {name for name, _ in model.named_parameters()}
        assert ("lm_head.weight" in stored) == (base == "untied")
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == (base == "tied")
        assert model.config.tie_word_embeddings == (base == "tied")
        for name, tensor in expected["weights"].items():
            assert torch.equal(stored[name], tensor), name
    else:
        model = PeftModel.from_pretrained(untrained, written)
        assert set(stored) == set(get_peft_model_state_dict(model))
        assert len(stored) == len(expected["weights"]) == 28
        for name, tensor in expected["weights"].items():
            assert torch.equal(stored[f"base_model.model.{name}".replace(".default", "")], tensor), name
    assert gap(model, expected["logits"]) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", STAGES)
def test_b63_b66_a_checkpoint_holds_the_same_weights(found: Cells, stage: str, kind: str) -> None:
    one, _ = found[f"{stage} untied {kind}"]
    name = f"{'adapter_model' if kind != 'full' else 'model'}.safetensors"
    exported, light = (load_file(Path(one[where]) / name) for where in ("written", "light"))
    assert set(exported) == set(light)
    assert all(torch.equal(exported[name], light[name]) for name in light)


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_b63_b66_weights_that_were_not_gathered_are_named_on_every_rank(found: Cells, kind: str) -> None:
    one, other = found["failures"]
    assert one == other
    named = "q_proj.lora_A.default.weight" if kind == "lora" else "model.embed_tokens.weight"
    assert "weights are empty" in one[f"{kind} gather"] and named in one[f"{kind} gather"]


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_i4_an_export_that_differs_ends_every_rank_and_keeps_its_place_free(
    found: Cells, folder: Path, kind: str
) -> None:
    one, other = found["failures"]
    assert one[f"{kind} verify"] == other[f"{kind} verify"] == "differs, on rank 0"
    name = "adapter" if kind == "lora" else "model"
    assert not (folder / "bad" / name).exists() and (folder / "bad" / f"{name}.unverified").is_dir()
