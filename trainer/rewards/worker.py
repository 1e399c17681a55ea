"""A process of its own for one reward function, started by processes.py: calls come in on stdin, answers go out on
stdout. Imports nothing heavy: there may be many of them."""

import ctypes
import json
import os
import pickle
import signal
import sys
from collections.abc import Callable
from typing import Any

from trainer.record.rollout_rows import json_safe
from trainer.rewards.failed import Failed, may_heal
from trainer.rewards.functions import describe

PR_SET_PDEATHSIG = 1


def main() -> None:
    calls, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    # What the function reads is nothing, and what it prints goes where the trainer's own words go.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    if sys.platform == "linux":  # also when it is stuck in C code and sees no end of its stdin
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    function: Callable[..., Any] | None = None
    while True:
        try:
            request = pickle.load(calls)
        except EOFError:
            return
        try:
            if function is None:
                function, answer = request(), {}
            else:
                answer = _answer(function, *request)
            text = json.dumps(answer)
        except (Exception, SystemExit) as raised:
            text = json.dumps({"raised": [describe(raised), may_heal(raised)]})
        answers.write(text + "\n")
        answers.flush()


def _answer(function: Callable[..., Any], keywords: dict[str, Any], handed: set[str]) -> dict[str, Any]:
    """``handed``: log_metric and log_extra, as far as the function takes them."""
    metrics: list[tuple[str, Any]] = []
    columns: dict[str, list[Any]] = {}

    def log_metric(name: str, value: Any) -> None:
        plain = _plain(value)
        metrics.append((name, plain if isinstance(plain, float) else json_safe(plain)))  # NaN stays NaN

    def log_extra(column: str, values: Any) -> None:
        columns[column] = [json_safe(_plain(value)) for value in values]

    logs = {name: log for name, log in (("log_metric", log_metric), ("log_extra", log_extra)) if name in handed}
    returned = _plain(function(**keywords, **logs))
    if isinstance(returned, list | tuple):
        returned = [
            {"failed": [value.why, value.may_heal]} if isinstance(value, Failed) else _plain(value)
            for value in returned
        ]
    return {"returned": returned, "metrics": metrics, "columns": columns}


def _plain(value: Any) -> Any:
    """An array or a tensor as the lists and numbers in it, and a fraction as a number; everything else as it is."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return value if isinstance(value, str | bool | int | None) or not hasattr(value, "__float__") else float(value)
