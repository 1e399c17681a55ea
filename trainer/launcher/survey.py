"""``zero-grpo hosts HOSTFILE --probe``: what each host has, and what keeps them from training together."""

import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from trainer.launcher.hosts import Host
from trainer.launcher.reach import PACKAGE_ROOT, VERSIONS, Answer, ask, check_tools, twice, unlike

MOST_SECONDS_APART = 5.0
"""Of two clocks. Records of one run carry the times of all hosts, and files are told apart by their age."""
LEAST_SHARED_GIB = 1.0
"""Of /dev/shm, through which NCCL talks inside a host. Containers often have 64 MiB."""


def survey(hosts: Sequence[Host], model: str = "") -> list[Answer]:
    """Asks all hosts at once over ssh; ``clock`` becomes seconds that its clock is ahead of ours. ``model``: a folder
    whose files are compared."""
    check_tools()
    model = os.path.abspath(model) if model else ""
    paths = [sys.executable, str(PACKAGE_ROOT), *filter(None, [model])]
    question = {"paths": paths, "peer": "", "port": 0, "versions": VERSIONS | {"model": model}}
    question["facts"] = {"folder": str(Path.cwd())}

    def one(host: Host) -> Answer:
        peer = next((other.name for other in hosts if other is not host), host.name)
        before = time.time()
        answer = ask(host, question | {"peer": peer})
        if not isinstance(answer, str):
            # Its clock was read somewhere between the two readings of ours.
            after, clock = time.time(), answer["facts"]["clock"]
            answer["facts"]["clock"] = clock - before if clock < before else max(0.0, clock - after)
        return answer

    with ThreadPoolExecutor(max_workers=32) as pool:
        return list(pool.map(one, hosts))


def compared(hosts: Sequence[Host], answers: Sequence[Answer]) -> str:
    """One column a host that answers; "" where none does. A row in which they must agree and do not begins with "!"."""
    here = _answering(hosts, answers)
    if not here:
        return ""
    rows = [("host", *(host.name for host, _ in here)), ("slots", *(str(host.slots) for host, _ in here))]
    wrong = {problem.partition(":")[0] for problem in unlike(hosts, answers)}
    if twice(hosts, answers):
        wrong.add("address")
    versions = here[0][1]["versions"]
    for name, cell in (*_ROWS[:3], *((name, _version(name)) for name in versions), *_ROWS[3:]):
        cells = [cell(answer) for _, answer in here]
        rows.append((f"! {name}" if name in wrong else name, *cells))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def problems(hosts: Sequence[Host], answers: Sequence[Answer]) -> list[str]:
    """What is in the way of a run, each with its fix."""
    found = [f"{host.name}: {why}" for host, why in zip(hosts, answers, strict=True) if isinstance(why, str)]
    here = _answering(hosts, answers)
    on_gpus = any(answer["facts"]["gpus"] for _, answer in here)
    for host, answer in here:
        facts, cards = answer["facts"], len(answer["facts"]["gpus"])
        if answer["missing"]:
            found.append(f"{host.name}: has no {', '.join(answer['missing'])}. Fix: the same paths on every host")
        if facts["disk"] is None:
            found.append(f"{host.name}: has no folder {Path.cwd()}. Fix: start where every host has one, shared by all")
        if abs(facts["clock"]) > MOST_SECONDS_APART:
            found.append(f"{host.name}: its clock is {facts['clock']:+.0f} s off this one. Fix: let NTP set both")
        if on_gpus and cards < (needed := max(host.chosen, default=host.slots - 1) + 1):
            fix = f"{host.name} slots={cards}" if cards else "take it out of the hostfile, or repair its driver"
            found.append(f"{host.name}: slots={needed}, but {cards} GPU(s). Fix: {fix}")
        if cards and facts["shared"] is not None and facts["shared"] < LEAST_SHARED_GIB * 2**30:
            free = facts["shared"] / 2**30
            found.append(f"{host.name}: /dev/shm has {free:.2f} GiB. Fix: docker run --shm-size=8g, or --ipc=host")
    return found + twice(hosts, answers) + unlike(hosts, answers)


def _answering(hosts: Sequence[Host], answers: Sequence[Answer]) -> list[tuple[Host, dict[str, Any]]]:
    return [(host, answer) for host, answer in zip(hosts, answers, strict=True) if not isinstance(answer, str)]


def _gib(value: float | None) -> str:
    return "-" if value is None else f"{value / 2**30:.1f} GiB"


def _gpus(facts: dict[str, Any]) -> str:
    kinds = sorted(set(facts["gpus"]))
    return ", ".join(f"{facts['gpus'].count(kind)} x {kind}" for kind in kinds) or "none"


def _version(name: str) -> Callable[[dict[str, Any]], str]:
    return lambda answer: answer["versions"][name] or "-"


_ROWS: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
    ("address", lambda a: a["address"]),
    ("interface", lambda a: a["facts"]["interface"] or "-"),
    ("free port", lambda a: str(a["port"])),
    ("GPUs", lambda a: _gpus(a["facts"])),
    ("cores", lambda a: str(a["facts"]["cores"])),
    ("free memory", lambda a: _gib(a["facts"]["memory"])),
    ("free disk here", lambda a: _gib(a["facts"]["disk"])),
    ("free /dev/shm", lambda a: _gib(a["facts"]["shared"])),
    ("clock", lambda a: f"{a['facts']['clock']:+.1f} s"),
]
"""What, and how it is shown; after the third come the versions."""
