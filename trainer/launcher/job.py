"""``zero-grpo train ... --gpus N | --hostfile H``: starts the ranks, passes on what they say, ends with their code.

The launcher's own lines and every rank's stray output go to a log; the terminal shows what rank 0 says. Nothing that
was started outlives this process, on any host.
"""

import base64
import contextlib
import ipaddress
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType

from trainer.errors import Refused, redacted
from trainer.launcher import status
from trainer.launcher.handover import Handover, split_environment, write_secrets
from trainer.launcher.hosts import Host, read_hostfile, table
from trainer.launcher.lease import Lease
from trainer.launcher.outcome import LOST, Outcome
from trainer.launcher.probe import look
from trainer.launcher.reach import PACKAGE_ROOT, Meeting, check_tools, meet
from trainer.launcher.speech import heard, say

ASKED_TO_END = {signal.SIGINT: 130, signal.SIGTERM: 75, signal.SIGHUP: 75}
SECONDS_TO_END = 30.0
"""For the others, once one has ended; as long as launch.py gives those beside it."""

EXPORTED = ("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL")
"""What of the environment the deepspeed launcher would write into a line of shell for other hosts."""
PRIVATE = ".launch"
"""In run.dir, while a run over a hostfile goes on: lease and secrets."""


def launch_here(arguments: Sequence[str], ranks: int, run_dir: Path, port: int = 0) -> int:
    """``python -m trainer ARGUMENTS`` on ``ranks`` ranks of this machine; returns the run's exit code."""
    free = look({"paths": [], "peer": "localhost", "port": port})["port"]
    if free is None:
        raise Refused(f"--master_port {port}: in use. Fix: another port, or none to take a free one.")
    with tempfile.TemporaryDirectory(prefix="zero-grpo-", ignore_cleanup_errors=True) as folder:
        launch_id = secrets.token_hex(8)
        # The launcher numbers the cards from 0, whichever the user has made visible.
        visible = {name: os.environ[name] for name in ("CUDA_VISIBLE_DEVICES",) if name in os.environ}
        lease = Lease(Path(folder) / "lease")
        handover = Handover(launch_id, list(arguments), os.getcwd(), visible, str(lease.path), "", same_host=True)
        job = _Job(launch_id, Outcome([Host(socket.gethostname(), ranks)]), lease, run_dir, Path(folder))
        return job.run(_launch(ranks, free, handover), os.environ | {"PYTHONUNBUFFERED": "1"}, Path.cwd())


def launch_on_hosts(
    arguments: Sequence[str], hostfile: str, run_file: str, run_dir: Path, key_names: Iterable[str], port: int = 0
) -> int:
    """The same over the hosts of a file. ``key_names``: variables with the keys of reward services."""
    hosts = read_hostfile(hostfile)
    check_tools()
    run_dir = run_dir.absolute()
    launch_id = secrets.token_hex(8)
    with (
        tempfile.TemporaryDirectory(prefix="zero-grpo-", ignore_cleanup_errors=True) as folder,
        _private(run_dir) as private,
    ):
        lease, keys = Lease(private / f"{launch_id}.lease"), private / f"{launch_id}.secrets"
        try:
            meeting = meet(hosts, [Path.cwd(), Path(run_file).absolute()], lease.path, port)
            say(table(hosts))
            _warn(meeting)
            open_variables, secret_variables = split_environment(os.environ, set(key_names))
            write_secrets(keys, secret_variables)
            handover = Handover(
                launch_id, list(arguments), os.getcwd(), open_variables, str(lease.path), str(keys), same_host=False
            )
            own = Path(folder) / "hostfile"
            own.write_text("".join(f"{host.name} slots={host.slots}\n" for host in hosts), encoding="ascii")
            # force_multi: a single host may be another one than this, where the launcher would otherwise start.
            options = ["--hostfile", str(own), "--force_multi", "--no_ssh_check", "--no_local_rank"]
            options += ["--master_addr", meeting.address, "--master_port", str(meeting.port)]
            job = _Job(launch_id, Outcome(hosts), lease, run_dir, Path(folder), keys)
            # The launcher writes its own folder into a line of shell; ours has been checked.
            return job.run(_runner(options, handover), _environment_for_pdsh(), PACKAGE_ROOT)
        finally:
            lease.end()
            keys.unlink(missing_ok=True)


def _launch(ranks: int, port: int, handover: Handover) -> list[str]:
    """What the deepspeed launcher's front end would start for one machine. The front end imports everything once more,
    for seconds, and takes a /job/hostfile for an order to go to other hosts."""
    world = base64.urlsafe_b64encode(json.dumps({"localhost": list(range(ranks))}).encode()).decode()
    options = [f"--world_info={world}", "--master_addr=127.0.0.1", f"--master_port={port}", "--no_local_rank"]
    return [sys.executable, "-m", "deepspeed.launcher.launch", *options, "--module", "trainer", handover.word()]


def _runner(options: Sequence[str], handover: Handover) -> list[str]:
    return [sys.executable, "-m", "deepspeed.launcher.runner", *options, "--module", "trainer", handover.word()]


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


@contextlib.contextmanager
def _private(run_dir: Path) -> Iterator[Path]:
    """A folder in run.dir that only its owner can enter, gone afterwards, as is run.dir when nothing else is in it."""
    made = [folder for folder in (run_dir, *run_dir.parents) if not folder.exists()]
    folder = run_dir / PRIVATE
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise Refused(
            f"run.dir: cannot create {folder}: {error.strerror}. Fix: set run.dir to a path you can write."
        ) from error
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):  # what another launch into it has left stays, for that one to end
            folder.rmdir()
            for empty in made:
                empty.rmdir()


class _Job:
    """A started launcher, until it and all ranks have ended."""

    def __init__(
        self,
        launch_id: str,
        outcome: Outcome,
        lease: Lease,
        run_dir: Path,
        folder: Path,
        keys: Path | None = None,
    ) -> None:
        self.launch_id, self.outcome, self.lease, self.run_dir, self.keys = launch_id, outcome, lease, run_dir, keys
        self.log = folder / "launcher.log"
        self.asked: list[int] = []

    def run(self, command: Sequence[str], environment: dict[str, str], folder: Path) -> int:
        """Starts and waits; the exit code."""
        # A session of its own: a Ctrl-C reaches the ranks by the lease alone, and once. The launcher would answer it
        # with a `pkill -f` on every host that ends other people's runs of the same user, too.
        self._catch_signals()
        process = subprocess.Popen(
            command,
            env=environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        if self.keys:
            # Ctrl-Z would stop the renewing of the lease, and so end the run on the other hosts. After the start, since
            # what is ignored is inherited.
            signal.signal(signal.SIGTSTP, signal.SIG_IGN)
        reader = threading.Thread(target=self._sort, args=(process,), daemon=True)
        reader.start()
        self._wait(process)
        self._end_group(process, reader)
        return self._close()

    def _catch_signals(self) -> None:
        def note(number: int, frame: FrameType | None) -> None:
            self.asked.append(number)

        for number in ASKED_TO_END:
            # nohup means it. A shell without job control ignores SIGINT for everything in the background, unasked.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, note)

    def _sort(self, process: subprocess.Popen[str]) -> None:
        """What rank 0 says to the terminal, the rest to the log, until nobody writes any more."""
        assert process.stdout is not None
        with self.log.open("w", encoding="utf-8") as file:
            for line in process.stdout:
                told = heard(line, self.launch_id)
                if isinstance(told, str):
                    with contextlib.suppress(OSError):  # a terminal that was closed
                        say(told)
                elif told:
                    self.outcome.take(told)
                else:
                    self.outcome.note(line)
                    with contextlib.suppress(OSError):  # a full disk must not stop the reading: ranks would block
                        file.write(redacted(line))
                        file.flush()

    def _wait(self, process: subprocess.Popen[str]) -> None:
        """Until the launcher has ended, or time is over for those asked to end."""
        deadline, passed_on = float("inf"), 0
        while process.poll() is None and time.monotonic() < deadline:
            if passed_on < len(self.asked):
                passed_on += 1
                number = self.asked[passed_on - 1]
                self.lease.signal(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
                # Asked once they save, which takes as long as it takes; who asks again is in a hurry.
                patience = (float("inf"), SECONDS_TO_END, 0.0)[min(passed_on, 3) - 1]
                deadline = time.monotonic() + patience
            if self.outcome.failing:
                deadline = min(deadline, time.monotonic() + SECONDS_TO_END)
            if self.keys and len(self.outcome.begun) == self.outcome.ranks:
                self.keys.unlink(missing_ok=True)  # every rank has read it
            time.sleep(0.1)

    def _end_group(self, process: subprocess.Popen[str], reader: threading.Thread) -> None:
        """The lease ends what is left on every host, then SIGKILL what is left of the session here."""
        if process.poll() is not None:
            # Whatever still holds the pipe may be a rank whose launcher was killed, or about to end by itself.
            reader.join(timeout=1)
        self.lease.end()
        reader.join(timeout=5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        reader.join(timeout=5)

    def _close(self) -> int:
        code, message = self.outcome.code(), self.outcome.message()
        known = status.read(self.run_dir)
        if code == LOST and self.asked and (known.get("state") != "running" or self.asked[0] == signal.SIGINT):
            code, message = ASKED_TO_END[signal.Signals(self.asked[0])], "ended as asked; nothing was saved."
        if code == LOST and any((self.run_dir / "checkpoints").glob("step-*")):
            message += " Fix: the same command with --resume auto goes on from the newest checkpoint."
        log = self._keep_log(code)
        if known.get("state") in ("running", "lost") and code in (LOST, 130):
            state = "lost" if code == LOST else "interrupted"
            status.write(self.run_dir, known | {"state": state, "exit_code": code, "reason": message})
        if code == LOST:
            message += f"\nWhat all ranks and the launcher printed: {log}"
        if message:
            with contextlib.suppress(OSError):
                say(f"\n{message}")
        return code

    def _keep_log(self, code: int) -> Path:
        """Beside the run's records, since it holds what reward functions printed; a refused run has none."""
        if code != 2 and (self.run_dir / "run_status.json").exists():
            target = self.run_dir / "launcher.log"
            with target.open("ab") as kept, self.log.open("rb") as log:
                shutil.copyfileobj(log, kept)
            return target
        if code == LOST:
            kept_log = Path(tempfile.mkstemp(prefix="zero-grpo-", suffix=".log")[1])
            shutil.copyfile(self.log, kept_log)
            return kept_log
        return self.log
