"""Faults of the files that a user brings: each is found before the weights are read, and named with its place (I7)."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import trainer.models.policy
from tests.tiny_run import write_run
from trainer.config import load
from trainer.errors import Refused
from trainer.preflight.prepare import check, load_models, start_engine
from trainer.world import World

RUN_FILE = """
[run]
dir = "{folder}/run"
steps = 2
[model]
name_or_path = "{folder}/model"
[data]
source = "{folder}/train.jsonl"
chat_template = "off"
[rollout]
prompts_per_step = 2
max_new_tokens = 8
[engine]
device = "cpu"
[[reward]]
name = "score"
kind = "python"
function = "rewards.py:spread"
"""


def append(name: str, text: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        with (folder / name).open("a") as file:
            file.write(text)

    return edit


def change(old: str, new: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        text = (folder / "run.toml").read_text()
        assert text.count(old) == 1
        (folder / "run.toml").write_text(text.replace(old, new))

    return edit


def add(section: str, line: str) -> Callable[[Path], None]:
    return change(f"[{section}]\n", f"[{section}]\n{line}\n")


def both(*edits: Callable[[Path], None]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        for one in edits:
            one(folder)

    return edit


def write(name: str, text: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        (folder / name).write_text(text)

    return edit


FAULTS: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "no TOML": (append("run.toml", "= 3\n"), ("run.toml:19: ", "not valid TOML")),
    "unknown key": (add("rollout", "max_completion_length = 9"), ("run.toml", "rollout.max_new_tokens")),
    "wrong value": (change("steps = 2", 'steps = "two"'), ("run.toml", "run.steps", "two")),
    "not JSON": (append("train.jsonl", '{"prompt": \n'), ("train.jsonl", "row 9", "JSON")),
    "no prompt": (append("train.jsonl", '{"text": "x"}\n'), ("train.jsonl", "row 9", "prompt")),
    "blank prompt": (append("train.jsonl", '{"prompt": " "}\n'), ("train.jsonl", "row 9", "prompt")),
    "overlong prompt": (add("data", "max_prompt_tokens = 12"), ("train.jsonl", "row 2", "20", "12")),
    "no data file": (change("train.jsonl", "trian.jsonl"), ("trian.jsonl", "train.jsonl")),
    "too few prompts": (change("prompts_per_step = 2", "prompts_per_step = 9"), ("rollout.prompts_per_step = 9", "8")),
    "reward syntax": (append("rewards.py", "def f(:\n"), ("SyntaxError", "(rewards.py:24)")),
    "no such reward": (change("rewards.py:spread", "rewards.py:spred"), ("rewards.py", "spred", "spread")),
    "reward column": (
        both(append("rewards.py", "def f(completions, gold): return [0.0]\n"), change("py:spread", "py:f")),
        ("rewards.py:f", "column 'gold'", "columns present"),
    ),
    "no such hook": (
        append("run.toml", '[hooks]\nbefore_rollout = ["rewards_hook:f"]\n'),
        ("hooks.before_rollout", "rewards_hook"),
    ),
    "DeepSpeed not JSON": (
        both(write("ds.json", '{"zero_optimization": {\n'), add("engine", 'deepspeed = "{folder}/ds.json"')),
        ("ds.json:2: ", "not valid JSON"),
    ),
    "DeepSpeed contradicts": (
        both(write("ds.json", '{"gradient_clipping": 3.0}'), add("engine", 'deepspeed = "{folder}/ds.json"')),
        ("ds.json", "gradient_clipping", "3", "optim.max_grad_norm"),
    ),
    "no such model": (change("/model", "/modle"), ("model.name_or_path", "modle")),
    "no such adapter": (append("run.toml", '[lora]\nstart_adapter = "nowhere"\n'), ("lora.start_adapter", "nowhere")),
    "replay": (
        both(
            lambda folder: (folder / "old").mkdir(),
            write("old/step-000001.jsonl", json.dumps({"group": 0}) + "\n"),
            add("rollout", 'replay = "{folder}/old"'),
            change("steps = 2", "steps = 1"),
            change('source = "{folder}/train.jsonl"\nchat_template = "off"\n', ""),
        ),
        ("rollout.replay", "step-000001.jsonl", "line 1", "prompt_ids"),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_i7_a_fault_in_a_file_is_found_before_the_weights(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    edit, parts = FAULTS[fault]
    write_run(tmp_path)
    file = tmp_path / "run.toml"
    file.write_text(RUN_FILE)
    edit(tmp_path)
    file.write_text(file.read_text().replace("{folder}", str(tmp_path)))

    def weights_are_read(*_: object) -> None:
        raise AssertionError("the weights were read first")

    monkeypatch.setattr(trainer.models.policy, "load_causal", weights_are_read)
    with pytest.raises(Refused) as refused:
        checked = check(load(str(file), []), tmp_path, world)
        load_models(checked, world)
    assert [part for part in parts if part not in str(refused.value)] == [], str(refused.value)
    assert "Traceback" not in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_i7_the_same_files_without_a_fault_start(world: World, tmp_path: Path) -> None:
    write_run(tmp_path)
    file = tmp_path / "run.toml"
    file.write_text(RUN_FILE.replace("{folder}", str(tmp_path)))
    checked = check(load(str(file), []), tmp_path, world)
    start_engine(checked, load_models(checked, world), world)
