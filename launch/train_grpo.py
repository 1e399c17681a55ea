"""GRPO by flags, as the seed document starts it: they make a run file, which is shown, saved, and trained on.

torchrun --nproc_per_node=4 --master_port=29500 launch/train_grpo.py --model_name_or_path Qwen/Qwen2.5-1.5B ...
"""

import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # the checkout around it, installed or not

import tomli_w
from train_grpo_flags import SETTINGS, SWITCHES, read, usage

from trainer.__main__ import RANK, ended, main
from trainer.config import RunConfig, overrides, secrets, source, warnings
from trainer.config.fields import dotted_keys
from trainer.config.mistakes import mistakes
from trainer.config.problems import Problem
from trainer.config.rules import broken
from trainer.errors import Refused
from trainer.interrupts import leave
from trainer.launcher import say
from trainer.record.run_dir import RunDirectory

GROUP = 8
"""Completions a prompt. GRPO compares them with each other; the document, which has no groups, names no number."""
ENCODER_TIMEOUT = 600.0
"""Seconds for a rank's completions of a step: an encoder of 568M weights on a CPU takes its time."""
FIRST_LINE = "# Written by launch/train_grpo.py, and again at its next start. To change it by hand, take a copy."
STILL_MISSING = """
# Still missing: what a completion is worth. This would be the function `score` of a rewards.py beside this file:
# [[reward]]
# name = "score"
# kind = "python"
# function = "rewards.py:score"
"""


@dataclass
class RunFile:
    """What the flags make of a run file."""

    path: Path
    settings: dict[str, str] = field(default_factory=dict)
    """Dotted key -> value, as text."""
    origins: dict[str, str] = field(default_factory=dict)
    """Dotted key -> the flag that it comes from, or the reason."""
    rewards: list[dict[str, Any]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    """What was decided or set aside, and why."""

    def set(self, key: str, value: str, origin: str) -> None:
        self.settings[key], self.origins[key] = value, origin


def start(arguments: Sequence[str]) -> int:
    """Makes the run file, the same on every rank, and trains on it. Returns the exit code."""
    if {"-h", "--help"} & set(arguments):
        if RANK == 0:
            say(usage())
        return 0
    wrong: list[str] = []
    flags, keys = read(arguments, wrong)
    run_file = translate(flags, keys, int(os.environ.get("WORLD_SIZE") or 1), wrong)
    tree, config = check(run_file, keys, wrong)
    resume = {"": "", "true": "auto"}.get(asked := flags.get("resume_from_checkpoint", ""), asked)
    if not resume:
        RunDirectory(config.run.dir).check()
    text = written(tree, run_file)
    save(run_file.path, text)
    if RANK == 0:
        say("\n".join([text, f"Saved as {run_file.path}.", *(f"- {remark}" for remark in run_file.remarks)]))
    if not config.reward:
        raise Refused(no_reward(config, run_file.path))
    return main(["train", str(run_file.path), *(["--resume", resume] if resume else [])])


def translate(flags: dict[str, str], keys: Sequence[str], ranks: int, wrong: list[str]) -> RunFile:
    """The run file that the flags ask for. ``keys`` are laid over it later, and are only looked at here."""
    folder = Path(flags.get("output_dir", ""))
    folder = folder if folder.name not in ("", "..") else folder.resolve()
    run_file = RunFile(Path(f"{folder}.toml"))
    for name, choices in SWITCHES.items():
        if name not in flags:
            continue
        value = flags[name].lower()
        if value not in choices:
            wrong.append(f"--{name} {flags[name]}: expected {' or '.join(choices)}.")
        elif setting := choices[value]:
            run_file.set(*setting, f"--{name}")
    for name, (key, _) in SETTINGS.items():
        if name in flags:
            run_file.set(key, flags[name], f"--{name}")
    if "seed" in flags and "data_seed" not in flags:
        run_file.set("data.seed", flags["seed"], "--seed")
    if run_file.settings.get("log.report_to") == '["none"]':
        run_file.set("log.report_to", "[]", "--report_to none")
    batch(flags, ranks, run_file, wrong)
    adapter(keys, run_file)
    evaluation(flags, keys, run_file)
    rewards(flags, run_file)
    return run_file


def batch(flags: dict[str, str], ranks: int, run_file: RunFile, wrong: list[str]) -> None:
    """Completions a step = per device x accumulation x ranks, in whole groups."""
    numbers = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "num_generations": GROUP}
    for name in numbers:
        text = flags.get(name, str(numbers[name]))
        if not (text.isascii() and text.isdigit() and int(text) > 0):
            wrong.append(f"--{name} {text}: expected a whole number >= 1.")
            return
        numbers[name] = int(text)
    device, accumulation, group = numbers.values()
    total = device * accumulation * ranks
    product = f"{device} a device x {accumulation} accumulated x {ranks} rank(s) = {total} completions a step"
    if total % group:
        times = group // math.gcd(device * ranks, group)
        wrong.append(
            f"--per_device_train_batch_size, --gradient_accumulation_steps: {product}, which are no whole groups of"
            f" {group} (--num_generations). Use --gradient_accumulation_steps {times}, or a multiple of it."
        )
        return
    whose = "--num_generations" if "num_generations" in flags else "not in the document; --num_generations N changes it"
    run_file.set("engine.micro_batch", str(device), "--per_device_train_batch_size")
    run_file.set("rollout.prompts_per_step", str(total // group), product)
    run_file.set("rollout.num_generations", str(group), whose)
    run_file.remarks.append(
        f"{product}. GRPO compares completions of one prompt: groups of G = {group} ({whose}), {total // group}"
        " prompt(s) a step."
    )


def adapter(keys: Sequence[str], run_file: RunFile) -> None:
    """Without a LoRA flag all weights are trained, as by transformers; a run file's own default is an adapter."""
    if any(key.startswith("lora.") for key in run_file.settings) or any(key.startswith("--lora.") for key in keys):
        return
    run_file.set("lora.r", "0", "no LoRA flag: all weights")
    run_file.remarks.append("All weights are trained, since no LoRA flag is given. --lora_r 16 trains an adapter.")


def evaluation(flags: dict[str, str], keys: Sequence[str], run_file: RunFile) -> None:
    """On the split that is named, or on the one called eval that the document's own conversion writes."""
    named = "dataset_test_split" in flags or any(key.replace("-", "_").startswith("__data.eval_") for key in keys)
    if "eval_steps" not in flags or named:
        return
    data = flags.get("dataset_name", "")
    if "eval" in saved_splits(Path(data)):
        run_file.set("data.eval_split", "eval", "found in --dataset_name")
        return
    del run_file.settings["eval.every"]
    run_file.remarks.append(
        f"--eval_steps {flags['eval_steps']} is set aside: {data} is no saved folder with a split called eval, so there"
        " is nothing to evaluate on. --dataset_test_split NAME names a split, --data.eval_fraction 0.1 holds a tenth"
        " of the prompts out."
    )


def saved_splits(folder: Path) -> list[str]:
    """The splits of a folder that DatasetDict.save_to_disk wrote; none of anything else."""
    listing = folder / "dataset_dict.json"
    try:
        return list(json.loads(listing.read_text(encoding="utf-8"))["splits"]) if listing.is_file() else []
    except (OSError, ValueError, KeyError, TypeError):
        return []  # what is wrong with the folder is said where its rows are read


def rewards(flags: dict[str, str], run_file: RunFile) -> None:
    """A function, an encoder or reward model, or both, which are summed."""
    if given := flags.get("reward_function"):
        file, _, name = given.rpartition(":")
        # Given as seen from here, read as seen from the run file.
        function = f"{os.path.relpath(file, run_file.path.parent)}:{name}" if file.endswith(".py") else given
        kind = "python" if file or given.endswith(".py") else "builtin"
        run_file.rewards.append({"name": "score", "kind": kind, "function": function})
        run_file.origins["reward.0.function"] = "--reward_function"
    if not (path := flags.get("reward_model_name_or_path")):
        return
    kind, name = ("model", "judge") if is_classifier(Path(path)) else ("embedding", "similarity")
    run_file.rewards.append({"name": name, "kind": kind, "path": path, "timeout": ENCODER_TIMEOUT})
    run_file.origins[f"reward.{len(run_file.rewards) - 1}.path"] = "--reward_model_name_or_path"
    scores = (
        "the score of this reward model" if kind == "model" else "the cosine of completion and reference answer, by it"
    )
    both = f", added to --reward_function {given}" if given else ""
    run_file.remarks.append(f"--reward_model_name_or_path {path}: the reward is {scores}{both}. No projection.")


def is_classifier(folder: Path) -> bool:
    """A folder with a sequence-classification model. What is not here, as BAAI/bge-m3 before it is downloaded, is taken
    for an encoder, as the document does; the trainer refuses what is none."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return any(name.endswith("ForSequenceClassification") for name in config["architectures"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def check(run_file: RunFile, keys: Sequence[str], wrong: list[str]) -> tuple[dict[str, Any], RunConfig]:
    """The run file as a tree and as a config. Raises `Refused` with every mistake, each under its flag."""
    tree: dict[str, Any] = {"reward": [dict(entry) for entry in run_file.rewards]} if run_file.rewards else {}
    order = dotted_keys()
    settings = sorted(run_file.settings.items(), key=lambda setting: order.index(setting[0]))
    _, wrong_keys = overrides.apply(tree, [*(f"--{key}={value}" for key, value in settings), *keys])
    problems = secrets.take(tree)
    tables = [name for name in RunConfig.model_fields if name in tree]
    config, found = mistakes(tree, tuple(entry["name"] for entry in run_file.rewards) or ("score",))
    problems += found or (broken(config) if config else [])
    # The reward alone may still be missing: what the other flags mean is worth knowing before one is written.
    problems = [problem for problem in problems if run_file.rewards or problem.keys[0] != ("reward",)]
    wrong = [*wrong, *wrong_keys, *(located(problem, run_file) for problem in problems)]
    if not tree.get("run", {}).get("dir"):
        wrong.append("--output_dir is missing: the directory that this run writes.")
    if wrong or config is None:
        listed = "\n  ".join(dict.fromkeys(wrong))
        raise Refused(
            f"train_grpo.py cannot make a run file of its flags.\n  {listed}\n`--help` lists the flags; any key of a"
            " run file is taken too, as --section.key VALUE."
        )
    return {name: tree[name] for name in tables}, config


def located(problem: Problem, run_file: RunFile) -> str:
    """The problem under the flag that set one of its keys, or that would."""
    flag_of = {key: f"--{name}" for name, (key, _) in SETTINGS.items()} | run_file.origins
    for path in problem.keys:
        key = ".".join(str(part) for part in path)
        if key in flag_of:
            return f"{flag_of[key]}: {problem.text}"
    return problem.text


def written(tree: dict[str, Any], run_file: RunFile) -> str:
    """The text of the run file, with the origin of each key beside it."""
    rewards = tree.get("reward", [])
    text = f"{FIRST_LINE}\n\n{tomli_w.dumps({name: table for name, table in tree.items() if name != 'reward'})}"
    text += "".join(f"\n[[reward]]\n{tomli_w.dumps(entry)}" for entry in rewards)
    lines = text.split("\n")
    for path, number in source.key_lines(text).items():
        if origin := run_file.origins.get(".".join(str(part) for part in path)):
            lines[number - 1] += f"  # {origin}"
    return "\n".join(lines) + ("" if rewards else STILL_MISSING)


def save(path: Path, text: str) -> None:
    """Each rank writes the same bytes, at once and whole: none waits for another, and hosts need not share the disk."""
    try:
        if path.exists() and not path.read_text(encoding="utf-8", errors="replace").startswith(FIRST_LINE):
            raise Refused(f"{path} exists, and train_grpo.py did not write it. Fix: move it, or another --output_dir.")
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.{RANK}")
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    except OSError as error:
        raise Refused(f"{path}: the run file cannot be saved: {error}. Fix: another --output_dir.") from error


def no_reward(config: RunConfig, path: Path) -> str:
    unsafe = "".join(f"\n- {sentence}" for sentence in warnings(config))
    return (
        "there is no reward: what is a completion worth?\nFix: --reward_model_name_or_path BAAI/bge-m3, an encoder that"
        " compares with the reference answer, or --reward_function rewards.py:score, a function of yours, or"
        " --reward_function with the name of a built-in: exact_match, last_number, math_verify. Or fill in"
        f" [[reward]] at the end of a copy of {path}." + (f"\nWorth a second thought before:{unsafe}" if unsafe else "")
    )


if __name__ == "__main__":
    leave(ended(lambda: start(sys.argv[1:])))
