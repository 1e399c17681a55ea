"""Reward functions that fail: wrong counts, wrong values, exceptions, time-outs, columns that the data lack."""

import re
import signal
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from trainer.batch import Completion, Prompt
from trainer.config.grpo import Reward
from trainer.errors import Refused, Stopped
from trainer.limit import Overdue, call_within
from trainer.rewards.runtime import RewardResult, RewardRuntime


def runtime(folder: Path, source: str, **keys: Any) -> RewardRuntime:
    """One reward `f` from a file of its own."""
    (folder / "judge.py").write_text(textwrap.dedent(source))
    return RewardRuntime([Reward(name="r", kind="python", function="judge.py:f", **keys)], folder)


def prompt(index: int = 0, **columns: Any) -> Prompt:
    return Prompt(index=index, text="?", ids=(1,), messages=None, columns=columns)


def four(**columns: Any) -> list[Completion]:
    """Two groups of two; the texts are "0" .. "3"."""
    return [
        Completion(
            group=i // 2,
            generation=i % 2,
            prompt=prompt(10 + i // 2, **columns),
            ids=(5,),
            sampling_logps=(0.0,),
            finish="stop",
            text=str(i),
        )
        for i in range(4)
    ]


def returns(folder: Path, expression: str, **keys: Any) -> tuple[list[Completion], RewardResult]:
    source = f"import numpy as np, torch, fractions\ndef f(completions):\n    return {expression}\n"
    rows = four()
    return rows, runtime(folder, source, **keys).score(rows, 0)


@pytest.mark.parametrize(
    ("expression", "got"),
    [
        ("[1.0]", "returned 1 value"),
        ("[1.0] * 3", "returned 3 values"),
        ("[1.0] * 5", "returned 5 values"),
        ("[]", "returned 0 values"),
        ("1.0", "returned a float"),
        ("np.float32(1)", "returned a float32"),
        ("None", "returned None"),
        ("(1.0 for _ in completions)", "returned a generator"),
        ("{i: 1.0 for i in range(4)}", "returned a dict"),
        ("'1234'", "returned a str"),
        ("torch.tensor(1.0)", "returned a Tensor of shape ()"),
        ("torch.ones(4, 1)", "returned a Tensor of shape (4, 1)"),
        ("np.ones((1, 4))", "returned a ndarray of shape (1, 4)"),
        ("np.ones(1)", "returned 1 value"),
    ],
)
def test_b43_a_wrong_number_of_rewards_ends_the_run(tmp_path: Path, expression: str, got: str) -> None:
    with pytest.raises(Stopped) as stop:
        returns(tmp_path, expression)
    assert f"reward 'r' (judge.py:f) {got}; expected a list of 4 numbers" in str(stop.value)
    assert stop.value.exit_code == 3


@pytest.mark.parametrize(
    "expression",
    [
        "[0, 1, 2, 3]",
        "(0, 1, 2, 3)",
        "np.arange(4)",
        "np.arange(4, dtype='float32')",
        "torch.arange(4.0, requires_grad=True)",
        "torch.arange(4.0).bfloat16()",
        "[torch.tensor(float(i), requires_grad=True) for i in range(4)]",
        "[np.float64(i) for i in range(4)]",
        "[fractions.Fraction(i) for i in range(4)]",
    ],
)
def test_b43_arrays_and_tensors_of_the_right_length_are_read(tmp_path: Path, expression: str) -> None:
    rows, result = returns(tmp_path, expression)
    assert [c.reward for c in rows] == [0.0, 1.0, 2.0, 3.0]
    assert all(type(c.reward) is float for c in rows)
    assert result.messages == []


def test_b43_log_extra_of_the_wrong_length_ends_the_run(tmp_path: Path) -> None:
    source = "def f(completions, log_extra):\n    log_extra('n', [1])\n    return [1.0] * 4"
    with pytest.raises(Stopped, match="logged 1 values in column 'n' with log_extra; expected 4"):
        runtime(tmp_path, source).score(four(), 0)


def test_b44_none_leaves_a_row_unscored_and_nothing_else(tmp_path: Path) -> None:
    rows, result = returns(tmp_path, "[1, None, 0, 2]")
    assert [c.reward for c in rows] == [1.0, None, 0.0, 2.0]
    assert rows[1].rewards == {"r": None}
    assert result.messages == []


def test_b44_none_everywhere_is_told_and_does_not_end_the_run(tmp_path: Path) -> None:
    rows, result = returns(tmp_path, "[None] * 4", max_unscored=0.0)
    assert [c.reward for c in rows] == [None] * 4
    assert result.messages == ["step 1: none of the 4 completions has a reward: nothing to learn from"]
    assert result.metrics == {"rewards/r/failed_fraction": (0.0, 4)}


def test_b44_none_is_not_replaced_by_the_fallback_for_failures(tmp_path: Path) -> None:
    rows, _ = returns(tmp_path, "[1, None, 0, 2]", fallback=0.1)
    assert rows[1].reward is None


@pytest.mark.parametrize(
    ("expression", "value", "advice"),
    [
        ("[0, 0, float('nan'), 0]", "nan", "return None"),
        ("np.array([0, 0, np.nan, 0])", "nan", "return None"),
        ("[0, 0, float('inf'), 0]", "inf", "finite"),
        ("torch.tensor([0, 0, -torch.inf, 0])", "-inf", "finite"),
        ("[0, 0, '1.0', 0]", "'1.0'", "expected a number"),
        ("[0, 0, [1.0], 0]", "[1.0]", "expected a number"),
        ("[0, 0, 1j, 0]", "1j", "expected a number"),
    ],
)
def test_b44_what_is_no_finite_number_ends_the_run(tmp_path: Path, expression: str, value: str, advice: str) -> None:
    with pytest.raises(Stopped) as stop:
        returns(tmp_path, expression)
    assert f"reward 'r' (judge.py:f) returned {value} for row 12 generation 1" in str(stop.value)
    assert advice in str(stop.value)


def test_b44_true_and_false_are_one_and_zero(tmp_path: Path) -> None:
    for expression in ("[True, False, True, False]", "np.array([True, False] * 2)", "[np.bool_(1), np.bool_(0)] * 2"):
        rows, _ = returns(tmp_path, expression)
        assert [c.reward for c in rows] == [1.0, 0.0, 1.0, 0.0]


def test_b44_a_metric_that_is_no_number_is_left_out(tmp_path: Path) -> None:
    source = """
    def f(completions, log_metric):
        log_metric("bad", float("nan"))
        log_metric("worse", "x")
        log_metric("good", 2)
        return [1.0] * len(completions)
    """
    result = runtime(tmp_path, source).score(four(), 0)
    assert result.metrics == {"good": (2.0, 1), "rewards/r/failed_fraction": (0.0, 4)}
    assert len(result.messages) == 2 and "log_metric('bad', nan) left out" in result.messages[0]


RAISES_ON_ROW_2 = """
calls = []
def f(completions, log_metric, log_extra):
    calls.append(len(completions))
    log_metric("seen", 1.0)
    if "2" in completions:
        raise KeyError("task")
    log_extra("text", completions)
    return [1.0] * len(completions)
"""


def test_b45_only_the_row_that_raises_is_unscored(tmp_path: Path) -> None:
    rewards = runtime(tmp_path, RAISES_ON_ROW_2, retries=1)
    rows = four()
    result = rewards.score(rows, 6)
    assert [c.reward for c in rows] == [1.0, 1.0, None, 1.0]
    assert rewards._functions[0].function.__globals__["calls"] == [4, 4, 1, 1, 1, 1]
    assert result.messages == [
        "reward 'r' (judge.py:f), step 7, unscored: KeyError: 'task' (judge.py:7): row 12 generation 1"
    ]
    # What failed calls logged is forgotten; columns stay aligned with the completions.
    assert result.metrics == {"rewards/r/failed_fraction": (1.0, 4), "seen": (3.0, 3)}
    assert result.columns == {"text": ["0", "1", None, "3"]}


def test_b45_a_failure_becomes_a_number_only_if_the_user_named_one(tmp_path: Path) -> None:
    rows = four()
    result = runtime(tmp_path, RAISES_ON_ROW_2, fallback=-1.0).score(rows, 0)
    assert [c.reward for c in rows] == [1.0, 1.0, -1.0, 1.0]
    assert "given the fallback -1" in result.messages[0]
    assert result.metrics["rewards/r/failed_fraction"] == (1.0, 4)


def test_b45_a_failure_that_passes_is_retried(tmp_path: Path) -> None:
    source = """
    calls = []
    def f(completions):
        calls.append(1)
        if len(calls) < 3:
            raise ConnectionError("busy")
        return [1.0] * len(completions)
    """
    rows = four()
    result = runtime(tmp_path, source, retries=2).score(rows, 0)
    assert [c.reward for c in rows] == [1.0] * 4 and result.messages == []


def test_b45_a_batch_that_fails_where_its_rows_do_not_is_told(tmp_path: Path) -> None:
    source = "def f(completions):\n    assert len(completions) == 1, 'one at a time'\n    return [1.0]"
    rows = four()
    result = runtime(tmp_path, source, retries=0).score(rows, 0)
    assert [c.reward for c in rows] == [1.0] * 4
    assert "AssertionError: one at a time (judge.py:2), but scored every row" in result.messages[0]


@pytest.mark.parametrize(("max_unscored", "stops"), [(0.2, True), (0.25, False), (0.0, True)])
def test_b45_too_many_failures_end_the_run(tmp_path: Path, max_unscored: float, stops: bool) -> None:
    rewards = runtime(tmp_path, RAISES_ON_ROW_2, retries=0, max_unscored=max_unscored, fallback=0.0)
    if not stops:
        rewards.score(four(), 0)
        return
    with pytest.raises(Stopped) as stop:
        rewards.score(four(), 0)
    assert f"failed on 1 of 4 completions in step 1, more than max_unscored = {max_unscored:g}" in str(stop.value)
    assert "KeyError: 'task' (judge.py:7): row 12 generation 1" in str(stop.value)


STUCK = {
    "sleeps": "import time\ndef f(completions):\n    time.sleep(60)",
    "loops": "def f(completions):\n    while True: pass",
    # `re` holds the GIL: a second thread that waits for this one would not wake up.
    "re": "import re\ndef f(completions):\n    re.match(r'(a+)+$', 'a' * 40 + 'b')",
    "swallows": """
import time
def f(completions):
    try:
        time.sleep(60)
    except Exception:
        return [0.0] * 4""",
    "async sleeps": "import asyncio\nasync def f(completions):\n    await asyncio.sleep(60)",
    "async blocks": "import time\nasync def f(completions):\n    time.sleep(1.5)",
}


@pytest.mark.parametrize("source", STUCK.values(), ids=STUCK.keys())
def test_b45_a_stuck_function_leaves_its_rows_unscored_in_time(tmp_path: Path, source: str) -> None:
    rewards = runtime(tmp_path, source, timeout=0.2, max_unscored=1.0)
    rows = four()
    start = time.monotonic()
    result = rewards.score(rows, 0)
    assert time.monotonic() - start < 1.0
    assert [c.reward for c in rows] == [None] * 4
    assert "no answer within 0.2 s: row 11 generation 1, row 11 generation 2, row 12 generation 1" in result.messages[0]


def test_b45_threads_of_a_stuck_function_do_not_hold_the_run(tmp_path: Path) -> None:
    source = """
    import time
    from concurrent.futures import ThreadPoolExecutor
    def f(completions):
        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(lambda c: time.sleep(3), completions))
    """
    start = time.monotonic()
    runtime(tmp_path, source, timeout=0.2, max_unscored=1.0).score(four(), 0)
    assert time.monotonic() - start < 2.0


def test_b45_stuck_on_one_row_does_not_cost_a_limit_for_each_row(tmp_path: Path) -> None:
    source = """
    import time
    def f(completions):
        if len(completions) > 1:
            raise ValueError("no")
        if completions[0] != "0":
            time.sleep(60)
        return [1.0]
    """
    rows = four()
    start = time.monotonic()
    runtime(tmp_path, source, timeout=0.3, retries=0, max_unscored=1.0).score(rows, 0)
    assert time.monotonic() - start < 0.6
    assert [c.reward for c in rows] == [1.0, None, None, None]


@pytest.mark.parametrize("error", ["TimeoutError('service')", "ValueError('service')"])
def test_b45_an_async_function_that_raises_leaves_its_row_unscored(tmp_path: Path, error: str) -> None:
    source = f"""
    async def f(completions):
        if "2" in completions:
            raise {error}
        return [1.0] * len(completions)
    """
    rows = four()
    result = runtime(tmp_path, source, retries=0).score(rows, 0)
    assert [c.reward for c in rows] == [1.0, 1.0, None, 1.0]
    assert "Error: service" in result.messages[0] and "row 12 generation 1" in result.messages[0]


def test_b45_sys_exit_in_a_function_is_a_failure_and_an_interrupt_is_not(tmp_path: Path) -> None:
    rows = four()
    runtime(tmp_path, "import sys\ndef f(completions):\n    sys.exit(0)", max_unscored=1.0).score(rows, 0)
    assert [c.reward for c in rows] == [None] * 4
    rewards = runtime(tmp_path, "def f(completions):\n    raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        rewards.score(rows, 0)


def test_b45_functions_with_time_limits_of_their_own_work(tmp_path: Path) -> None:
    # math-verify's default limit is a signal, which fails outside the main thread.
    source = """
    from math_verify import parse, verify
    def f(completions, answer):
        return [float(verify(parse(a), parse(c))) for c, a in zip(completions, answer)]
    """
    rows = four(answer="2.0")
    result = runtime(tmp_path, source).score(rows, 0)
    assert [c.reward for c in rows] == [0.0, 0.0, 1.0, 0.0]
    assert result.messages == []


def test_b45_a_limit_leaves_the_timer_and_handler_of_others_in_place() -> None:
    rang = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: rang.append(time.monotonic()))
    start = time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, 0.4)
    try:
        with pytest.raises(Overdue):
            call_within(0.1, lambda: time.sleep(5))
        assert call_within(5, lambda: 7) == 7
        assert not rang
        time.sleep(0.5)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(rang) == 1 and rang[0] - start == pytest.approx(0.4, abs=0.1)


def problems(folder: Path, head: str, *prompts: Prompt) -> list[str]:
    return runtime(folder, f"{head}\n    return [0.0] * len(completions)").check(prompts)


def test_b46_a_missing_column_is_named_with_the_columns_present(tmp_path: Path) -> None:
    [problem] = problems(tmp_path, "def f(prompts, completions, answer):", prompt(answr="4", level=1))
    assert "reward 'r' (judge.py:f) needs the column 'answer', which the data lack" in problem
    assert "(columns present: answr, level); did you mean 'answr'?" in problem


def test_b46_a_misspelt_argument_is_a_missing_column_with_a_hint(tmp_path: Path) -> None:
    [problem] = problems(tmp_path, "def f(completions, completions_ids):", prompt())
    assert "'completions_ids'" in problem and "did you mean 'completion_ids'?" in problem
    assert "columns present: none" in problem


@pytest.mark.parametrize(
    "head",
    [
        "def f(completions, answer):",
        "def f(completions, answer, **kwargs):",
        "def f(completions, *, answer, missing=None):",
        "def f(*, completions, **kwargs):",
        "async def f(prompts, completions, answer, trainer_state, log_metric, log_extra):",
    ],
)
def test_b46_functions_that_fit_are_let_through(tmp_path: Path, head: str) -> None:
    assert problems(tmp_path, head, prompt(answer="4")) == []


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ("def f(prompts):", "takes neither `completions` nor `completion_ids`"),
        ("def f(completions, /):", "takes completions by position only"),
    ],
)
def test_b46_functions_that_cannot_be_called_are_named(tmp_path: Path, head: str, message: str) -> None:
    [problem] = problems(tmp_path, head, prompt())
    assert message in problem


def test_b46_a_column_with_the_name_of_an_argument_is_refused(tmp_path: Path) -> None:
    [problem] = problems(tmp_path, "def f(completions):", prompt(completions="old"))
    assert "a column named completions" in problem


def test_b46_rows_without_an_answer_are_listed_where_a_reward_reads_it(tmp_path: Path) -> None:
    prompts = [prompt(i, chosen="" if i >= 5 else "yes", answer="4") for i in range(30)]
    assert problems(tmp_path, "def f(completions, answer, **kwargs):", *prompts) == []
    [problem] = problems(tmp_path, "def f(completions, chosen):", *prompts)
    rows = ", ".join(str(i) for i in range(6, 26))
    assert f"reads 'chosen', which is missing or empty in 25 rows: {rows} and 5 more" in problem
    # A column of another meaning may be empty, and so may an answer that a function can do without.
    assert problems(tmp_path, "def f(completions, hint, answer=None):", prompt(hint=None), prompt(answer="")) == []


def test_b46_a_signature_that_python_cannot_tell_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=re.escape("Python cannot tell its parameters")):
        RewardRuntime([Reward(name="r", kind="python", function="builtins:iter")], tmp_path)
