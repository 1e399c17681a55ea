"""The number of a weight's bits: any bit counts, and most ranks are right."""

import pytest
import torch
from torch import nn

from trainer.models.checksum import checksums, unlike

INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.uint8: torch.uint8}


class Holder(nn.Module):
    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(tensor, requires_grad=False)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_f21_every_single_bit_counts(dtype: torch.dtype) -> None:
    module = Holder((torch.arange(12).reshape(3, 4).T * 11).to(dtype))
    before = checksums(module)
    words = module.weight.data.T.flatten().view(INTEGERS[dtype])
    for place in (0, 5, 11):
        for bit in range(8 * words.element_size()):
            flipped = torch.tensor([1 << bit]).view(words.dtype)[0]
            words[place] ^= flipped
            assert checksums(module) != before
            words[place] ^= flipped
    assert checksums(module) == before
    words[[0, 5]] = words[[5, 0]]
    assert checksums(module) != before


def test_chunks_are_one_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Holder(torch.randn(1000))
    whole = checksums(module)
    monkeypatch.setattr("trainer.models.checksum.CHUNK", 7)
    assert checksums(module) == whole


def test_the_one_that_differs_from_most_is_named_and_of_two_both() -> None:
    same = {"a": 1, "b": 2}
    assert unlike([same, same, same]) == {}
    assert unlike([same, {"a": 1, "b": 3}, same]) == {"b": [1]}
    assert unlike([{"a": 9, "b": 2}, same]) == {"a": [0, 1]}
    assert unlike([same, {"a": 9, "b": 2}, {"a": 8, "b": 2}]) == {"a": [0, 1, 2]}
