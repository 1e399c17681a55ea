"""`zero-grpo preflight`: every problem in one list, from the files alone; tables for people, one JSON object."""

import json
import re
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma2Config, Qwen2Config, Qwen2ForCausalLM

from tests.tiny import TINY, tiny_qwen2, tiny_tokenizer
from tests.tiny_run import run_config
from trainer.__main__ import main
from trainer.config.sections import Lora, Model
from trainer.errors import Refused
from trainer.models import skeleton
from trainer.preflight.report import SECTIONS
from trainer.preflight.survey import Survey, survey
from trainer.preflight.versions import out_of_range

SCORES = """
def right(completions, answer):
    print("a print of the user's")
    return [float(text == wanted) for text, wanted in zip(completions, answer)]

def fair(completions, answer):
    return [0.5 for _ in completions]

def picky(completions):
    if "" in completions:
        raise ValueError("nothing to judge")
    return [0.0 for _ in completions]

def broken(completions):
    raise KeyError("key")

def short(completions):
    return [0.0]
"""


@pytest.fixture
def folder(run_here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    target = run_here
    (target / "scores.py").write_text(SCORES)
    rows = [{"prompt": f"{n} + 1 =", "answer": f"{n + 1}"} for n in range(8)]
    (target / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.syspath_prepend(target)
    return target


def surveyed(folder: Path, settings: dict[str, Any] | None = None, *, ranks: int = 1, reward: str = "spread") -> Survey:
    config = run_config(folder, settings, reward=reward)
    return survey(config, folder, torch.device("cpu"), ranks=ranks, begins=True)


def asked(folder: Path, capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the object that --json prints, and nothing beside it."""
    code = main(["preflight", "run.toml", "--json", *arguments])
    return code, json.loads(capfd.readouterr().out)


WRONG = (
    *("--model.name_or_path", "./nowhere", "--data.source", "trian.jsonl", "--reward.score.function", "rewards.py:no"),
    *("--hooks.before_rollout", '["no_such_hooks:check"]'),
)
SAID = ("no such folder", "similar names: train.jsonl", "defines no 'no'", "no module 'no_such_hooks'")


@pytest.mark.parametrize("command", ["train", "preflight"])
def test_all_problems_are_one_list(command: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "out").mkdir()
    (folder / "out/run_status.json").write_text("{}")
    assert main([command, "run.toml", *WRONG]) == 2
    out = capfd.readouterr().out
    told = " ".join(out.split())
    assert ("5 problems." if command == "train" else "5 errors") in told
    assert [word for word in (*SAID, "already holds a run") if word not in told] == []
    assert "for want of" in told and "rewards on the data" in told
    assert "Traceback" not in out and out.index("no such folder") < out.index("for want of")


def test_the_record_of_a_run_that_is_ready(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rewards = ("--reward.score.function", "scores.py:right", "--data.source", "answers.jsonl")
    code, record = asked(folder, capfd, *rewards, "--gpus", "3", "--checkpoint.keep", "2")
    assert (code, record["ok"], record["errors"], record["not_checked"]) == (0, True, [], [])
    assert set(record) == {"ok", "errors", "warnings", "not_checked", *SECTIONS}
    batch = record["batch"]
    assert (batch["ranks"], batch["prompts_per_step"], batch["completions_per_step"]) == (3, 4, 16)
    assert (batch["prompts_per_rank"], batch["completions_per_rank"]) == ([1, 2], [4, 8])
    assert (batch["completion_tokens_per_step"], batch["updates"], batch["epochs"]) == (16 * 8, 2, 1.0)
    # Two groups of a prompt of 6 and 4 completions, whose last token is no input.
    assert (batch["micro_batches_per_rank"], batch["tokens_per_micro_batch"]) == (1, 2 * (6 + 4 * 7))
    assert record["prompts"] | {"first": ""} == {
        "train": 8, "eval": 0, "shortest": 6, "longest": 6, "left_out": 0, "cut": 0, "first": "",
    }  # fmt: skip
    assert record["rewards"] == {"score": {"row": 1, "reference": 1.0, "shuffled": 0.0, "empty": 0.0}}
    model, disk = record["model"], record["disk"]
    assert (model["class"], model["window"], model["longest_row"]) == ("Qwen2ForCausalLM", 64, 14)
    assert model["stop_ids"] == [299] and 0 < model["trained"] < model["parameters"]
    assert (disk["keep"], disk["needed_bytes"]) == (2, 3 * disk["checkpoint_bytes"]) and disk["free_bytes"] > 0
    assert record["versions"]["torch"] == torch.__version__ and "python" in record["versions"]
    assert not (folder / "out").exists()


def test_the_record_of_a_run_file_that_cannot_be_read(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, record = asked(folder, capfd, "--optim.lr", "fast", "--grpo.eps_low", "5")
    assert (code, record["ok"], len(record["errors"])) == (2, False, 2)
    assert any("optim.lr" in error for error in record["errors"])
    assert set(record) == {"ok", "errors", "warnings", "not_checked", *SECTIONS}


def test_a_hostfile_is_read_and_its_ranks_counted(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "hosts.txt").write_text("a slots=2\nb slots=2\n")
    code, record = asked(folder, capfd, "--hostfile", "hosts.txt")
    assert (code, record["hosts"], record["batch"]["ranks"]) == (0, {"a": 2, "b": 2}, 4)
    (folder / "hosts.txt").write_text("a slots=2\na slots=x\n")
    code, record = asked(folder, capfd, "--hostfile", "hosts.txt", "--data.source", "no.jsonl")
    assert code == 2 and "hosts.txt" in record["errors"][0] and "no.jsonl" in record["errors"][-1]


def test_the_page_has_errors_first_and_fits_100_columns(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rewards = ("--reward.score.function", "scores.py:fair", "--data.source", "answers.jsonl")
    assert main(["preflight", "run.toml", *rewards, "--optim.lr", "1e-3", "--model.attn", "flash_attention_2"]) == 2
    lines = capfd.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    heads = ["1 error", "3 warnings", "Batch", "Rewards, tried on row 1", " model"]
    places = [next(at for at, line in enumerate(lines) if line.startswith(head)) for head in heads]
    assert places == sorted(places)
    assert lines[-1] == "refused: 1 error, 3 warnings; nothing was trained or written"
    assert any(line.split() == ["score", "1", "0.5", "0.5", "0.5", "0.00"] for line in lines)


# The model's files


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen2.5-1.5B's shapes in a file of holes: 3.1 GB to whoever reads them."""
    folder = tmp_path_factory.mktemp("large")
    sizes = {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12}
    config = Qwen2Config(**TINY | sizes | {"vocab_size": 151936}, tie_word_embeddings=True)
    config.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    with torch.device("meta"):
        weights = Qwen2ForCausalLM(config).state_dict()
    header, end = {}, 0
    for name, weight in weights.items():
        if name != "lm_head.weight":  # tied
            span = [end, end + 2 * weight.numel()]
            header[name], end = {"dtype": "BF16", "shape": list(weight.shape), "data_offsets": span}, span[1]
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return folder


def test_a_model_of_1_5b_is_checked_within_seconds_and_without_its_weights(
    large: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded(*_: Any, **__: Any) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr("trainer.models.policy.AutoModelForCausalLM.from_pretrained", loaded)
    monkeypatch.setattr("safetensors.torch.load_file", loaded)
    start = time.process_time()
    found = surveyed(folder, {"model.name_or_path": str(large), "lora.r": 16})
    assert time.process_time() - start < 10
    assert (found.errors, found.unread) == ([], "")
    assert found.parameters is not None and 1.5e9 < found.parameters.total < 1.65e9
    assert 18e6 < found.parameters.trained < 19e6


def weights_edited(edit: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def change(model: Path) -> None:
        weights = load_file(model / "model.safetensors")
        edit(weights)
        save_file(weights, model / "model.safetensors", metadata={"format": "pt"})

    return change


def sharded(model: Path, *, lost: bool) -> None:
    weights = load_file(model / "model.safetensors")
    names = sorted(weights)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: weights[name] for name in part}, model / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    (model / "model.safetensors").unlink()
    if lost:
        (model / "b.safetensors").unlink()


def of_the_bare_model(weights: dict[str, Any]) -> None:
    for name in list(weights):
        weights[name.removeprefix("model.")] = weights.pop(name)


def under_the_heads_name(weights: dict[str, Any]) -> None:
    weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")


FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "whole": (lambda model: None, ""),
    "in shards": (lambda model: sharded(model, lost=False), ""),
    "of the bare model": (weights_edited(of_the_bare_model), ""),
    "tied under the other name": (weights_edited(under_the_heads_name), ""),
    "a shard is lost": (lambda model: sharded(model, lost=True), "1 of 2 files.*b.safetensors"),
    "one weight is missing": (
        weights_edited(lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight")),
        "lack 1 weights of Qwen2ForCausalLM .first: model.layers.1.mlp.up_proj.weight",
    ),
    "another shape": (
        weights_edited(lambda weights: weights.update({"model.norm.weight": torch.ones(8)})),
        r"1 weights do not have the shape.*model.norm.weight is \[8\], config.json wants \[32\]",
    ),
    "cut": (
        lambda model: (model / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:-5]),
        "model.safetensors is cut or damaged",
    ),
    "none": (lambda model: (model / "model.safetensors").unlink(), "no weights there"),
}


@pytest.mark.parametrize(("change", "said"), FILES.values(), ids=FILES)
def test_headers_tell_whether_weights_are_whole(change: Callable[[Path], object], said: str, folder: Path) -> None:
    change(folder / "model")
    found = surveyed(folder)
    assert found.unread == "" and len(found.errors) == bool(said)
    if said:
        with pytest.raises(Refused, match=said):
            found.refuse()


def test_weights_are_read_where_headers_or_hooks_need_them_and_only_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "looks.py").write_text("def look(context): assert context.policy.lm_head.weight.device.type == 'cpu'\n")
    assert main(["preflight", "run.toml"]) == 0
    assert "loading model" not in capfd.readouterr().out
    assert main(["preflight", "run.toml", "--hooks.before_rollout", '["looks:look"]']) == 0
    assert "loading model" in capfd.readouterr().out


def test_a_head_that_changes_its_logits_is_seen_without_weights() -> None:
    skeleton.check_head_of(tiny_qwen2().config, 0.7)
    sizes = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "head_dim": 8}
    capped = Gemma2Config(**sizes, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    with pytest.raises(Refused, match="scaling or soft-capping"):
        skeleton.check_head_of(capped, 1.0)


def test_targets_that_the_model_lacks_are_seen_without_weights(folder: Path) -> None:
    (error,) = surveyed(folder, {"lora.targets": ["c_attn"]}).errors
    assert "c_attn" in error and "q_proj" in error


def test_the_skeleton_counts_what_the_model_has(folder: Path) -> None:
    whole = tiny_qwen2()
    causal = skeleton.build(Model(name_or_path=str(folder / "model")), whole.config, torch.float32)
    assert skeleton.with_adapter(causal, Lora(r=0)) == (whole.num_parameters(), whole.num_parameters())
    assert all(parameter.device.type == "meta" for parameter in causal.parameters())


# Rewards

PROBED: dict[str, tuple[str, str, str]] = {
    # function -> errors and warnings
    "right": ("scores.py:right", "", ""),
    "one number": ("scores.py:short", "returned 1 value; expected a list of 3 numbers", ""),
    "always fails": ("scores.py:broken", "fails on every completion that it was tried on.*KeyError", ""),
    "fails on nothing": (
        "scores.py:picky",
        "",
        "fails on some completions .empty, row 1.: ValueError: nothing",
    ),
    "tells nothing apart": ("scores.py:fair", "", "gives the reference answer of row 1 0.5, and no less .*empty 0.5"),
}


@pytest.mark.parametrize(("function", "error", "warning"), PROBED.values(), ids=PROBED)
def test_every_reward_is_tried_once(function: str, error: str, warning: str, folder: Path) -> None:
    reward = [{"name": "score", "kind": "python", "function": function, "retries": 0}]
    data = {"data.source": str(folder / "answers.jsonl")}
    config = run_config(folder, data).model_copy(update={"reward": ()})
    config = type(config).model_validate(config.model_dump(exclude_unset=True) | {"reward": reward})
    found = survey(config, folder, torch.device("cpu"), ranks=1, begins=True)
    for told, pattern in ((found.errors, error), (found.warnings, warning)):
        assert len(told) == bool(pattern)
        if pattern:
            assert re.search(pattern, told[0])


def test_a_reward_that_may_fail_is_only_warned_of(folder: Path) -> None:
    settings = {"name": "score", "kind": "python", "function": "scores.py:broken", "retries": 0, "max_unscored": 1.0}
    config = run_config(folder)
    config = type(config).model_validate(config.model_dump(exclude_unset=True) | {"reward": [settings]})
    found = survey(config, folder, torch.device("cpu"), ranks=1, begins=True)
    assert found.errors == [] and "fails on every completion" in found.warnings[0]


# What is known to end badly


def test_answers_that_will_be_cut_are_warned_of(folder: Path) -> None:
    rows = [{"prompt": f"{n}", "answer": "1 + " * (30 if n % 2 else 1)} for n in range(8)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (warning,) = surveyed(folder).warnings
    assert "rollout.max_new_tokens = 8: 4 of 8 reference answers are longer" in warning


def test_rope_scaling_without_need_is_warned_of(folder: Path) -> None:
    (warning,) = surveyed(folder, {"model.rope.type": "linear", "model.rope.factor": 2.0}).warnings
    assert "RoPE scaling is set but not needed" in warning and "linear is static" in warning


def test_versions_that_were_not_asked_for_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert out_of_range() == []
    asked_for = ["torch>=99", "transformers>=1", "vllm>=1; extra == 'x'", "not-installed-here>=1"]
    monkeypatch.setattr("trainer.preflight.versions.requires", lambda _: asked_for)
    (warning,) = out_of_range()
    assert warning == f"torch {torch.__version__} is installed; this version was made for torch>=99"
