"""What a user can get wrong: one message that says what, where and how to mend it, exit code 2, nothing written."""

import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.bad_input import CASES, Change
from tests.tiny_run import RUN_FILE, write_run
from trainer import interrupts
from trainer.__main__ import main
from trainer.world import World


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("right"))


@pytest.fixture
def folder(right: Path, tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run that is right, in a folder of its own; the command runs in it, as a job of this one process."""
    target = tmp_path / "run"
    shutil.copytree(right, target)
    (target / "run.toml").write_text(RUN_FILE)
    monkeypatch.chdir(target)
    monkeypatch.syspath_prepend(target)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(target / "extensions"))
    monkeypatch.setattr("trainer.run.connect", lambda *_, **__: world)
    monkeypatch.setattr("trainer.run.disconnect", lambda: None)
    handlers = {number: signal.getsignal(number) for number in interrupts.KINDS}
    yield target
    for number, handler in handlers.items():
        signal.signal(number, handler)


def files(folder: Path) -> dict[str, bytes]:
    found = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {str(path): path.read_bytes() for path in found}


@pytest.mark.parametrize(("change", "arguments", "words"), CASES.values(), ids=CASES.keys())
def test_b93_bad_input_is_refused_in_one_message(
    change: Change, arguments: str, words: tuple[str, ...], folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    change(folder)
    before = files(folder)
    start = time.monotonic()
    code = main(["train", "run.toml", *arguments.split()])
    out, err = capfd.readouterr()
    assert not (folder / "canary").exists(), "code of the input has run"
    assert code == 2
    phases, refusal, message = out.partition("\nrefused: ")
    assert all(line.endswith(" ...") for line in phases.splitlines())
    assert refusal and "\nrefused: " not in message
    for word in words:
        assert word in message
    assert "Traceback" not in out + err
    assert files(folder) == before
    assert time.monotonic() - start < 15


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", "COMMAND"),
        ("trian run.toml", "choose from 'train'"),
        ("train", "RUN.toml"),
        ("init no-such", "Recipes: "),
        ("init first-run again", "it takes no again"),
        ("keys grpo.kl.coeff", "Did you mean grpo.kl.coef?"),
        ("keys grpo kl", "it takes no kl"),
    ],
)
def test_a_wrong_command_line_is_refused(arguments: str, words: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(arguments.split()) == 2
    out, err = capfd.readouterr()
    assert words in out and err == ""


PHASES = ["loading torch and transformers ...", "checking configuration, rewards and data ...", "loading model ..."]


def test_preflight_says_what_it_is_doing_as_it_begins(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """No model is loaded; the last line is the verdict."""
    assert main(["preflight", "run.toml"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[:2] == PHASES[:2] and not any(line.endswith(" ...") for line in lines[2:])
    assert lines[-1].startswith("ready: no errors, ")


def test_train_says_what_it_is_doing_as_it_begins(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "run.toml", "--engine.deepspeed", "zero1"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[:4] == [*PHASES, "starting the engine (zero1) ..."] and not lines[4].endswith(" ...")


def test_other_ranks_do_not_say_it_again(
    folder: Path, world: World, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("trainer.__main__.RANK", 1)
    monkeypatch.setattr("trainer.run.connect", lambda *_, **__: replace(world, rank=1))
    assert main(["preflight", "run.toml"]) == 0
    assert [line for line in capfd.readouterr().out.splitlines() if line in PHASES] == []


def test_keys_and_init_answer(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "grpo.kl"]) == 0
    assert "grpo.kl.coef" in capfd.readouterr().out
    assert main(["init"]) == 0
    assert "[[reward]]" in capfd.readouterr().out


def test_the_local_rank_of_the_deepspeed_launcher_is_passed_over(capfd: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--local_rank=1", "init"], ["init", "--local-rank", "1"]):
        assert main(arguments) == 0
        assert "[[reward]]" in capfd.readouterr().out


def test_b70_a_checkpoint_that_is_not_there_ends_with_5_and_writes_nothing(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = files(folder)
    assert main(["train", "run.toml", "--resume", "out/checkpoints/step-000010"]) == 5
    out, err = capfd.readouterr()
    assert "refused: --resume out/checkpoints/step-000010: out/checkpoints/step-000010: no such folder" in out
    assert "Traceback" not in out + err and files(folder) == before
