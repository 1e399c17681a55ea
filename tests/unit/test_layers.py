"""The floors of the house: imports go down only, each library has one importer, and nothing grows out of sight."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "trainer"

FLOORS = (
    ("errors", "batch", "quiet", "heartbeat", "run_status", "outside", "limit"),
    ("config", "world", "algorithm", "record", "interrupts", "launcher", "arguments", "faults", "untouched"),
    ("data", "models", "engine", "balance", "plan", "report"),
    ("rewards", "rollout", "checkpoint", "minibatch", "watch", "data_tools", "frozen_shards"),
    ("state", "evaluate", "measure"),
    ("collect", "update", "output", "ranks"),
    ("preflight", "train"),
    ("out_of_memory", "eval_run", "doctor"),
    ("run",),
    ("__main__",),
)
"""A folder or file of trainer/ imports from lower floors and from itself. README.md shows the same numbers."""

FLOOR_OF = {part: floor for floor, parts in enumerate(FLOORS) for part in parts}

ONLY_IMPORTERS = {
    "deepspeed": "engine",
    "peft": "models",
    "bitsandbytes": "models engine",
    "torch.distributed": "world",
}

HEAVY = {"torch", "transformers", "deepspeed", "peft", "datasets", "accelerate", "numpy"}
"""What the run file must be read without, so that a mistake in it is told in a second."""

MOST_LINES, MOST_LINES_OF_A_FUNCTION = 300, 60

MODULES = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text("utf-8")) for path in PACKAGE.rglob("*.py")}
"""Every module by its path in trainer/."""


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import at any depth; `from a import b` gives a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: write the import in full"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def part_of(path: str) -> str:
    """The folder or file of trainer/ that a module belongs to: `models` of models/head.py, `engine` of engine.py."""
    return path.split("/")[0].removesuffix(".py")


def begins_with(name: str, library: str) -> bool:
    return f"{name}.".startswith(f"{library}.")


def upward(modules: dict[str, ast.Module]) -> list[str]:
    """Imports that do not go down."""
    found = []
    for path, tree in modules.items():
        for line, name in imports(tree):
            if not begins_with(name, "trainer"):
                continue
            part, other = part_of(path), name.split(".")[1]
            if part != other and FLOOR_OF[other] >= FLOOR_OF[part]:
                found.append(f"{path}:{line} (floor {FLOOR_OF[part]}) imports {name} (floor {FLOOR_OF[other]})")
    return found


def strangers(modules: dict[str, ast.Module]) -> list[str]:
    """Imports of a library outside the part that owns it, and heavy ones in config."""
    found = []
    for path, tree in modules.items():
        for line, name in imports(tree):
            for library, owner in ONLY_IMPORTERS.items():
                if begins_with(name, library) and part_of(path) not in owner.split():
                    found.append(f"{path}:{line} imports {name}; only {owner} does")
            if part_of(path) == "config" and name.split(".")[0] in HEAVY:
                found.append(f"{path}:{line} imports {name}; config imports nothing heavy")
    return found


def test_every_part_has_one_floor() -> None:
    parts = {part_of(path) for path in MODULES} - {"__init__"}
    assert parts == set(FLOOR_OF)
    assert len(FLOOR_OF) == sum(map(len, FLOORS))


def test_imports_go_down() -> None:
    assert upward(MODULES) == []


def test_a_library_has_one_importer_and_config_has_no_heavy_one() -> None:
    assert strangers(MODULES) == []


def test_config_stands_on_errors_alone() -> None:
    """The records of batch.py hold tensors, so even a lower floor would bring torch in."""
    below = {name for path, tree in MODULES.items() if part_of(path) == "config" for _, name in imports(tree)}
    assert {name.split(".")[1] for name in below if begins_with(name, "trainer")} == {"config", "errors", "outside"}


@pytest.mark.parametrize("path", sorted(MODULES))
def test_size_and_silence(path: str) -> None:
    source = (PACKAGE / path).read_text("utf-8")
    assert len(source.splitlines()) <= MOST_LINES
    for node in ast.walk(MODULES[path]):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            assert lines <= MOST_LINES_OF_A_FUNCTION, f"{node.name}: {lines} lines"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "print", f"line {node.lineno}: launcher.say speaks to the user, on rank 0"


@pytest.mark.parametrize(
    ("path", "source", "said"),
    [
        (
            "data/prompts.py",
            "from trainer.train import grpo_step",
            "floor 2) imports trainer.train.grpo_step (floor 6)",
        ),
        ("engine.py", "def f():\n    from trainer.models.head import x", "engine.py:2 (floor 2)"),
        ("world.py", "from trainer import config", "imports trainer.config (floor 1)"),
    ],
)
def test_a_wrong_import_would_be_seen(path: str, source: str, said: str) -> None:
    (found,) = upward({path: ast.parse(source)})
    assert said in found


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("train.py", "import deepspeed.comm as comm"),
        ("checkpoint/export.py", "from peft import PeftModel"),
        ("measure.py", "from torch import distributed"),
        ("config/load.py", "import torch"),
    ],
)
def test_a_stranger_would_be_seen(path: str, source: str) -> None:
    assert len(strangers({path: ast.parse(source)})) == 1
