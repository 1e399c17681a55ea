"""Keys of accounts do not belong in a run file: it is copied into every run directory."""

from typing import Any

from trainer.config.fields import Path
from trainer.config.problems import Problem, dotted
from trainer.errors import KEYS

_NAMES = {
    "access_token", "api_key", "api_token", "apikey", "auth_token", "authorization", "bearer", "credentials",
    "hf_token", "hub_token", "password", "passwd", "private_key", "secret", "secret_key", "token", "wandb_key",
}  # fmt: skip
_FIX = (
    "Keep it in an environment variable and out of the file; a [[reward]] names the variable: key_env ="
    ' "OPENAI_API_KEY".'
)


def is_secret(text: str) -> bool:
    return KEYS.search(text) is not None


def take(tree: Any, prefix: Path = ()) -> list[Problem]:
    """Remove every secret from parsed TOML, and say where each one stood. No message repeats one."""
    found = []
    items = list(tree.items()) if isinstance(tree, dict) else list(enumerate(tree)) if isinstance(tree, list) else []
    for name, value in reversed(items):
        path = (*prefix, name)
        named = isinstance(name, str) and name.lower().replace("-", "_") in _NAMES and value not in ("", False)
        if named or (isinstance(value, str) and is_secret(value)):
            del tree[name]
            found.append(Problem((path,), f"{dotted(path)} holds a secret. {_FIX}"))
        else:
            found += take(value, path)
    return found[::-1] if not prefix else found
