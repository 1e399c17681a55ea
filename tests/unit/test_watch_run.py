"""Signals and alarms through real steps of a tiny model that was taught one answer; broken runs, and a healthy one."""

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import trainer.train
from tests.tiny import tiny_qwen2, tiny_tokenizer
from tests.tiny_run import PROMPTS, distance, start, step, weights, write_run
from trainer.__main__ import main
from trainer.checkpoint.save import Checkpoints
from trainer.checkpoint.store import step_of
from trainer.errors import Stopped
from trainer.measure import step_metrics
from trainer.output import Output
from trainer.record.metrics import Sums
from trainer.record.run_dir import RunDirectory
from trainer.report.read import read_run
from trainer.state import State
from trainer.train import roll_back, save, train
from trainer.update import outside_response, passes
from trainer.watch.alarms import Alarm
from trainer.watch.garble import LIMITS
from trainer.world import World

ALARM = Alarm("garble", "raised", 2, 1, 1, "garble_rate", 0.9, 0.4, 0.0, "update_too_large")
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


def test_a_collapse_is_rolled_back_and_tried_with_other_samples(
    taught: Path, world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At a rate that no samples survive: three times, then it stops. Nothing is lost, nothing stands there twice."""
    run_dir = tmp_path / "run"
    settings = {"optim.lr": 0.3, "optim.warmup_steps": 40, "watch.on_garble": "rollback", "checkpoint.keep": 3}
    state, output, checkpoints = begun(taught, world, run_dir, settings)
    with pytest.raises(Stopped, match=r"came again with other samples \(rollbacks: 3\)[\s\S]*--resume .*step-0000"):
        train(state, output, checkpoints)
    back = [one for one in recorded(run_dir, "alarms.jsonl") if one["event"] == "rolled_back"]
    assert [one["count"] for one in back] == [1, 2, 3] and all(one["alarm"] == "garble" for one in back)
    assert capsys.readouterr().out.count("the run has gone back to step") == 3
    metrics = recorded(run_dir, "metrics.jsonl")
    assert [row["step"] for row in metrics] == list(range(1, state.step + 1)), "each step stands there once"
    folders = [run_dir / f"rolled-back-{number}" for number in (1, 2, 3)]
    for number, (one, aside) in enumerate(zip(back, folders, strict=True), 1):
        gone = recorded(aside, "metrics.jsonl")
        assert [row["step"] for row in gone] == list(range(1, one["from_step"] + 1)), "the run as it was"
        files = [int(file.stem[5:]) for file in sorted((aside / "rollouts").glob("step-*"))]
        assert files == list(range(one["step"] + 1, one["from_step"] + 1)), "its later files"
        assert gone[-1]["garble_rate"] >= 0.4 and recorded(aside, "alarms.jsonl")[-1]["alarm"] == "garble"
        assert f"seed {number} (run.seed + {number})" in one["message"] and aside.name in one["message"]
        # The first step that was done again, as it was before and as it is where it stands now.
        name = f"step-{one['step'] + 1:06d}.jsonl"
        again = next(later for later in [*folders[number:], run_dir] if (later / "rollouts" / name).exists())
        tries = [recorded(folder / "rollouts", name) for folder in (aside, again)]
        rows, samples = ([[row[key] for row in rows] for rows in tries] for key in ("row", "completion_ids"))
        assert rows[0] == rows[1] and samples[0] != samples[1], "the same prompts, other samples"
        (then, *_), (now, *_) = (
            [row for row in recorded(folder, "metrics.jsonl") if row["step"] == one["step"] + 1]
            for folder in (aside, again)
        )
        assert (then["kl_coef"], then["lr"]) == (now["kl_coef"], now["lr"]), "neither coefficient nor rate has changed"
    assert "rolled-back-3" in str(read_run(run_dir).notes) and read_run(run_dir / "rolled-back-1").rollouts


def test_without_a_checkpoint_from_before_a_rollback_is_a_stop(taught: Path, world: World, tmp_path: Path) -> None:
    settings = {"optim.lr": 0.3, "optim.warmup_steps": 40, "watch.on_garble": "rollback", "checkpoint.every": 40}
    state, output, checkpoints = begun(taught, world, tmp_path / "run", settings)
    with pytest.raises(Stopped, match=r"no checkpoint to go back to[\s\S]*begin again, with the change above"):
        train(state, output, checkpoints)
    assert save(state, output, checkpoints) is not None, "what was reached can be saved"


def test_a_checkpoint_that_is_damaged_is_not_gone_back_to(taught: Path, world: World, tmp_path: Path) -> None:
    state, output, checkpoints = begun(taught, world, tmp_path / "run", {"watch.on_garble": "rollback"})
    for _ in range(2):
        output.step(*step(state))
        state.at_boundary()
        save(state, output, checkpoints)
    checkpoints.keep_good(1)
    before = weights(state)
    assert checkpoints.good is not None
    shutil.copytree(checkpoints.store.folder(2), checkpoints.good)  # pruned by now, and of another step inside
    (checkpoints.good / "progress.json").write_text("{}")
    with pytest.raises(Stopped, match=r"cannot go back: .*progress\.json"):
        roll_back(state, output, checkpoints, [ALARM])
    assert distance(before, weights(state)) == 0 and checkpoints.store.folder(2).is_dir()


def test_records_that_cannot_be_set_aside_stop_every_rank(
    taught: Path, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An OSError of rank 0 alone would leave the others waiting."""
    state, output, checkpoints = begun(taught, world, tmp_path / "run", {"watch.on_garble": "rollback"})
    output.step(*step(state))
    state.at_boundary()
    save(state, output, checkpoints)

    def full(step: int) -> Path:
        raise OSError("no space left on device")

    monkeypatch.setattr(output.directory, "set_aside", full)
    with pytest.raises(Stopped, match="cannot be set aside: no space left"):
        roll_back(state, output, checkpoints, [ALARM])


def test_what_was_the_best_at_the_good_checkpoint_is_kept_for_a_way_back(
    taught: Path, world: World, tmp_path: Path
) -> None:
    state, output, checkpoints = begun(taught, world, tmp_path / "run", {"checkpoint.keep": 1})
    for number in range(1, 5):
        output.step(*step(state))
        state.at_boundary()
        assert state.boundary is not None
        folder = checkpoints.save(number, state.boundary.progress, state.boundary.random_states)
        if number in (1, 3):
            checkpoints.keep_best(folder)
        if number == 2:
            checkpoints.keep_good(2)
    store = checkpoints.store
    assert [step_of(one) for one in store.folders()] == [4, 3, 2, 1]
    assert checkpoints.still_best({"step": 1, "value": 0.5}) and (store.path / "best").read_text() == "step-000001\n"
    assert checkpoints.still_best({"step": 9, "value": 0.5}) is None and not (store.path / "best").exists()


def test_rollbacks_are_counted_by_the_highest_number(tmp_path: Path) -> None:
    """One was removed, one was packed, and one copied by a user."""
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    assert directory.rollbacks() == 0
    for name in ("rolled-back-2", "rolled-back-2.bak", "rolled-back-old", "rolled-back-1.tar"):
        (directory.path / name).mkdir()
    assert directory.rollbacks() == 2 and directory.set_aside(1).name == "rolled-back-3"


def test_a_cause_is_explained_by_the_first_of_its_alarms(
    taught: Path, world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    state, output, _ = begun(taught, world, run_dir, {"watch.baseline_steps": 1})
    metrics, completions = step(state)
    output.step(metrics, completions)
    for state.step in range(2, 60):
        output.step(metrics | {"kl": 5.0, "grad_norm": 1e9, "garble_rate": 0.9}, completions)
    said = [line for line in capsys.readouterr().out.splitlines() if "ALARM " in line]
    explained = [(line.split("ALARM ")[1].split(":")[0], "Fix: " in line and "Excerpt" in line) for line in said]
    first = [("garble", True), ("kl", False), ("gradient", False)]
    assert explained == [*first, *first], explained
    assert "Suspected: as for garble." in said[1]
    alarms = recorded(run_dir, "alarms.jsonl")
    assert all(one["fix"] and one["evidence"]["excerpt"] for one in alarms) and len(alarms) == len(said)


def test_samples_say_how_they_are_garbled(taught: Path, world: World, tmp_path: Path) -> None:
    """Completions of the step, each with every part of its garble: in words, and as JSON."""
    run_dir = tmp_path / "run"
    state, output, _ = begun(taught, world, run_dir, {"log.samples_every": 1})
    metrics, completions = step(state)
    for one in completions:
        one.text = "\ufffd\u2581" * 10
    output.step(metrics, completions)
    rows = recorded(run_dir / "samples", "step_1.jsonl")
    assert [row["picked"] for row in rows] == ["first", "best", "worst"]
    for row in rows:
        assert set(row["garble"]) == set(LIMITS) and row["completion_ids"] and row["raw"] and row["rewards"]
        assert (row["garble"]["replacement"], row["garble"]["word_marks"], row["garble"]["empty"]) == (0.5, 0.5, 0.0)
    text = (run_dir / "samples/step_1.txt").read_text()
    assert text.startswith("Query: ") and text.count("garble replacement 0.5, word_marks 0.5") == 3


@pytest.mark.parametrize("shared", [True, False])
def test_kl_outside_of_the_response_is_measured(taught: Path, world: World, tmp_path: Path, shared: bool) -> None:
    """0 by the layout of the rows, with a KL that is not; and what a wrong mask adds is found, token by token."""
    state, _, _ = begun(taught, world, tmp_path / "run", {})
    state.shared_prompts = shared
    step(state)
    metrics, completions = step(state)
    assert metrics["kl"] > 1e-6 and metrics["kl_outside_response"] == 0
    (batch, *_) = passes(state, completions)
    rows, stop_ids = batch.rows, state.decoder.stop_ids

    def outside() -> list[int]:
        return outside_response(batch, stop_ids).nonzero()[:, 0].tolist()

    assert outside() == []
    # The first prompt token in the place of a response's, and each completion's last token once more.
    batch.rows = rows._replace(targets=torch.cat([rows.input_ids.flatten()[:1], rows.targets[1:]]))
    assert outside() == [0]
    lasts = (rows.completion.diff(append=torch.tensor([-1])) != 0).nonzero()[:, 0]
    order = torch.cat([torch.arange(len(rows.targets)), lasts]).sort().values
    batch.rows = rows._replace(targets=rows.targets[order], completion=rows.completion[order])
    added = (order[1:] == order[:-1]).nonzero()[:, 0] + 1
    assert outside() == added.tolist() and len(added) == len(batch.completions)
    # The same, where the completions are said to hold them: padding behind the end token.
    batch.completions = [replace(one, ids=(*one.ids, one.ids[-1])) for one in batch.completions]
    stopped = torch.tensor([one.finish == "stop" for one in batch.completions])
    assert outside() == added[stopped].tolist() and stopped.any()


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


def test_a_run_that_was_killed_after_a_rollback_does_not_draw_the_old_samples(
    run_here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its newest checkpoint is from before the rollback, whose records lie beside it."""
    one = ["train", "run.toml", "--checkpoint.every", "1", "--engine.device", "cpu"]
    assert main([*one, "--run.steps", "1"]) == 0
    tries = []
    for number in range(3):
        run_dir = run_here / f"out{number}"
        shutil.copytree(run_here / "out", run_dir)
        if number == 2:
            (run_dir / "rolled-back-1").mkdir()
        assert main([*one, "--run.steps", "2", "--run.dir", str(run_dir), "--resume", "auto"]) == 0
        tries.append([row["completion_ids"] for row in recorded(run_dir / "rollouts", "step-000002.jsonl")])
    assert tries[0] == tries[1] != tries[2]
