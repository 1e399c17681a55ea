"""Signals and alarms through real steps of a tiny model that was taught one answer; broken runs, and a healthy one."""

import json
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import trainer.train
from tests.tiny import tiny_qwen2, tiny_tokenizer
from tests.tiny_run import PROMPTS, start, step, write_run
from trainer.checkpoint.save import Checkpoints
from trainer.errors import Stopped
from trainer.measure import step_metrics
from trainer.output import Output
from trainer.record.metrics import Sums
from trainer.state import State
from trainer.train import save, train
from trainer.world import World

ANSWERS = ("the answer is 42", "the answer is 23")
REWARD = '''

def is_42(completions, **_):
    """Half of what the model was taught."""
    return [float(text.strip() == "the answer is 42") for text in completions]
'''
SETTINGS: dict[str, Any] = {
    "run.steps": 40,
    "rollout.max_new_tokens": 24,
    "optim.name": "adamw",
    "optim.lr": 2e-3,
    "optim.max_grad_norm": 1.0,
    "grpo.kl.coef": 0.01,
    "checkpoint.every": 1,
    "checkpoint.keep": 1,
}


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder whose model answers every prompt by one of two sentences."""
    model, tokenizer = tiny_qwen2().train(), tiny_tokenizer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rows = [[*tokenizer.encode(prompt), -1, *tokenizer.encode(answer), 299] for prompt in PROMPTS for answer in ANSWERS]
    longest = max(map(len, rows)) - 1
    ids, labels = torch.full((len(rows), longest), 297), torch.full((len(rows), longest), -100)
    for i, row in enumerate(rows):
        head, tail = row[: row.index(-1)], row[row.index(-1) + 1 :]
        ids[i, : len(row) - 1] = torch.tensor(head + tail)
        labels[i, len(head) : len(row) - 1] = torch.tensor(tail)
    for _ in range(300):
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    folder = write_run(tmp_path_factory.mktemp("taught"), model.eval())
    with (folder / "rewards.py").open("a") as file:
        file.write(REWARD)
    return folder


def begun(taught: Path, world: World, run_dir: Path, settings: dict[str, Any]) -> tuple[State, Output, Checkpoints]:
    state = start(taught, world, SETTINGS | {"run.dir": str(run_dir)} | settings, reward="is_42")
    output = Output(state)
    checkpoints = Checkpoints(state.config, state.policy, state.engine, world, state.facts, "run")
    output.begin(goes_on=False)
    return state, output, checkpoints


def recorded(run_dir: Path, name: str) -> list[dict[str, Any]]:
    file = run_dir / name
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_b39_a_collapse_is_stopped_with_a_checkpoint_from_before(
    taught: Path, world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rate at which the model forgets how to write within some steps."""
    state, output, checkpoints = begun(taught, world, tmp_path / "run", {"optim.lr": 0.3, "optim.warmup_steps": 40})
    with pytest.raises(Stopped, match=r"ALARM garble[\s\S]*Fix: [\s\S]*--resume .*step-0000") as stopped:
        train(state, output, checkpoints)
    alarms = recorded(tmp_path / "run", "alarms.jsonl")
    metrics = recorded(tmp_path / "run", "metrics.jsonl")
    (garble,) = (one for one in alarms if one["alarm"] == "garble")
    assert metrics[0]["garble_rate"] < 0.2 and [row["garble_rate"] >= 0.4 for row in metrics[-2:]] == [True, True]
    assert not any(a["garble_rate"] >= 0.4 <= b["garble_rate"] for a, b in pairwise(metrics[:-1]))
    assert garble["step"] == metrics[-1]["step"] == state.step < state.steps
    assert garble["cause"] == "update_too_large" and garble["event"] == "raised"
    shown = garble["evidence"]
    assert 1 <= len(shown["tokens"]) <= 5 and all(0 < token["share"] <= 1 for token in shown["tokens"])
    assert shown["excerpt"]["broken"]
    said = capsys.readouterr().out
    assert said.count("ALARM garble:") == 1 and "Most frequent tokens" in said
    # Pruning to one checkpoint has kept the one from before; what was reached is saved on top.
    good = checkpoints.good
    assert good is not None and good.is_dir() and str(good) in str(stopped.value)
    first_sign = min(one["since"] for one in alarms)
    assert 0 < output.alarms.good_step < first_sign  # type: ignore[operator]
    assert save(state, output, checkpoints) == checkpoints.store.folder(state.step)
    assert good.is_dir()


def test_a_healthy_run_raises_nothing(taught: Path, world: World, tmp_path: Path) -> None:
    state, output, _ = begun(taught, world, tmp_path / "run", {})
    for _ in range(25):
        assert output.step(*step(state)) == []
    metrics = recorded(tmp_path / "run", "metrics.jsonl")
    assert metrics[-1]["reward_mean"] > metrics[0]["reward_mean"] + 0.3, "it learns"
    assert recorded(tmp_path / "run", "alarms.jsonl") == []
    # What alarms read is in the row; what does not exist is not.
    for key in (
        "garble_rate",
        "garble/scripts",
        "repetition",
        "top_token_share",
        "kl_tail_fraction",
        "held_memory_gib",
    ):
        assert key in metrics[-1], key
    for key in ("held_memory_gib", "sampling_logp_gap", "sampling_logp_gap_max", "reward_group_std", "reward_kl_ratio"):
        assert math.isfinite(metrics[-1][key])
    assert "kl_rank_max" not in metrics[-1], "one rank has nothing to compare"
    assert "memory_slope_mib" in metrics[-1] and "memory_slope_mib" not in metrics[5]
    assert metrics[-1]["sampling_logp_gap_max"] >= metrics[-1]["sampling_logp_gap"]
    assert abs(metrics[-1]["memory_slope_mib"]) < 0.01


def test_an_update_away_from_the_reward_is_named(
    taught: Path, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = trainer.train.set_advantages

    def inverted(*arguments: Any) -> None:
        real(*arguments)
        for completion in arguments[1]:
            completion.advantage *= -1

    monkeypatch.setattr(trainer.train, "set_advantages", inverted)
    state, output, _ = begun(taught, world, tmp_path / "run", {"watch.baseline_steps": 3})
    raised = [alarm for _ in range(30) for alarm in output.step(*step(state))]
    assert "reward_fall" in {alarm.alarm for alarm in raised}
    assert not {"garble", "sampling_gap"} & {alarm.alarm for alarm in raised}


def test_sampling_at_another_temperature_than_scoring_is_seen(taught: Path, world: World, tmp_path: Path) -> None:
    state, output, _ = begun(taught, world, tmp_path / "run", {})
    state.engine.module.head.temperature = 3.0
    raised = [alarm for _ in range(4) for alarm in output.step(*step(state))]
    assert [alarm.alarm for alarm in raised][:1] == ["sampling_gap"] and raised[0].step == 3
    assert raised[0].cause == "sampling_differs"


def test_a_resumed_run_goes_on_counting(taught: Path, world: World, tmp_path: Path) -> None:
    state, output, checkpoints = begun(taught, world, tmp_path / "run", {"watch.baseline_steps": 2})
    for _ in range(3):
        output.step(*step(state))
    state.at_boundary()
    save(state, output, checkpoints)
    assert output.alarms.good_step == 3
    again, branch = Output(state), Output(state)
    for other, goes_on in ((again, True), (branch, False)):
        other.restore(json.loads(json.dumps(output.progress())), goes_on=goes_on)
        assert other.alarms.beginning() == output.alarms.beginning()
        assert other.alarms.standings == output.alarms.standings
    assert again.alarms.good_step == 3 and branch.alarms.good_step is None


class Two(World):
    """Rank 0 of two, the other of which has ``other``'s sums."""

    other: Sums

    def gather_objects(self, value: Any) -> list[Any]:
        return [value, (list(self.other.totals), list(self.other.maxima))]

    def all_reduce_sum(self, values: Sequence[float]) -> list[float]:
        theirs = [number for name in sorted(self.other.totals) for number in self.other.totals[name]]
        return [mine + other for mine, other in zip(values, theirs, strict=True)]

    def all_reduce_max(self, values: Sequence[float]) -> list[float]:
        return [
            max(mine, self.other.maxima[name]) for mine, name in zip(values, sorted(self.other.maxima), strict=True)
        ]


def test_the_kl_of_the_ranks_has_a_lowest_and_a_highest() -> None:
    """The mean is over all tokens; the two others are means of a rank each."""
    ranks = []
    for total, count in ((1.0, 10), (9.0, 30)):
        sums = Sums()
        sums.add("kl", total, count)
        sums.add("completion_tokens_mean", count, 1)
        for name, value in (("kl_coef", 0.1), ("kl_rank_max", total / count), ("kl_rank_min", -total / count)):
            sums.maximum(name, value)
        ranks.append(sums)
    for mine, other in (ranks, reversed(ranks)):
        world = Two(0, 2, 0, torch.device("cpu"))
        object.__setattr__(world, "other", other)
        other.maximum("seconds_update", 1.0)
        other.maximum("peak_memory_gib", 1.0)
        metrics = step_metrics(world, mine, {"update": 1.0}, 2**30)
        assert metrics["kl"] == pytest.approx(0.25)
        assert (metrics["kl_rank_min"], metrics["kl_rank_max"]) == pytest.approx((0.1, 0.3))
