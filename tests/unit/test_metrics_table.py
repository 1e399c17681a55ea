"""The table of metrics in launch/README.md: every key that a step can write is there, and no other."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiny_run import start, step, write_run
from trainer.world import World

ROOT = Path(__file__).parents[2]
SQUARES = {"kl_square", "reward_square"}
"""Reduced over ranks with the others, and turned into standard deviations."""
NOT_HERE = {"kl_rank_min", "kl_rank_max", "memory_slope_mib", "slowest_rank_ratio"}
"""Of several ranks, or of twenty steps."""


def table() -> list[str]:
    """The keys of the first column."""
    section = (ROOT / "launch/README.md").read_text("utf-8").split("\n## Metrics\n")[1].split("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return [key for cell in cells for key in re.findall(r"`([^`]+)`", cell)]


def written() -> Iterator[str]:
    """Every key in the code as a regular expression: what an f-string fills in may be anything."""
    for path in (ROOT / "trainer").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name("sums"), attr="add" | "maximum"), args=[key, *_]):
                    yield from pattern(key)
                case ast.Assign(targets=[ast.Subscript(value=ast.Name("metrics"), slice=key)]):
                    yield from pattern(key)
                case ast.Assign(targets=[ast.Subscript(value=ast.Attribute(attr="metrics"), slice=key)]):
                    yield from pattern(key)


def pattern(key: ast.expr) -> Iterator[str]:
    """A name that a reward function chose is a variable, and in no table."""
    match key:
        case ast.Constant(value=str(text)):
            yield re.escape(text)
        case ast.JoinedStr(values=parts):
            yield "".join(re.escape(part.value) if isinstance(part, ast.Constant) else r"\w+" for part in parts)


def test_every_key_that_the_code_writes_is_in_the_table() -> None:
    keys, patterns = table(), set(written()) - SQUARES
    assert len(keys) == len(set(keys)) and len(patterns) > 15
    assert [one for one in patterns if not any(re.fullmatch(one, key) for key in keys)] == []
    assert [key for key in keys if key != "step" and not any(re.fullmatch(one, key) for one in patterns)] == []


@pytest.mark.parametrize("settings", [{}, {"grpo.kl.estimator": "exact", "grpo.updates_per_rollout": 2}])
def test_every_key_of_a_step_is_in_the_table(settings: dict[str, object], tmp_path: Path, world: World) -> None:
    state, found = start(write_run(tmp_path), world, settings), set()
    for _ in range(2):  # the KL, and what is divided by it, begins at 0
        metrics, _ = step(state)
        found |= {key.replace("/score", "/NAME") for key in metrics}
    assert found | {"step"} | NOT_HERE == set(table()) and not found & NOT_HERE
