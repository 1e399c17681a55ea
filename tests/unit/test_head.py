"""The chunked head against a naive log-softmax in float64, its gradients, and its memory. Row B89."""

import pytest
import torch
from torch import nn

from trainer.models import head
from trainer.models.head import ChunkedHead
from trainer.record.memory import PeakMemory


def naive(hidden, weight, targets, temperature, reference_hidden, reference_weight):
    logps = (hidden.double() @ weight.double().T / temperature).log_softmax(-1)
    reference = (reference_hidden.double() @ reference_weight.double().T / temperature).log_softmax(-1)
    return (
        logps.gather(-1, targets[:, None])[:, 0],
        -(logps.exp() * logps).sum(-1),
        (logps.exp() * (logps - reference)).sum(-1),
    )


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("chunk_rows", [1, 7, 100])
def test_values_and_gradients_equal_the_naive_head(
    monkeypatch: pytest.MonkeyPatch, frozen: bool, chunk_rows: int
) -> None:
    torch.manual_seed(0)
    vocabulary, width, rows = 50, 16, 20
    monkeypatch.setattr(head, "CHUNK_BYTES", 4 * vocabulary * chunk_rows)
    lm_head = nn.Linear(width, vocabulary, bias=False)
    lm_head.weight.requires_grad_(not frozen)
    reference_weight = torch.randn(vocabulary, width)
    hidden = torch.randn(rows, width, requires_grad=True)
    reference_hidden, targets = torch.randn(rows, width), torch.randint(vocabulary, (rows,))
    mix = torch.randn(2, rows)

    found = ChunkedHead(lm_head, 0.7)(hidden, targets, reference_hidden, reference_weight)
    inputs = [hidden] if frozen else [hidden, lm_head.weight]
    gradients = torch.autograd.grad((mix[0] * found[0] + mix[1] * found[2]).sum(), inputs)

    expected = naive(hidden, lm_head.weight, targets, 0.7, reference_hidden, reference_weight)
    expected_gradients = torch.autograd.grad((mix[0] * expected[0] + mix[1] * expected[2]).sum(), inputs)
    for one, other in zip((*found, *gradients), (*expected, *expected_gradients), strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-4, atol=1e-5)
    assert not found[1].requires_grad
    if frozen:
        assert lm_head.weight.grad is None


def test_adding_a_constant_to_the_logits_changes_nothing() -> None:
    """KL, entropy and log-prob are of distributions, so a reward model's or anyone's unnormalised logits cannot
    enter."""
    torch.manual_seed(0)
    hidden, targets = torch.randn(5, 8), torch.arange(5)
    lm_head, shifted = nn.Linear(8, 11), nn.Linear(8, 11)
    shifted.weight, shifted.bias = lm_head.weight, nn.Parameter(lm_head.bias + 3.0)
    reference = torch.randn(5, 8)
    for one, other in zip(
        ChunkedHead(lm_head, 1.0)(hidden, targets, reference, None),
        ChunkedHead(shifted, 1.0)(hidden, targets, reference, None),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_without_a_reference_there_is_no_kl_and_with_itself_it_is_zero() -> None:
    torch.manual_seed(0)
    lm_head = nn.Linear(8, 11, bias=False)
    hidden, targets = torch.randn(5, 8), torch.arange(5)
    assert ChunkedHead(lm_head, 1.0)(hidden, targets, hidden, None)[2].abs().max() == 0
    assert ChunkedHead(lm_head, 1.0)(hidden, targets, None, None)[2].abs().max() == 0


def test_b89_the_full_vocabulary_never_stands_in_memory() -> None:
    """151,936 columns, 256 scored tokens: the naive log-softmax holds 148 MiB per copy, a chunk holds 64."""
    vocabulary, width, rows = 151_936, 8, 256
    lm_head = nn.Linear(width, vocabulary, bias=False).requires_grad_(False)
    hidden = torch.randn(rows, width, requires_grad=True)
    largest = 0
    real = torch.nn.functional.linear

    def spy(*args):
        nonlocal largest
        out = real(*args)
        largest = max(largest, out.numel() * out.element_size())
        return out

    head.linear = spy
    try:
        logps, _, _ = ChunkedHead(lm_head, 1.0)(hidden, torch.arange(rows), None, None)
        logps.sum().backward()
    finally:
        head.linear = real
    assert largest <= head.CHUNK_BYTES
    expected = (hidden @ lm_head.weight.T).log_softmax(-1)[torch.arange(rows), torch.arange(rows)]
    torch.testing.assert_close(logps, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("exact", [False, True])
def test_b89_the_estimate_at_the_start_is_what_scoring_holds(exact: bool) -> None:
    """Counted on 151,936 columns: several chunks, forward and backward."""
    vocabulary, width, rows = 151_936, 4, 512
    weight = torch.randn(vocabulary, width)
    lm_head = nn.Linear(width, vocabulary, bias=False).requires_grad_(False)
    hidden = torch.randn(rows, width, requires_grad=True)
    reference = (torch.randn(rows, width), weight) if exact else (None, None)
    with PeakMemory(torch.device("cpu")) as memory:
        memory.take_peak()
        before = memory.take_peak()
        logps, _, kl = ChunkedHead(lm_head, 1.0)(hidden, torch.arange(rows), *reference)
        (logps + kl).sum().backward()
        held = memory.take_peak() - before
    assert held / head.peak_bytes(vocabulary, rows, exact=exact) == pytest.approx(1, abs=0.06)
    assert head.whole_bytes(vocabulary, 4096) > 20 * held
