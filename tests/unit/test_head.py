"""The chunked head against a naive log-softmax in float64: values, gradients, operations, memory. Row B89."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from trainer.models import head
from trainer.models.head import ChunkedHead
from trainer.record.memory import PeakMemory

VOCABULARY, WIDTH, ROWS = 50, 16, 20
QWEN = 151_936
"""Columns of Qwen2.5's head."""

by_frozen = pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
by_exact = pytest.mark.parametrize("exact", [False, True], ids=["no reference", "exact KL"])


def naive(
    hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, reference: tuple[Tensor, ...], temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, entropies and KLs in float64; ``reference``: hidden states, weight, bias."""
    logps = ((hidden.double() @ weight.double().T + bias.double()) / temperature).log_softmax(-1)
    other, its_weight, its_bias = (one.detach().double() for one in reference)
    reference_logps = ((other @ its_weight.T + its_bias) / temperature).log_softmax(-1)
    probs = logps.exp()
    return (
        logps.gather(-1, targets[:, None])[:, 0],
        -(probs * logps).sum(-1),
        (probs * (logps - reference_logps)).sum(-1),
    )


def make_head(frozen: bool, *, bias: bool = False, vocabulary: int = VOCABULARY, width: int = WIDTH) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(width, vocabulary, bias=bias).requires_grad_(not frozen)


def in_chunks(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(head, "CHUNK_ROWS", rows)


@by_frozen
@pytest.mark.parametrize("own_weight", [False, True], ids=["the same head", "its own head"])
@pytest.mark.parametrize("chunk_rows", [1, 7, 100])
def test_values_and_gradients_equal_the_naive_head(
    monkeypatch: pytest.MonkeyPatch, frozen: bool, own_weight: bool, chunk_rows: int
) -> None:
    in_chunks(monkeypatch, chunk_rows)
    lm_head = make_head(frozen, bias=True)
    weight, bias = lm_head.weight, lm_head.bias
    hidden = torch.randn(ROWS, WIDTH, requires_grad=True)
    reference_hidden, targets = torch.randn(ROWS, WIDTH), torch.randint(VOCABULARY, (ROWS,))
    reference_weight = torch.randn(VOCABULARY, WIDTH) if own_weight else None
    mix = torch.randn(2, ROWS)

    found = ChunkedHead(lm_head, 0.7)(hidden, targets, reference_hidden, reference_weight)
    inputs = [hidden] if frozen else [hidden, weight, bias]
    gradients = torch.autograd.grad((mix[0] * found[0] + mix[1] * found[2]).sum(), inputs)

    reference = (reference_hidden, weight if reference_weight is None else reference_weight, bias)
    expected = naive(hidden, weight, bias, targets, reference, 0.7)
    expected_gradients = torch.autograd.grad((mix[0] * expected[0] + mix[1] * expected[2]).sum(), inputs)
    for one, other in zip((*found, *gradients), (*expected, *expected_gradients), strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-5, atol=1e-5)
    assert not found[1].requires_grad


@by_frozen
@by_exact
def test_gradients_are_the_derivatives(monkeypatch: pytest.MonkeyPatch, frozen: bool, exact: bool) -> None:
    """By finite differences in float64, with rows of all magnitudes of p_y."""
    in_chunks(monkeypatch, 3)
    chunked = ChunkedHead(make_head(frozen, bias=True, vocabulary=7, width=4).double(), 0.7)
    hidden = (torch.randn(8, 4).double() * torch.linspace(0.1, 8, 8)[:, None]).requires_grad_()
    reference = (torch.randn(8, 4).double(), torch.randn(7, 4).double()) if exact else (None, None)
    targets = torch.randint(7, (8,))

    def terms(*inputs: Tensor) -> list[Tensor]:
        return [term for term in chunked(inputs[0], targets, *reference) if term.requires_grad]

    inputs = (hidden,) if frozen else (hidden, chunked.weight, chunked.bias)
    assert len(terms(*inputs)) == (2 if exact else 1)
    assert torch.autograd.gradcheck(terms, inputs)


def test_a_token_that_cannot_occur_contributes_nothing() -> None:
    lm_head = make_head(frozen=False, bias=True)
    with torch.no_grad():
        lm_head.bias[40:] = float("-inf")
    hidden, reference = torch.randn(2, ROWS, WIDTH)
    hidden.requires_grad_()
    targets = torch.randint(40, (ROWS,))
    found = ChunkedHead(lm_head, 1.0)(hidden, targets, reference, None)
    gradients = torch.autograd.grad(sum(found[::2]).sum(), [hidden, lm_head.weight])
    weight, bias = lm_head.weight[:40], lm_head.bias[:40]
    expected = naive(hidden, weight, bias, targets, (reference, weight, bias), 1.0)
    by_hidden, by_weight = torch.autograd.grad(sum(expected[::2]).sum(), [hidden, lm_head.weight])
    for one, other in zip((*found, *gradients), (*expected, by_hidden, by_weight), strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-5, atol=1e-5)


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
    kl = ChunkedHead(lm_head, 1.0)(hidden, targets, None, None)[2]
    assert kl.abs().max() == 0 and not kl.requires_grad


def test_a_reference_with_its_own_head_keeps_the_bias_it_began_with() -> None:
    """Full fine-tuning of a head with a bias: the KL is measured from the bias before the first update."""
    lm_head = make_head(frozen=False, bias=True)
    chunked, weight, bias = ChunkedHead(lm_head, 1.0), lm_head.weight.detach().clone(), lm_head.bias.detach().clone()
    hidden, targets = torch.randn(ROWS, WIDTH), torch.randint(VOCABULARY, (ROWS,))
    with torch.no_grad():
        lm_head.bias += torch.randn(VOCABULARY)
    found = chunked(hidden, targets, hidden, weight)[2]
    expected = naive(hidden, lm_head.weight, lm_head.bias, targets, (hidden, weight, bias), 1.0)[2]
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    assert expected.min() > 0.1


def test_a_head_that_is_its_embedding_gets_the_sum_of_both_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    in_chunks(monkeypatch, 7)
    lm_head = make_head(frozen=False)
    embedding = nn.Embedding(VOCABULARY, WIDTH)
    embedding.weight = lm_head.weight
    ids, targets = torch.randint(VOCABULARY, (2, ROWS))
    ChunkedHead(lm_head, 1.0)(embedding(ids), targets, None, None)[0].sum().backward()
    assert lm_head.weight.grad is not None
    weight = lm_head.weight.detach().double().requires_grad_()
    (weight[ids] @ weight.T).log_softmax(-1).gather(1, targets[:, None]).sum().backward()
    torch.testing.assert_close(lm_head.weight.grad.double(), weight.grad, rtol=1e-5, atol=1e-5)


@by_frozen
def test_the_weight_of_the_backward_is_the_one_that_is_there_then(frozen: bool) -> None:
    """ZeRO-3 releases a Parameter's storage after the forward, and gathers it into another before the backward."""
    gradients = []
    for released in (False, True):
        lm_head = make_head(frozen)
        hidden = torch.randn(ROWS, WIDTH, requires_grad=True)
        logps = ChunkedHead(lm_head, 1.0)(hidden, torch.arange(ROWS), None, None)[0]
        if released:
            whole = lm_head.weight.data.clone()
            lm_head.weight.data.fill_(float("nan"))
            lm_head.weight.data = whole
        logps.sum().backward()
        gradients.append([hidden.grad, lm_head.weight.grad])
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


def test_in_bf16_many_chunks_add_up_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """600 chunks whose gradients point one way: a sum in bf16 stands still at 256 times what a chunk adds."""
    rows, vocabulary = 600, 8
    in_chunks(monkeypatch, 1)
    lm_head = make_head(frozen=False, bias=True, vocabulary=vocabulary).bfloat16()
    hidden = (1 + 0.1 * torch.randn(rows, WIDTH)).bfloat16()
    targets = torch.zeros(rows, dtype=torch.long)
    logps = ChunkedHead(lm_head, 0.7)(hidden.requires_grad_(), targets, None, None)[0]
    assert logps.dtype == torch.float32
    found = torch.autograd.grad(logps.sum(), [lm_head.weight, lm_head.bias, hidden])
    weight, bias, inputs = (one.detach().double().requires_grad_() for one in (lm_head.weight, lm_head.bias, hidden))
    expected_logps = naive(inputs, weight, bias, targets, (inputs, weight, bias), 0.7)[0]
    expected = torch.autograd.grad(expected_logps.sum(), [weight, bias, inputs])
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.bfloat16
        assert ((one.double() - other).norm() / other.norm()).item() < 2**-8


@by_frozen
@by_exact
def test_in_bf16_only_the_products_are_rounded(monkeypatch: pytest.MonkeyPatch, frozen: bool, exact: bool) -> None:
    in_chunks(monkeypatch, 7)
    lm_head = make_head(frozen, bias=True).bfloat16()
    weight, bias = lm_head.weight, lm_head.bias
    hidden, reference_hidden = torch.randn(2, ROWS, WIDTH).bfloat16()
    hidden.requires_grad_()
    targets = torch.randint(VOCABULARY, (ROWS,))
    logps, entropy, kl = ChunkedHead(lm_head, 0.7)(hidden, targets, reference_hidden if exact else None, None)
    expected = naive(hidden, weight, bias, targets, (reference_hidden, weight, bias), 0.7)
    inputs = [hidden] if frozen else [hidden, weight, bias]
    found = [logps, entropy, *torch.autograd.grad((logps + 2 * kl).sum(), inputs)]
    gradients = torch.autograd.grad((expected[0] + (2 if exact else 0) * expected[2]).sum(), inputs)
    for one, other in zip(found, (*expected[:2], *gradients), strict=True):
        assert ((one.double() - other).norm() / other.norm()).item() < 2**-7


@by_frozen
@by_exact
def test_products_with_the_vocabulary_are_counted(frozen: bool, exact: bool) -> None:
    """Of 2NVH operations each: logits, and gradient of the hidden states by every term; for a trained head logits
    twice, and one gradient each of hidden states and weight. Without gradients, logits alone."""
    lm_head = make_head(frozen)
    hidden, targets = torch.randn(ROWS, WIDTH), torch.randint(VOCABULARY, (ROWS,))
    reference = (torch.randn(ROWS, WIDTH), None) if exact else (None, None)

    def products(gradient: bool) -> float:
        with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(gradient):
            logps, _, kl = ChunkedHead(lm_head, 1.0)(hidden.requires_grad_(gradient), targets, *reference)
            if gradient:
                (logps + kl).sum().backward()
        return counter.get_total_flops() / (2 * ROWS * VOCABULARY * WIDTH)

    terms = 1 + exact
    assert products(gradient=False) == terms
    assert products(gradient=True) == (terms + terms if frozen else terms + terms + 2)


class _Largest(TorchDispatchMode):
    """Most elements that any operator returned."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.elements = max(self.elements, result.numel())
        return result


def test_a_frozen_head_makes_no_gradient_of_its_weight() -> None:
    """LoRA: nothing of the vocabulary's size is there in the backward pass."""
    largest = {}
    for frozen in (False, True):
        lm_head = make_head(frozen)
        hidden = torch.randn(ROWS, WIDTH, requires_grad=True)
        terms = ChunkedHead(lm_head, 1.0)(hidden, torch.arange(ROWS), torch.randn(ROWS, WIDTH), None)
        with _Largest() as seen:
            (terms[0] + terms[2]).sum().backward()
        largest[frozen] = seen.elements
        assert (lm_head.weight.grad is None) == frozen and hidden.grad is not None
    assert largest == {False: ROWS * VOCABULARY, True: ROWS * WIDTH}


def held(rows: int, *, exact: bool, frozen: bool = True, dtype: torch.dtype = torch.float32) -> int:
    """Bytes at the peak of a forward and backward pass on Qwen2.5's vocabulary and a tiny body."""
    width = 4
    lm_head = make_head(frozen, vocabulary=QWEN, width=width).to(dtype)
    hidden = torch.randn(rows, width, dtype=dtype, requires_grad=True)
    reference = (torch.randn(rows, width, dtype=dtype), lm_head.weight.detach()) if exact else (None, None)
    with PeakMemory(torch.device("cpu")) as memory:
        memory.take_peak()
        before = memory.take_peak()
        logps, _, kl = ChunkedHead(lm_head, 1.0)(hidden, torch.arange(rows), *reference)
        (logps + kl).sum().backward()
        return memory.take_peak() - before


@by_exact
def test_b89_the_estimate_at_the_start_is_what_scoring_holds(monkeypatch: pytest.MonkeyPatch, exact: bool) -> None:
    in_chunks(monkeypatch, 32)
    rows = 80
    for frozen in (True, False):
        for dtype in (torch.float32, torch.bfloat16):
            estimate = head.peak_bytes(QWEN, rows, exact=exact)
            found = held(rows, exact=exact, frozen=frozen, dtype=dtype)
            gradient = 0 if frozen else 4 * QWEN * 4
            assert (found - gradient) / estimate == pytest.approx(1, abs=0.06)
    assert head.whole_bytes(QWEN, 4096) > 20 * found


def test_b89_the_peak_does_not_grow_with_the_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    in_chunks(monkeypatch, 32)
    few, many = (held(rows, exact=False, frozen=False) for rows in (64, 128))
    assert many < 1.01 * few
    assert head.peak_bytes(QWEN, 64, exact=False) == head.peak_bytes(QWEN, 128, exact=False)
    assert head.peak_bytes(QWEN, 16, exact=False) == head.peak_bytes(QWEN, 32, exact=False) / 2
