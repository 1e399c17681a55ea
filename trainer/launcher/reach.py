"""Before a start over a hostfile: the tools are here, every host answers, and the ranks have a place to meet."""

import base64
import ipaddress
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import Refused
from trainer.launcher import probe
from trainer.launcher.hosts import Host

PACKAGE_ROOT = Path(__file__).parents[2]
PLAIN = re.compile(r"[A-Za-z0-9_@+=:,./-]+")
"""What a shell, pdsh and the deepspeed launcher take as it is."""

PACKAGES = ("zero-grpo", "torch", "deepspeed", "transformers", "peft", "bitsandbytes")
"""Whose versions must be equal: ranks exchange what these lay out."""
VERSIONS = {"packages": PACKAGES, "root": str(PACKAGE_ROOT)}

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "--")
FIXES = (
    ("Could not resolve hostname", "correct the name, or add the host to /etc/hosts or ~/.ssh/config"),
    ("Permission denied", "set up a key without a passphrase prompt: ssh-copy-id {host}"),
    ("Host key verification failed", "connect once by hand, ssh {host}, and compare the key that it shows"),
    ("", "is the host up, and does its sshd answer `ssh {host} true`?"),
)


Answer = dict[str, Any] | str
"""What a host says of itself, or why it says nothing."""


@dataclass(frozen=True)
class Meeting:
    """Where rank 0 listens for the others."""

    address: str
    port: int


def check_tools() -> None:
    """Refused when pdsh or ssh is missing, or our own paths would not survive a shell on the other hosts."""
    missing = [tool for tool in ("pdsh", "ssh") if not shutil.which(tool)]
    if missing:
        raise Refused(
            f"--hostfile: {' and '.join(missing)} not found on PATH; the deepspeed launcher reaches hosts by them. "
            "Fix: on Debian or Ubuntu, apt install pdsh openssh-client; or start torchrun on each host "
            "(launch/README.md)."
        )
    odd = [path for path in (sys.executable, str(PACKAGE_ROOT)) if not PLAIN.fullmatch(path)]
    if odd:
        raise Refused(
            f"--hostfile: the deepspeed launcher puts {' and '.join(odd)} unquoted into a shell line. "
            "Expected letters, digits and _@+=:,./- only. Fix: install zero-grpo under such a path, on every host."
        )


def meet(hosts: Sequence[Host], paths: Sequence[Path], shared: Path, port: int) -> Meeting:
    """Asks every host at once over ssh. ``paths`` must exist on each, ``shared`` is a file in run.dir; ``port`` 0 takes
    a free one. Refused with all hosts that do not serve, each with its reason, and with what they do not share."""
    needed = [sys.executable, str(PACKAGE_ROOT), *map(str, paths), str(shared)]
    common = {"paths": needed, "peer": hosts[min(1, len(hosts) - 1)].name, "versions": VERSIONS}
    asks = [common | {"port": port if n == 0 else 0} for n in range(len(hosts))]
    with ThreadPoolExecutor(max_workers=32) as pool:
        answers = list(pool.map(ask, hosts, asks))
    problems = []
    for host, answer in zip(hosts, answers, strict=True):
        if isinstance(answer, str):
            problems.append(f"  {host.name}: {answer}")
            continue
        missing = answer["missing"]
        if missing == [str(shared)]:
            problems.append(
                f"  {host.name}: does not see run.dir {shared.parent.parent} as this machine does. "
                "Fix: put run.dir on a file system that all hosts share"
            )
        elif missing:
            problems.append(f"  {host.name}: has no {', '.join(missing)}. Fix: the same paths on every host")
        if answer["port"] is None:
            problems.append(
                f"  {host.name}: port {port} is in use. Fix: another --master_port, or none to take a free one"
            )
    problems += [f"  {problem}" for problem in (*twice(hosts, answers), *unlike(hosts, answers))]
    if problems:
        raise Refused("--hostfile: nothing was started.\n" + "\n".join(f"{problem}." for problem in problems))
    first = answers[0]
    assert not isinstance(first, str)
    return Meeting(first["address"], first["port"])


def twice(hosts: Sequence[Host], answers: Sequence[Answer]) -> list[str]:
    """Hosts that are one machine, listed by name and by address, say: its ranks would share cards."""
    first: dict[str, str] = {}
    found = []
    for host, answer in zip(hosts, answers, strict=True):
        if isinstance(answer, str) or not (machine := answer["machine"]):
            continue
        if (other := first.setdefault(machine, host.name)) != host.name:
            found.append(f"{host.name}: the same machine as {other}. Fix: one line for it, with all of its slots")
    return found


def unlike(hosts: Sequence[Host], answers: Sequence[Answer]) -> list[str]:
    """Versions in which the hosts differ, with the hosts of each."""
    here = [(host.name, one["versions"]) for host, one in zip(hosts, answers, strict=True) if not isinstance(one, str)]
    found = []
    for what in here[0][1] if here else ():
        names: dict[str, list[str]] = {}
        for name, versions in here:
            if versions[what]:
                names.setdefault(versions[what], []).append(name)
        if len(names) > 1:
            said = "; ".join(f"{version} on {', '.join(those)}" for version, those in names.items())
            found.append(f"{what}: {said}. Fix: the same on every host")
    return found


def ask(host: Host, ask: dict[str, Any], script: str = probe.__file__) -> Answer:
    """The answer of the probe, or of another ``script``, or the reason for none and its fix."""
    question = base64.urlsafe_b64encode(json.dumps(ask).encode()).decode()
    command = [*SSH, host.name, sys.executable, "-I", "-", question]
    try:
        ended = subprocess.run(command, input=Path(script).read_bytes(), capture_output=True, timeout=60)
    except subprocess.TimeoutExpired:
        return f"no answer within 60 s. Fix: `ssh {host.name} true` must end at once"
    said = ended.stderr.decode(errors="replace").strip().splitlines()
    if ended.returncode == 255:
        reason = said[-1].rstrip(".\r") if said else "ssh failed without a word"
        fix = next(fix for needle, fix in FIXES if needle in reason).format(host=host.name)
        return f"not reachable: {reason}. Fix: {fix}"
    if ended.returncode != 0:
        return (
            f"{sys.executable} does not run there: {said[-1] if said else ''}. Fix: install zero-grpo at the same path"
        )
    try:
        answer: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
        ipaddress.ip_address(answer["address"])  # it becomes part of a line of shell on the other hosts
    except (ValueError, IndexError, KeyError):
        return f"answers {ended.stdout[-100:]!r} to our probe. Fix: what its shell runs at a login must print nothing"
    return answer
