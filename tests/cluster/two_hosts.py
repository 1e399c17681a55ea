"""Hosts on this machine, two or three: joined network namespaces, each with its own address, name, /dev/shm and sshd.

They share the file system, as a cluster shares one, but for ``private`` in ``folder``, which hostb has of its own.
They are joined by a switch, or two of them by slow_cable.py.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ADDRESSES = {"hosta": "10.213.77.1", "hostb": "10.213.77.2", "hostc": "10.213.77.3"}
TOOLS = ("ip", "nsenter", "unshare", "ssh", "ssh-keygen", "/usr/sbin/sshd", "pdsh")

SSHD = """
ListenAddress {address}:22
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin prohibit-password
"""
SSH = """
Host *
    IdentityFile {folder}/user_key
    UserKnownHostsFile {folder}/known_hosts
    StrictHostKeyChecking yes
"""
# What a host sees of its own. The last line becomes its sshd, whose namespaces every command on the host joins.
BOOT = """
set -eu
hostname {name}
mount --bind {folder}/hosts /etc/hosts
mount --bind {folder}/ssh_config /etc/ssh/ssh_config
mount -t tmpfs tmpfs /dev/shm
{more}
mkdir -p /run/sshd
exec /usr/sbin/sshd -D -e -f {folder}/sshd_{name}
"""


def unavailable() -> str:
    """Why there can be no hosts here; empty when there can."""
    missing = [tool for tool in TOOLS if not shutil.which(tool)]
    if missing:
        return f"no {', '.join(missing)}: apt install iproute2 openssh-server pdsh"
    if os.geteuid() != 0:
        return "network namespaces need root"
    trial = f"zg-trial-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", trial], capture_output=True, text=True)
    if made.returncode:
        return f"no network namespaces here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", trial], check=True)
    return ""


class Hosts:
    """Those that run. ``folder`` is seen by all."""

    def __init__(self, folder: Path, count: int, slow: bool) -> None:
        self.folder = folder
        self.addresses = dict(list(ADDRESSES.items())[:count])
        self.slow = slow
        self.relay: subprocess.Popen[str] | None = None
        self.tag = f"zg{os.getpid()}-{count}{'s' if slow else ''}"
        self.sshd: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        for name in ("host_key", "user_key"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name))
        key = (self.folder / "host_key.pub").read_text()
        names = "".join(f"{address} {name}\n" for name, address in self.addresses.items())
        (self.folder / "hosts").write_text("127.0.0.1 localhost\n" + names)
        (self.folder / "known_hosts").write_text(",".join(self.addresses) + " " + key)
        (self.folder / "ssh_config").write_text(SSH.format(folder=self.folder))
        (self.folder / "private").mkdir()
        for name in self.addresses:
            _run("ip", "netns", "add", self._namespace(name))
        self._connect([self._namespace(name) for name in self.addresses])
        for name, address in self.addresses.items():
            inside = ("ip", "-n", self._namespace(name))
            _run(*inside, "address", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _run(*inside, "link", "set", device, "up")
            self._boot(name, address)

    def stop(self) -> None:
        for name in self.addresses:
            for pid in self.processes(name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for process in (*self.sshd.values(), *([self.relay] if self.relay else [])):
            process.kill()
            process.wait()
        for name in (*self.addresses, "switch"):
            subprocess.run(["ip", "netns", "del", self._namespace(name)], capture_output=True)

    def popen(self, host: str, command: Sequence[str], folder: Path, **settings: Any) -> subprocess.Popen[str]:
        """A command on a host, with its name, network and mounts."""
        # By a shell inside: nsenter's own --wd opens the folder before it enters the host's mounts, and a file there
        # cannot be renamed to one that is named by its path.
        enter = ("bash", "-c", 'cd "$1" && shift && exec "$@"', "-", str(folder))
        inside = ["nsenter", "-t", str(self.sshd[host].pid), "-m", "-u", "-n", "--", *enter, *command]
        return subprocess.Popen(inside, text=True, **settings)

    def processes(self, host: str) -> list[int]:
        """All that runs on a host, except the sshd that listens."""
        found = subprocess.run(["ip", "netns", "pids", self._namespace(host)], capture_output=True, text=True)
        return [int(pid) for pid in found.stdout.split() if int(pid) != self.sshd[host].pid and _works(int(pid))]

    def link(self, state: str) -> None:
        """The cable of hosta, "up" or "down"."""
        _run("ip", "-n", self._namespace("hosta"), "link", "set", "eth0", state)

    def _connect(self, namespaces: Sequence[str]) -> None:
        """Gives each its device eth0."""
        if self.slow:
            relay = [sys.executable, str(Path(__file__).with_name("slow_cable.py")), *namespaces]
            self.relay = subprocess.Popen(relay, stdout=subprocess.PIPE, text=True)
            assert self.relay.stdout is not None and self.relay.stdout.readline() == "connected\n"
            return
        switch = self._namespace("switch")
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "switch", "up", "type", "bridge")
        for number, here in enumerate(namespaces):
            port = f"port{number}"
            _run("ip", "link", "add", "eth0", "netns", here, "type", "veth", "peer", "name", port, "netns", switch)
            _run("ip", "-n", switch, "link", "set", port, "up", "master", "switch")

    def _boot(self, name: str, address: str) -> None:
        (self.folder / f"sshd_{name}").write_text(SSHD.format(address=address, folder=self.folder))
        own = f"mount -t tmpfs tmpfs {self.folder}/private" if name == "hostb" else ""
        script = BOOT.format(name=name, folder=self.folder, more=own)
        log = (self.folder / f"sshd_{name}.log").open("wb")
        command = ["ip", "netns", "exec", self._namespace(name), "unshare", "--mount", "--uts", "bash", "-c", script]
        self.sshd[name] = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + 10
        while b"Server listening" not in (self.folder / f"sshd_{name}.log").read_bytes():
            assert time.monotonic() < deadline and self.sshd[name].poll() is None, "sshd does not start"
            time.sleep(0.1)

    def _namespace(self, host: str) -> str:
        return f"{self.tag}-{host}"


@contextlib.contextmanager
def running(folder: Path, count: int = 2, *, slow: bool = False) -> Iterator[Hosts]:
    hosts = Hosts(folder, count, slow)
    try:
        hosts.start()
        yield hosts
    finally:
        hosts.stop()


def _works(pid: int) -> bool:
    """Whether it is more than a zombie that nobody has reaped yet."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    return False


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
