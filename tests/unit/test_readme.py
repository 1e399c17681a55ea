"""What the READMEs say is so: commands parse, run files load, keys, files and functions exist, the examples run."""

import ast
import json
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import train_grpo_flags
from transformers import PreTrainedModel

from tests.prompt_loader import Loader
from tests.tiny import tiny_qwen2, tiny_tokenizer
from tests.unit.test_layers import FLOOR_OF
from trainer.__main__ import parser
from trainer.arguments import without_local_rank
from trainer.batch import Completion
from trainer.checkpoint.export import export
from trainer.config import describe, load, recipes, shipped
from trainer.config.fields import dotted_keys
from trainer.config.sections import Lora, Model
from trainer.errors import Refused
from trainer.models.policy import load_config, load_policy
from trainer.rewards.runtime import RewardRuntime

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
READMES = [README, *sorted(ROOT.glob("[a-z]*/README.md")), *sorted(ROOT.glob("trainer/*/README.md"))]

USERS_FILES = ("run.toml", "rewards.py", "prompts.jsonl")
"""What a reader has of his own; `zero-grpo init` speaks of each."""

FIRST_RUN = str(shipped.recipes() / "first-run.toml")
"""What `zero-grpo init > run.toml` writes."""

KINDS_OF_FILE = (".py", ".sh", ".toml", ".json", ".jsonl", ".md", ".lock", ".txt", "/")


def blocks(readme: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", readme.read_text("utf-8"), re.MULTILINE | re.DOTALL)


def spans(readme: Path) -> list[str]:
    """Inline code outside of the code blocks."""
    prose = re.sub(r"^```.*?^```", "", readme.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`\n]+)`", prose)


def commands(readme: Path) -> Iterator[list[str]]:
    """Every command as words, without variables before it and redirection after it."""
    lines = [line for block in blocks(readme, "bash") for line in block.replace("\\\n", " ").splitlines()]
    programs = r"(\.venv/bin/)?(zero-grpo|deepspeed|torchrun|python|pip|source) |\./"
    lines += [span for span in spans(readme) if re.match(programs, span)]
    for line in lines:
        command: list[str] = []
        for word in [*shlex.split(line, comments=True), "&&"]:
            if word == "&&":
                if command:
                    yield command[: command.index(">")] if ">" in command else command
                command = []
            elif command or not re.fullmatch(r"[A-Z_]+=.*", word):
                command.append(word)


def check_command(words: list[str]) -> str:
    """What is wrong with a command; empty when nothing is."""
    match words:
        case ["zero-grpo" | "trainer", *rest]:
            return check_zero_grpo(rest)
        case ["python", "-m", "pytest", *paths]:
            return "".join(f"no {path}" for path in paths if not (ROOT / path).exists())
        case ["python", "-m", *rest] | ["deepspeed", "--num_gpus" | "--hostfile", _, "--module", *rest]:
            return check_command(rest)
        case ["torchrun", "--nnodes", _, "--node_rank", _, *ranks, "-m", "trainer", "train", "run.toml"]:
            return "" if ranks[::2] == ["--nproc_per_node", "--master_addr", "--master_port"] else f"not {ranks}"
        case ["sbatch", "launch/slurm.sbatch", *rest]:
            return check_zero_grpo(["train", *rest])
        case ["torchrun", "--nproc_per_node", _, "-m", *rest]:
            return check_command(rest)
        case ["torchrun", "--nproc_per_node=4", "--master_port=29500", "launch/train_grpo.py", *flags]:
            return check_flags(flags)
        case ["python", "launch/train_grpo.py", *flags]:
            return check_flags([flag for flag in flags if flag != "--help"])
        case ["python", tool, *_] if tool.startswith("tools/"):
            return "" if (ROOT / tool).is_file() else f"no {tool}"
        case ["pip", "install", *wanted]:
            return check_pip([word for word in wanted if word != "-e"])
        case ["source", ".venv/bin/activate"]:
            return ""
        case [script, *rest] if script.startswith("./"):
            return check_script(ROOT / script, rest)
    return "a command that no test knows"


def check_zero_grpo(words: list[str]) -> str:
    """By the real parser, with the overrides laid over a real run file."""
    arguments, rest = parser().parse_known_args(without_local_rank(words))
    try:
        match arguments.command.__name__:
            case "init":
                recipes.read(arguments.recipe)
            case "keys":
                describe(arguments.section)
            case "hosts" | "report" | "samples" | "check" | "convert":
                pass
            case "doctor":
                if arguments.target.endswith(".toml"):
                    load(FIRST_RUN, rest)
                    rest = []
            case "export":
                load(FIRST_RUN, rest)
                rest = []
            case _:
                load(FIRST_RUN if arguments.run_file == "run.toml" else str(ROOT / arguments.run_file), rest)
                rest = []
    except Refused as refusal:
        return str(refusal)
    return f"it takes no {rest}" if rest else ""


def check_flags(words: list[str]) -> str:
    """By the real tables of train_grpo.py."""
    wrong: list[str] = []
    train_grpo_flags.read(words, wrong)
    return "".join(wrong)


def check_script(script: Path, options: list[str]) -> str:
    if not script.is_file() or not script.stat().st_mode & 0o100:
        return f"{script} is no program"
    if script.name == "local.sh":
        return check_zero_grpo(["train", *options])
    if script.name == "multinode.sh":
        return check_zero_grpo(["train", *options[1:]])
    source = script.read_text("utf-8")
    return "".join(f"{script.name} does not know {option}" for option in options if f"{option})" not in source)


def check_pip(wanted: list[str]) -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    dependencies = {re.split(r"[<>=;\[ ]", dependency)[0] for dependency in project["dependencies"]}
    for word in wanted:
        name, _, extra = word.rstrip("]").partition("[")
        if name not in (".", project["name"], *dependencies):
            return f"{name} is no dependency"
        if extra and extra not in project["optional-dependencies"]:
            return f"there is no extra {extra}"
    return ""


def find(name: str, readme: Path) -> Path | None:
    """A file of the project, as a README of that folder may name it."""
    folders = (readme.parent, ROOT, ROOT / "trainer", ROOT / "tests/unit", ROOT / "tests/dist")
    return next((folder / name for folder in folders if (folder / name).exists()), None)


@cache
def texts_in_the_code() -> frozenset[str]:
    trees = [ast.parse(path.read_text("utf-8")) for path in (ROOT / "trainer").rglob("*.py")]
    constants = [node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return frozenset(text for text in constants if isinstance(text, str))


def is_written_by_a_run(name: str) -> bool:
    """Whether the code spells each part of a path in a run directory; numbers in it are any."""
    parts = [part for part in re.split(r"/|\d+", name) if part]
    return all(part in texts_in_the_code() for part in parts)


def has(path: Path, name: str) -> bool:
    """Whether a module defines `function`, `Class` or `Class.method`."""
    body: list[ast.stmt] = ast.parse(path.read_text("utf-8")).body
    for part in name.split("."):
        defined = [n for n in body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
        found = next((node for node in defined if node.name == part), None)
        if found is None:
            return False
        body = found.body
    return True


def check_name(span: str, readme: Path) -> str:
    """What is wrong with a span that names a file, a function in a file, or a key; empty when nothing is."""
    if named := re.fullmatch(r"([\w./-]+\.py): ([\w.]+)", span):
        path = find(named[1], readme)
        return "" if path and has(path, named[2]) else "no such function"
    if re.fullmatch(r"[\w.][\w./-]*", span) and span.endswith(KINDS_OF_FILE):
        return "" if find(span, readme) or span in USERS_FILES or is_written_by_a_run(span) else "no such file"
    if named := re.match(r"([a-z]+)(\.[a-z_]+)+(?= = |$)", span):
        tables = {key.split(".")[0] for key in dotted_keys()}
        return "no such key" if named[1] in tables and named[0] not in dotted_keys() else ""
    return ""


by_readme = pytest.mark.parametrize("readme", READMES, ids=lambda path: str(path.relative_to(ROOT)))


@by_readme
def test_every_command_is_one(readme: Path) -> None:
    problems = {shlex.join(words): problem for words in commands(readme) if (problem := check_command(words))}
    assert problems == {}


@by_readme
def test_every_file_function_and_key_exists(readme: Path) -> None:
    assert {span: problem for span in spans(readme) if (problem := check_name(span, readme))} == {}


@by_readme
def test_every_link_leads_somewhere(readme: Path) -> None:
    text = readme.read_text("utf-8")
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("#"):
            assert f"\n## {target[1:]}\n" in text, target
        else:
            assert (readme.parent / target).exists(), target


@by_readme
def test_every_toml_block_is_a_run_file(readme: Path, tmp_path: Path) -> None:
    for block in blocks(readme, "toml"):
        (tmp_path / "block.toml").write_text(block, "utf-8")
        load(str(tmp_path / "block.toml"))


def test_every_recipe_is_listed() -> None:
    assert set(recipes.names()) <= set(spans(ROOT / "launch/README.md"))


def test_the_first_run_speaks_of_the_users_files() -> None:
    assert [name for name in USERS_FILES if name not in recipes.read("first-run")] == []


def test_the_readme_is_short() -> None:
    assert len(README.read_text("utf-8").splitlines()) <= 200


def test_what_was_tried_is_what_the_results_say() -> None:
    def kept(name: str) -> Any:
        return json.loads((ROOT / f"tests/results/{name}.json").read_text())

    soak, kills, hangs, bad = (kept(name) for name in ("soak", "kills", "hangs", "bad-input"))
    text = README.read_text("utf-8")
    number = sum(soak["kills"].values())
    assert f"{number} of {number} went on by the same command, {soak['unequal_bits']} bits unequal" in text
    assert f"{soak['processes_left']} processes left; {soak['median_seconds_from_kill_to_step']:.0f} s to" in text
    assert f"{kills['kills']} of {kills['kills']}, 0 bits unequal" in text
    assert f"{hangs['named_with_rank_and_phase']} of {hangs['hangs']} named" in text
    assert f"all ranks ended {hangs['until_all_ranks_had_ended']['p95_seconds']} s after it" in text
    tried = sum(kind["tried"] for kind in bad["kinds"].values())
    assert f"{tried} changed at random, {bad['wrong']} wrong answers" in text


def test_the_file_map_is_the_house() -> None:
    (block,) = blocks(README, "text")
    floors = {}
    for line in block.splitlines():
        words = line.split()
        if line.startswith("  "):
            floor = next(at for at, word in enumerate(words) if word.isdigit())
            for name in words[:floor]:
                assert (ROOT / "trainer" / name).exists(), name
                floors[name.strip("/").removesuffix(".py")] = int(words[floor])
        else:
            name, *rest = words
            inside = [word.strip(",") for word in rest if word.strip(",").endswith(KINDS_OF_FILE)]
            assert [path for path in ("", *inside) if not (ROOT / name / path).exists()] == []
    assert floors == FLOOR_OF


def test_the_reward_scores_the_row(tmp_path: Path) -> None:
    reward = next(block for block in blocks(README, "python") if "def my_reward" in block)
    (row,) = blocks(README, "json")
    assert len(reward.splitlines()) <= 6
    (tmp_path / "rewards.py").write_text(reward, "utf-8")
    (prompt,) = Loader(tmp_path)([json.loads(row)]).train

    runtime = RewardRuntime(load(FIRST_RUN).reward, tmp_path)
    assert runtime.check([prompt]) == []
    completions = [
        Completion(0, generation, prompt, (1,), (-1.0,), "stop", text)
        for generation, text in enumerate(("17 + 25 = 42.", "42, or rather 41", "I do not know"))
    ]
    assert runtime.score(completions, 0).messages == []
    assert [completion.reward for completion in completions] == [1.0, 0.0, 0.0]


def test_the_result_loads_as_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter of a run of that name, exported by our own code, and loaded by the lines of the README."""
    monkeypatch.chdir(tmp_path)
    config = load(FIRST_RUN)
    base = Path(config.model.name_or_path)
    tiny_qwen2().save_pretrained(base)
    model = Model(name_or_path=str(base))
    policy = load_policy(model, load_config(model)[0], Lora(r=4), tiny_tokenizer(), torch.float32)
    for name, parameter in policy.causal.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    engine: Any = SimpleNamespace(gathered=nullcontext)
    world: Any = SimpleNamespace(is_main=True, agree=lambda error: None)
    export(policy, engine, world, Path(config.run.dir), config)

    names: dict[str, Any] = {}
    exec(next(block for block in blocks(README, "python") if "PeftModel" in block), names)
    ids = torch.tensor([names["tokenizer"]("What is 2 + 3?")["input_ids"]])
    logits: Callable[[PreTrainedModel], torch.Tensor] = lambda model: model(input_ids=ids).logits  # noqa: E731
    with torch.no_grad():
        torch.testing.assert_close(logits(names["model"].eval()), logits(policy.causal.eval()))


@pytest.mark.parametrize(
    "command",
    [
        "zero-grpo train run.toml --grpo.kl.coeff 1",
        "zero-grpo train launch/recipes/nothing.toml",
        "zero-grpo init nothing",
        "zero-grpo keys nothing",
        "zero-grpo init first-run --gpus 2",
        "python -m trainer train run.toml --run.steps many",
        "python launch/train_grpo.py --learning_rat 1",
        "./tools/check.sh --nothing",
        "./launch/nothing.sh",
        "python -m pytest tests/unit/test_nothing.py",
        ".venv/bin/zero-grpo train run.toml",
        "python tools/nothing.py",
        "pip install -e .[nothing]",
        "make",
    ],
)
def test_a_wrong_command_would_be_seen(command: str) -> None:
    assert check_command(shlex.split(command))


@pytest.mark.parametrize(
    "span",
    ["train.py: nothing", "engine.py: ZeroEngine.nothing", "nothing.py", "samples/nothing_5.txt", "grpo.nothing"],
)
def test_a_wrong_name_would_be_seen(span: str) -> None:
    assert check_name(span, README)
