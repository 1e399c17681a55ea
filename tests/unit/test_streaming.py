"""A reference that is streamed: the log-probs of a resident one, bit for bit, and two layers on the device at most."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel, set_seed

from tests.tiny import TINY, tiny_qwen2
from tests.tiny_run import start, step, weights, write_run
from tests.unit.test_shared_prefix import FAMILIES, completions
from trainer.batch import PackedRows
from trainer.models.packing import filler, micro_batches, pack, pack_groups
from trainer.models.policy import Policy
from trainer.models.reference import ROLE, Reference, make_reference
from trainer.models.scorer import TokenScorer
from trainer.models.shared_prefix import share_prompts
from trainer.models.streaming import Placement, StreamedScorer
from trainer.state import State
from trainer.world import World

CPU = torch.device("cpu")
LAYERS = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"))


def passes(*, shared: bool) -> list[PackedRows]:
    """Several micro-batches of unequal size, the last a filler, as a rank with less to do than the others has."""
    parts = list(micro_batches(completions(), micro_batch=5, token_budget=0, shared=shared))
    packed = [pack_groups(part, device=CPU) if shared else pack(part, pad_id=0, device=CPU) for part in parts]
    assert len(packed) == 3
    return [*packed, filler(token_id=0, device=CPU)]


def model_of(family: str, dtype: torch.dtype = torch.float32, layers: int = 2) -> PreTrainedModel:
    set_seed(0)
    model = FAMILIES[family]()
    for number in range(2, layers):
        model.model.layers.append(type(model.model.layers[0])(model.config, number))
    model.config.num_hidden_layers = layers
    model.config.layer_types = ["full_attention"] * layers
    return model.to(dtype).eval()


def streamed(model: PreTrainedModel, placement: Placement) -> StreamedScorer:
    return StreamedScorer(TokenScorer(placement.frozen(model, ROLE, "host"), 0.7), placement, ROLE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "a row each"])
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_the_resident_model(family: str, shared: bool, dtype: torch.dtype) -> None:
    model = model_of(family, dtype)
    if shared:
        assert share_prompts(model) == ""
    batches = passes(shared=shared)
    found = streamed(model, Placement(CPU))(batches)
    with torch.no_grad():
        expected = [TokenScorer(model, 0.7)(rows, return_hidden=True) for rows in batches]
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours["logps"], theirs["logps"]) and torch.equal(ours["hidden"], theirs["hidden"])


def reference_of(model: PreTrainedModel) -> Reference:
    policy = Policy(model, None, None, None, model.dtype)  # type: ignore[arg-type]
    return make_reference(policy, "cpu", temperature=1.0, placement=Placement(CPU), continued=False)


def sizes(model: PreTrainedModel) -> list[int]:
    """Bytes of each layer, then of what follows them: norm and head."""
    parts: list[Sequence[nn.Module]] = [[layer] for layer in model.model.layers]
    parts.append([model.model.norm, model.lm_head])
    return [sum(one.nbytes for module in part for one in module.parameters()) for part in parts]


def most_of_two(model: PreTrainedModel) -> int:
    each = sizes(model)
    return max(one + other for one, other in pairwise(each))


def test_two_layers_are_on_the_device_at_most_and_none_after() -> None:
    model, placement = model_of("llama", layers=LAYERS), Placement(CPU)
    scorer = streamed(model, placement)
    scorer(passes(shared=False))
    assert placement.peak[ROLE, "device"] == most_of_two(model)
    assert placement.held[ROLE, "device"] == 0
    everything = sum(one.nbytes for one in (*model.parameters(), *model.buffers()))
    assert placement.held[ROLE, "host"] == everything
    del scorer
    assert placement.held[ROLE, "host"] == 0


class Hoarding(Placement):
    """What ``through`` would be if it let go of nothing."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.kept: list[dict[str, Tensor]] = []

    def _bring(self, module: nn.Module, role: str) -> tuple[dict[str, Tensor], None]:
        weights, _ = super()._bring(module, role)
        self.kept.append(dict(weights))
        return weights, None


class Hasty(Placement):
    """And if it brought everything before it begins."""

    def through(self, modules: Sequence[nn.Module], role: str) -> Iterator[Any]:
        everything = [self._bring(module, role) for module in modules]
        yield from super().through(modules, role)
        del everything


@pytest.mark.parametrize("broken", [Hoarding, Hasty])
def test_a_streamer_that_keeps_its_layers_is_counted(broken: type[Placement]) -> None:
    model, placement = model_of("llama", layers=LAYERS), broken(CPU)
    scorer = streamed(model, placement)
    scorer(passes(shared=False))
    assert placement.peak[ROLE, "device"] >= sum(sizes(model)) > most_of_two(model)


def test_a_copy_that_somebody_else_holds_is_counted_too() -> None:
    placement = Placement(CPU)
    held = []
    for run in placement.through(model_of("llama", layers=LAYERS).model.layers, ROLE):
        held.append(run.args[1]["self_attn.q_proj.weight"][:1])  # a view is enough
    assert placement.held[ROLE, "device"] == LAYERS * 32 * 32 * 4
    held.clear()
    assert placement.held[ROLE, "device"] == 0


def test_a_resident_copy_is_counted_on_the_device() -> None:
    model, placement = model_of("llama"), Placement(CPU)
    copied = placement.frozen(model, ROLE, "device")
    assert placement.held[ROLE, "device"] == sum(one.nbytes for one in (*model.parameters(), *model.buffers()))
    assert not placement.held[ROLE, "host"]
    del copied


def test_the_weights_pass_once_for_all_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    model, brought, copy = model_of("qwen2 tied"), [], Placement.copy
    reference = reference_of(model)

    def counted(self: Placement, tensor: Tensor, role: str, place: Any) -> Tensor:
        brought.append(tensor.nbytes)
        return copy(self, tensor, role, place)

    monkeypatch.setattr(Placement, "copy", counted)
    reference.score(TokenScorer(model, 1.0), passes(shared=False) * 3, exact=True)
    assert sum(brought) == sum(sizes(model))


def test_a_copy_keeps_its_ties_and_is_not_the_policy() -> None:
    model = tiny_qwen2()
    copied = Placement(CPU).frozen(model, ROLE, "host")
    assert copied.lm_head.weight is copied.model.embed_tokens.weight
    theirs = {one.data_ptr() for one in model.parameters()}
    assert not any(one.data_ptr() in theirs or one.requires_grad for one in copied.parameters())


SETTINGS: dict[str, dict[str, Any]] = {
    "k3": {},
    "exact": {"grpo.kl.estimator": "exact"},
    "exact bf16": {"grpo.kl.estimator": "exact", "model.dtype": "bf16"},
    "k3 bf16, a row each": {"model.dtype": "bf16", "model.attn": "eager"},
    "exact, a row each, in the reward": {
        "grpo.kl.estimator": "exact",
        "grpo.kl.placement": "reward",
        "model.attn": "eager",
    },
    "lora": {"lora.r": 4},
}


def run_two_steps(folder: Path, world: World, settings: dict[str, Any]) -> tuple[State, list[dict[str, float]]]:
    base = {"lora.r": 0, "engine.micro_batch": 5, "optim.lr": 0.5, "grpo.kl.coef": 0.3, "run.steps": 2}
    state = start(folder, world, base | settings)
    return state, [step(state)[0] for _ in range(2)]


@pytest.mark.parametrize("variant", ["k3 bf16, a row each", "exact"])
def test_a_step_with_a_sharded_reference_is_that_of_the_resident_one(folder: Path, world: World, variant: str) -> None:
    (ours, found), (theirs, expected) = (
        run_two_steps(folder, world, SETTINGS[variant] | {"reference.mode": mode}) for mode in ("zero3", "auto")
    )
    assert ours.reference is not None and ours.reference.kind == "sharded copy"
    left = sum(one.numel() for one in ours.reference.copy.parameters())
    assert left < 0.02 * sum(one.numel() for one in ours.policy.causal.parameters()), "norms and biases alone"
    assert [one["kl"] for one in found] == [one["kl"] for one in expected] and found[1]["kl"] > 1e-6
    moved = weights(theirs)
    assert all(torch.equal(weight, moved[name]) for name, weight in weights(ours).items())


@pytest.mark.parametrize("variant", SETTINGS)
def test_a_step_is_that_of_the_resident_reference(
    folder: Path, world: World, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, call = [], StreamedScorer.__call__
    monkeypatch.setattr(StreamedScorer, "__call__", lambda self, batches: (begun.append(1), call(self, batches))[1])
    other = {"reference.mode": "auto" if variant != "lora" else "adapter"}
    (ours, found), (theirs, expected) = (
        run_two_steps(folder, world, SETTINGS[variant] | mode) for mode in ({"reference.mode": "cpu"}, other)
    )
    assert ours.reference is not None and ours.reference.kind == "streamed copy"
    assert theirs.reference is not None and theirs.reference.streamed is None
    assert any("two at a time, once a step" in note for note in ours.notes)
    measured = [{name: value for name, value in one.items() if "second" not in name} for one in (*found, *expected)]
    for one in measured:
        for memory in ("peak_memory_gib", "held_memory_gib"):
            one.pop(memory)
    assert measured[:2] == measured[2:] and found[1]["kl"] > 1e-6
    moved = weights(theirs)
    assert all(torch.equal(weight, moved[name]) for name, weight in weights(ours).items())
    assert len(begun) == 3, "a small pass at the start, and one a step"
    placement = ours.reference.streamed.placement
    assert placement.held[ROLE, "device"] == 0 < placement.held[ROLE, "host"]
    assert placement.peak[ROLE, "device"] < 0.75 * placement.held[ROLE, "host"]


def test_an_architecture_that_does_more_than_its_layers_stays_resident() -> None:
    model = model_of("llama")
    plain = type(model.model).forward

    def scaled(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        hidden, *rest = plain(self, *args, **kwargs)
        return (hidden * 1.001, *rest)

    model.model.forward = scaled.__get__(model.model)
    reference = reference_of(model)
    assert reference.kind == "resident copy" and reference.streamed is None
    assert reference.where.endswith("LlamaForCausalLM does more than call its layers one after the other")


def test_layers_that_see_a_part_of_the_context_stay_resident() -> None:
    set_seed(0)
    model = MistralForCausalLM(MistralConfig(**TINY, head_dim=8, sliding_window=16)).eval()
    reference = reference_of(model)
    assert reference.kind == "resident copy" and "do not see the whole context" in reference.where


def test_parts_of_other_names_stay_resident() -> None:
    model = model_of("llama")
    model.model.decoder_norm = model.model.norm
    del model.model.norm
    with pytest.raises(AttributeError):
        model(input_ids=torch.arange(3)[None])
    reference = reference_of(model)
    assert reference.kind == "resident copy" and "cannot be called one by one" in reference.where
