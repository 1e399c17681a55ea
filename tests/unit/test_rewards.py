"""Rewards: what functions are handed, what becomes of what they return, and how they are found."""

import random
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from trainer.batch import Completion, Prompt
from trainer.collect import recorded_reward
from trainer.config.grpo import Reward
from trainer.errors import Refused
from trainer.rewards.runtime import RewardRuntime, total_reward

TRL_MODULE = """
import asyncio, re
from dataclasses import dataclass

CALLS = []

def num_tokens(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]

def accuracy(completions, ground_truth, **kwargs):
    found = [re.search(r"<answer>(.*?)</answer>", text) for text in completions]
    return [1.0 if m and m.group(1) == truth else 0.0 for m, truth in zip(found, ground_truth)]

def chat_format(completions, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    return [bool(re.match(r"^<answer>.*</answer>$", content)) for content in contents]

def math_only(prompts, completions, task, **kwargs):
    return [1.0 if t == "math" else None for t in task]

def logged(prompts, completions, log_metric=None, log_extra=None, **kwargs):
    if log_extra:
        log_extra("length", [len(c) for c in completions])
    if log_metric:
        log_metric("accuracy", 0.25)
        log_metric("accuracy", 0.75)
    return [0.0] * len(prompts)

def curriculum(completions, trainer_state, **kwargs):
    return [trainer_state.global_step / trainer_state.max_steps] * len(completions)

def keeps(**kwargs):
    CALLS.append(kwargs)
    return [0.0] * len(kwargs["completions"])

async def slow_a(prompts, completions, **kwargs):
    await asyncio.sleep(0.3)
    return [1.0] * len(completions)

async def slow_b(prompts, completions, **kwargs):
    await asyncio.sleep(0.3)
    return [2.0] * len(completions)

@dataclass
class Judge:
    scale: float
    async def __call__(self, completions, **kwargs):
        return [self.scale * len(text) for text in completions]

judge = Judge(scale=0.5)
NUMBER = 3
"""


@pytest.fixture(autouse=True)
def search_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test its own, or a module is found beside the run file of an earlier test."""
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rewards.py").write_text(TRL_MODULE)
    return tmp_path


def runtime(folder: Path, *functions: str, max_steps: int | None = None, **keys: Any) -> RewardRuntime:
    sections = [
        Reward(name=f"r{i}", kind="python", function=f"rewards.py:{function}", **keys)
        for i, function in enumerate(functions)
    ]
    rewards = RewardRuntime(sections, folder)
    rewards.max_steps = max_steps
    return rewards


def row(text: str, *, index: int = 0, chat: bool = False, **columns: Any) -> Completion:
    messages = ({"role": "system", "content": "Be short."}, {"role": "user", "content": "2+2?"}) if chat else None
    prompt = Prompt(index=index, text="2+2?", ids=(1, 2), messages=messages, columns=columns)
    logps = (-1.0, -1.0, -1.0)
    return Completion(
        group=index, generation=0, prompt=prompt, ids=(7, 8, 9), sampling_logps=logps, finish="stop", text=text
    )


def test_unmodified_trl_functions_score_strings(folder: Path) -> None:
    rows = [row("<answer>4</answer>", ground_truth="4", task="math"), row("5", ground_truth="4", task="math")]
    rewards = runtime(folder, "num_tokens", "accuracy", "math_only", "curriculum", max_steps=10)
    assert rewards.check([c.prompt for c in rows]) == []
    result = rewards.score(rows, 5)
    assert [c.rewards for c in rows] == [
        {"r0": 3.0, "r1": 1.0, "r2": 1.0, "r3": 0.5},
        {"r0": 3.0, "r1": 0.0, "r2": 1.0, "r3": 0.5},
    ]
    assert [c.reward for c in rows] == [5.5, 4.5]
    assert result.messages == []


def test_unmodified_trl_functions_score_messages(folder: Path) -> None:
    rows = [row("<answer>4</answer>", chat=True), row("4", chat=True)]
    runtime(folder, "chat_format").score(rows, 0)
    assert [c.reward for c in rows] == [1.0, 0.0]


def test_what_a_function_is_handed(folder: Path) -> None:
    rewards = runtime(folder, "keeps", "keeps")
    rewards.score([row("a", chat=True, answer="4"), row("b", index=1, answer=None, level=3)], 0)
    calls = rewards._functions[0].function.__globals__["CALLS"]
    handed = calls[0]
    assert set(handed) == {
        "prompts",
        "completions",
        "completion_ids",
        "answer",
        "level",
        "log_metric",
        "log_extra",
        "trainer_state",
    }
    system, user = {"role": "system", "content": "Be short."}, {"role": "user", "content": "2+2?"}
    assert handed["prompts"] == [[system, user], "2+2?"]
    assert handed["completions"] == [[{"role": "assistant", "content": "a"}], "b"]
    assert handed["completion_ids"] == [[7, 8, 9], [7, 8, 9]]
    assert handed["answer"] == ["4", None] and handed["level"] == [None, 3]
    # A function that edits its messages edits neither the data nor what the next function sees.
    handed["prompts"][0][0]["content"] = "changed"
    assert calls[1]["prompts"][0][0] == system


def test_only_accepted_arguments_are_passed(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(
        "def strict(completions, answer):\n    return [float(a == c) for c, a in zip(completions, answer)]"
    )
    rows = [row("4", answer="4", other=1)]
    runtime(tmp_path, "strict").score(rows, 0)
    assert rows[0].reward == 1.0


def test_logged_metrics_are_sums_and_counts(folder: Path) -> None:
    result = runtime(folder, "logged").score([row("abc"), row("a")], 0)
    assert result.metrics == {"accuracy": (1.0, 2), "rewards/r0/failed_fraction": (0.0, 2)}
    assert result.columns == {"length": [3, 1]}


def test_async_functions_wait_at_the_same_time(folder: Path) -> None:
    rows = [row("ab"), row("abcd")]
    rewards = runtime(folder, "slow_a", "judge", "slow_b")
    start = time.monotonic()
    rewards.score(rows, 0)
    assert time.monotonic() - start < 0.55
    assert [c.rewards for c in rows] == [{"r0": 1.0, "r1": 1.0, "r2": 2.0}, {"r0": 1.0, "r1": 2.0, "r2": 2.0}]


def test_async_functions_keep_one_event_loop_over_the_run(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(
        "import asyncio\nloops = []\n"
        "async def f(completions):\n    loops.append(asyncio.get_running_loop())\n    return [float(len(set(loops)))]"
    )
    rewards = runtime(tmp_path, "f")
    rows = [row("a")]
    for step in range(2):
        rewards.score(rows, step)
    assert rows[0].reward == 1.0


def test_weights_sum_and_weight_zero_only_records(folder: Path) -> None:
    sections = [
        Reward(name="tokens", kind="python", function="rewards.py:num_tokens", weight=-0.5),
        Reward(name="exact", kind="builtin", function="exact_match", weight=2.0),
        Reward(name="watched", kind="python", function="rewards.py:math_only", weight=0.0),
    ]
    rows = [row("4", answer="4", task="code"), row("5", answer="4", task="math")]
    RewardRuntime(sections, folder).score(rows, 0)
    assert [c.reward for c in rows] == [0.5, -1.5]
    assert rows[0].rewards == {"tokens": 3.0, "exact": 1.0, "watched": None}


MULTI_TASK = """
def sums(completions, task):
    return [1.0 if kind == "sum" else None for kind in task]
def poems(completions, task):
    return [0.5 if kind == "poem" else None for kind in task]
def fails_on_jokes(completions, task):
    if "joke" in task:
        raise ValueError("no joke")
    return [0.25] * len(completions)
"""


@pytest.mark.parametrize(
    ("rewards", "weights", "failed", "total"),
    [
        ({"a": 1.0, "b": 0.5}, {"a": 2.0, "b": -1.0}, (), 1.5),
        ({"a": 1.0, "b": None}, {"a": 2.0, "b": 1.0}, (), 2.0),  # b does not apply
        ({"a": None, "b": None}, {}, (), None),
        ({"a": 1.0, "b": None}, {}, ("b",), None),  # b should have applied
        ({"a": 1.0, "b": None}, {"b": 0.0}, ("b",), 1.0),  # b only records
        ({"a": None, "b": 1.0}, {"b": 0.0}, (), None),  # what only records scores nothing
        ({"a": 0.0}, {}, (), 0.0),
    ],
)
def test_total_reward(
    rewards: dict[str, float | None], weights: dict[str, float], failed: tuple[str, ...], total: float | None
) -> None:
    assert total_reward(rewards, weights, failed) == total


def test_functions_of_several_tasks_leave_each_other_s_rows_out(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(MULTI_TASK)
    rewards = runtime(tmp_path, "sums", "poems", "fails_on_jokes", retries=0)
    rows = [row("a", task="sum"), row("b", task="poem"), row("c", task="joke"), row("d", task="sonnet")]
    rewards.score(rows, 0)
    assert [c.reward for c in rows] == [1.25, 0.75, None, 0.25]


def test_b45_a_fallback_is_a_score(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(MULTI_TASK)
    rewards = runtime(tmp_path, "sums", "fails_on_jokes", retries=0, fallback=-1.0)
    rows = [row("a", task="sum"), row("c", task="joke")]
    rewards.score(rows, 0)
    assert [c.reward for c in rows] == [1.25, -1.0]


@pytest.mark.parametrize(
    ("row", "reward"),
    [
        ({"rewards": {"a": 1.0, "b": None}, "reward": 9.0}, 2.0),  # by today's weights
        ({"rewards": {"a": 1.0, "b": None}, "reward": None}, None),  # b had failed
        ({"rewards": {"a": 1.0, "b": None}}, 2.0),
        ({"rewards": {"a": None, "b": None}, "reward": None}, None),
    ],
)
def test_a_recorded_reward_is_summed_by_the_same_rule(row: dict[str, Any], reward: float | None) -> None:
    assert recorded_reward(row, {"a": 2.0, "b": 1.0}) == reward


def test_a_rank_without_completions_asks_nothing(folder: Path) -> None:
    rewards = runtime(folder, "accuracy")
    result = rewards.score([], 0)
    assert (result.metrics, result.columns, result.messages) == ({}, {}, [])


def test_functions_of_one_file_share_its_state_and_two_files_of_a_name_do_not(folder: Path) -> None:
    rewards = runtime(folder, "keeps", "keeps")
    first, second = (reward.function for reward in rewards._functions)
    assert first is second
    (folder / "b").mkdir()
    (folder / "b" / "rewards.py").write_text("def keeps(completions):\n    return [9.0] * len(completions)")
    sections = [
        Reward(name="a", kind="python", function="rewards.py:keeps"),
        Reward(name="b", kind="python", function="b/rewards.py:keeps"),
    ]
    rows = [row("x")]
    RewardRuntime(sections, folder).score(rows, 0)
    assert rows[0].rewards == {"a": 0.0, "b": 9.0}


def test_reward_files_are_kept_with_the_run(folder: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    runtime(folder, "accuracy", "num_tokens").copy_into(run_dir)
    assert [path.name for path in (run_dir / "rewards").iterdir()] == ["rewards.py"]
    assert (run_dir / "rewards" / "rewards.py").read_text() == TRL_MODULE


def test_a_file_may_import_its_neighbours_and_shadows_no_module(tmp_path: Path) -> None:
    (tmp_path / "judges").mkdir()
    (tmp_path / "judges" / "scales_of_mine.py").write_text("SCALE = 2.0")
    (tmp_path / "judges" / "random.py").write_text(
        "from scales_of_mine import SCALE\ndef f(completions):\n    return [SCALE] * len(completions)"
    )
    rows = [row("a")]
    RewardRuntime([Reward(name="r", kind="python", function="judges/random.py:f")], tmp_path).score(rows, 0)
    assert rows[0].reward == 2.0
    assert sys.modules["random"] is random


def test_a_module_may_lie_beside_the_run_file(tmp_path: Path) -> None:
    (tmp_path / "module_of_mine.py").write_text("def f(completions):\n    return [3.0] * len(completions)")
    rows = [row("a")]
    RewardRuntime([Reward(name="r", kind="python", function="module_of_mine:f")], tmp_path).score(rows, 0)
    assert rows[0].reward == 3.0


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("rewards.py", 'expected "module:callable"'),
        ("reward.py:accuracy", "did you mean 'rewards.py'"),
        ("rewards.py:acuracy", "defines no 'acuracy'; did you mean 'accuracy'"),
        ("rewards.py:NUMBER", "not callable, it is of type int"),
        ("rewards.py:Judge", "is a class"),
        ("no_such_package.sub:f", "there is no module 'no_such_package'"),
        ("broken.py:f", "SyntaxError: '(' was never closed (broken.py:3)"),
        ("needs.py:f", "No module named 'no_such_package' (needs.py:2)"),
        ("raises.py:f", "KeyError: 'x' (raises.py:3)"),
        ("exits.py:f", "importing exits.py failed: SystemExit: 3"),
        ("needs:f", "importing needs failed: ModuleNotFoundError: No module named 'no_such_package' (needs.py:2)"),
    ],
)
def test_a_function_that_cannot_be_had_is_refused_in_one_message(folder: Path, function: str, message: str) -> None:
    (folder / "broken.py").write_text("x = 1\n\ny = (1,\n")
    (folder / "needs.py").write_text("\nimport no_such_package")
    (folder / "raises.py").write_text("def g():\n    x = {}\n    return x['x']\n\ng()\n")
    (folder / "exits.py").write_text("raise SystemExit(3)")
    with pytest.raises(Refused) as refusal:
        RewardRuntime([Reward(name="acc", kind="python", function=function)], folder)
    assert message in str(refusal.value)
    assert f"reward 'acc', function = '{function}'" in str(refusal.value)


def test_all_rewards_that_cannot_be_had_are_named_at_once(folder: Path) -> None:
    sections = [
        Reward(name="a", kind="python", function="rewards.py:nope"),
        Reward(name="a", kind="builtin", function="nope"),
        Reward(name="b", kind="model", path="./somewhere"),
    ]
    with pytest.raises(Refused) as refusal:
        RewardRuntime(sections, folder)
    text = str(refusal.value)
    assert len(text.splitlines()) == 4
    assert "two rewards are called 'a'" in text and "reward.b.path = ./somewhere: no such folder" in text
