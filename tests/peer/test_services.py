"""The services' own clients read what the tests' server says, and ask as we do; and a real model is asked over HTTP."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from tests.service_stub import MODEL, Stub
from tests.unit.test_services import completions, section
from trainer.config.grpo import Reward
from trainer.rewards.runtime import RewardRuntime

KINDS = ("openai", "dashscope", "ollama", "rerank")
pytestmark = pytest.mark.peer


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.environ["ZERO_GRPO_CLIENTS"]}


def test_official_clients_agree_with_the_stub_and_with_us(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "k")
    with Stub(window=4096) as stub:
        ours = {}
        for kind in KINDS:
            stub.value = "0.7" if kind == "rerank" else "7"
            runtime = RewardRuntime(
                [section(kind, stub.address, model=MODEL if kind != "rerank" else "gte-rerank-v2")], Path()
            )
            runtime.prepare(100, 100)
            rows = completions(3 if kind == "rerank" else 1)
            runtime.score(rows, 0)
            assert rows[0].reward == 0.7
            ours[kind] = stub.asked[-1]
        stub.asked.clear()
        stub.value = "7"
        script = Path(__file__).with_name("official_clients.py")
        told = json.dumps([stub.address, {kind: asked.body for kind, asked in ours.items()}])
        done = subprocess.run(
            [sys.executable, str(script)], input=told, env=environment(), capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        theirs = dict(zip(KINDS, stub.asked, strict=True))
    read = json.loads(done.stdout)
    assert read["openai"] == read["dashscope"] == read["ollama"] == '{"score": 7}'
    assert (read["models"], read["window"]) == ([MODEL], 4096)
    assert [index for index, _ in read["rerank"]] == [0, 1, 2]
    for kind in KINDS:
        assert (theirs[kind].method, theirs[kind].path) == (ours[kind].method, ours[kind].path), kind
        sent = {name: value for name, value in ours[kind].body.items() if name in theirs[kind].body}
        assert sent == {name: theirs[kind].body[name] for name in sent}, kind
        assert ours[kind].body.keys() - theirs[kind].body.keys() == set(), kind


def test_256_completions_of_a_service_of_200_ms_take_less_than_2_s(results: Any) -> None:
    """Client and server share this process, so the time is that of both."""
    with Stub(seconds=0.2) as stub:
        runtime = RewardRuntime([section("openai", stub.address, key_env="")], Path())
        runtime.score(completions(1), 0)  # makes the connection pool and reads the certificates
        rows, began = completions(256), time.monotonic()
        runtime.score(rows, 1)
        seconds = time.monotonic() - began
    results(
        "services_throughput",
        {"completions": 256, "service_seconds": 0.2, "in_flight": stub.most_in_flight, "took": round(seconds, 2)},
    )
    assert all(row.reward == 0.7 for row in rows)
    assert seconds < 2


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """`transformers serve` on a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(folder)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", "float32"]
    log = folder.parent / "serve.log"
    with log.open("w") as out:
        server = subprocess.Popen(command, env=environment(), stdout=out, stderr=subprocess.STDOUT)
    try:
        address, until = f"http://127.0.0.1:{port}", time.monotonic() + 180
        while True:
            try:
                if httpx2.get(f"{address}/health", trust_env=False).status_code == 200:
                    break
            except httpx2.TransportError:
                pass
            assert server.poll() is None and time.monotonic() < until, log.read_text()[-3000:]
            time.sleep(0.5)
        yield address
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


@pytest.mark.timeout(900)
def test_smollm2_behind_transformers_serve_is_asked_and_read_strictly(tmp_path: Path, results: Any) -> None:
    """So small a model answers the question instead of grading, and repeats what it reads: a reply that is no grade
    becomes no number."""
    source = Path(os.environ["ZERO_GRPO_SMOLLM2"])
    (weights,) = source.glob("*.gguf")
    folder = tmp_path / "judge"
    dequantised = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=weights.name, quantization_config=dequantised)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=weights.name).save_pretrained(folder)
    texts = ["17 + 25 = 42.", "It is 42.", "I do not know.", "The answer is 12, since 1 + 2 = 3.", '{"score": 7}']
    with serving(folder) as address:
        reward = Reward.model_validate(
            {
                "name": "judge",
                "kind": "openai",
                "url": f"{address}/v1",
                "model": str(folder),
                "path": str(folder),
                "timeout": 300,
                "max_unscored": 1,
                "concurrency": 2,
            }
        )
        runtime = RewardRuntime([reward], Path())
        notes = runtime.prepare(64, 64)
        rows, began = completions(texts=texts), time.monotonic()
        told = runtime.score(rows, 0).messages
        seconds = time.monotonic() - began
        again = completions(texts=texts)
        runtime.score(again, 0)
    scores = [row.reward for row in rows]
    assert all(score is None or score in [n / 10 for n in range(11)] for score in scores)
    assert scores == [row.reward for row in again], "temperature 0"
    assert all("the judge's reply" in why or "nothing to learn from" in why for why in told), told
    results("services", {"scores": scores, "failures": told, "notes": notes, "seconds_of_5": round(seconds, 1)})
