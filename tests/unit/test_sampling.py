"""Keyed sampling: the right distribution, the filters of transformers, and samples that nothing but their key
decides."""

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import trainer.rollout.decoder
from tests.tiny import tiny_qwen2, tiny_tokenizer
from trainer.batch import Prompt
from trainer.config.grpo import Rollout
from trainer.errors import Stopped
from trainer.rollout.decoder import Group
from trainer.rollout.hf import HfDecoder
from trainer.rollout.sampling import KeyedSampler, NoiseKey, Sampler, inverse_cdf

BELOW_ONE = float(np.nextafter(1, 0))


def test_each_token_owns_the_slice_of_its_probability() -> None:
    probabilities = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.125, 0.125, 0.0]])
    edges = {0.0: 1, 0.2499: 1, 0.25: 3, 0.7499: 3, 0.75: 4, 0.8749: 4, 0.875: 5, BELOW_ONE: 5, 1.0: 5}
    drawn = inverse_cdf(probabilities.expand(len(edges), -1), torch.tensor(list(edges), dtype=torch.float64))
    assert drawn.tolist() == list(edges.values())


def test_a_grid_of_uniforms_gives_every_token_its_share() -> None:
    torch.manual_seed(0)
    probabilities = torch.randn(50).softmax(-1)
    uniforms = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    counts = torch.bincount(inverse_cdf(probabilities.expand(100_000, -1), uniforms), minlength=50)
    assert (counts / 100_000 - probabilities).abs().max() < 2e-5


def test_a_row_that_does_not_sum_to_one_keeps_its_last_tokens() -> None:
    """A large vocabulary in fp32 sums to a little less or more than 1."""
    for total in (0.999, 1.001):
        probabilities = torch.full((1, 4), total / 4)
        assert inverse_cdf(probabilities, torch.tensor([BELOW_ONE])).item() == 3
        assert inverse_cdf(probabilities, torch.tensor([0.7501])).item() == 3
        assert inverse_cdf(probabilities, torch.tensor([0.7499])).item() == 2


def test_a_vocabulary_of_150_000_keeps_the_edges_of_its_slices() -> None:
    """The lower edges of equal slices of 151,936 tokens: a cumulative sum rounded to fp32 would move one in two."""
    size = 151_936
    tokens = torch.arange(0, size, 1519)
    probabilities = torch.full((1, size), 1 / size).expand(len(tokens), -1)
    assert inverse_cdf(probabilities, (tokens.double() + 0.001) / size).tolist() == tokens.tolist()


def test_noise_is_uniform_and_differs_with_every_part_of_its_key() -> None:
    key = {"seed": 0, "purpose": "train", "step": 3, "prompt": 5, "generation": 1}
    first = NoiseKey(**key).uniforms(4000)
    assert np.array_equal(first, NoiseKey(**key).uniforms(4000))
    # Kolmogorov-Smirnov, 0.1 % point of 4000 draws.
    assert np.abs(np.sort(first) - (np.arange(4000) + 0.5) / 4000).max() < 1.95 / 4000**0.5
    for other in ({"seed": 1}, {"purpose": "eval"}, {"step": 4}, {"prompt": 6}, {"generation": 2}):
        second = NoiseKey(**key | other).uniforms(4000)
        assert abs(np.corrcoef(first, second)[0, 1]) < 0.06, other


def test_a_shorter_limit_keeps_the_noise_of_the_positions_it_has() -> None:
    key = NoiseKey(0, "train", 0, 0, 0)
    assert np.array_equal(key.uniforms(7), key.uniforms(512)[:7])


def sampler(uniforms: Tensor, *, size: int = 300, **rollout: object) -> KeyedSampler:
    draw = Sampler(Rollout(**rollout), tokenizer_size=size, dtype=torch.float32)
    return KeyedSampler(draw, uniforms, torch.zeros(1, 1, dtype=torch.bool))


FILTERS = {
    "top_k": ({"top_k": 7}, [TopKLogitsWarper(7)]),
    "top_p": ({"top_p": 0.6}, [TopPLogitsWarper(0.6)]),
    "min_p": ({"min_p": 0.2}, [MinPLogitsWarper(0.2)]),
    "all": (
        {"repetition_penalty": 1.4, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
        [
            RepetitionPenaltyLogitsProcessor(1.4),
            TemperatureLogitsWarper(0.7),
            TopKLogitsWarper(20),
            TopPLogitsWarper(0.8),
            MinPLogitsWarper(0.05),
        ],
    ),
    "penalty": ({"repetition_penalty": 1.4}, [RepetitionPenaltyLogitsProcessor(1.4)]),
}


@pytest.mark.parametrize("name", FILTERS)
def test_filters_leave_what_those_of_transformers_leave(name: str) -> None:
    """The shares of 20,000 evenly spread uniforms are the probabilities that transformers samples by."""
    ours, theirs = FILTERS[name]
    torch.manual_seed(1)
    context, logits = torch.tensor([[3, 4, 3, 9]]), torch.randn(1, 40) * 2
    expected = LogitsProcessorList(theirs)(context, logits.clone()).softmax(-1)[0]
    rows = 20_000
    uniforms = (torch.arange(rows, dtype=torch.float64)[:, None] + 0.5) / rows
    made = sampler(uniforms, size=40, **ours)
    made(context.expand(rows, -1), logits.expand(rows, -1).clone())
    shares = torch.bincount(made.tokens[0], minlength=40) / rows
    assert (shares - expected).abs().max() < 1.1 / rows
    assert not ((shares > 0) & (expected == 0)).any()
    scored = (logits / ours.get("temperature", 1.0)).log_softmax(-1)[0]
    torch.testing.assert_close(
        made.logps[0], scored[made.tokens[0]], msg="scored with the temperature, before any filter"
    )


def test_ids_beyond_the_tokenizer_are_never_sampled() -> None:
    """Qwen2.5 pads its embedding from 151,665 tokens to 151,936 rows; such ids decode to nothing."""
    logits = torch.zeros(64, 300)
    logits[:, 290:] = 50.0
    uniforms = (torch.arange(64, dtype=torch.float64)[:, None] + 0.5) / 64
    greedy = torch.full((64, 1), torch.nan)
    for made in (sampler(uniforms, size=290), sampler(greedy, size=290), sampler(uniforms, size=290, top_k=5)):
        made(torch.zeros(64, 1, dtype=torch.long), logits.clone())
        assert int(made.tokens[0].max()) < 290


def test_generate_is_left_with_one_choice() -> None:
    made = sampler(torch.full((2, 1), 0.3))
    scores = made(torch.zeros(2, 1, dtype=torch.long), torch.randn(2, 300))
    assert torch.equal(scores.argmax(-1), made.tokens[0])
    assert torch.isfinite(scores).sum(-1).tolist() == [1, 1]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_b40_one_logit_that_is_not_finite_ends_the_run(value: float) -> None:
    logits = torch.zeros(3, 300)
    logits[2, 299] = value
    with pytest.raises(Stopped, match="NaN or infinity"):
        sampler(torch.full((3, 1), 0.5))(torch.zeros(3, 1, dtype=torch.long), logits)


def test_samples_do_not_depend_on_batch_split_or_order(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_qwen2()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    tokenizer = tiny_tokenizer()
    made = HfDecoder(model, tokenizer, Rollout(max_new_tokens=10), stop_ids=tuple(range(250, 300)), seed=4)
    groups = [
        Group(place, Prompt(row, "", tuple(range(row, row + length)), None, {}))
        for place, (row, length) in enumerate([(0, 3), (4, 17), (9, 1), (31, 8)])
    ]

    def samples(groups: list[Group], rows: int, step: int = 6) -> dict[tuple[int, int], tuple[int, ...]]:
        monkeypatch.setattr(trainer.rollout.decoder, "MAX_ROWS", rows)
        found = made.generate(groups, step=step, generations=3)
        return {(one.prompt.index, one.generation): one.ids for one in found}

    whole = samples(groups, 128)
    assert len(set(whole.values())) == 12 and len({len(ids) for ids in whole.values()}) > 2
    for rows in (1, 5):
        assert samples(groups, rows) == whole
    assert samples(groups[::-1], 128) == whole
    assert samples(groups[2:], 4) == {key: ids for key, ids in whole.items() if key[0] in (9, 31)}
    assert samples(groups, 128, step=7) != whole
