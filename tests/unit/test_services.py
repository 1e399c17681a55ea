"""Rewards that a service answers: every fault of every service, and what becomes of the score."""

import logging
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.service_stub import MODEL, Stub
from trainer.batch import Completion, Prompt
from trainer.config.grpo import Reward
from trainer.errors import Refused, Stopped
from trainer.rewards import asking
from trainer.rewards.runtime import RewardResult, RewardRuntime
from trainer.rewards.services import breaker, chat, http

KEY = "canary-0f3c9-key-that-nobody-may-see"
ROWS = 4

SECTIONS: dict[str, dict[str, Any]] = {
    "openai": {"kind": "openai", "path_of_url": "/v1", "model": MODEL},
    "dashscope": {"kind": "dashscope", "path_of_url": "", "model": "qwen-plus"},
    "rerank": {"kind": "dashcope", "path_of_url": "/api/v1", "model": "gte-rerank-v2"},
    "ollama": {"kind": "ollama", "path_of_url": "", "model": MODEL},
    "http": {"kind": "http", "path_of_url": "/score"},
}
JUDGES = ("openai", "dashscope", "ollama")
BATCHES = ("rerank", "http")

# fault -> (what becomes of the rows, requests a row or call, words of the reason)
SCORED, HEALS, FAILS, STOPS = "scored", "failed, may heal", "failed", "run stopped"
FAULTS: dict[str, tuple[str, int, str]] = {
    "": (SCORED, 1, ""),
    "500": (HEALS, 3, "answered 500"),
    "429": (HEALS, 3, "asks to wait 7 s"),
    "408": (HEALS, 3, "answered 408"),
    "409": (HEALS, 3, "answered 409"),
    "503": (HEALS, 3, "answered 503"),
    "cut off": (HEALS, 3, "Error"),
    "hang": (HEALS, 1, "no whole answer within 0.3 s"),
    "drip": (HEALS, 1, "no whole answer within 0.3 s"),
    "huge": (HEALS, 1, "longer than 4 MiB"),
    "gzip": (HEALS, 1, "compressed (gzip)"),
    "redirect": (HEALS, 1, "redirect to '127.0.0.1', which is not followed"),
    "html": (HEALS, 1, "no JSON"),
    "truncated": (HEALS, 1, "no JSON"),
    "400": (FAILS, 1, "answered 400"),
    "fewer": (FAILS, 1, "the reply has"),
    "more": (FAILS, 1, "twice"),
    "401": (STOPS, 1, "answered 401"),
    "403": (STOPS, 1, "answered 403"),
    "404": (STOPS, 1, "answered 404"),
    "413": (STOPS, 1, "answered 413"),
    "422": (STOPS, 1, "answered 422"),
}
ONLY: dict[str, tuple[tuple[str, ...], tuple[str, int, str]]] = {
    "prose": (JUDGES, (FAILS, 1, "not the JSON that was asked for")),
    "another key": (JUDGES, (FAILS, 1, "and nothing else")),
    "reordered": (BATCHES, (SCORED, 1, "")),
    "another id": (BATCHES, (FAILS, 1, "not asked for")),
}
CELLS = [(name, fault) for name in SECTIONS for fault in FAULTS] + [
    (name, fault) for fault, (names, _) in ONLY.items() for name in names
]
VALUES = {
    "NaN": "NaN is no number",
    "Infinity": "is no number",
    "-Infinity": "is no number",
    "1e308": "outside of",
    "1e999": "outside of",
    "-1001": "outside of",
    "true": "expected a number",
    '"0.8"': "expected a number",
    "null": "expected a number",
    "[7]": "expected a number",
    "0x7": "no",
    "1" + "0" * 400: "outside of",
    "9" * 5000: "no",
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The pauses that were due, none of which is waited for; and a key in the environment."""
    due: list[float] = []
    real = http._pause

    def pause(state: Any) -> float:
        due.append(real(state))
        return 0.001

    monkeypatch.setattr(http, "_pause", pause)
    monkeypatch.setattr(asking, "PAUSES_S", ())
    monkeypatch.setenv("JUDGE_KEY", KEY)
    for proxy in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):  # not used, or every cell fails
        monkeypatch.setenv(proxy, "http://127.0.0.1:9")
    yield due


def section(name: str, address: str, **keys: Any) -> Reward:
    told = dict(SECTIONS[name])
    url = address + told.pop("path_of_url")
    key = {} if name == "ollama" else {"key_env": "JUDGE_KEY"}
    return Reward.model_validate({"name": "judge", "url": url, "max_unscored": 1, "timeout": 20} | key | told | keys)


def completions(n: int = ROWS, texts: list[str] | None = None, **columns: Any) -> list[Completion]:
    prompt = Prompt(0, "What is 17 + 25?", (1, 2), None, {"answer": "42"} | columns)
    said = texts or [f"It is {place}." for place in range(n)]
    return [Completion(0, place, prompt, (5,), (-1.0,), "stop", text) for place, text in enumerate(said)]


def ask(reward: Reward, rows: list[Completion]) -> RewardResult:
    return RewardRuntime([reward], Path()).score(rows, step=3)


@pytest.mark.parametrize(("name", "fault"), CELLS, ids=[f"{name}-{fault or 'fine'}" for name, fault in CELLS])
def test_every_fault_of_every_service(
    name: str, fault: str, quick: list[float], caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    expected, requests, words = FAULTS.get(fault) or ONLY[fault][1]
    caplog.set_level(logging.DEBUG)
    rows, judge = completions(), name in JUDGES
    with Stub([fault] if fault else [], lasting=True, value="7" if judge else "0.7") as stub, Stub() as other:
        stub.elsewhere = other.address
        reward = section(name, stub.address, timeout=0.3 if fault in ("hang", "drip") else 20)
        runtime, began, message = RewardRuntime([reward], Path()), time.monotonic(), ""
        try:
            message = "\n".join(runtime.score(rows, step=3).messages)
        except Stopped as stopped:
            message = str(stopped)
            assert expected == STOPS and stopped.exit_code == 3
        seconds = time.monotonic() - began
        calls = ROWS if judge else 1
        asked, strangers = stub.asked, other.asked + other.others
    assert expected != STOPS or message
    assert words in message, message
    assert seconds < 3, "hangs"
    # Stopped by the first of several at a time, or by the circuit that had opened; never more than was due.
    assert 1 <= len(asked) <= calls * requests and (expected == STOPS or len(asked) == calls * requests)
    assert strangers == []
    scores = [row.rewards.get("judge") for row in rows]
    if expected == SCORED:
        assert scores == ([0.7] * ROWS if judge else [0.7, 0.71, 0.72, 0.73])
    else:
        assert scores == [None] * ROWS, "an invented reward"
    if fault in ("401", "403") and name != "ollama":
        assert "JUDGE_KEY" in message and f"{stub.address}/" in message
    if fault == "429":
        assert all(7 <= pause <= 7.5 for pause in quick) and len(quick) >= calls * 2
    if fault == "huge":
        assert stub.sent < 32 * 2**20
    assert KEY not in message + caplog.text + "".join(capsys.readouterr()) + repr(vars(runtime)) + repr(reward)
    if name != "ollama":
        assert all(one.headers["authorization"] == f"Bearer {KEY}" for one in asked)


@pytest.mark.parametrize("name", SECTIONS)
def test_twice_500_and_then_fine(name: str, quick: list[float]) -> None:
    rows = completions(1)
    with Stub(["500", "500"], value="7" if name in JUDGES else "0.7") as stub:
        assert ask(section(name, stub.address), rows).messages == []
        assert len(stub.asked) == 3
    assert rows[0].reward == 0.7
    assert 0.25 <= quick[0] <= 0.5 <= quick[1] <= 1, "exponential, with a random part"


@pytest.mark.parametrize("name", SECTIONS)
@pytest.mark.parametrize("value", VALUES, ids=lambda value: value[:12])
def test_what_is_no_score_becomes_none(name: str, value: str) -> None:
    rows = completions(2)
    with Stub(value=value) as stub:
        said = "\n".join(ask(section(name, stub.address), rows).messages)
    assert [row.reward for row in rows] == [None, None]
    assert VALUES[value] in said, said


@pytest.mark.parametrize("name", SECTIONS)
def test_down_and_unknown_hosts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{free.getsockname()[1]}"
    rows = completions(2)
    assert "ConnectError" in ask(section(name, nobody), rows).messages[0]
    real = socket.getaddrinfo

    def lookup(host: str, *rest: Any, **others: Any) -> Any:
        if "invalid" in str(host):
            raise socket.gaierror(-2, "Name or service not known")
        return real(host, *rest, **others)

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    told = ask(section(name, "https://judge.invalid"), rows).messages[0]
    assert "https://judge.invalid" in told and "Name or service not known" in told
    assert [row.reward for row in rows] == [None, None]


def test_a_wait_that_is_longer_than_the_time_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(asking, "PAUSES_S", ())
    rows = completions(1)
    with Stub(["429"], lasting=True) as stub:
        began = time.monotonic()
        said = ask(section("http", stub.address, timeout=5, key_env=""), rows).messages[0]
        assert len(stub.asked) == 1 and time.monotonic() - began < 2
    assert "asks to wait 7 s" in said


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("7", 7), (" 0 ", 0), ("Sat, 01 Jan 2000 00:00:00 GMT", 0), ("soon", None), ("-1", None), ("", None), ("٣", None)],
)
def test_retry_after(header: str, seconds: float | None) -> None:
    assert http._retry_after(header) == seconds


def test_retry_after_as_a_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1_700_000_000.0)
    assert http._retry_after("Tue, 14 Nov 2023 22:13:50 GMT") == 30


def test_s10_the_key_comes_from_the_environment_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    with Stub() as stub:
        reward = section("openai", stub.address)
        monkeypatch.delenv("JUDGE_KEY")
        with pytest.raises(Refused, match="environment variable JUDGE_KEY is not set"):
            RewardRuntime([reward], Path())
        monkeypatch.setenv("JUDGE_KEY", "two words")
        with pytest.raises(Refused) as refused:
            RewardRuntime([reward], Path())
        assert "two words" not in str(refused.value)
        monkeypatch.setenv("JUDGE_KEY", "first\n")
        runtime = RewardRuntime([reward], Path())
        monkeypatch.setenv("JUDGE_KEY", "second")
        runtime.score(completions(1), 0)
        assert stub.asked[0].headers["authorization"] == "Bearer second"


def test_a_reply_that_quotes_the_key_is_not_repeated() -> None:
    with Stub(["400"]) as stub:  # the stub's error message holds the header
        said = ask(section("http", stub.address), completions(1)).messages[0]
    assert "no: [key]" in said and KEY not in said


QUOTING = {
    "no field": '{"error": "Incorrect API key provided: KEY"}',
    "a long way in": '{"error": "PAD KEY"}',
    "no number": '{"scores": [{"id": "0", "score": "KEY"}]}',
    "an unknown id": '{"scores": [{"id": "KEY", "score": 1}]}',
    "no list": '{"scores": "KEY"}',
    "no score": '{"choices": [{"message": {"content": null, "refusal": "KEY"}}]}',
    "no verdict": '{"choices": [{"message": {"content": "KEY"}}]}',
    "another verdict": '{"choices": [{"message": {"content": "{\\"score\\": \\"KEY\\"}"}}]}',
}


@pytest.mark.parametrize("name", ["openai", "http"])
@pytest.mark.parametrize("key", [KEY, "canary/with+a/slash", "sk-canary-of-another-account"])
@pytest.mark.parametrize("reply", QUOTING.values(), ids=QUOTING)
def test_no_reply_of_200_leads_to_the_key(name: str, key: str, reply: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not key.startswith("sk-"):
        monkeypatch.setenv("JUDGE_KEY", key)
    written = key.replace("/", r"\/") if "verdict" not in reply else key
    with Stub() as stub:
        told = reply.replace("PAD", "x" * 100).replace("KEY", written)
        monkeypatch.setattr(stub, "_reply", lambda *_: (200, told))
        said = "\n".join(ask(section(name, stub.address), completions(1)).messages)
    assert "unscored" in said and "canary" not in said


def test_a_key_that_is_an_ordinary_word_leaves_replies_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "0")
    rows = completions(1)
    with Stub(value="10") as stub:
        ask(section("openai", stub.address), rows)
    assert rows[0].reward == 1.0


def test_f22_an_open_circuit_spares_the_service_and_heals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Down for a while: after five calls nobody is asked; then one call is made, and the others wait for it."""
    rows = completions(40)
    with Stub(["503"], lasting=True) as stub:
        runtime = RewardRuntime([section("openai", stub.address, concurrency=2, retries=0)], Path())
        said = "\n".join(runtime.score(rows, 0).messages)
        assert breaker.FAILURES <= len(stub.asked) <= breaker.FAILURES + 1
        assert "not asked, after" in said
        asked = len(stub.asked)
        runtime.score(rows, 0)
        assert len(stub.asked) == asked
        monkeypatch.setattr(breaker, "COOL_DOWN_S", 0.0)
        stub.most_in_flight, stub.seconds = 0, 0.005
        runtime.score(rows, 0)  # each call is a trial now, and all in vain
        assert stub.most_in_flight == 1
        stub.faults.clear()
        stub.most_in_flight, stub.seconds = 0, 0.02
        runtime.score(rows, 0)
    assert all(row.reward == 0.7 for row in rows)


def test_f22_a_run_pauses_until_the_service_is_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(asking, "PAUSES_S", (0.05, 0.05))
    monkeypatch.setattr(breaker, "COOL_DOWN_S", 0.04)
    rows = completions(32)
    with Stub(["503"] * 12) as stub:
        ask(section("openai", stub.address, retries=0, max_unscored=0), rows)
        assert len(stub.asked) < 32 * 2
    assert all(row.reward == 0.7 for row in rows)
    assert "asked for again" in capsys.readouterr().out


def test_f23_a_wrong_key_ends_the_run_at_once() -> None:
    with Stub(["401"], lasting=True) as stub:
        began = time.monotonic()
        with pytest.raises(Stopped, match="JUDGE_KEY is not accepted"):
            ask(section("openai", stub.address, concurrency=1), completions(64))
        assert len(stub.asked) <= 2 and time.monotonic() - began < 2


def test_256_completions_of_a_slow_service_are_asked_at_once() -> None:
    rows = completions(256)
    with Stub(seconds=0.2) as stub:
        began = time.monotonic()
        ask(section("openai", stub.address), rows)
        seconds = time.monotonic() - began
        assert stub.most_in_flight == 64
    assert all(row.reward == 0.7 for row in rows)
    assert seconds < 10, "one after another they take 51"


def test_a_server_of_ones_own_gets_what_the_row_holds() -> None:
    rows = completions(20, level=3)
    with Stub(value="-12.5") as stub:
        ask(section("http", stub.address, model="rm"), rows)
        full, rest = sorted((asked.body for asked in stub.asked), key=lambda body: -len(body["items"]))
        assert (len(full["items"]), len(rest["items"])) == (16, 4)
        assert full["model"] == "rm"
        assert full["items"][1] == {
            "id": "1",
            "prompt": "What is 17 + 25?",
            "completion": "It is 1.",
            "reference": "42",
            "columns": {"level": 3},
        }
    assert all(row.reward == -12.5 for row in rows)


def test_the_completions_of_a_prompt_are_reranked_in_one_call() -> None:
    rows = (
        completions(3)
        + [replace(row, prompt=replace(row.prompt, text="Another?")) for row in completions(2)]
        + completions(1, texts=[""])
    )
    with Stub(value="0.25") as stub:
        ask(section("rerank", stub.address), rows)
        asked = sorted((one.body["input"]["query"], len(one.body["input"]["documents"])) for one in stub.asked)
    assert asked == [("Another?", 2), ("What is 17 + 25?", 1), ("What is 17 + 25?", 3)]
    assert all(row.reward == 0.25 for row in rows)


def test_a_field_that_a_server_does_not_know_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    rows = completions(8)
    with Stub(unknown=frozenset({"response_format", "chat_template_kwargs"})) as stub:
        runtime = RewardRuntime([section("openai", stub.address)], Path())
        runtime.score(rows, 0)
        before = len(stub.asked)
        runtime.score(rows, 1)
        assert len(stub.asked) == before + 8 and stub.asked[-1].body["temperature"] == 0
    assert all(row.reward == 0.7 for row in rows)
    assert capsys.readouterr().out.count("takes no 'response_format'") == 1


NAMES = {
    "prompt echoed": ('{"error": {"message": "cannot take: The temperature of a seed is 20 degrees"}}', []),
    "request echoed": ('{"detail": [{"loc": ["body", "x"], "input": {"temperature": 0, "seed": 0}}]}', []),
    "message": ("""{"error": {"message": "Unsupported value: 'temperature' must be 1"}}""", ["temperature"]),
    "param": ('{"error": {"message": "no", "param": "seed"}}', ["seed"]),
    "path": ('{"error": {"message": "no", "param": "response_format.json_schema"}}', ["response_format"]),
    "loc": ('{"detail": [{"type": "extra_forbidden", "loc": ["body", "seed"], "input": 0}]}', ["seed"]),
    "bare": ('{"error": {"message": "Unrecognized argument supplied: max_tokens"}}', ["max_tokens"]),
    "window": ('{"error": {"message": "context length exceeded", "param": "max_tokens"}}', []),
    "no JSON": ("no 'seed' please", ["seed"]),
}


@pytest.mark.parametrize(("body", "named"), NAMES.values(), ids=NAMES)
def test_the_field_that_a_server_names(body: str, named: list[str]) -> None:
    assert chat._named(body, ["temperature", "seed", "max_tokens", "response_format"]) == named


def test_what_did_not_help_to_leave_out_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, refused = completions(1), """{"error": {"message": "no such thing as a 'seed' here"}}"""
    with Stub() as stub:
        runtime, real = RewardRuntime([section("openai", stub.address)], Path()), stub._reply
        monkeypatch.setattr(stub, "_reply", lambda *_: (400, refused))
        runtime.score(rows, 0)
        assert rows[0].reward is None and "seed" not in stub.asked[-1].body
        monkeypatch.setattr(stub, "_reply", real)
        runtime.score(rows, 1)
        assert stub.asked[-1].body["seed"] == 0
    assert rows[0].reward == 0.7


def test_the_window_that_a_model_was_trained_with_is_not_that_of_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with Stub() as stub:
        listed = {"data": [{"id": MODEL, "meta": {"n_ctx_train": 131072}}]}
        monkeypatch.setattr(stub, "_reply", lambda *_: (200, listed))
        (note,) = RewardRuntime([section("openai", stub.address)], Path()).prepare(512, 512)
    assert "does not say how long" in note


def test_a_judge_is_asked_for_json_in_its_own_way() -> None:
    bodies = {}
    for name in JUDGES:
        with Stub() as stub:
            ask(section(name, stub.address, prompt="Is it polite?"), completions(1))
            bodies[name] = stub.asked[0].body
    assert bodies["openai"]["response_format"]["json_schema"]["schema"] == bodies["ollama"]["format"]
    assert bodies["dashscope"]["response_format"] == {"type": "json_object"}
    for body in bodies.values():
        assert "Is it polite?" in body["messages"][0]["content"] and "JSON" in body["messages"][0]["content"]
        assert body["stream"] is False
