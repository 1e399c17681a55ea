"""Whole runs with a judge behind HTTP: what is tried before the start, trained on, recorded, and never shown."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.service_stub import MODEL, Stub
from trainer import run_status
from trainer.__main__ import main
from trainer.record.run_dir import read_lines
from trainer.rewards import asking
from trainer.rewards.services import breaker, http

KEY = "canary-91b7-key-that-nobody-may-see"
RUN_FILE = """
[run]
dir = "out"
steps = 3
[model]
name_or_path = "model"
[data]
source = "train.jsonl"
chat_template = "off"
[rollout]
prompts_per_step = 2
num_generations = 4
max_new_tokens = 4
[checkpoint]
every = 1
[[reward]]
name = "spread"
kind = "python"
function = "rewards.py:spread"
[[reward]]
name = "judge"
kind = "openai"
url = "{url}/v1"
model = "judge-1"
key_env = "JUDGE_KEY"
retries = 0
max_unscored = 0.25
"""
PROBES = 2
"""Completions that the start tries it on."""


@pytest.fixture
def stub(run_here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(asking, "PAUSES_S", (0.05, 0.05))
    monkeypatch.setattr(breaker, "COOL_DOWN_S", 0.02)
    monkeypatch.setattr(http, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr("trainer.record.run_dir.RunDirectory.lock", lambda _: None)  # until the process ends
    with Stub(window=4096) as served:
        (run_here / "run.toml").write_text(RUN_FILE.replace("{url}", served.address))
        yield served


def test_s7_a_run_goes_through_an_outage_and_shows_no_key(
    stub: Stub, run_here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stub.faults = [""] * (PROBES + 8) + ["503"] * 6
    assert main(["preflight", "run.toml"]) == 0
    assert main(["train", "run.toml"]) == 0
    said = "".join(capsys.readouterr())
    assert "window of 4096 tokens" in said and "and not again" in said
    assert "asked for again" in said and "answered 503" in said
    rows = read_lines(Path("out/metrics.jsonl"))
    assert [row["reward/judge"] for row in rows] == [pytest.approx(0.7)] * 3
    assert [row["rewards/judge/failed_fraction"] for row in rows] == [0, 0, 0]
    assert all(row["rewards/judge/cut"] == 0 and "rewards/judge/speaks_to_judge" in row for row in rows)
    assert len(stub.asked) == PROBES + 3 * 8 + 6
    assert all(asked.headers["authorization"] == f"Bearer {KEY}" for asked in stub.asked + stub.others)
    written = [file for folder in (run_here, tmp_path / "cache") for file in folder.rglob("*") if file.is_file()]
    assert any("checkpoints" in file.parts for file in written) and any("probes" in file.parts for file in written)
    assert [file for file in written if KEY.encode() in file.read_bytes()] == []
    assert KEY not in said
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            assert KEY.encode() not in command.read_bytes()


def test_f23_a_key_that_is_withdrawn_ends_the_run_saved(
    stub: Stub, run_here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stub.faults, stub.lasting = [""] * (PROBES + 8) + ["401"], True
    assert main(["train", "run.toml"]) == 3
    said = "".join(capsys.readouterr())
    status = run_status.read(Path("out"))
    assert status is not None and status["exit_code"] == 3 and status["step"] == 1
    assert "JUDGE_KEY is not accepted" in said and "answered 401" in said and stub.address in said
    assert "Traceback" not in said + str(status) and KEY not in said + str(status)
    stub.faults = []
    assert main(["train", "run.toml", "--resume", "auto"]) == 0


def test_s104_the_start_refuses_what_cannot_work(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    stub.window = 200
    assert main(["train", "run.toml"]) == 2
    assert "its window holds 200 tokens" in "".join(capsys.readouterr())
    assert stub.asked == []
    stub.window, stub.faults, stub.lasting = 4096, ["404"], True
    assert main(["train", "run.toml"]) == 2
    said = "".join(capsys.readouterr())
    assert "no such model" in said and "Traceback" not in said
    assert not Path("out").exists() and MODEL in stub.asked[0].body["model"]
