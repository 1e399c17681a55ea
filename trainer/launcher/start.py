"""``zero-grpo train ... --gpus N | --hostfile H``: starts the ranks, here or over hosts, and ends with their code.

Nothing that was started outlives this process, on any host.
"""

import base64
import contextlib
import ipaddress
import json
import os
import secrets
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.errors import Refused
from trainer.launcher.handover import Handover, split_environment, write_secrets
from trainer.launcher.hosts import Host, table
from trainer.launcher.job import Job, Signals
from trainer.launcher.lease import FOLDER, Lease
from trainer.launcher.outcome import Outcome
from trainer.launcher.probe import look
from trainer.launcher.reach import PACKAGE_ROOT, Meeting, check_tools, meet
from trainer.launcher.speech import say

EXPORTED = ("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL")
"""What of the environment the deepspeed launcher would write into a line of shell for other hosts."""


@dataclass(frozen=True)
class Wanted:
    """``arguments``: those of every rank. ``port``: where rank 0 listens, 0 for a free one."""

    arguments: Sequence[str]
    run_dir: Path
    grace_seconds: float
    port: int = 0


def launch_here(wanted: Wanted, ranks: int) -> int:
    """``python -m trainer ARGUMENTS`` on ``ranks`` ranks of this machine; returns the run's exit code."""
    free = look({"paths": [], "peer": "localhost", "port": wanted.port})["port"]
    if free is None:
        raise Refused(f"--master_port {wanted.port}: in use. Fix: another port, or none to take a free one.")

    def launch(signals: Signals) -> int:
        launch_id = secrets.token_hex(8)
        # The launcher numbers the cards from 0, whichever the user has made visible.
        visible = {name: os.environ[name] for name in ("CUDA_VISIBLE_DEVICES",) if name in os.environ}
        with _lease(Path(tempfile.gettempdir()) / f"zero-grpo-{launch_id}.lease") as lease:
            handover = _handover(launch_id, wanted, visible, lease, Path(), same_host=True)
            outcome = Outcome([Host(socket.gethostname(), ranks)])
            job = Job(launch_id, outcome, lease, wanted.run_dir, signals, wanted.grace_seconds)
            return job.run(_launch(ranks, free, handover), os.environ | {"PYTHONUNBUFFERED": "1"}, PACKAGE_ROOT)

    return _listening(launch)


def launch_on_hosts(wanted: Wanted, hosts: Sequence[Host], run_file: str, key_names: Iterable[str]) -> int:
    """The same over ``hosts``. ``key_names``: variables with the keys of reward services."""
    check_tools()
    run_dir = wanted.run_dir.absolute()

    def launch(signals: Signals) -> int:
        launch_id = secrets.token_hex(8)
        with _private(run_dir) as private, _lease(private / f"{launch_id}.lease") as lease:
            keys, own = lease.path.with_suffix(".secrets"), lease.path.with_suffix(".hosts")
            try:
                meeting = meet(hosts, [Path.cwd(), Path(run_file).absolute()], lease.path, wanted.port)
                say(table(hosts))
                _warn(meeting)
                open_variables, secret_variables = split_environment(os.environ, set(key_names))
                write_secrets(keys, secret_variables)
                handover = _handover(launch_id, wanted, open_variables, lease, keys, same_host=False)
                own.write_text(_hostfile(hosts), encoding="ascii")
                job = Job(launch_id, Outcome(hosts), lease, run_dir, signals, wanted.grace_seconds, keys)
                # The launcher writes its own folder into a line of shell; ours has been checked.
                return job.run(_runner(hosts, own, meeting, handover), _environment_for_pdsh(), PACKAGE_ROOT)
            finally:
                keys.unlink(missing_ok=True)
                own.unlink(missing_ok=True)

    return _listening(launch)


def _listening(launch: Callable[[Signals], int]) -> int:
    """``launch()`` under signals that end it, from its first file on, and on a disk that may refuse."""
    signals = Signals()
    try:
        return launch(signals)
    except KeyboardInterrupt:
        say("\nended as asked, before any rank was started.")
        return signals.code
    except OSError as error:
        if signals.starting:
            raise
        raise Refused(f"nothing was started: {error}. Fix: make room there, or make it writable.") from error
    finally:
        if not signals.starting:
            signals.restore()


@contextlib.contextmanager
def _lease(path: Path) -> Iterator[Lease]:
    lease = Lease(path)
    try:
        yield lease
    finally:
        lease.end()


@contextlib.contextmanager
def _private(run_dir: Path) -> Iterator[Path]:
    """A folder in run.dir that only its owner can enter, gone afterwards, as is run.dir when nothing else is in it."""
    made = [folder for folder in (run_dir, *run_dir.parents) if not folder.exists()]
    folder = run_dir / FOLDER
    try:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise Refused(
                f"run.dir: cannot create {folder}: {error.strerror}. Fix: set run.dir to a path you can write."
            ) from error
        yield folder
    finally:
        with contextlib.suppress(OSError):  # what another launch into it has left stays, for that one to end
            folder.rmdir()
            for empty in made:
                empty.rmdir()


def _handover(
    launch_id: str, wanted: Wanted, variables: dict[str, str], lease: Lease, keys: Path, *, same_host: bool
) -> Handover:
    secret = "" if same_host else str(keys)
    return Handover(launch_id, list(wanted.arguments), os.getcwd(), variables, str(lease.path), secret, same_host)


def _launch(ranks: int, port: int, handover: Handover) -> list[str]:
    """What the deepspeed launcher's front end would start for one machine. The front end imports everything once more,
    for seconds, and takes a /job/hostfile for an order to go to other hosts."""
    world = base64.urlsafe_b64encode(json.dumps({"localhost": list(range(ranks))}).encode()).decode()
    options = [f"--world_info={world}", "--master_addr=127.0.0.1", f"--master_port={port}", "--no_local_rank"]
    return [sys.executable, "-m", "deepspeed.launcher.launch", *options, "--module", "trainer", handover.word()]


def _runner(hosts: Sequence[Host], hostfile: Path, meeting: Meeting, handover: Handover) -> list[str]:
    # force_multi: a single host may be another one than this, where the launcher would otherwise start.
    options = ["--hostfile", str(hostfile), "--force_multi", "--no_ssh_check", "--no_local_rank"]
    options += ["--master_addr", meeting.address, "--master_port", str(meeting.port)]
    if any(host.chosen for host in hosts):
        options += ["--include", "@".join(host.spec for host in hosts)]
    return [sys.executable, "-m", "deepspeed.launcher.runner", *options, "--module", "trainer", handover.word()]


def _hostfile(hosts: Sequence[Host]) -> str:
    return "".join(f"{host.name} slots={max(host.chosen, default=host.slots - 1) + 1}\n" for host in hosts)


def _environment_for_pdsh() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(EXPORTED)}
    # Without them a host that has lost power would hold pdsh for hours.
    alive = "-oBatchMode=yes -oServerAliveInterval=10 -oServerAliveCountMax=3"
    more = {"PDSH_SSH_ARGS_APPEND": f"{kept.get('PDSH_SSH_ARGS_APPEND', '')} {alive}".strip()}
    # No file: the launcher would read a .deepspeed_env in ~ or in its folder, and paste it into a line of shell.
    return kept | more | {"DS_ENV_FILE": os.devnull, "PYTHONUNBUFFERED": "1"}


def _warn(meeting: Meeting) -> None:
    for path in (Path(".deepspeed_env").absolute(), Path.home() / ".deepspeed_env"):
        if path.exists():
            say(f"{path} is not used: launch/README.md lists the variables that go to the other hosts.")
    if ipaddress.ip_address(meeting.address).is_global:
        say(
            f"Warning: rank 0 listens on {meeting.address}, a public address, and whoever reaches it can join or stop "
            "the run. Let a firewall admit the hosts alone, or name them by their private addresses."
        )
