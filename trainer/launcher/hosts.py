"""The hostfile: ``name slots=N`` a line, read strictly, since its names end up on ssh's command line."""

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.errors import Refused

MOST_SLOTS, MOST_BYTES = 16, 1 << 20
NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
GRAMMAR = f'one host a line, "NAME slots=N" with N of 1 to {MOST_SLOTS}; # begins a comment'


@dataclass(frozen=True)
class Host:
    """``slots``: ranks on it. ``chosen``: the numbers of its slots that --include or --exclude leaves, which are those
    of its cards; () where it is all of them."""

    name: str
    slots: int
    chosen: tuple[int, ...] = ()

    @property
    def spec(self) -> str:
        """As the deepspeed launcher's --include takes it."""
        return f"{self.name}:{','.join(map(str, self.chosen))}" if self.chosen else self.name


def read_hostfile(path: Path | str) -> list[Host]:
    """The hosts in file order, ranks count through them. Refused with every bad line in one message.

    A missing file is refused too: the deepspeed launcher would train on this machine alone.
    """
    try:
        with Path(path).open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise Refused(
            f"hostfile {path}: cannot be read: {reason}. Expected a file with {GRAMMAR}. "
            "Fix: give the path of one, or use --gpus N to train on this machine."
        ) from error
    if len(raw) > MOST_BYTES:
        raise Refused(f"hostfile {path}: larger than {MOST_BYTES >> 20} MiB. Expected a file with {GRAMMAR}.")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise Refused(f"hostfile {path}, line {line}: not UTF-8 text. Fix: save the file as UTF-8.") from error
    return parse_hostfile(text, str(path))


def parse_hostfile(text: str, path: str) -> list[Host]:
    """The same, of a text; ``path`` is for the messages."""
    hosts: list[Host] = []
    first_seen: dict[str, int] = {}
    problems = []
    # Lines end at \n alone: str.splitlines would also split at characters that look like nothing in an editor.
    for number, line in enumerate(text.split("\n"), start=1):
        words = line.partition("#")[0].strip(" \t\r")
        if not words:
            continue
        found = _host(re.split(r"[ \t]+", words))
        if isinstance(found, Host) and (before := first_seen.setdefault(found.name.lower(), number)) != number:
            found = f"{found.name} is already in line {before}. Fix: one line a host, with all of its slots"
        if isinstance(found, Host):
            hosts.append(found)
        else:
            problems.append(f"  line {number}: {_shown(line.rstrip(chr(13)))}: {found}.")
    if problems:
        raise Refused(f"hostfile {path}: expected {GRAMMAR}.\n" + "\n".join(problems))
    if not hosts:
        raise Refused(
            f"hostfile {path}: it names no host. Expected {GRAMMAR}. Fix: add the hosts, or use --gpus N to train on "
            "this machine."
        )
    return hosts


def selected(hosts: Sequence[Host], include: str, exclude: str) -> list[Host]:
    """What --include leaves of a hostfile, or --exclude, in its order: the deepspeed launcher's ``NAME@NAME:0,2``.

    Refused with every name and slot that the file does not have.
    """
    if include and exclude:
        raise Refused("--include and --exclude: one of them.")
    if not include and not exclude:
        return list(hosts)
    flag, by_name = "--include" if include else "--exclude", {host.name: host for host in hosts}
    named: dict[str, set[int]] = {}
    problems = []
    for spec in (include or exclude).split("@"):
        name, colon, numbers = (spec, "", "") if spec in by_name else spec.rpartition(":")
        if (host := by_name.get(name)) is None:
            problems.append(f"  {_shown(spec)}: no such host. The file has {', '.join(by_name)}.")
        elif colon and ":" in name:
            problems.append(f"  {_shown(spec)}: the deepspeed launcher takes no slots of an IPv6 address. Fix: a name.")
        elif colon and not re.fullmatch(r"[0-9]{1,2}(,[0-9]{1,2})*", numbers):
            problems.append(f"  {_shown(spec)}: {_shown(numbers)} are no slots. Fix: {name}:0,2, say.")
        else:
            slots = set(map(int, numbers.split(","))) if colon else set(range(host.slots))
            if unknown := sorted(slots - set(range(host.slots))):
                problems.append(f"  {_shown(spec)}: no slot {unknown[0]}. {name} has 0 to {host.slots - 1}.")
            named.setdefault(name, set()).update(slots)
    if problems:
        raise Refused(f"{flag}: expected NAME@NAME:SLOT,SLOT of the hostfile.\n" + "\n".join(problems))
    found = []
    for host in hosts:
        of_it = named.get(host.name, set())
        kept = sorted(of_it if include else set(range(host.slots)) - of_it)
        if kept:
            found.append(Host(host.name, len(kept), () if len(kept) == host.slots else tuple(kept)))
    if not found:
        raise Refused(f"{flag} {exclude}: no host is left.")
    return found


def table(hosts: Sequence[Host]) -> str:
    """Hosts, slots and ranks, for the eye."""
    width = max(len("host"), *(len(host.name) for host in hosts))
    lines = [f"{'host':<{width}}  slots  ranks"]
    first = 0
    for host in hosts:
        last = first + host.slots - 1
        ranks = str(first) if first == last else f"{first}-{last}"
        slots = f"  slot {', '.join(map(str, host.chosen))}" if host.chosen else ""
        lines.append(f"{host.name:<{width}}  {host.slots:>5}  {ranks}{slots}")
        first += host.slots
    return "\n".join([*lines, f"{len(hosts)} host(s), {first} rank(s)"])


def _host(words: Sequence[str]) -> Host | str:
    """The host of a line, or what is wrong with it and the fix."""
    name, *settings = words
    if problem := _name_problem(name):
        return problem
    if not settings:
        return f"no slots. Fix: {name} slots=N, N being the ranks on it"
    if len(settings) > 1 or not settings[0].startswith("slots="):
        return f"expected slots=N alone after the name, got {_shown(' '.join(settings))}. Fix: {name} slots=N"
    value = settings[0].removeprefix("slots=")
    if not re.fullmatch(r"[0-9]{1,2}", value) or not 1 <= int(value) <= MOST_SLOTS:
        return f"slots={value[:20]}: expected a whole number of 1 to {MOST_SLOTS}. Fix: {name} slots=N"
    return Host(name, int(value))


def _name_problem(name: str) -> str:
    if NAME.fullmatch(name) and len(name) <= 253:
        return ""
    try:
        # The zone of an address (%eth0) would be read by pdsh.
        if "%" not in name and ipaddress.ip_address(name):
            return ""
    except ValueError:
        pass
    fix = "Fix: a host name or an IP address: ASCII letters, digits, dots and hyphens"
    if "@" in name:
        fix = "Fix: name the host alone; the user for ssh stands in ~/.ssh/config"
    elif "," in name or "[" in name:
        fix = "Fix: a line for each host"
    elif ":" in name:
        fix = "Fix: NAME slots=N; the port for ssh stands in ~/.ssh/config"
    return f"{_shown(name)} is not a host name. {fix}"


def _shown(text: str) -> str:
    return repr(text) if len(text) <= 100 else f"{text[:100]!r}..."
