"""Faults that a test asks for: ZERO_GRPO_FAULT="kill@rank1:step4:phase=save.after_shard", with ZERO_GRPO_TEST=1."""

import os
import re
import signal
from typing import NoReturn

from trainer import heartbeat
from trainer.errors import Refused

KINDS = ("kill", "stop", "term", "spin", "gil")
FORM = re.compile(rf"({'|'.join(KINDS)})@rank(\d+):step(\d+):phase=([a-z._]+)")

_wanted: tuple[str, int, int, str] | None = None
"""Kind, rank, step and phase, until it has come about."""


def read_environment() -> None:
    """Notes the fault that is asked for. Refused outside a test: a variable left behind must not kill a run."""
    global _wanted
    if not (asked := os.environ.get("ZERO_GRPO_FAULT")):
        return
    if os.environ.get("ZERO_GRPO_TEST") != "1":
        raise Refused(f"ZERO_GRPO_FAULT={asked} is set, for tests alone. Fix: unset it, or set ZERO_GRPO_TEST=1 too.")
    if not (found := FORM.fullmatch(asked)):
        raise Refused(f"ZERO_GRPO_FAULT={asked}: expected KIND@rankN:stepN:phase=NAME, KIND one of {', '.join(KINDS)}.")
    if found[4] not in (places := (*heartbeat.PHASES, *heartbeat.POINTS)):
        raise Refused(f"ZERO_GRPO_FAULT={asked}: no phase {found[4]!r}; there are {', '.join(places)}.")
    _wanted = found[1], int(found[2]), int(found[3]), found[4]
    heartbeat.at_phase = _reached


def _reached(phase: str, step: int) -> None:
    """This rank is there: the fault comes about, once, if this is its place."""
    global _wanted
    if _wanted is None or _wanted[1:] != (int(os.environ.get("RANK", 0)), step, phase):
        return
    kind, _wanted = _wanted[0], None
    if kind == "spin":
        _spin()
    if kind == "gil":
        sum(range(1 << 62))  # years in C, without a look at signals or other threads
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}[kind])


def _spin() -> NoReturn:
    while True:
        pass
