"""Between rollout and rewards: what a run tells its reward functions, and what it keeps of what they log."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from tests.tiny_run import run_config, write_run
from trainer import train
from trainer.batch import Completion, Prompt
from trainer.collect import MOST_MESSAGES, of_all_ranks, score
from trainer.config.grpo import Reward
from trainer.preflight.prepare import check
from trainer.record.metrics import Sums
from trainer.record.rollout_rows import row
from trainer.rewards.runtime import RewardResult, RewardRuntime
from trainer.world import World

LOGS = """
def logs(completions, log_extra, log_metric, **_):
    log_extra("length", [len(text) for text in completions])
    log_metric("longest", max(map(len, completions)))
    return [0.0] * len(completions)
"""


def test_what_rewards_log_of_a_completion_is_kept_with_its_row(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(LOGS)
    rewards = RewardRuntime([Reward(name="r", kind="python", function="rewards.py:logs")], tmp_path)
    prompt = Prompt(0, "q", (1,), None, {"answer": "a"})
    completions = [Completion(0, i, prompt, (2,), (-0.5,), "stop", text) for i, text in enumerate(["one", "three"])]
    config = SimpleNamespace(rollout=SimpleNamespace(replay=""))
    sums = Sums()
    score(cast(Any, SimpleNamespace(config=config, rewards=rewards, step=0, notes=[])), completions, sums)
    columns = [row(completion, 1)["columns"] for completion in completions]
    assert columns == [{"answer": "a", "length": 3}, {"answer": "a", "length": 5}]
    assert prompt.columns == {"answer": "a"}
    assert sums.means()["longest"] == 5


def test_rewards_know_how_long_the_run_is(tmp_path: Path, world: World) -> None:
    config = run_config(write_run(tmp_path), {"run.steps": 0, "run.epochs": 2.5})
    assert check(config, tmp_path, world).rewards.max_steps == 5  # of 8 prompts, 4 a step


def test_what_went_wrong_on_another_rank_is_told_once() -> None:
    def told(*by_rank: list[str]) -> list[str]:
        world = cast(Any, SimpleNamespace(gather_objects=lambda mine: [mine, *by_rank[1:]]))
        return of_all_ranks(by_rank[0], world)

    assert told([], ["busy: row 2", "all"], ["all", "busy: row 3"]) == ["busy: row 2", "all", "busy: row 3"]
    many = told([], [str(number) for number in range(50)])
    assert len(many) == MOST_MESSAGES + 1 and many[-1].startswith("and 30 more")


def test_a_step_and_an_evaluation_gather_what_rewards_say(monkeypatch: Any, world: World) -> None:
    state = SimpleNamespace(
        config=SimpleNamespace(rollout=SimpleNamespace(replay="")),
        rewards=SimpleNamespace(score=lambda *_: RewardResult(messages=["busy"])),
        step=0,
    )
    assert score(cast(Any, state), [], Sums()) == ["busy"]
    monkeypatch.setattr(train, "answer_and_score", lambda decoder, score, *_, **__: (score([]), score([])))
    monkeypatch.setattr(train, "gathered", lambda *_, **__: None)
    monkeypatch.setattr(train, "of_all_ranks", lambda said, world: [f"all ranks: {said}"])
    evaluation = SimpleNamespace(num_generations=1, correct_at=1.0)
    notes: list[str] = []
    train.held_out(
        cast(Any, SimpleNamespace(eval=evaluation)), world, cast(Any, None), cast(Any, state).rewards, [], 0, notes
    )
    assert notes == ["all ranks: ['busy', 'busy']"]
