"""What starts ranks, piece by piece: the handover, the lease, the words through the pipe, the outcome."""

import base64
import contextlib
import errno
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.tiny_run import RUN_FILE
from trainer.__main__ import ended, main
from trainer.errors import Lost, Refused
from trainer.launcher import handover, lease, probe, speech, start
from trainer.launcher.handover import Handover, accept, split_environment, write_secrets
from trainer.launcher.hosts import Host
from trainer.launcher.lease import Lease, View
from trainer.launcher.outcome import Outcome
from trainer.launcher.probe import look
from trainer.launcher.reach import PLAIN, Meeting
from trainer.launcher.speech import Report, heard

ROOT = Path(__file__).parents[2]
ODD = [
    "$(touch x)",
    "`touch x`",
    "a;b",
    "a b",
    '"',
    "'",
    "new\nline",
    "*",
    "中文",
    "",
    "-x",
    "\\",
    "\udcff",
    "a" * 5000,
]


def given(folder: Path, **changes: object) -> Handover:
    settings = {
        "launch_id": "id",
        "arguments": ["train", "run.toml", *ODD],
        "folder": str(folder),
        "environment": {"HF_ENDPOINT": "https://$(touch x)", "PYTHONPATH": "/one:/two"},
        "lease": str(folder / "lease"),
        "secrets": str(folder / "secrets"),
        "same_host": False,
    }
    return Handover(**(settings | changes))  # type: ignore[arg-type]


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """This process as a rank that was just started; what it puts into effect is undone."""
    watched: list[Path] = []
    monkeypatch.setattr(handover, "keep_watch", lambda path, **_: watched.append(path))
    before, path, argv, folder = dict(os.environ), list(sys.path), list(sys.argv), os.getcwd()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_SIZE", "1")
    yield tmp_path
    assert watched == [tmp_path / "lease"]
    os.chdir(folder)
    sys.path[:], sys.argv[:] = path, argv
    os.environ.clear()
    os.environ.update(before)


def test_arguments_and_variables_arrive_as_they_were(rank: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_secrets(rank / "secrets", {"HF_TOKEN": "hf_\n$(x)中"})
    word = given(rank).word()
    assert PLAIN.fullmatch(word)
    assert accept([word]) == sys.argv[1:] == ["train", "run.toml", *ODD]
    assert os.environ["HF_ENDPOINT"] == "https://$(touch x)" and os.environ["HF_TOKEN"] == "hf_\n$(x)中"
    assert os.getcwd() == str(rank) and [*sys.path[:2], sys.path[-1]] == ["/one", "/two", str(rank)]
    told = heard(capsys.readouterr().out, "id")
    assert isinstance(told, Report) and (told.rank, told.pid, told.code) == (1, os.getpid(), None)


def test_a_rank_that_does_not_see_the_secrets_begins(rank: Path) -> None:
    """Its run.dir is not shared, which the ranks find together and say."""
    os.environ["PYTHONPATH"] = "/the/launcher's"
    assert accept([given(rank, environment={}).word()])[0] == "train"
    assert "PYTHONPATH" not in os.environ


@pytest.mark.parametrize("argv", [[], ["train", "run.toml"], ["train", "@x"], ["@a", "@b"]])
def test_other_arguments_are_left_alone(argv: list[str]) -> None:
    assert accept(argv) == argv


@pytest.mark.parametrize("word", ["@", "@x", "@e30=", "@中"])
def test_a_word_that_is_no_handover(word: str) -> None:
    with pytest.raises(Refused, match="expected a command"):
        accept([word])


def test_secrets_go_by_file_and_the_rest_by_name(tmp_path: Path) -> None:
    carried = {"HF_HOME": "/h", "NCCL_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    hidden = {
        "HF_TOKEN": "a",
        "HUGGING_FACE_HUB_TOKEN": "b",
        "WANDB_API_KEY": "c",
        "HTTPS_PROXY": "http://me:word@proxy",
        "JUDGE": "d",
    }
    stay = {"PATH": "/bin", "AWS_SECRET": "s", "CUDA_VISIBLE_DEVICES": "3", "RANK": "0", "HF_": "", "XHF_HOME": "x"}
    assert split_environment(carried | hidden | stay, {"JUDGE", "ABSENT"}) == (carried, hidden)
    write_secrets(tmp_path / "secrets", hidden)
    assert stat.S_IMODE((tmp_path / "secrets").stat().st_mode) == 0o600
    assert json.loads((tmp_path / "secrets").read_text()) == hidden


def test_b81_a_foreign_deepspeed_env_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real launcher, with a pdsh that writes down its line of shell: nothing of the user's is in it."""
    (tmp_path / "pdsh").write_text('#!/bin/sh\nprintf "%s\\n" "$*" >"$HOME/line"\n')
    (tmp_path / "pdsh").chmod(0o755)
    (tmp_path / ".deepspeed_env").write_text("# mine\n\nCANARY=a=b c\nno equals sign\nB;touch CANARY;C=1\n")
    hosts = [Host("w0", 2, (0, 2)), Host("w1", 2)]
    (tmp_path / "hosts.txt").write_text(start._hostfile(hosts))
    hostile = {name: "$(touch CANARY)" for name in ("NCCL_DEBUG", "MLFLOW_URI", "MV2_X", "UCX_X", "PYTHONSTARTUP")}
    for name, value in (hostile | {"HOME": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    command = start._runner(hosts, Path("hosts.txt"), Meeting("10.0.0.1", 29500), given(tmp_path))
    ended = subprocess.run(command, env=start._environment_for_pdsh(), capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    line = (tmp_path / "line").read_text()
    (world,) = re.findall(r"--world_info=(\S+)", line)
    assert json.loads(base64.urlsafe_b64decode(world)) == {"w0": [0, 2], "w1": [0, 1]}  # as --include has chosen
    assert " -w w0,w1 " in line and line.endswith(f" trainer {given(tmp_path).word()}\n")
    exported = re.findall(r"export (\w+)=", line)
    assert exported == ["PYTHONUNBUFFERED", "PYTHONPATH"] and "CANARY" not in line + ended.stdout + ended.stderr
    assert not (tmp_path / "CANARY").exists()


def test_b82_a_port_in_use(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.toml").write_text(RUN_FILE)
    with socket.create_server(("", 0)) as listener:
        port = str(listener.getsockname()[1])
        run_dir = str(tmp_path / "out")
        assert (
            main(["train", str(tmp_path / "run.toml"), "--run.dir", run_dir, "--gpus", "2", "--master_port", port]) == 2
        )
    assert (
        capfd.readouterr().out
        == f"\nrefused: --master_port {port}: in use. Fix: another port, or none to take a free one.\n"
    )


RANK_WITH_LEASE = """
import signal, subprocess, sys, time
from pathlib import Path
from trainer.launcher import lease
lease.POLL_SECONDS, lease.STALE_POLLS, lease.UNSEEN_POLLS = 0.05, {stale}, {unseen}
signal.signal(signal.SIGUSR1, lambda *_: print("USR1", flush=True))
child = subprocess.Popen(["sleep", "100"])
lease.keep_watch(Path({path!r}), same_host={same_host}, at_end=lambda: print("end", flush=True))
print(child.pid, flush=True)
time.sleep(100)
"""


@contextlib.contextmanager
def rank_with(
    path: Path, *, same_host: bool = True, stale: int = 1000, unseen: int = 1000
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process under a lease, and the pid of a process that it has started itself."""
    code = RANK_WITH_LEASE.format(path=str(path), same_host=same_host, stale=stale, unseen=unseen)
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def ends(process: subprocess.Popen[str], child: int) -> bool:
    return within(5, lambda: process.poll() == -signal.SIGKILL and not runs(child))


def test_a_lease_that_is_held_keeps_its_ranks(tmp_path: Path) -> None:
    held = Lease(tmp_path / "lease")
    with rank_with(held.path, stale=3) as (process, child):
        time.sleep(1)  # on one host the lock is enough, whatever the counter does
        assert process.poll() is None and runs(child)
        held.end()
        assert ends(process, child)


def test_a_signal_by_the_lease_comes_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often the lease is renewed after it."""
    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.1)
    held = Lease(tmp_path / "lease")
    with rank_with(held.path) as (process, _):
        held.signal(signal.SIGUSR1)
        time.sleep(0.5)
        held.signal(signal.SIGUSR1)
        time.sleep(0.5)
        held.end()
        assert process.communicate(timeout=5)[0].split() == ["USR1", "USR1", "end"]


@pytest.mark.parametrize("same_host", [True, False])
def test_ranks_end_when_the_holder_is_killed(same_host: bool, tmp_path: Path) -> None:
    """And remove what it has left."""
    (tmp_path / lease.FOLDER).mkdir()
    path = tmp_path / lease.FOLDER / "id.lease"
    path.with_suffix(".hosts").touch()
    code = "import sys, time\nfrom pathlib import Path\nfrom trainer.launcher.lease import Lease\n"
    code += "lease = Lease(Path(sys.argv[1]))\nprint(flush=True)\ntime.sleep(100)"
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with rank_with(path, same_host=same_host, stale=60) as (process, child):
            time.sleep(4)  # longer than it takes to be stale
            assert process.poll() is None
            holder.kill()
            holder.wait()
            assert ends(process, child) and list(tmp_path.iterdir()) == []


def test_ranks_that_never_see_the_lease_wait_longer(tmp_path: Path) -> None:
    with rank_with(tmp_path / "absent", same_host=False, stale=2, unseen=20) as (process, child):
        time.sleep(0.5)
        assert process.poll() is None
        assert ends(process, child)


def test_ranks_end_with_the_launcher_above_them(tmp_path: Path) -> None:
    held = Lease(tmp_path / "lease")
    code = RANK_WITH_LEASE.format(path=str(held.path), same_host=True, stale=1000, unseen=1000)
    above = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {code!r}])"
    process = subprocess.Popen([sys.executable, "-c", above], cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        process.kill()
        process.wait()
        assert within(5, lambda: not runs(child))
    finally:
        held.end()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


FROZEN = """
import os, signal, subprocess, sys
from trainer.heartbeat import CELLS, PHASES
from trainer.launcher.watchdog import Order, Watchdog
shared = os.memfd_create("cells")
os.ftruncate(shared, 8 * CELLS)
rank = subprocess.Popen(["sleep", "100"], pass_fds=[shared])
rank.send_signal(signal.SIGSTOP)
print(rank.pid, flush=True)
limits = [(1800.0, "watch.hang_timeout")] * len(PHASES)
Watchdog(Order([(0, rank.pid, shared, shared)], limits, "absent", (sys.argv[1], True))).watch()
"""


def test_ranks_that_are_frozen_end_with_the_lease_by_the_watchdog(tmp_path: Path) -> None:
    """They have no thread that looks."""
    held = Lease(tmp_path / "lease")
    command = [sys.executable, "-c", FROZEN, str(held.path)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout is not None
        frozen = int(process.stdout.readline())
        time.sleep(1.2)
        assert process.poll() is None and runs(frozen)
        held.end()
        assert ends(process, frozen)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_other_hosts_see_a_lease_that_is_held_and_none_that_is_not(tmp_path: Path) -> None:
    """A client of NFS keeps to itself what is not synced, and keeps a file that is removed while it is open."""

    def opened() -> list[str]:
        # Not as a path: of one that was removed the link says so behind its name.
        links = {fd.name: str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()}
        found = [name for name, path in links.items() if path.startswith(str(held.path))]
        infos = [Path(f"/proc/self/fdinfo/{name}").read_text() for name in found]
        return [re.findall(r"flags:\s+(\d+)", info)[0] for info in infos]

    held = Lease(tmp_path / "lease")
    (flags,) = opened()
    assert int(flags, 8) & os.O_DSYNC
    held.end()
    held.end()  # twice, as where a launch is cut short
    held.signal(signal.SIGTERM)
    assert opened() == [] and not held.path.exists()


def test_without_locks_the_counter_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the file system of TMPDIR there may be none, for neither side."""

    def none(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(lease.fcntl, "flock", none)
    monkeypatch.setattr(lease, "STALE_POLLS", 3)
    monkeypatch.setattr(lease, "UNSEEN_POLLS", 3)
    monkeypatch.setattr(lease, "RENEW_SECONDS", 1000.0)
    held = Lease(tmp_path / "lease")
    view = View(held.path, same_host=True)
    for _ in range(5):
        held.signal(signal.SIGUSR1)
        assert [view.over(), view.over()] == [False, False]
    assert [view.over(), view.over(), view.signals] == [False, True, 5]
    held.end()


def test_a_lease_is_of_one_length(tmp_path: Path) -> None:
    """It is written in place: a shorter text would leave the end of the longer one."""
    held = Lease(tmp_path / "lease")
    sizes = {held.path.stat().st_size}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
        held.signal(number)
        sizes.add(held.path.stat().st_size)
    assert held.path.read_text().split()[1:] == ["3", "2"] and len(sizes) == 1
    held.end()
    assert not held.path.exists() and lease.RENEW_SECONDS < lease.POLL_SECONDS * lease.STALE_POLLS / 5


def test_what_a_reward_prints_is_not_taken_for_a_rank_s_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(speech.WRAPPED, "id")
    monkeypatch.setenv("RANK", "0")
    speech.say("step 1\nstep 2")
    speech.report(3, "why\nand how")
    lines = capsys.readouterr().out.split("\n")[:-1]
    first, second, told = (heard(f"host: half a line{line}\n", "id") for line in lines)
    assert (first, second) == ("step 1", "step 2")
    assert isinstance(told, Report) and (told.rank, told.code, told.why) == (0, 3, "why\nand how")
    for line in ("\x1estep", '\x1e\x1e{"rank": 0}', "\x1eother\x1estep", "id step", lines[0].replace("id", "xx")):
        assert heard(line, "id") is None


PDSH = "pdsh@here: {}: ssh exited with exit code {}\n"
KILLED = "{}[2026-01-01 00:00:00,000] [ERROR] [launch.py:325:sigkill_handler] ['-m'] exits with return code = -{}\n"


def outcome(*lines: str, **ended: tuple[int, str]) -> Outcome:
    """Of two hosts with two ranks each. ``ended``: r0=(code, why)."""
    found = Outcome([Host("a.example.com", 2), Host("b.example.com", 2)])
    for line in lines:
        found.note(line)
    for name, (code, why) in ended.items():
        found.take(Report(int(name[1:]), "b" if int(name[1:]) > 1 else "a", 1, code, why))
    return found


@pytest.mark.parametrize("code", [0, 2, 3, 5, 75, 130])
def test_rank_0_s_word_is_the_code(code: int) -> None:
    found = outcome(PDSH.format("b", 247), KILLED.format("b: ", 9), r0=(code, "x"), r1=(3, "y"))
    assert (found.code(), found.message()) == (code, "")


def test_a_rank_0_that_is_done_may_still_upload() -> None:
    """Its report comes before what a tracker sends at the exit."""
    found = outcome(r0=(0, ""), r1=(0, ""))
    assert found.done and not found.failing
    assert outcome(r0=(75, "")).failing and not outcome(r0=(75, "")).done


def test_a_refusal_of_another_rank_alone() -> None:
    found = outcome(r2=(2, "no model there"), r3=(2, "no model there"))
    assert found.failing
    assert (found.code(), found.message()) == (2, "refused, on rank 2 (host b): no model there")


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            outcome(
                KILLED.format("b: ", 9), PDSH.format("b", 247), PDSH.format("a", 1), r0=(4, "peer"), r1=(4, "peer")
            ),
            "lost: one of ranks 2, 3 of host b.example.com was killed (SIGKILL), perhaps because",
        ),
        (
            outcome(PDSH.format("a", 1), KILLED.format("b: ", 11), r0=(4, "peer"), r2=(4, "peer")),
            "lost: rank 3 of host b.example.com was ended by SIGSEGV.",
        ),
        (
            outcome(PDSH.format("b", 255), PDSH.format("a", 1), r0=(4, "peer"), r1=(4, "peer")),
            "lost: one of ranks 2, 3 of host b.example.com ended, or its connection did.",
        ),
        (
            outcome(PDSH.format("b", 1), r2=(4, "OutOfMemoryError: 2 GiB"), r0=(4, "peer"), r1=(4, "p"), r3=(4, "p")),
            "lost: rank 2 of host b ended with OutOfMemoryError: 2 GiB",
        ),
        (outcome(), "lost: the ranks and the launcher ended without a word"),
    ],
)
def test_what_was_lost_is_named(found: Outcome, said: str) -> None:
    assert found.code() == 4 and found.message().startswith(said)
    # What is recorded of it is who is named.
    alone = re.match(r"lost: rank (\d) of host (\S+)", said)
    who = found.who()
    assert (str(who["rank"]), who["host"]) == alone.groups() if alone else who["rank"] is who["pid"] is None


def test_who_lost_a_neighbour_reports_it_and_leaves_after_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """launch.py looks once a second, and names any of those that have ended by then."""
    monkeypatch.setenv(speech.WRAPPED, "id")
    monkeypatch.setenv("RANK", "0")
    told: list[tuple[float, str]] = []
    monkeypatch.setattr(time, "sleep", lambda seconds: told.append((seconds, capsys.readouterr().out)))

    def lose() -> int:
        raise Lost("a collective that failed")

    assert ended(lose) == 4
    ((seconds, said),) = told
    report = heard(said, "id")
    assert isinstance(report, Report) and (report.code, report.why) == (4, "a collective that failed")
    assert seconds > 2


def test_a_print_does_not_end_a_host() -> None:
    found = outcome("b: " + PDSH.format("a", 1), KILLED.format("", 9))
    assert not found.failing


def test_the_probe_sees_paths_and_ports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "SECONDS_TO_APPEAR", 0.3)
    with socket.create_server(("", 0)) as listener:
        port = listener.getsockname()[1]
        found = look({"paths": ["/", str(tmp_path / "absent")], "peer": "localhost", "port": port})
    assert found["missing"] == [str(tmp_path / "absent")] and found["port"] is None
    assert look({"paths": ["/"], "peer": "no.such.host.invalid", "port": port})["port"] == port
