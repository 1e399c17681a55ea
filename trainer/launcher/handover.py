"""What a rank is started with, as data: one word on the command line, and a private file for what is secret.

Nothing of it is read by a shell, so every argument arrives as it was given, on every host.
"""

import base64
import contextlib
import io
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from trainer.errors import NAMES_OF_KEYS, Refused
from trainer.launcher.lease import keep_watch
from trainer.launcher.speech import WRAPPED, report

CARRIED = re.compile(
    r"(HF|HUGGING_FACE|NCCL|GLOO|TORCH|CUDA|TRANSFORMERS|WANDB)_\w+|OMP_NUM_THREADS|TOKENIZERS_PARALLELISM|PYTHONPATH"
    r"|(HTTPS?|NO)_PROXY|(https?|no)_proxy",
    re.ASCII,
)
"""The variables that go along to other hosts, besides those that a reward names as its key_env."""
CREDENTIALS_IN_URL = re.compile(r"^[^/\s]*@|://[^/\s]*@")


@dataclass(frozen=True)
class Handover:
    """``folder``: where the run was started. ``environment``: set on the rank, secrets excluded.

    ``same_host``: the ranks inherit the environment, and see the lease's lock.
    """

    launch_id: str
    arguments: list[str]
    folder: str
    environment: dict[str, str]
    lease: str
    secrets: str
    same_host: bool

    def word(self) -> str:
        """``@`` and URL-safe base64: characters that no shell and no launcher changes."""
        return "@" + base64.urlsafe_b64encode(json.dumps(asdict(self)).encode()).decode()


def split_environment(
    environment: Mapping[str, str], key_names: Iterable[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """(open, secret) variables for the other hosts. Which cards a rank gets is for its own host to say."""
    carried = {name: value for name, value in environment.items() if CARRIED.fullmatch(name)}
    carried |= {name: environment[name] for name in key_names if name in environment}
    carried.pop("CUDA_VISIBLE_DEVICES", None)
    keys = set(key_names)
    secret = {
        name: value
        for name, value in carried.items()
        if name in keys or NAMES_OF_KEYS.search(name) or CREDENTIALS_IN_URL.search(value)
    }
    return {name: value for name, value in carried.items() if name not in secret}, secret


def write_secrets(path: Path, secrets: Mapping[str, str]) -> None:
    """For the owner's eyes alone, from its first byte on."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        json.dump(dict(secrets), file)


def accept(argv: Sequence[str]) -> list[str]:
    """On a rank that was started with a handover: puts it into effect and returns the arguments in it. Otherwise
    ``argv``."""
    if len(argv) != 1 or not argv[0].startswith("@"):
        return list(argv)
    try:
        given = Handover(**json.loads(base64.urlsafe_b64decode(argv[0][1:])))
    except (ValueError, TypeError) as error:
        raise Refused(f"zero-grpo {argv[0]}: expected a command. `zero-grpo --help` lists them.") from error
    secrets = Path(given.secrets)
    keep_watch(Path(given.lease), same_host=given.same_host, at_end=lambda: _forget(secrets))
    os.environ |= given.environment | {WRAPPED: given.launch_id}
    if isinstance(sys.stdout, io.TextIOWrapper):  # what reads it expects that, whatever the terminal's encoding
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")
    if not given.same_host:
        if "PYTHONPATH" not in given.environment:
            os.environ.pop("PYTHONPATH", None)  # the launcher's own
        with contextlib.suppress(OSError):  # absent where run.dir is not shared, which the run finds and says
            os.environ |= json.loads(secrets.read_text(encoding="utf-8"))
    # The launcher was started elsewhere, and the user's folder comes last, so that a file there, trainer.py or
    # datasets.py say, takes no package's place.
    os.chdir(given.folder)
    sys.path[:1] = filter(None, os.environ.get("PYTHONPATH", "").split(":"))
    sys.path.append(given.folder)
    threads = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_SIZE", 1))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, threads)))
    sys.argv[1:] = given.arguments
    report()
    return given.arguments


def _forget(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
