"""Run files to start from: `zero-grpo init RECIPE > run.toml`."""

import difflib

from trainer.config import shipped
from trainer.errors import Refused


def names() -> list[str]:
    """The recipes that ship, in alphabetical order."""
    return sorted(file.stem for file in shipped.recipes().glob("*.toml"))


def read(name: str) -> str:
    """The text of a recipe. Raises `Refused` with the names that there are."""
    available = names()
    wanted = name.removesuffix(".toml")
    if wanted not in available:
        close = difflib.get_close_matches(wanted, available, n=1)
        hint = f"Did you mean {close[0]}? " if close else ""
        raise Refused(f"zero-grpo init {name}: there is no such recipe. {hint}Recipes: {', '.join(available)}.")
    return (shipped.recipes() / f"{wanted}.toml").read_text(encoding="utf-8")
