"""What services with a key said when they were tried before the first rollout, kept for an hour: each of these calls
may cost money, and `preflight`, `train` and every rank of it would make them."""

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from trainer.batch import Completion
from trainer.config.grpo import Reward
from trainer.outside import read
from trainer.rewards.answers import Scores

KEPT_S = 3600.0
"""Short, since a key may be withdrawn or a server stopped meanwhile."""


FAILED_KEPT_S = 60.0
"""Of a service that is away: for the other ranks of this host, which else would wait for it one after another."""
NO_CACHE = (OSError, RuntimeError)
"""What a folder that cannot be used raises, and pathlib of a user without a home."""


@dataclass(frozen=True)
class Kept:
    """What one probe brought, and when."""

    scores: Scores
    at: float


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """The ranks of one host ask one after another, so that the first one pays. All do where the user has no home, or
    one whose file system knows no locks."""
    with ExitStack() as held:
        with suppress(*NO_CACHE):
            folder = _folder()
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            fcntl.flock(held.enter_context((folder / "lock").open("w")), fcntl.LOCK_EX)
        yield


def known(section: Reward, completions: Sequence[Completion]) -> Kept | None:
    try:
        record = read(_file(section, completions))
        scores, ago = Scores(list(record["values"])), time.time() - record["at"]
        for place, (why, heals) in record["failures"].items():
            scores.fail(int(place), f"{why} (asked {ago:.0f} s ago)", may_heal=heals)
    except (*NO_CACHE, ValueError, KeyError, TypeError, AttributeError):  # never kept, or damaged
        return None
    return Kept(scores, record["at"]) if 0 <= ago < (FAILED_KEPT_S if scores.failures else KEPT_S) else None


def keep(section: Reward, completions: Sequence[Completion], scores: Scores) -> None:
    """Numbers and reasons, no key."""
    failures = {place: (why, place in scores.may_heal) for place, why in scores.failures.items()}
    try:
        file = _file(section, completions)
        beside = file.with_suffix(f".{os.getpid()}")
        record = {"values": scores.values, "failures": failures, "at": time.time()}
        beside.write_text(json.dumps(record), "utf-8")
        os.replace(beside, file)
    except NO_CACHE:  # then the next one pays again
        return


def _file(section: Reward, completions: Sequence[Completion]) -> Path:
    asked = [(one.prompt.text, one.prompt.columns, one.text) for one in completions]
    key = hashlib.sha256(os.environ.get(section.key_env, "").encode(errors="surrogateescape")).hexdigest()
    record = json.dumps([section.model_dump(), key, asked], sort_keys=True, default=str)
    return _folder() / f"{hashlib.sha256(record.encode(errors='backslashreplace')).hexdigest()}.json"


def _folder() -> Path:
    """In the user's cache: beside the run file it would be one more file to wonder about."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zero-grpo" / "probes"
