"""Keys of accounts: through commands that succeed and commands that fail, none is said, recorded or passed on."""

import importlib.machinery
import json
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.tiny_run import RUN_FILE
from trainer.__main__ import main
from trainer.config import load
from trainer.errors import KEYS_OF_RUN, Refused, redacted
from trainer.launcher import speech

CANARIES = {
    "HF_TOKEN": "hf_canaryCANARYcanaryCANARY",
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdefcanary00",
    "DASHSCOPE_API_KEY": "sk-canary0123456789",
    "JUDGE_KEY": "no-form-that-anybody-knows",
}
"""The last two lines of defence: forms that are known, and whatever the environment calls a key."""

TELLS = """
import os
KEYS = "|".join(os.environ.get(name, "") for name in {names})
def on_import(completions): raise AssertionError
def raises(completions, **_): raise ValueError("refused: Authorization: Bearer " + KEYS)
def exits(completions, **_): raise SystemExit(KEYS)
def long(completions, **_): return [KEYS] * len(completions)
"""
RAISES_AT_IMPORT = TELLS + "raise RuntimeError(KEYS)\n"


def rewards(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "rewards.py").write_text(text.format(names=sorted(CANARIES)))


def hook(folder: Path) -> None:
    (folder / "tells_keys.py").write_text("import os\ndef look(context): raise ValueError(dict(os.environ))\n")


def hostfile(folder: Path) -> None:
    """Of a host whose ssh writes down its arguments and then fails."""
    (folder / "bin").mkdir()
    for name in ("ssh", "pdsh"):
        (folder / "bin" / name).write_text(f'#!/bin/sh\nprintf "%s\\n" "$*" >>"{folder}/arguments"\nexit 255\n')
        (folder / "bin" / name).chmod(0o755)
    (folder / "hosts").write_text("w0 slots=1\n")


def nothing(folder: Path) -> None:
    pass


TRAIN = ("train", "run.toml")
PATHS: dict[str, tuple[Callable[[Path], object], tuple[str, ...], int]] = {
    "a run": (nothing, (*TRAIN, "--log.report_to", '["wandb"]'), 0),
    "preflight": (nothing, ("preflight", "run.toml"), 0),
    "preflight for a program": (nothing, ("preflight", "run.toml", "--json"), 0),
    "a plan": (nothing, ("plan", "run.toml"), 0),
    "the keys": (nothing, ("keys",), 0),
    "a secret as an argument": (nothing, (*TRAIN, "--model.name_or_path", CANARIES["HF_TOKEN"]), 2),
    "a secret of no known form": (nothing, (*TRAIN, "--model.name_or_path", CANARIES["JUDGE_KEY"]), 2),
    "a secret in a path": (nothing, (*TRAIN, "--data.source", f"x/{CANARIES['WANDB_API_KEY']}.jsonl"), 2),
    "a secret in an address": (
        nothing,
        (*TRAIN, "--reward.score.url", f"http://me:{CANARIES['JUDGE_KEY']}@localhost", "--reward.score.kind", "http"),
        2,
    ),
    "a reward file that raises": (rewards(RAISES_AT_IMPORT), TRAIN, 2),
    "a reward that raises": (rewards(TELLS), (*TRAIN, "--reward.score.function", "rewards.py:raises"), 2),
    "a reward that leaves": (rewards(TELLS), (*TRAIN, "--reward.score.function", "rewards.py:exits"), 2),
    "a reward that returns them": (rewards(TELLS), (*TRAIN, "--reward.score.function", "rewards.py:long"), 2),
    "the same, preflight for a program": (
        rewards(TELLS),
        ("preflight", "run.toml", "--json", "--reward.score.function", "rewards.py:raises"),
        2,
    ),
    "a hook that raises": (hook, (*TRAIN, "--hooks.before_rollout", '["tells_keys:look"]'), 2),
    "an unknown command": (nothing, (CANARIES["DASHSCOPE_API_KEY"],), 2),
    "a checkpoint that is not there": (nothing, (*TRAIN, "--resume", CANARIES["DASHSCOPE_API_KEY"]), 5),
    "a host that does not answer": (hostfile, (*TRAIN, "--hostfile", "hosts"), 2),
    "a hostfile with one": (
        lambda folder: (folder / "hosts").write_text(f"root:{CANARIES['JUDGE_KEY']}@w0 slots=1\n"),
        (*TRAIN, "--hostfile", "hosts"),
        2,
    ),
    "another recipe": (nothing, ("init", CANARIES["JUDGE_KEY"]), 2),
}


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a tracker was told."""
    for name, value in CANARIES.items():
        monkeypatch.setenv(name, value)
    told: list[str] = []
    wandb = ModuleType("wandb")
    wandb.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
    wandb.init = lambda **words: told.append(repr(words))  # type: ignore[attr-defined]
    wandb.log = lambda metrics, step: told.append(repr(metrics))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    return told


def holding(folder: Path) -> list[str]:
    """Files with a canary in them."""
    found = [path for path in folder.rglob("*") if path.is_file()]
    return [str(path) for path in found if any(value.encode() in path.read_bytes() for value in CANARIES.values())]


@pytest.mark.parametrize("path", PATHS)
def test_s7_no_key_is_said_or_written(
    path: str, told: list[str], run_here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    prepare, arguments, code = PATHS[path]
    prepare(run_here)
    monkeypatch.syspath_prepend(run_here)
    monkeypatch.setenv("PATH", f"{run_here}/bin:{os.environ['PATH']}")
    planted = holding(run_here)
    assert main(arguments) == code
    out, err = capfd.readouterr()
    for value in CANARIES.values():
        assert value not in out + err + "".join(told)
    assert holding(run_here) == planted
    if path == "a run":
        assert len(told) >= 3 and json.loads(Path("out/run_status.json").read_text())["state"] == "done"
    if path == "a host that does not answer":
        assert "BatchMode=yes" in (run_here / "arguments").read_text()
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        line = process.read_bytes() if process.exists() else b""
        assert not any(value.encode() in line for value in CANARIES.values())


def test_s7_what_a_message_quotes_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in CANARIES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SSH_KEY", "/home/me/.ssh/key")  # a place, no key
    monkeypatch.setenv("SORT_KEY", "length")  # too short for one
    monkeypatch.setenv("HF_TOKEN_READ", "read-canary")
    monkeypatch.setenv("TOKENIZER_NAME", "tokenizer-name")
    said = f"{' '.join(CANARIES.values())} http://me:word@host /home/me/.ssh/key length read-canary tokenizer-name"
    assert redacted(said) == (
        "[secret] [secret] [secret] [secret] http[secret]host /home/me/.ssh/key length [secret] tokenizer-name"
    )
    problem = Refused(said, "another")
    assert "word" not in f"{problem} {problem.problems}"
    monkeypatch.delenv(speech.WRAPPED, raising=False)
    speech.say(said)
    assert capsys.readouterr().out == redacted(said) + "\n"


def test_s7_a_key_env_is_a_key_whatever_it_is_called(run_here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE", "judge-canary")
    assert redacted("judge-canary") == "judge-canary"
    reward = '[[reward]]\nname = "judge"\nkind = "openai"\nmodel = "judge-canary"\nkey_env = "JUDGE"\nurl = "ftp://h"\n'
    (run_here / "judged.toml").write_text(RUN_FILE + reward)
    with pytest.raises(Refused, match=r"reward\.judge\.url"):
        load("judged.toml")
    assert redacted("judge-canary") == "[secret]"
    KEYS_OF_RUN.discard("JUDGE")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://tok3n@h", "http://h"),
        ("http://h:80/v1?api_key=tok3n", "http://h:80"),
        ("http://h/v1#tok3n", "http://h"),
        ("http://u:p:tok3n@h/", "http://h"),
        ("me:tok3n@h/v1", "h"),
        ("http://a@tok3n@h", "http://h"),
        ("ftp://h/tok3n", "ftp://h"),
        ("http://h /\\ntok3n", "http://h "),
    ],
)
def test_s7_a_refused_address_is_shown_without_what_may_be_a_key(url: str, shown: str, run_here: Path) -> None:
    reward = f'[[reward]]\nname = "judge"\nkind = "openai"\nmodel = "m"\nkey_env = "K_E"\nurl = "{url}"\n'
    (run_here / "judged.toml").write_text(RUN_FILE + reward)
    with pytest.raises(Refused) as refusal:
        load("judged.toml")
    assert f'reward.judge.url = "{shown}": ' in str(refusal.value) and "tok3n" not in str(refusal.value)


def test_s13_a_run_writes_in_its_own_folder_alone(run_here: Path, tmp_path: Path) -> None:
    """And follows the umask there."""
    (tmp_path / "beside").mkdir()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if "__pycache__" not in path.parts}
    mask = os.umask(0o077)
    try:
        assert main(["train", "run.toml"]) == 0
    finally:
        os.umask(mask)
    after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if "__pycache__" not in path.parts}
    changed = [path for path, time in after.items() if before.get(path) != time]
    out = run_here / "out"
    assert {path.relative_to(out).parts[:1] for path in changed if path.is_relative_to(out)} >= {("checkpoints",)}
    assert [path for path in changed if not path.is_relative_to(out) and path != run_here] == []
    assert [path for path in [out, *out.rglob("*")] if stat.S_IMODE(path.stat().st_mode) & 0o077] == []
