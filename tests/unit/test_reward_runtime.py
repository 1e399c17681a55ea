"""The rewards of a step: at the same time, in processes that can be killed, again after pauses, never paid twice."""

import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer import interrupts
from trainer.batch import Completion, Prompt
from trainer.config.grpo import Reward
from trainer.errors import Preempted, Stopped
from trainer.rewards import asking, calls, processes
from trainer.rewards.ledger import Ledger
from trainer.rewards.runtime import RewardRuntime


@pytest.fixture(autouse=True)
def search_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test its own, or a module is found beside the run file of an earlier test."""
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def as_services(monkeypatch: pytest.MonkeyPatch) -> None:
    """Async functions of a file in the place of services."""
    resolve = RewardRuntime._resolve

    def paid(self: RewardRuntime, section: Reward) -> Any:
        found = resolve(self, section)
        settings = f"{section.function} {section.url}"
        return dataclasses.replace(found, concurrency=section.calls_at_a_time, keeps_time=True, paid=settings)

    monkeypatch.setattr(RewardRuntime, "_resolve", paid)


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "PAUSES_S", (0.01, 0.02, 0.03))


def runtime(folder: Path, source: str, *names: str, hang_timeout: float = 1800.0, **keys: Any) -> RewardRuntime:
    """Functions of one file; ``keys`` of all of them."""
    (folder / "judge.py").write_text(textwrap.dedent(source))
    sections = [Reward(name=name, kind="python", function=f"judge.py:{name}", **keys) for name in names or ("f",)]
    return RewardRuntime(sections, folder, hang_timeout=hang_timeout)


def rows(n: int = 4, **columns: Any) -> list[Completion]:
    """Groups of two; the texts are "0", "1" and so on."""
    return [
        Completion(
            group=i // 2,
            generation=i % 2,
            prompt=Prompt(index=i // 2, text="?", ids=(1,), messages=None, columns=columns),
            ids=(5, i),
            sampling_logps=(0.0, 0.0),
            finish="stop",
            text=str(i),
        )
        for i in range(n)
    ]


def module_of(rewards: RewardRuntime) -> dict[str, Any]:
    return rewards._functions[0].function.__globals__  # type: ignore[no-any-return]


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def ended_soon(*pids: int) -> None:
    until = time.monotonic() + 10
    while not all(map(gone, pids)):
        assert time.monotonic() < until, "an orphan"
        time.sleep(0.05)


# At the same time


def test_services_work_while_functions_of_this_process_do(tmp_path: Path) -> None:
    source = """
    import threading
    began = threading.Event()
    def local(completions):
        return [float(began.wait(5))] * len(completions)
    async def remote(completions):
        began.set()
        return [1.0] * len(completions)
    """
    scored = rows()
    runtime(tmp_path, source, "local", "remote").score(scored, 0)
    assert [c.reward for c in scored] == [2.0] * 4


COUNTS = """
import asyncio
now, most, sizes = 0, 0, []
async def f(completions):
    global now, most
    sizes.append(len(completions))
    now += 1
    most = max(most, now)
    await asyncio.sleep(0.02)
    now -= 1
    return [float(text) for text in completions]
"""


@pytest.mark.parametrize(("keys", "most"), [({}, 64), ({"concurrency": 3}, 3)])
def test_a_service_is_asked_for_many_completions_at_a_time(
    tmp_path: Path, as_services: None, keys: dict[str, int], most: int
) -> None:
    rewards, scored = runtime(tmp_path, COUNTS, **keys), rows(256 if most == 64 else 7)
    rewards.score(scored, 0)
    assert module_of(rewards)["most"] == most and set(module_of(rewards)["sizes"]) == {1}
    assert [c.reward for c in scored] == [float(i) for i in range(len(scored))]


def test_an_async_function_gets_all_completions_in_one_call_unless_told_how_many_calls(tmp_path: Path) -> None:
    rewards = runtime(tmp_path, COUNTS)
    rewards.score(rows(6), 0)
    assert module_of(rewards)["sizes"] == [6]
    rewards = runtime(tmp_path, COUNTS, concurrency=2)
    rewards.score(rows(6), 0)
    assert module_of(rewards)["sizes"] == [1] * 6 and module_of(rewards)["most"] == 2


def test_b45_one_call_of_many_that_hangs_or_raises_costs_its_row(tmp_path: Path) -> None:
    source = """
    import asyncio
    tries = []
    async def f(completions):
        tries.append(completions[0])
        if completions[0] == "1":
            await asyncio.sleep(60)
        if completions[0] == "2":
            raise KeyError("task")
        return [1.0]
    """
    rewards, scored = runtime(tmp_path, source, concurrency=4, timeout=0.2, retries=1), rows()
    messages = rewards.score(scored, 0).messages
    assert [c.reward for c in scored] == [1.0, None, None, 1.0]
    assert "no answer within 0.2 s: row 1 generation 2" in messages[0]
    assert "KeyError: 'task' (judge.py:9): row 2 generation 1" in messages[1]
    assert sorted(module_of(rewards)["tries"]) == ["0", "1", "2", "2", "3"]  # what hangs is not asked twice


def test_b45_sys_exit_in_an_async_function_leaves_the_loop_alive(tmp_path: Path) -> None:
    source = """
    import sys
    async def f(completions):
        if "2" in completions:
            sys.exit(3)
        return [1.0] * len(completions)
    """
    scored = rows()
    runtime(tmp_path, source, retries=0).score(scored, 0)
    assert [c.reward for c in scored] == [1.0, 1.0, None, 1.0]


def test_b45_a_service_that_never_ends_is_given_up_and_what_came_is_kept(
    tmp_path: Path, as_services: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = """
    import asyncio
    async def f(completions):
        await asyncio.sleep(0 if int(completions[0]) < 2 else 60)
        return [1.0]
    """
    monkeypatch.setattr(calls, "BETWEEN_TRIES_S", 0.1)
    monkeypatch.setattr(asking, "PAUSES_S", ())
    scored = rows()
    rewards = runtime(tmp_path, source, concurrency=2, timeout=0.1, retries=0, max_unscored=1.0)
    start = time.monotonic()
    [message] = rewards.score(scored, 0).messages
    assert time.monotonic() - start < 2  # 2 waves of 0.2 s
    assert [c.reward for c in scored] == [1.0, 1.0, None, None]
    assert "not answered when the 0.4 s for 4 completions were over: row 2" in message


def test_no_reward_makes_the_other_ranks_wait_until_they_give_up(tmp_path: Path) -> None:
    source = """
    import time
    def f(completions):
        if len(completions) > 1:
            raise ValueError("all at once")
        time.sleep(0.15)
        raise ValueError("one")
    """
    rewards = runtime(tmp_path, source, hang_timeout=1.0, timeout=0.3, retries=0, max_unscored=1.0)
    start = time.monotonic()
    result = rewards.score(rows(30), 0)
    assert time.monotonic() - start < 0.9  # not 30 times 0.15 s
    assert "no answer within 0.3 s" not in str(result.messages)
    assert "all that was left of the step's share of watch.hang_timeout, called row by row" in str(result.messages)


# In processes


def in_processes(
    folder: Path, body: str, n: int = 4, *, header: str = "def f(completions, **_):", **keys: Any
) -> tuple[list[Completion], Any]:
    source = f"import ctypes, os, re, signal, sys\n{header}\n    [text] = completions\n"
    scored = rows(n)
    keys = {"concurrency": 2, "timeout": 5.0, "retries": 0} | keys
    result = runtime(folder, source + textwrap.indent(textwrap.dedent(body), "    "), **keys).score(scored, 0)
    return scored, result


def test_calls_run_in_so_many_other_processes_without_torch_in_them(tmp_path: Path) -> None:
    body = """
    print("a line that is no answer")
    assert sys.stdin.read() == "" and "torch" not in sys.modules
    return [os.getpid()]
    """
    scored, result = in_processes(tmp_path, body, n=6)
    assert result.messages == []
    processes = {c.reward for c in scored}
    assert len(processes) == 2 and os.getpid() not in processes


def test_a_process_imports_the_trainer_and_not_a_file_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trainer.py").write_text("raise RuntimeError('mine')")
    monkeypatch.syspath_prepend(tmp_path)
    scored, result = in_processes(tmp_path, "return [1.0]", n=1)
    assert (result.messages, scored[0].reward) == ([], 1.0)


STUCK_OR_CRASHED = {
    "C code that holds the GIL": ("ctypes.PyDLL(None).sleep(60)", "no answer within 0.5 s; its process was killed"),
    "re": ("re.match(r'(a+)+$', 'a' * 40 + 'b')", "no answer within 0.5 s; its process was killed"),
    "os._exit": ("os._exit(3)", "its process ended with exit code 3"),
    "a crash": ("os.kill(os.getpid(), signal.SIGSEGV)", "its process ended by SIGSEGV"),
    "sys.exit": ("sys.exit(3)", "SystemExit: 3"),
    "raises": ("{}['gold']", "KeyError: 'gold' (judge.py:5)"),
    "no JSON": ("return [1j]", "not JSON serializable"),
}


@pytest.mark.parametrize(("code", "why"), STUCK_OR_CRASHED.values(), ids=STUCK_OR_CRASHED)
def test_b45_a_call_that_is_stuck_or_crashes_costs_its_row_alone(tmp_path: Path, code: str, why: str) -> None:
    start = time.monotonic()
    scored, result = in_processes(tmp_path, f"if text == '1':\n    {code}\nreturn [1.0]", timeout=0.5)
    assert time.monotonic() - start < 5
    assert [c.reward for c in scored] == [1.0, None, 1.0, 1.0]
    [message] = result.messages
    assert why in message and message.endswith(": row 1 generation 2")


def test_a_stuck_process_is_killed_with_what_it_started(tmp_path: Path) -> None:
    body = f"""
    import pathlib, subprocess
    child = subprocess.Popen(["sleep", "60"])
    pathlib.Path({str(tmp_path / "pids")!r}).write_text(f"{{os.getpid()}} {{child.pid}}")
    ctypes.PyDLL(None).sleep(60)
    """
    in_processes(tmp_path, body, n=1, timeout=1.0, max_unscored=1.0)
    ended_soon(*map(int, (tmp_path / "pids").read_text().split()))


@pytest.mark.parametrize("value", ["float('nan')", "float('inf')", "'1.0'", "[1.0]"])
def test_b44_what_is_no_finite_number_ends_the_run_from_a_process_too(tmp_path: Path, value: str) -> None:
    with pytest.raises(Stopped, match=r"returned .* for row"):
        in_processes(tmp_path, f"return [{value}]", n=1)


def test_a_file_that_loads_here_and_not_there_fails_by_name(tmp_path: Path) -> None:
    source = "import sys\nif 'torch' not in sys.modules:\n    raise RuntimeError('away')\ndef f(completions):\n    ..."
    why = "its process could not load it: Refused: importing judge.py failed: RuntimeError: away"
    with pytest.raises(Stopped, match=why):
        runtime(tmp_path, source, concurrency=1, timeout=5.0).score(rows(1), 0)


def test_what_a_function_is_handed_and_logs_is_the_same_in_a_process(tmp_path: Path) -> None:
    source = """
    import numpy
    def f(prompts, completions, completion_ids, level, trainer_state, log_metric, log_extra):
        log_metric("steps", trainer_state.max_steps - trainer_state.global_step)
        log_metric("bad", float("nan"))
        log_extra("seen", [str(row) for row in zip(prompts, completions, completion_ids, level)])
        return numpy.ones(len(completions))
    """
    found = []
    for keys in ({}, {"concurrency": 1}):
        rewards, scored = runtime(tmp_path, source, **keys), rows(2, level=7)
        rewards.max_steps = 9
        result = rewards.score(scored, 4)
        total, count = result.metrics["steps"]
        found.append(([c.reward for c in scored], result.columns, total / count))
        assert "log_metric('bad', nan) left out" in result.messages[0]
    assert found[0] == found[1] == ([1.0, 1.0], {"seen": ["('?', '0', [5, 0], 7)", "('?', '1', [5, 1], 7)"]}, 5.0)


def test_a_builtin_may_run_in_processes(tmp_path: Path) -> None:
    section = Reward(name="r", kind="builtin", function="regex", pattern="[02]", concurrency=1)
    scored, rewards = rows(), RewardRuntime([section], tmp_path)
    assert rewards.check([c.prompt for c in scored]) == []
    rewards.score(scored, 0)
    assert [c.reward for c in scored] == [1.0, 0.0, 1.0, 0.0]


def test_a_stuck_process_ends_with_the_trainer_that_was_killed(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(
        "import ctypes, os, pathlib\ndef f(completions):\n"
        f"    pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))\n    ctypes.PyDLL(None).sleep(60)\n"
    )
    trainer = f"""
import functools, pathlib
from trainer.rewards.event_loop import EventLoop
from trainer.rewards.functions import resolve
from trainer.rewards.processes import InProcesses
load = functools.partial(resolve, "judge.py:f", pathlib.Path({str(tmp_path)!r}), {{}})
EventLoop().run(InProcesses(load, 60.0, 0)(completions=["a"]), 60.0)
"""
    process = subprocess.Popen([sys.executable, "-c", trainer])
    until = time.monotonic() + 60
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.05)
    worker = int((tmp_path / "pid").read_text())
    assert not gone(worker)
    process.kill()
    process.wait()
    ended_soon(worker)


# SIGTERM


@pytest.fixture
def deferred(monkeypatch: pytest.MonkeyPatch) -> Any:
    """SIGTERM as it is while a run trains."""
    monkeypatch.setattr(interrupts, "_received", [])
    monkeypatch.setattr(interrupts, "_deferred", True)
    before = signal.signal(signal.SIGTERM, interrupts._note)
    yield
    signal.signal(signal.SIGTERM, before)


SLOW = {
    "async": ({}, "import asyncio, os\nasync def f(completions):\n    await asyncio.sleep(60)"),
    "in a process": ({"concurrency": 2}, "import time\ndef f(completions):\n    time.sleep(60)"),
    "in a pause": ({"max_unscored": 0.0}, "async def f(completions):\n    raise ConnectionError('away')"),
}


@pytest.mark.parametrize(("keys", "source"), SLOW.values(), ids=SLOW)
def test_f8_sigterm_does_not_wait_for_rewards(
    tmp_path: Path, deferred: None, keys: dict[str, Any], source: str
) -> None:
    rewards = runtime(tmp_path, source, **keys)
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    start = time.monotonic()
    with pytest.raises(Preempted) as end:
        rewards.score(rows(), 0)
    assert time.monotonic() - start < 3 and end.value.exit_code == 75
    assert rewards._loop is not None and not rewards._loop._running


def test_f8_a_call_that_is_cancelled_hears_of_it(tmp_path: Path, deferred: None) -> None:
    source = """
    import asyncio, threading
    cancelled = threading.Event()
    async def f(completions):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise
    """
    rewards = runtime(tmp_path, source)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
    with pytest.raises(Preempted):
        rewards.score(rows(), 0)
    assert module_of(rewards)["cancelled"].wait(2)


# Again after a pause

AWAY = """
asked = []
async def f(completions):
    asked.append(list(completions))
    if len(asked) <= {fails} and completions[0] != "0":
        {error}
    return [float(text) + 1 for text in completions]
"""


def test_f22_a_service_that_was_away_is_asked_again_for_what_it_owes(
    tmp_path: Path,
    short_pauses: None,
    as_services: None,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rewards = runtime(tmp_path, AWAY.format(fails=7, error="raise ConnectionError('refused')"), max_unscored=0.25)
    scored = rows()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert rewards.score(scored, 2).messages == []
    assert [c.reward for c in scored] == [1.0, 2.0, 3.0, 4.0]
    # 4 calls, then 3 for the rows without a score, and after the next pause 3 more, which are answered.
    asked = [one for [one] in module_of(rewards)["asked"]]
    assert asked == ["0", "1", "2", "3", *"123", *"123"]
    why = "3 of 4 completions have no score (ConnectionError: refused (judge.py:6))"
    told = [
        f"rank 1: reward 'f' (judge.py:f), step 3: {why}; they are asked for again in {pause} s"
        for pause in ("0.01", "0.02")
    ]
    assert capfd.readouterr().out.splitlines() == told


def test_f23_a_service_that_stays_away_ends_the_run_after_the_last_pause(
    tmp_path: Path, short_pauses: None, as_services: None
) -> None:
    rewards = runtime(tmp_path, AWAY.format(fails=99, error="raise TimeoutError"))
    with pytest.raises(Stopped, match=r"failed on 3 of 4 completions in step 1, more than max_unscored = 0\.5") as stop:
        rewards.score(rows(), 0)
    assert stop.value.exit_code == 3
    assert len(module_of(rewards)["asked"]) == 4 + 3 * 3


@pytest.mark.parametrize(
    ("error", "heals"),
    [
        ("raise KeyError('gold')", False),
        ("raise FileNotFoundError('gold')", False),
        ("raise RuntimeError('client') from ConnectionResetError()", True),
        ("import socket; raise socket.gaierror(-2, 'name not known')", True),
        ("import ssl; raise ssl.SSLError('certificate')", True),
    ],
)
def test_only_what_may_heal_is_waited_for(
    tmp_path: Path, short_pauses: None, as_services: None, error: str, heals: bool
) -> None:
    rewards = runtime(tmp_path, AWAY.format(fails=4, error=error))
    if heals:
        rewards.score(rows(), 0)
    else:
        with pytest.raises(Stopped, match="more than max_unscored"):
            rewards.score(rows(), 0)
    assert len(module_of(rewards)["asked"]) == (7 if heals else 4)


def test_nothing_is_waited_for_where_too_many_rows_will_never_have_a_score(
    tmp_path: Path, short_pauses: None, as_services: None
) -> None:
    error = "raise TimeoutError if completions[0] == '1' else KeyError('gold')"
    rewards = runtime(tmp_path, AWAY.format(fails=99, error=error), max_unscored=0.25)
    with pytest.raises(Stopped, match="failed on 3 of 4"):
        rewards.score(rows(), 0)
    assert len(module_of(rewards)["asked"]) == 4


def test_what_is_within_max_unscored_is_not_waited_for(tmp_path: Path, short_pauses: None, as_services: None) -> None:
    rewards = runtime(tmp_path, AWAY.format(fails=99, error="raise TimeoutError"), max_unscored=0.75)
    scored = rows()
    rewards.score(scored, 0)
    assert [c.reward for c in scored] == [1.0, None, None, None]
    assert len(module_of(rewards)["asked"]) == 4


def test_no_pause_begins_that_the_other_ranks_would_not_wait_for(
    tmp_path: Path, as_services: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "PAUSES_S", (50.0,))
    source = AWAY.format(fails=99, error="raise TimeoutError")
    with pytest.raises(Stopped):
        runtime(tmp_path, source, timeout=1.0, hang_timeout=100.0).score(rows(), 0)


def test_what_another_process_says_is_what_the_function_said(tmp_path: Path) -> None:
    body = """
    import datetime
    from trainer.rewards.failed import Failed
    log_extra("when", [datetime.date(2026, 1, 2)])
    log_extra("seen", [{1}])
    log_metric("odd", datetime.date(2026, 1, 2))
    if text == "1":
        return [Failed("busy", may_heal=True)]
    return [1.0]
    """
    scored, result = in_processes(tmp_path, body, n=2, header="def f(completions, log_extra, log_metric):")
    assert [c.reward for c in scored] == [1.0, None]
    assert result.columns["when"][0] == "2026-01-02" and result.columns["seen"][0] == "{1}"
    assert any("unscored: busy: row 1 generation 2" in told for told in result.messages)
    assert any("log_metric('odd', '2026-01-02') left out, not a finite number" in told for told in result.messages)


@pytest.mark.parametrize("body", ["raise ConnectionError('refused')", "return [Failed('busy', may_heal=True)]"])
def test_a_service_that_another_process_asks_may_heal(tmp_path: Path, short_pauses: None, body: str) -> None:
    body = (
        f"from trainer.rewards.failed import Failed\nif not os.path.exists('{tmp_path}/up'):\n    {body}\nreturn [1.0]"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asking, "_pause", lambda _: (tmp_path / "up").touch())
        scored, _ = in_processes(tmp_path, body, n=2, max_unscored=0.0)
    assert [c.reward for c in scored] == [1.0, 1.0]


def test_processes_that_are_slow_to_start_are_waited_for(tmp_path: Path) -> None:
    reward = runtime(tmp_path, "def f(completions): ...", concurrency=2, timeout=0.5, retries=0)._functions[0]
    assert reward.longest(2) == processes.START_S + 0.5 + calls.BETWEEN_TRIES_S


# The ledger

PAID = """
asked = []
async def f(completions, level, log_metric, log_extra):
    asked.append(completions[0])
    log_metric("length", 0.1 * len(completions[0]) + int(completions[0]) / 3)
    if completions[0] == "2":
        log_extra("odd", [completions[0]])
    if completions[0] == "3" and len(asked) <= 4:
        raise KeyError("3")
    return [None if completions[0] == "1" else int(completions[0]) / 7]
"""


def test_f24_what_was_paid_for_is_not_asked_again(tmp_path: Path, as_services: None) -> None:
    found = []
    for expected in (["0", "1", "2", "3"], ["3"]):  # the one that failed
        rewards, scored = runtime(tmp_path, PAID, retries=0), rows(level=1)
        if len(expected) == 1:
            rewards._functions[0].function.__globals__["asked"].extend("xxxx")
        rewards.ledger = Ledger(tmp_path, 0, ranks=1)
        result = rewards.score(scored, 3)
        assert [one for one in module_of(rewards)["asked"] if one != "x"] == expected
        found.append(([c.reward for c in scored[:3]], result.columns, result.metrics["length"]))
    assert found[0][:2] == found[1][:2]
    assert found[0][0] == [0.0, None, 2 / 7] and found[0][1] == {"odd": [None, None, "2", None]}
    rewards, scored = runtime(tmp_path, PAID), rows(level=1)
    rewards.ledger = Ledger(tmp_path, 0, ranks=1)
    result = rewards.score(scored, 3)
    assert result.metrics["length"] == found[1][2]  # bit for bit, from the file
    told = f"4 scores of step 4 taken from {rewards.ledger.file}; delete it to ask again"
    assert [message for message in result.messages if told in message]
    assert scored[3].reward == 3 / 7 and module_of(rewards)["asked"] == []


OTHER: dict[str, Callable[[Completion], Completion]] = {
    "tokens": lambda c: dataclasses.replace(c, ids=(5, 99)),
    "generation": lambda c: dataclasses.replace(c, generation=7),
    "row": lambda c: dataclasses.replace(c, prompt=dataclasses.replace(c.prompt, index=7)),
    "prompt": lambda c: dataclasses.replace(c, prompt=dataclasses.replace(c.prompt, text="??")),
    "columns": lambda c: dataclasses.replace(c, prompt=dataclasses.replace(c.prompt, columns={"level": 2})),
}


@pytest.mark.parametrize("change", OTHER.values(), ids=OTHER)
def test_another_question_is_asked(tmp_path: Path, change: Callable[[Completion], Completion]) -> None:
    [one] = rows(1, level=1)
    assert Ledger.key("r", "s", 0, one) == Ledger.key("r", "s", 0, dataclasses.replace(one))
    assert Ledger.key("r", "s", 0, one) != Ledger.key("r", "s", 0, change(one))
    assert len({Ledger.key("r", "s", 0, one), Ledger.key("q", "s", 0, one), Ledger.key("r", "t", 0, one)}) == 3
    assert Ledger.key("r", "s", 0, one) != Ledger.key("r", "s", 1, one)


def test_the_settings_that_make_a_score_are_part_of_the_question(tmp_path: Path) -> None:
    def paid(**keys: Any) -> str:
        section = Reward(name="r", kind="http", url="http://a", **keys)
        return RewardRuntime.settings_of(section)

    assert paid() == paid(weight=2.0, timeout=5.0, retries=0, max_unscored=0.0, fallback=1.0, concurrency=3)
    assert paid() != paid(model="other")


def test_the_ledger_forgets_what_a_checkpoint_holds_and_outlives_a_torn_line(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, 1, ranks=2)
    assert not (tmp_path / "paid").exists()
    for step in range(3):
        ledger.keep(f"key {step}", step, calls.Scores([step / 3]))
    ledger.flush()
    ledger.forget_before(1)
    ledger.keep("key 3", 3, calls.Scores([None]))
    file = tmp_path / "paid" / "rank-00001.jsonl"
    with file.open("a") as torn:
        torn.write('{"step": 9, "key": "to')
    again = Ledger(tmp_path, 1, ranks=2)
    again.keep("key 4", 4, calls.Scores([4.0]))
    last = Ledger(tmp_path, 1, ranks=2)
    values = [last.known(f"key {step}") for step in range(5)]
    assert [known.values if known else "" for known in values] == ["", [1 / 3], [2 / 3], [None], [4.0]]
    last.forget_before(9)
    assert not file.exists()


def test_the_ledgers_of_all_ranks_are_known_on_any_number_of_them(tmp_path: Path) -> None:
    for rank in range(3):
        Ledger(tmp_path, rank, ranks=3).keep(f"key {rank}", 4, calls.Scores([float(rank)]))
    fewer = [Ledger(tmp_path, rank, ranks=2) for rank in range(2)]
    more = Ledger(tmp_path, 3, ranks=4)
    for ledger in (*fewer, more):
        found = [ledger.known(f"key {rank}") for rank in range(3)]
        assert [one and one.values for one in found] == [[0.0], [1.0], [2.0]]
    fewer[0].forget_before(4)  # a checkpoint without that step: nothing is lost
    assert [file.name for file in sorted((tmp_path / "paid").iterdir())] == ["rank-00000.jsonl", "rank-00001.jsonl"]
    assert Ledger(tmp_path, 0, ranks=1).known("key 2") is not None


def test_scores_that_cannot_be_read_or_forgotten_end_no_rank_alone(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, 0, ranks=1)
    ledger.keep("key", 0, calls.Scores([1.0]))
    with pytest.MonkeyPatch.context() as broken:
        broken.setattr(Path, "read_bytes", failing(13))
        with pytest.raises(Stopped, match=r"cannot be read: Permission denied\. Fix: let this user"):
            Ledger(tmp_path, 0, ranks=1)
    rewards = runtime(tmp_path, "def f(completions): ...")
    rewards.ledger = ledger
    with pytest.MonkeyPatch.context() as broken:
        broken.setattr(Path, "unlink", failing(28))
        [note] = rewards.forget_paid_before(1)
    assert "checkpoint of step 1" in note and "cannot be written: No space left" in note
    assert rewards.forget_paid_before(1) == [] and not ledger.file.exists()


def failing(number: int) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return fail
