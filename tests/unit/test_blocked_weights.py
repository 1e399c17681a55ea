"""Products by blocked copies of the weights: the same values, for as long as they are asked for."""

import pytest
import torch
from torch import Tensor, nn

from tests.tiny import tiny_qwen2, tiny_tokenizer
from trainer.batch import Prompt
from trainer.config.grpo import Rollout
from trainer.models import blocked_weights
from trainer.models.shared_prefix import share_prompts
from trainer.record.memory import PeakMemory
from trainer.rollout.decoder import Group
from trainer.rollout.shared import SharedDecoder


class Quantised(nn.Linear):
    """As bitsandbytes makes them: a linear layer by inheritance, whose weight holds something else."""


def layers(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 192), nn.SiLU(), nn.Linear(192, 48, bias=False)).to(dtype)


def blocked(model: nn.Module) -> list[bool]:
    return ["forward" in layer.__dict__ for layer in model.modules() if isinstance(layer, nn.Linear)]


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-8)])
@pytest.mark.parametrize("rows", [1, 8, 100])
@torch.no_grad()
def test_products_are_the_same(dtype: torch.dtype, error: float, rows: int) -> None:
    model, hidden = layers(dtype), torch.randn(rows, 3, 64).to(dtype)
    expected = model(hidden)
    with blocked_weights.blocked_weights(model):
        assert blocked(model) == [True, True]
        torch.testing.assert_close(model(hidden), expected, atol=error, rtol=error)


@torch.no_grad()
def test_they_end_with_the_block_and_a_new_one_reads_the_weights_anew() -> None:
    model, hidden = layers(), torch.randn(8, 64)
    with pytest.raises(InterruptedError), blocked_weights.blocked_weights(model):
        raise InterruptedError
    assert blocked(model) == [False, False]
    model[2].weight.mul_(2)
    doubled = model(hidden)
    with blocked_weights.blocked_weights(model):
        torch.testing.assert_close(model(hidden), doubled)


@torch.no_grad()
def test_what_has_no_blocks_is_left_alone() -> None:
    patched = nn.Linear(8, 8)
    patched.forward = lambda hidden: hidden  # type: ignore[method-assign]
    sharded = nn.Linear(8, 8)
    sharded.weight.data = torch.empty(0)
    model = nn.Sequential(nn.Linear(8, 8).double(), Quantised(8, 8), sharded, patched)
    with blocked_weights.blocked_weights(model):
        assert blocked(model) == [False, False, False, True]
        assert patched(torch.ones(1)) == 1
    assert patched(torch.ones(1)) == 1


@torch.no_grad()
def test_the_copies_count_as_memory() -> None:
    model = layers()
    with PeakMemory(torch.device("cpu")) as memory:
        base = memory.take_peak()
        with blocked_weights.blocked_weights(model):
            pass
        assert memory.take_peak() - base == 4 * (64 * 192 + 192 * 48)
        assert memory.take_peak() == base


def test_a_rollout_reads_blocked_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    model, read = tiny_qwen2().eval(), set()
    assert share_prompts(model) == ""
    product = blocked_weights._product

    def spy(layer: nn.Linear) -> object:
        def multiply(hidden: Tensor) -> Tensor:
            read.add(layer)
            return inner(hidden)

        inner = product(layer)
        return multiply

    monkeypatch.setattr(blocked_weights, "_product", spy)
    group = Group(0, Prompt(0, "", (5, 6, 7), None, {}))
    SharedDecoder(model, tiny_tokenizer(), Rollout(max_new_tokens=3), (), seed=3).generate(
        [group], step=0, generations=2
    )
    linears = {layer for layer in model.modules() if isinstance(layer, nn.Linear)}
    assert read == linears and model.get_output_embeddings() in read
    assert not any(blocked(model))
