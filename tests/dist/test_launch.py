"""The ways to start a run, with two ranks: what the terminal shows, the exit code, and that nothing is left running."""

import base64
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.tiny_run import RUN_FILE, write_run

ROOT = Path(__file__).parents[2]
ZERO_GRPO = (sys.executable, "-m", "trainer", "train", "run.toml")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2")

RUN = RUN_FILE + '[engine]\ndevice = "cpu"\n'
NOISE = ("deepspeed", "[INFO]", "WARNING", "Loading weights", "gemm_4bit", "Warning:", "Traceback", "\x1e")
FAILS_ON_RANK_1 = """
import os
calls = []
def spread(completions, **_):
    print("a print of the user's", os.environ["HF_TOKEN"])
    calls.append(completions)
    if os.environ["RANK"] == "1" and len(calls) > 1:  # the first call is a trial before the first step
        raise ValueError("no judge on rank 1 takes " + os.environ["HF_TOKEN"])
    return [float(len(text)) for text in completions]
"""
SOCKETS = """
import json, os
from pathlib import Path
def look(context):
    descriptors = [path for path in Path("/proc/self/fd").iterdir() if path.exists() or path.is_symlink()]
    mine = {os.readlink(path) for path in descriptors if path.is_symlink()}
    found = []
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in mine:  # it listens
                address, port = words[1].split(":")
                found.append([set(address) == {"0"}, int(port, 16)])
    told = {"listens": found, "port": int(os.environ["MASTER_PORT"])}
    Path(f"sockets-{os.environ['RANK']}.json").write_text(json.dumps(told))
"""
"""A hook that writes down where its rank listens: whether on every address, and the port."""
CANARY = "hf_canaryCANARYcanaryCANARY"


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_run(tmp_path)
    (tmp_path / "run.toml").write_text(RUN)
    return tmp_path


def started(folder: Path, command: tuple[str, ...]) -> subprocess.Popen[str]:
    # The folder too: hooks are modules.
    variables = {"PYTHONPATH": f"{ROOT}:{folder}", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    variables["HF_TOKEN"] = CANARY
    launched = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
    environment = {name: value for name, value in os.environ.items() if name not in launched} | variables
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True)


def run(folder: Path, *command: str) -> Ended:
    process = started(folder, command)
    try:
        out, err = process.communicate(timeout=150)
    finally:
        process.kill()
    assert CANARY not in out + err
    written = [path for path in (folder / "out").rglob("*") if path.is_file()]
    assert [path for path in written if CANARY.encode() in path.read_bytes()] == []
    return Ended(process.returncode, out, err)


def status(folder: Path) -> dict[str, object]:
    return json.loads((folder / "out/run_status.json").read_text())


def of_a_run(process: Path, folder: Path) -> bool:
    """Whether it works in the folder, or was started from there: a launcher, and ranks that only begin, are elsewhere.

    ``process``: its folder in /proc. OSError where it has gone.
    """
    words = (process / "cmdline").read_text().split("\0")
    handovers = [json.loads(base64.urlsafe_b64decode(word[1:])) for word in words if word.startswith("@ey")]
    return (process / "cwd").readlink() == folder or any(one["folder"] == str(folder) for one in handovers)


def left(folder: Path) -> list[str]:
    """Processes of a run that was started in the folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if of_a_run(process, folder):
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def wait_for(condition: Callable[[], bool], seconds: float = 150) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_two_ranks_show_the_run_alone(folder: Path) -> None:
    (folder / "listed.py").write_text(SOCKETS)
    (folder / "trainer.py").write_text("raise RuntimeError('a file of the user takes our place')\n")
    hook = ("--hooks.before_rollout", '["listed:look"]')
    safely = (sys.executable, "-P", *ZERO_GRPO[1:])
    ended = run(folder, *safely, "--gpus", "2", "--log.histogram_every", "2", *hook)
    assert (ended.code, ended.err) == (0, "")
    lines = [line for line in ended.out.splitlines() if line]
    assert "2 rank(s)" in ended.out and sum(" | reward " in line for line in lines) == 2
    assert lines[-1].startswith("load it: ")
    for noise in NOISE:
        assert noise not in ended.out
    assert status(folder)["state"] == "done"
    log = (folder / "out/launcher.log").read_text()
    assert "launch.py" in log and "runner.py" not in log
    histogram = json.loads((folder / "out/histograms/step-000002.json").read_text())
    rows = [json.loads(line) for line in (folder / "out/rollouts/step-000002.jsonl").read_text().splitlines()]
    assert histogram["tokens"] == sum(len(row["completion_ids"]) for row in rows)  # of both ranks
    for rank in range(2):  # S8, as launch/README.md says
        told = json.loads((folder / f"sockets-{rank}.json").read_text())
        everywhere = [port for on_all, port in told["listens"] if on_all]
        assert everywhere == ([told["port"]] if rank == 0 else []) and len(told["listens"]) > len(everywhere)
    assert left(folder) == []


def test_a_mistake_that_two_ranks_find_is_said_once_and_last(folder: Path) -> None:
    (folder / "train.jsonl").write_text('{"prompt": null}\n')
    ended = run(folder, *ZERO_GRPO, "--gpus", "2")
    assert (ended.code, ended.err) == (2, "")
    assert ended.out.count("row 1, prompt: got null") == 1 and ended.out.count("\nrefused: ") == 1
    assert ended.out.count("checking configuration, rewards and data ...\n") == 1
    assert not (folder / "out").exists()
    assert left(folder) == []


def test_a_mistake_under_torchrun_is_said_once_in_its_last_report(folder: Path) -> None:
    (folder / "run.toml").write_text(RUN.replace("num_generations", "num_generation"))
    ended = run(folder, *TORCHRUN, "-m", "trainer", "train", "run.toml")
    everything = ended.out + ended.err
    assert everything.count("Did you mean rollout.num_generations?") == 1
    assert "Did you mean rollout.num_generations?" in everything.strip().splitlines()[-2]
    assert ended.code == 1  # torchrun's own, whatever the ranks return
    assert not (folder / "out").exists()
    assert left(folder) == []


def test_b45_a_reward_that_fails_on_one_rank_stops_all(folder: Path) -> None:
    (folder / "rewards.py").write_text(FAILS_ON_RANK_1)
    ended = run(folder, *ZERO_GRPO, "--gpus", "2", "--data.eval_fraction", "0.25")
    assert (ended.code, ended.err) == (3, "")
    assert ended.out.count("ValueError: no judge on rank 1") == 1 and "Traceback" not in ended.out
    assert "no judge on rank 1" in ended.out.split("stopped: ")[1]
    assert (status(folder)["state"], status(folder)["exit_code"]) == ("stopped", 3)
    assert "a print of the user's" in (folder / "out/launcher.log").read_text()
    assert left(folder) == []


def ended_by(number: signal.Signals, folder: Path, *more: str, before: tuple[str, ...] = ()) -> Ended:
    """Signalled after its first step."""
    process = started(folder, (*before, *ZERO_GRPO, "--run.steps", "5000", "--log.samples_every", "0", *more))
    try:
        wait_for(lambda: (folder / "out/metrics.jsonl").exists() or process.poll() is not None)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    wait_for(lambda: left(folder) == [], seconds=5)
    return Ended(process.returncode, out, err)


def test_ctrl_c_ends_all_ranks_and_is_recorded(folder: Path) -> None:
    # As a shell script starts what it puts into the background.
    ignored = ("bash", "-c", 'trap "" INT; exec "$@"', "-")
    ended = ended_by(signal.SIGINT, folder, "--gpus", "2", before=ignored)
    assert (ended.code, ended.err) == (130, "") and "Traceback" not in ended.out
    assert ended.out.strip().splitlines()[-1].startswith("interrupted: Ctrl-C, after step ")
    assert (status(folder)["state"], status(folder)["exit_code"]) == ("interrupted", 130)


def test_sigterm_ends_one_rank_which_shows_its_run_alone(folder: Path) -> None:
    ended = ended_by(signal.SIGTERM, folder, "--engine.deepspeed", "zero3")
    assert (ended.code, ended.err) == (75, "")
    assert "1 rank(s)" in ended.out and ended.out.strip().splitlines()[-1].startswith("preempted: SIGTERM")
    assert (status(folder)["state"], status(folder)["exit_code"]) == ("preempted", 75)
    for noise in NOISE:
        assert noise not in ended.out
