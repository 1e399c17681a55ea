"""A run over a hostfile, on two hosts: its numbers, its arguments, its secrets, its end, and that nothing is left."""

import base64
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.two_hosts import Hosts, running, unavailable
from tests.tiny_run import RUN_FILE, repeatable, write_run

ROOT = Path(__file__).parents[2]
MULTINODE = ("bash", str(ROOT / "launch/multinode.sh"))
TRAIN = (sys.executable, "-m", "trainer", "train", "run.toml")

RECORDS_WHAT_IT_SEES = """
import hashlib, json, os, socket, sys
names = "HF_TOKEN", "JUDGE_KEY", "HF_ENDPOINT", "GLOO_SOCKET_IFNAME", "UNRELATED"
seen = {name: hashlib.sha256(os.environ.get(name, "").encode()).hexdigest() for name in names}
with open(f"seen-{os.environ['RANK']}.json", "w") as file:
    json.dump({"host": socket.gethostname(), "argv": sys.argv[1:], "cwd": os.getcwd(), "variables": seen}, file)
"""
HOSTILE_FOLDER = "o $(touch canary)`touch canary`;touch canary;a  b\"'*\\\n中文"
SECRETS = {"HF_TOKEN": "hf_canaryCANARYcanary", "JUDGE_KEY": "sk-canary-of-the-judge"}
OPEN = {"HF_ENDPOINT": "https://mirror.example", "GLOO_SOCKET_IFNAME": "eth0"}

REASON = unavailable()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)


@dataclass(frozen=True)
class Ended:
    code: int
    out: str


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with running(written(tmp_path_factory.mktemp("cluster"))) as pair:
        yield pair


def written(folder: Path) -> Path:
    write_run(folder)
    (folder / "run.toml").write_text(RUN_FILE + '[engine]\ndevice = "cpu"\n')
    (folder / "hosts.txt").write_text("# both\r\nhosta slots=1\r\nhostb\tslots=1 # the second\n")
    return folder


def started(hosts: Hosts, *command: str, **variables: str) -> subprocess.Popen[str]:
    """On hosta."""
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return hosts.popen("hosta", command, hosts.folder, env=environment | variables, **output)


def run(hosts: Hosts, *command: str, **variables: str) -> Ended:
    process = started(hosts, *command, **variables)
    try:
        out, _ = process.communicate(timeout=600 if hosts.slow else 200)
    finally:
        process.kill()
    return Ended(process.returncode, out)


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def nothing_left(hosts: Hosts) -> bool:
    return all(hosts.processes(name) == [] for name in hosts.addresses)


def numbers(path: Path) -> list[dict[str, float]]:
    """The metrics of every step, without those of time and memory."""
    return [repeatable(json.loads(line)) for line in path.read_text().splitlines()]


def status(folder: Path) -> dict[str, object]:
    return json.loads((folder / "run_status.json").read_text())


class Samples:
    """The command lines of all processes on the hosts, several times a second, with what is encoded in them."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts, self.seen = hosts, set[str]()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> "Samples":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(0.2):
            for pid in [*self.hosts.processes("hosta"), *self.hosts.processes("hostb")]:
                try:
                    line = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
                except OSError:
                    continue
                words = [word for part in line.split("\0") for word in part.split() if word.startswith("@")]
                self.seen |= {line, *(base64.urlsafe_b64decode(word[1:]).decode() for word in words)}


def test_two_hosts_train_as_one_does(hosts: Hosts) -> None:
    """One launch: equal numbers, arguments byte for byte, variables, secrets out of sight, hostile files unread."""
    (hosts.folder / "rewards.py").write_text((hosts.folder / "rewards.py").read_text() + RECORDS_WHAT_IT_SEES)
    (hosts.folder / ".deepspeed_env").write_text('A="$(touch canary)"\nB;touch canary;C=1\n')
    (hosts.folder / "three.txt").write_text("# both\r\nhosta slots=1\r\nhostb\tslots=2 # the second\n")
    more = ("--run.dir", HOSTILE_FOLDER, "--data.seed", "3")
    with Samples(hosts) as samples:
        over_hosts = run(
            hosts,
            *MULTINODE,
            "three.txt",
            "run.toml",
            "--include",
            "hosta@hostb:1",
            *more,
            **SECRETS,
            **OPEN,
            UNRELATED="x",
            NCCL_DEBUG="$(touch canary)",
        )
    assert over_hosts.code == 0, over_hosts.out
    assert "hosta      1  0\nhostb      1  1  slot 1\n2 host(s), 2 rank(s)\n" in over_hosts.out
    assert f"{hosts.folder}/.deepspeed_env is not used" in over_hosts.out
    assert nothing_left(hosts) and not (hosts.folder / HOSTILE_FOLDER / ".launch").exists()
    assert not list(hosts.folder.rglob("canary")) and not (ROOT / "canary").exists()

    def digest(text: str) -> str:
        return hashlib.sha256(text.encode()).hexdigest()

    for rank, host in enumerate(("hosta", "hostb")):
        seen = json.loads((hosts.folder / f"seen-{rank}.json").read_text())
        assert seen["host"] == host and seen["cwd"] == str(hosts.folder)
        assert seen["argv"] == ["train", "run.toml", *more]
        expected = {"HF_TOKEN": SECRETS["HF_TOKEN"], **OPEN, "UNRELATED": "", "JUDGE_KEY": ""}
        assert {name: seen["variables"][name] for name in expected} == {n: digest(v) for n, v in expected.items()}

    everything = "".join(samples.seen) + over_hosts.out
    assert "run.toml" in everything and "mirror.example" in everything  # what was decoded is what was started
    for path in (hosts.folder / HOSTILE_FOLDER).rglob("*"):
        everything += path.read_bytes().decode(errors="replace") if path.is_file() else ""
    for secret in SECRETS.values():
        assert secret not in everything

    alone = run(hosts, *TRAIN, "--gpus", "2", "--data.seed", "3", "--run.dir", "alone")
    assert alone.code == 0, alone.out
    ours, theirs = (
        numbers(hosts.folder / HOSTILE_FOLDER / "metrics.jsonl"),
        numbers(hosts.folder / "alone/metrics.jsonl"),
    )
    assert len(ours) == 2
    for one, other in zip(ours, theirs, strict=True):
        assert one == pytest.approx(other, abs=1e-6)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_demo_over_two_hosts_is_the_demo_on_one(hosts: Hosts) -> None:
    """launch/recipes/demo.toml as it is, for 3 of its 100 steps, with both of its held-out evaluations."""
    make = (sys.executable, str(ROOT / "tools/tiny_model.py"), ".cache/demo-model")
    assert run(hosts, *make).code == 0
    recipe = str(ROOT / "launch/recipes/demo.toml")
    short = ("--run.steps", "3", "--engine.device", "cpu")
    over_hosts = run(hosts, *MULTINODE, "hosts.txt", recipe, *short, "--run.dir", "demo-hosts")
    assert over_hosts.code == 0, over_hosts.out
    alone = run(hosts, *TRAIN[:-1], recipe, *short, "--gpus", "2", "--run.dir", "demo-alone")
    assert alone.code == 0, alone.out
    ours, theirs = (numbers(hosts.folder / name / "metrics.jsonl") for name in ("demo-hosts", "demo-alone"))
    assert len(ours) == 3
    for one, other in zip(ours, theirs, strict=True):
        assert one == pytest.approx(other, abs=1e-6)
    last = "eval/step-000003.json"
    assert (hosts.folder / "demo-hosts" / last).read_text() == (hosts.folder / "demo-alone" / last).read_text()
    assert nothing_left(hosts)


RESUMABLE = ("--checkpoint.every", "1", "--log.samples_every", "0", "--resume", "auto")


def long_run(hosts: Hosts, run_dir: str, hostfile: str, *more: str) -> subprocess.Popen[str]:
    """One that has saved a step and will not end by itself."""
    more += ("--run.steps", "5000", "--run.dir", run_dir, *RESUMABLE)
    process = started(hosts, *MULTINODE, hostfile, "run.toml", *more)
    saved = hosts.folder / run_dir / "checkpoints"
    wait_for(lambda: any(saved.glob("step-*")) or process.poll() is not None, 150)
    assert process.poll() is None, process.communicate()[0]
    return process


def test_all_processes_of_one_host_killed(hosts: Hosts) -> None:
    """The other ends, the message names the one that was lost, and the same command goes on from the last save."""
    process = long_run(hosts, "killed", "hosts.txt")
    try:
        for pid in hosts.processes("hostb"):
            os.kill(pid, signal.SIGKILL)
        out, _ = process.communicate(timeout=45)
    finally:
        process.kill()
    assert process.returncode == 4, out
    last = out.strip().splitlines()
    fix = "Fix: the same command with --resume auto goes on from the newest checkpoint."
    assert last[-2] == f"lost: rank 1 of host hostb ended, or its connection did. {fix}"
    assert last[-1].endswith("killed/launcher.log") and "Traceback" not in out
    found = status(hosts.folder / "killed")
    assert (found["state"], found["exit_code"]) == ("lost", 4) and "hostb" in str(found["reason"])
    wait_for(lambda: nothing_left(hosts), 5)

    steps = len(numbers(hosts.folder / "killed/metrics.jsonl")) + 1
    more = ("--run.steps", str(steps), "--run.dir", "killed", *RESUMABLE)
    resumed = run(hosts, *MULTINODE, "hosts.txt", "run.toml", *more)
    assert resumed.code == 0 and "going on from killed/checkpoints/step-" in resumed.out, resumed.out
    assert [row["step"] for row in numbers(hosts.folder / "killed/metrics.jsonl")] == list(range(1, steps + 1))
    assert status(hosts.folder / "killed")["state"] == "done" and nothing_left(hosts)


def test_ctrl_c_reaches_a_rank_on_another_host(hosts: Hosts) -> None:
    """Of a hostfile with a single host, which is not this one: it trains there, not here."""
    (hosts.folder / "other.txt").write_text("hostb slots=1\n")
    process = long_run(hosts, "interrupted", "other.txt")
    try:
        assert status(hosts.folder / "interrupted")["host"] == "hostb"
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, out
    found = status(hosts.folder / "interrupted")
    assert (found["state"], found["exit_code"]) == ("interrupted", 130)
    wait_for(lambda: nothing_left(hosts), 5)


@pytest.mark.full
def test_f9_sigterm_to_a_rank_on_the_other_host_saves_on_both(hosts: Hosts) -> None:
    process = long_run(hosts, "preempted", "hosts.txt")
    try:
        ranks = [pid for pid in hosts.processes("hostb") if b"-u\0-m\0trainer\0@" in command_line(pid)]
        (rank,) = [pid for pid in ranks if b"launch" not in command_line(pid)]
        os.kill(rank, signal.SIGTERM)
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 75, out
    found = status(hosts.folder / "preempted")
    assert (found["state"], found["exit_code"]) == ("preempted", 75)
    assert f"saved preempted/checkpoints/step-{found['step']:06d}" in out
    wait_for(lambda: nothing_left(hosts), 5)


def of_the_trainer(hosts: Hosts) -> list[bytes]:
    """Without the sessions of sshd, which hears late of a cable that is slow, and not at all of one that was pulled."""
    pids = [pid for name in hosts.addresses for pid in hosts.processes(name)]
    return [line for pid in pids if b"trainer" in (line := command_line(pid))]


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.full
def test_f18_a_cable_that_is_pulled_ends_both_sides(hosts: Hosts) -> None:
    """No side hears that the other has gone: ssh gives up after 30 s, the watchdogs after twice their time."""
    process = long_run(hosts, "unplugged", "hosts.txt")
    try:
        hosts.link("down")
        began = time.monotonic()
        out, _ = process.communicate(timeout=120)
        seconds = time.monotonic() - began
    finally:
        hosts.link("up")
        process.kill()
    assert process.returncode == 4, out
    assert "hostb" in str(status(hosts.folder / "unplugged")["reason"]), out
    assert seconds < 75
    assert of_the_trainer(hosts) == []


@pytest.mark.full
@pytest.mark.timeout(600)
def test_three_hosts_train_as_one_and_end_as_one(tmp_path: Path) -> None:
    with running(written(tmp_path), 3) as three:
        (tmp_path / "hosts.txt").write_text("hosta slots=1\nhostb slots=1\nhostc slots=1\n")
        few = ("--rollout.prompts_per_step", "6", "--run.steps", "2")
        assert run(three, *MULTINODE, "hosts.txt", "run.toml", *few, "--run.dir", "apart").code == 0
        assert run(three, *TRAIN, *few, "--gpus", "3", "--run.dir", "together").code == 0
        for one, other in zip(
            *(numbers(tmp_path / name / "metrics.jsonl") for name in ("apart", "together")), strict=True
        ):
            assert one == pytest.approx(other, abs=1e-6)
        process = long_run(three, "killed", "hosts.txt", "--rollout.prompts_per_step", "6")
        try:
            for pid in three.processes("hostc"):
                os.kill(pid, signal.SIGKILL)
            out, _ = process.communicate(timeout=45)
        finally:
            process.kill()
        assert process.returncode == 4 and "hostc" in out, out
        wait_for(lambda: nothing_left(three), 35)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_f19_over_a_slow_and_lossy_cable_the_run_is_the_same(tmp_path: Path, hosts: Hosts) -> None:
    """200 ms late and one packet in twenty lost, from the first word over ssh on: the same weights, bit for bit."""
    few = ("--run.steps", "3", "--lora.r", "4", "--log.rollouts_every", "0", "--run.dir", "run-of-three")
    with running(written(tmp_path), slow=True) as far:
        over_it = run(far, *MULTINODE, "hosts.txt", "run.toml", *few)
        assert over_it.code == 0, over_it.out
        assert of_the_trainer(far) == []
    assert run(hosts, *MULTINODE, "hosts.txt", "run.toml", *few).code == 0
    adapter = "run-of-three/adapter/adapter_model.safetensors"
    assert (tmp_path / adapter).read_bytes() == (hosts.folder / adapter).read_bytes()
    assert numbers(tmp_path / "run-of-three/metrics.jsonl") == numbers(hosts.folder / "run-of-three/metrics.jsonl")


@pytest.mark.full
def test_ranks_on_no_host_outlive_the_command(hosts: Hosts) -> None:
    """It is killed, and the ranks' own hosts see the lease run out: the watchdogs, since no rank does anything."""
    process = long_run(hosts, "orphaned", "hosts.txt")
    try:
        pids = [pid for name in hosts.addresses for pid in hosts.processes(name)]
        ranks = [pid for pid in pids if command_line(pid).split(b"\0")[1:4] == [b"-u", b"-m", b"trainer"]]
        assert len(ranks) == 2
        for pid in ranks:
            os.kill(pid, signal.SIGSTOP)
        process.kill()
        process.wait()
        wait_for(lambda: nothing_left(hosts), 50)
    finally:
        process.kill()
    assert not (hosts.folder / "orphaned/.launch").exists()


def refused(hosts: Hosts, lines: str, *more: str, command: Sequence[str] = TRAIN) -> str:
    (hosts.folder / "refused.txt").write_text(lines)
    ended = run(hosts, *command, "--hostfile", "refused.txt", *more)
    assert ended.code == 2, ended.out
    assert ended.out.startswith("\nrefused: ") and "Traceback" not in ended.out
    assert nothing_left(hosts)
    return ended.out


def test_run_dir_that_one_host_does_not_share(hosts: Hosts) -> None:
    said = refused(hosts, "hosta slots=1\nhostb slots=1\n", "--run.dir", "private/out")
    assert f"  hostb: does not see run.dir {hosts.folder}/private/out" in said and "  hosta:" not in said
    assert "Fix: put run.dir on a file system that all hosts share." in said
    assert list((hosts.folder / "private").iterdir()) == []


def test_run_dir_that_one_host_does_not_share_with_a_launcher_of_the_user(hosts: Hosts) -> None:
    deepspeed = (sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", "hosts.txt", "--module", "trainer")
    ended = run(hosts, *deepspeed, "train", "run.toml", "--run.dir", "private/out")
    assert ended.code == 2, ended.out
    said = f"refused: run.dir: {hosts.folder}/private/out on hosta is not the folder of that name on hostb:"
    assert ended.out.count(said) == 1
    assert list((hosts.folder / "private").iterdir()) == []
    wait_for(lambda: nothing_left(hosts), 10)


def test_b82_hosts_that_do_not_serve_are_named_with_the_fix(hosts: Hosts) -> None:
    """A name that does not resolve, a host without sshd, a key that is not known, a port in use: one message."""
    with hosts.popen("hosta", [sys.executable, "-c", LISTENER], hosts.folder, stdout=subprocess.PIPE) as listener:
        try:
            assert listener.stdout is not None
            port = listener.stdout.readline().strip()
            names = "hosta slots=1\nnowhere slots=1\n10.213.77.1 slots=1\n127.0.0.1 slots=1\n"
            (hosts.folder / "refused.txt").write_text(names)
            ended = run(hosts, *TRAIN, "--hostfile", "refused.txt", "--master_port", port)
        finally:
            listener.kill()
    assert ended.code == 2 and ended.out.startswith("\nrefused: --hostfile: nothing was started.\n")
    assert f"  hosta: port {port} is in use. Fix: another --master_port" in ended.out
    assert "  nowhere: not reachable: ssh: Could not resolve hostname nowhere" in ended.out
    assert (
        "  10.213.77.1: not reachable: Host key verification failed. Fix: connect once by hand, ssh 10.2" in ended.out
    )
    assert "  127.0.0.1: not reachable: ssh: connect to host 127.0.0.1 port 22: Connection refused. Fix: " in ended.out
    assert not (hosts.folder / "out").exists()


def test_what_two_hosts_have_side_by_side(hosts: Hosts) -> None:
    (hosts.folder / "probed.txt").write_text("hosta slots=1\nhostb slots=1\n")
    ended = run(hosts, *TRAIN[:3], "hosts", "probed.txt", "--probe")
    assert ended.code == 0, ended.out
    rows = {line.split("  ")[0].strip(): line.split() for line in ended.out.splitlines()}
    assert rows["host"][1:] == ["hosta", "hostb"] and "!" not in ended.out
    assert rows["address"][1] != rows["address"][2] and rows["torch"][1] == rows["torch"][2]
    assert "-" not in rows["interface"][1:] and rows["clock"][1].startswith(("+0.", "-0."))
    (measured,) = [line for line in ended.out.splitlines() if line.startswith("all_reduce of 64 MiB, a rank on each")]
    assert "(gloo)" in measured and measured.endswith("Gb/s)") and nothing_left(hosts)


LISTENER = """
import socket, time
listener = socket.create_server(("", 0))
print(listener.getsockname()[1], flush=True)
time.sleep(100)
"""
