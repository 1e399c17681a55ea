"""The histogram of the KL of single tokens: counts, the document's readings of them, files, and no run ended by one."""

import json
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.tiny_run import start, step, write_run
from trainer.output import Output
from trainer.record.kl_histogram import EDGES, KLHistogram, readings, share
from trainer.record.rollout_rows import read_rollouts
from trainer.world import World


def counted(values: list[float]) -> list[int]:
    histogram = KLHistogram()
    for half in (values[::2], values[1::2]):
        histogram.add(torch.tensor(half, dtype=torch.float32))
    return histogram.take()


def test_each_token_is_counted_once_in_its_bin() -> None:
    values = [0.0, 1e-9, -1e-9, 0.011, 0.3, -0.3, 2.5, 1e6, -1e6, 100.0]
    counts = counted(values)
    assert sum(counts) == len(values)
    for value in (0.0, 0.011, 0.3, -0.3, 2.5):
        inside = [low <= value < high for low, high in pairwise(EDGES)]
        assert sum(inside) == 1 and counts[inside.index(True)] >= 1
    assert counts[len(counts) // 2] == 3 and counts[0] == 1 and counts[-1] == 2  # beyond the edges: the last bins


def test_what_was_taken_is_not_counted_again() -> None:
    histogram = KLHistogram()
    histogram.add(torch.ones(3))
    assert sum(histogram.take()) == 3 and sum(histogram.take()) == 0


def test_edges_rise_and_hold_the_documents_numbers() -> None:
    assert list(EDGES) == sorted(set(EDGES)) and {0.01, 0.05, 0.5, 2.0, -0.01} <= set(EDGES)
    assert [-edge for edge in reversed(EDGES)] == list(EDGES)


@pytest.mark.parametrize(
    ("values", "std", "holding"),
    [
        ([0.001] * 50 + [1.0] * 20 + [0.1] * 5, 0.4, [True, False, False]),
        ([0.02] * 99 + [0.2], 0.02, [False, True, False]),
        ([0.001] * 99 + [9.0], 0.9, [False, False, True]),
        ([0.001] * 40 + [0.1] * 30 + [1.0] * 15, 0.3, [False, False, False]),  # falls off without a second peak
    ],
)
def test_the_documents_readings(values: list[float], std: float, holding: list[bool]) -> None:
    found = readings(counted(values), sum(values) / len(values), std)
    assert [one.holds for one in found] == holding
    assert all(one.numbers and one.fact for one in found)


def test_shares_are_of_all_tokens() -> None:
    assert share(counted([0.02, 0.03, 0.5, 3.0]), 0.01, 0.05) == 0.5
    assert share([0] * (len(EDGES) - 1), 0.01, 0.05) == 0


def test_a_run_writes_histograms_samples_and_the_line(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without matplotlib: said once, and the JSON is there. The counts are of response tokens alone."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr("trainer.output.KL_LINE_EVERY", 2)
    settings = {"run.dir": str(tmp_path / "run"), "log.histogram_every": 2, "log.samples_every": 4}
    state = start(write_run(tmp_path), world, settings, away=0.3)
    output = Output(state)
    output.begin(goes_on=False)
    said = ""
    for _ in range(4):
        metrics, completions = step(state)
        output.step(metrics, completions)
        said += capsys.readouterr().out

    assert said.count("matplotlib") == 1 and said.count("| KL mean: ") == 2
    last = (
        f"Step 4 | KL mean: {metrics['kl']:.4g} | std: {metrics['kl_std']:.4g} | max: {metrics['kl_max']:.4g} nats/tok"
    )
    assert last in said.splitlines()
    folder = tmp_path / "run"
    assert sorted(path.name for path in (folder / "histograms").iterdir()) == ["step-000002.json", "step-000004.json"]
    histogram = json.loads((folder / "histograms" / "step-000004.json").read_text())
    rows = read_rollouts(folder, 4)
    assert histogram["tokens"] == sum(histogram["counts"]) == sum(len(row["completion_ids"]) for row in rows)
    assert (histogram["mean"], histogram["std"], histogram["max"]) == tuple(
        metrics[name] for name in ("kl", "kl_std", "kl_max")
    )
    middles = [(low + high) / 2 for low, high in pairwise(histogram["edges"])]
    mean = sum(middle * count for middle, count in zip(middles, histogram["counts"], strict=True)) / histogram["tokens"]
    assert mean == pytest.approx(metrics["kl"], rel=0.1) and metrics["kl"] > 1e-3
    assert len(histogram["readings"]) == 3

    text = (folder / "samples" / "step_4.txt").read_text()
    assert text.startswith(f"Query: {rows[0]['prompt']}\nResponse: ")
    samples = [json.loads(line) for line in (folder / "samples" / "step_4.jsonl").read_text().splitlines()]
    assert [one["picked"] for one in samples] == ["first", "best", "worst"]
    first, best, worst = samples
    assert first.items() >= rows[0].items()
    assert best["reward"] == max(row["reward"] for row in rows) and worst["reward"] == min(
        row["reward"] for row in rows
    )
    decoded = state.policy.tokenizer.decode(worst["completion_ids"])
    assert worst["raw"] == decoded and worst["raw"].startswith(worst["completion"][:3])


def test_a_picture_that_fails_ends_nothing(tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("trainer.record.kl_histogram.draw", full)
    state = start(write_run(tmp_path), world, {"run.dir": str(tmp_path / "run"), "log.histogram_every": 1})
    output = Output(state)
    output.begin(goes_on=False)
    for _ in range(2):
        output.step(*step(state))
    notes = [note for note in state.notes if "histogram" in note]
    assert len(notes) == 1 and "No space left on device" in notes[0]
