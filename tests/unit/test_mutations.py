"""What a user hands over, damaged at random: refused in one message with the right exit code, and nothing written."""

import random
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.mutations import CHECKPOINT, KINDS, write_inputs, write_records
from tests.tiny_run import write_run
from trainer.__main__ import main
from trainer.world import World

CODES = {
    "checkpoint": {0, 2, 5},
    "checkpoint, its sizes alone": {0, 2, 5},
    "records, resumed": {0, 2, 5},
    "records, doctor": {0, 1, 2},
    "records, export": {0, 2, 5},
}
"""Where not 0 and 2: damage may leave what was given as good as before, or mean something else that is right."""
MOST_SECONDS = 10.0
WRITE = ("train", "report", "export")
"""Commands that write where they succeed."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_run(tmp_path_factory.mktemp("inputs"))
    write_inputs(folder)
    return folder


@pytest.fixture
def here(tmp_path: Path, in_this_process: World, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    # A thread for each run that has begun, which would wait here for hundreds of them.
    monkeypatch.setattr("trainer.heartbeat._end_when_asked", lambda cells: None)
    return tmp_path


def files(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file with its size and time of change."""
    found = [path for path in folder.rglob("*") if "__pycache__" not in path.parts]
    return {str(path): (path.stat().st_size if path.is_file() else 0, path.stat().st_mtime_ns) for path in found}


def tried(kind: str, numbers: range, inputs: Path, here: Path, capfd: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Exit codes of the damages with these numbers; wrong ones are told with what was damaged."""
    mutations, command = KINDS[kind]
    codes, wrong, slowest = Counter[int](), [], 0.0
    for number in numbers:
        dice = random.Random(f"{kind} {number}")
        case = here / f"{number}"
        shutil.copytree(inputs, case)
        done = f"{number}: {dice.choice(mutations)(case, dice)}"
        with pytest.MonkeyPatch.context() as inside:
            inside.chdir(case)
            inside.syspath_prepend(case)
            before, start = files(case), time.monotonic()
            try:
                code = main(list(command))
            except Exception as error:
                code = -1
                wrong.append(f"{done}\n   {type(error).__name__}: {str(error)[:200]}")
            seconds = time.monotonic() - start
            out, err = capfd.readouterr()
            codes[code] += 1
            slowest = max(slowest, seconds)
            if code not in CODES.get(kind, {0, 2}) | {-1}:
                wrong.append(f"{done}\n   exit code {code}: {out[-200:]}")
            if "Traceback" in out + err or out.count("\nrefused: ") != (code in (2, 5)):
                wrong.append(f"{done}\n   not one message: {out[-300:]}{err[-300:]}")
            if (code or command[0] not in WRITE) and files(case) != before:
                wrong.append(f"{done}\n   written: {sorted(set(files(case).items()) ^ set(before.items()))[:3]}")
            if seconds > MOST_SECONDS:
                wrong.append(f"{done}\n   {seconds:.0f} s")
        shutil.rmtree(case)
    assert not wrong, f"{len(wrong)} of {len(numbers)}:\n" + "\n".join(wrong)
    return {
        "tried": len(numbers),
        "codes": {str(code): codes[code] for code in sorted(codes)},
        "slowest_s": round(slowest, 2),
    }


def prepared(kind: str, inputs: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Path:
    if not kind.startswith(("checkpoint", "replay", "records")):
        return inputs
    trained = inputs.parent / "trained"
    if not trained.exists():
        shutil.copytree(inputs, trained)
        with pytest.MonkeyPatch.context() as inside:
            inside.chdir(trained)
            assert main(["train", "run.toml"]) == 0
            assert (trained / CHECKPOINT).is_dir()
        write_records(trained)
        capfd.readouterr()
    return trained


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_input_is_refused_or_right(
    kind: str, inputs: Path, here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    tried(kind, range(8), prepared(kind, inputs, monkeypatch, capfd), here, capfd)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_200_damages_of_each_kind(
    inputs: Path,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    results: Callable[[str, dict[str, Any]], None],
) -> None:
    found = {kind: tried(kind, range(200), prepared(kind, inputs, monkeypatch, capfd), here, capfd) for kind in KINDS}
    results("bad-input", {"kinds": found, "wrong": 0})
