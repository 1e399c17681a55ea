"""Reading a run file: what is read, what is refused, and what the message says."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config import RunConfig, describe, dump, load, shipped
from trainer.config import recipes as shipped_recipes
from trainer.config.fields import dotted_keys, field_at, keys, literal
from trainer.config.rules import available
from trainer.config.watch import LEVELS, PhaseTimeout
from trainer.errors import Refused

MINIMAL = """\
[run]
steps = 3

[model]
name_or_path = "some/model"

[data]
source = "prompts.jsonl"

[[reward]]
name = "length-ok"
kind = "python"
function = "rewards.py:score"
"""


@pytest.fixture
def run_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(text: str | bytes, name: str = "run.toml") -> str:
        Path(name).write_bytes(text.encode() if isinstance(text, str) else text)
        return name

    return write


def refusal(path: str, *overrides: str) -> str:
    with pytest.raises(Refused) as caught:
        load(path, overrides)
    return str(caught.value)


def test_imports_pydantic_and_nothing_heavy():
    code = (
        "import sys, trainer.config, trainer.config.recipes, trainer.config.deepspeed_json\n"
        "print([m for m in ('torch', 'transformers', 'deepspeed', 'datasets', 'peft', 'numpy', 'tomli_w', 'rich')"
        " if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_minimal_file_and_defaults(run_file):
    config = load(run_file(MINIMAL))
    assert config.run.steps == 3 and config.reward[0].name == "length-ok"
    assert config.completions_per_step == 64 and config.is_lora
    # The defaults that the run file promises; each has its reason in `zero-grpo keys`.
    assert (config.optim.lr, config.optim.warmup_steps, config.optim.max_grad_norm) == (2e-5, 10, 1.0)
    assert (config.grpo.loss_type, config.grpo.eps_low, config.grpo.eps_high) == ("dapo", 0.2, 0.2)
    assert (config.grpo.kl.coef, config.grpo.kl.estimator, config.grpo.kl.placement) == (0.04, "k3", "loss")
    sampling = config.rollout
    off = (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.repetition_penalty)
    assert off == (1.0, 1.0, 0, 0.0, 1.0)
    assert config.model.trust_remote_code is False


def test_frozen(run_file):
    config = load(run_file(MINIMAL))
    with pytest.raises(ValueError, match="frozen"):
        config.optim.lr = 1.0


def test_byte_order_mark_and_windows_line_ends_are_read(run_file):
    assert load(run_file(b"\xef\xbb\xbf" + MINIMAL.replace("\n", "\r\n").encode())) == load(run_file(MINIMAL, "b.toml"))


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        (["--grpo.kl.coef", "0.1"], "grpo.kl.coef", 0.1),
        (["--grpo.kl.coef=0.1"], "grpo.kl.coef", 0.1),
        (["--optim.max-grad-norm", "0"], "optim.max_grad_norm", 0.0),
        (["--optim.lr", "1e-3", "--optim.lr", "1e-4"], "optim.lr", 1e-4),
        (["--rollout.stop", '["</a>", "\\n"]'], "rollout.stop", ("</a>", "\n")),
        (["--optim.betas", "[0.9, 0.95]"], "optim.betas", (0.9, 0.95)),
        (["--grpo.mask_truncated", "true"], "grpo.mask_truncated", True),
        (["--engine.token_budget", "4096"], "engine.token_budget", 4096),
        (["--engine.token_budget", "auto"], "engine.token_budget", "auto"),
        # A key that holds text takes any text, whatever TOML would make of it.
        (["--model.revision", "1234567"], "model.revision", "1234567"),
        (["--data.config", "2024-01-01"], "data.config", "2024-01-01"),
        (["--data.chat_template", "on"], "data.chat_template", "on"),
        (["--data.source=a=b.jsonl"], "data.source", "a=b.jsonl"),
        (["--data.system", 'say "[1]"\nrun.steps = 5'], "data.system", 'say "[1]"\nrun.steps = 5'),
        (
            ["--data.chat_template_kwargs.enable_thinking", "false"],
            "data.chat_template_kwargs",
            {"enable_thinking": False},
        ),
        (["--data.chat_template_kwargs", '{"a": [1]}'], "data.chat_template_kwargs", {"a": [1]}),
    ],
)
def test_overrides(run_file, overrides, key, value):
    config = load(run_file(MINIMAL), overrides)
    for name in key.split("."):
        config = getattr(config, name)
    assert config == value and type(config) is type(value)


@pytest.mark.parametrize("name", ["length-ok", "0"])
def test_override_of_a_reward_by_name_or_place(run_file, name):
    config = load(run_file(MINIMAL), [f"--reward.{name}.weight", "-0.5", f"--reward.{name}.max-unscored=0"])
    assert (config.reward[0].weight, config.reward[0].max_unscored) == (-0.5, 0.0)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["--reward.nobody.weight", "1"], ["no reward is called 'nobody'", "length-ok"]),
        (["--reward.1.weight", "1"], ["no reward is called '1'"]),
        (["--reward.length-ok.wieght", "1"], ["command line, --reward.length-ok.wieght", "Did you mean reward.weight"]),
        (["train"], ["train is not an override"]),
        (["-x", "1"], ["-x is not an override"]),
        (["--optim.lr"], ["--optim.lr has no value"]),
        (["--grpo.mask_truncated", "--optim.lr", "1e-5"], ["--grpo.mask_truncated has no value", "true"]),
        (["--optim..lr", "1"], ["--optim..lr has an empty name"]),
        (["--run.steps.x", "1"], ["--run.steps.x", "steps is a value"]),
        (["--optim.lr", "1e-5\nx = 1"], ["command line, --optim.lr", "number > 0"]),
        (["--optim.lr", "fast"], ["command line, --optim.lr", 'optim.lr = "fast"', "number > 0"]),
        (["--optim", "adamw"], ["optim = ", "a table with the keys name, lr"]),
        (["--lora.targets", "q_proj"], ['Write ["q_proj"]']),
        (["--grpo.mask_truncated", "True"], ["true or false"]),
        (["--kl-loss-type", "low_var_kl"], ["grpo.kl.estimator", "k3"]),
    ],
)
def test_wrong_overrides_are_named(run_file, overrides, said):
    message = refusal(run_file(MINIMAL), *overrides)
    assert all(part in message for part in said), message


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", ["run.toml: the file is empty", "zero-grpo init"]),
        (b"# nothing\n\n", ["the file is empty"]),
        (b"\x00\x01\x02", ["a binary file"]),
        (b"[run]\nsteps = 1\ndir = \"caf\xe9\"\n", ["run.toml:3", "0xe9 is not UTF-8"]),
        ("[run]\n".encode("utf-16"), ["UTF-16"]),
        (b"a" * (1 << 20) + b"b", ["larger than 1 MiB"]),
        (b"[run]\nsteps = \n", ["run.toml:2", "not valid TOML", "steps"]),
        (b"[run]\nsteps = 1\nsteps = 2\n", ["run.toml:3", "not valid TOML", "overwrite"]),
        (b"[run\nsteps = 1\n", ["run.toml:1", "not valid TOML"]),
        (b"[run]\ndir = runs/a\n", ["run.toml:2", 'Text stands in quotes: dir = "..."']),
        (b"[grpo]\nmask_truncated = True\n", ["run.toml:2", "Write true"]),
        (b"[reward]\nfallback = None\n", ["run.toml:2", "no null"]),
        (b"run:\n  steps: 1\n", ["run.toml:1", "key = value, not key: value"]),
        ("[run]\ndir = “a”\n".encode(), ["run.toml:2", "straight quotes"]),
        (b"x = " + b"[" * 5000 + b"]" * 5000, ["nested too deeply"]),
        (b"x = " + b"1" * 5000, ["not valid TOML"]),
    ],
)  # fmt: skip
def test_files_that_are_no_run_file(run_file, content, said):
    message = refusal(run_file(content))
    assert all(part in message for part in said), message
    assert "Traceback" not in message


def test_missing_file_directory_and_folder(run_file, tmp_path):
    run_file(MINIMAL, "gsm8k.toml")
    assert "Did you mean gsm8k.toml?" in refusal("gsm8.toml")
    assert "nowhere does not exist" in refusal("nowhere/run.toml")
    message = refusal(str(tmp_path))
    assert "this is a directory" in message and "gsm8k.toml" in message


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('[optim]\nlr = "1e-5"', ["run.toml:15: optim.lr", "a finite number > 0", "Remove the quotes"]),
        ("[optim]\nlr = nan", ["optim.lr = nan", "a finite number > 0"]),
        ("[optim]\nlr = inf", ["optim.lr = inf", "a finite number > 0"]),
        ("[optim]\nlr = 0", ["optim.lr = 0", "> 0"]),
        ("[optim]\nlr = true", ["optim.lr = true", "a finite number > 0"]),
        ("[optim]\nbetas = [0.9, 1.0]", ["optim.betas", "a list of 2", ">= 0 and < 1"]),
        ("[optim]\nbetas = [0.9]", ["optim.betas", "a list of 2"]),
        ("[grpo.kl]\ncoef = -0.1", ["grpo.kl.coef = -0.1", ">= 0"]),
        ("[rollout]\ntemperature = 0.0", ["rollout.temperature", "> 0"]),
        ("[rollout]\ntop_p = 1.5", ["rollout.top_p = 1.5", "> 0 and <= 1"]),
        ("[rollout]\ntop_k = 5.0", ["rollout.top_k = 5.0", "Write 5, without a decimal point"]),
        ("[rollout]\nstop = [1]", ["rollout.stop = [1]", "each item text"]),
        ('[rollout]\nstop = [""]', ["rollout.stop", "not empty"]),
        ('[grpo]\nmask_truncated = "yes"', ["grpo.mask_truncated", "true or false"]),
        ('[grpo]\nloss_type = "bnpo"', ["grpo.loss_type", '"dr_grpo"', 'Did you mean "dapo"?']),
        ('[grpo]\nloss_type = "dr-grpo"', ['Did you mean "dr_grpo"?']),
        ('[grpo.kl]\nestimator = "low_var_kl"', ['Did you mean "k3"?']),
        ("[engine]\ntoken_budget = 0", ['a whole number >= 1 or "auto"']),
        ("[grpo]\nkl = 3", ["grpo.kl = 3", "a table with the keys coef"]),
        ("[[grpo]]\neps_low = 0.1", ["grpo = ", "one table", "[grpo]"]),
        ("[data]\nchat_template_kwargs = 3", ["run.toml"]),
        ("[optim]\nlearning_rte = 1", ["run.toml:15: optim.learning_rte is not a key"]),
        ("[optim]\nweight_decy = 1", ["Did you mean optim.weight_decay?"]),
        ("[grpo]\nlr = 1", ["grpo.lr is not a key", "optim.lr"]),
        ("[model.lora]\nr = 1", ["there is no table [model.lora]", "lora.r"]),
        ("[optimizer]\nx = 1", ["there is no table [optimizer]", "[optim]"]),
    ],
)
def test_wrong_values_name_line_key_and_range(run_file, line, said):
    text = MINIMAL if not line.startswith("[data]") else MINIMAL.replace('[data]\nsource = "prompts.jsonl"', "")
    message = refusal(run_file(f"{text}{line}\n"))
    assert all(part in message for part in said), message


def test_single_brackets_for_a_reward(run_file):
    assert "Write [[reward]], in double brackets" in refusal(run_file(MINIMAL.replace("[[reward]]", "[reward]")))


def test_missing_model_and_missing_kind(run_file):
    message = refusal(run_file("[run]\nsteps = 1\n[data]\nsource = 'a'\n[[reward]]\nname = 'a'\n"))
    assert "run.toml: model.name_or_path is missing" in message
    assert "run.toml:5: reward.a.kind is missing" in message


def test_all_problems_of_a_file_in_one_message(run_file):
    text = (
        MINIMAL.replace("steps = 3", 'steps = "3"')
        + "[grpo]\nbeta = 0.1\ndual_clip = 1.1\n[grpo.kl]\nestimator = 'k1'\n[rollout]\nnum_generations = 0\n"
    )
    message = refusal(run_file(text), "--optim.lr", "fast", "loose")
    assert message.startswith("run.toml: 7 problems.")
    for part in ("run.steps", "grpo.beta", "grpo.dual_clip", "k1", "rollout.num_generations", "optim.lr", "loose"):
        assert part in message
    # A rule is not asked about a value that could not be read: steps were given, only badly.
    assert "neither run.steps" not in message


@pytest.mark.parametrize(
    "line",
    [
        '[[reward]]\napi_key = "abc"',
        '[data]\nhf_token = "x1y2z3"',
        '[model]\nrevision = "hf_abcdefghijklmnopqrstuvwx"',
        '[[reward]]\nkey_env = "sk-proj-0123456789abcdef"',
        '[run]\nsteps = "sk-proj-0123456789abcdef"',
        '[optim]\ntoken = "abc"',
        '[[reward]]\nurl = "https://user:pa55word@host/v1"',
        '[data]\nchat_template_kwargs = {nested = ["Bearer abcdefgh1234"]}',
    ],
)
def test_secrets_are_refused_and_not_repeated(run_file, line):
    message = refusal(run_file(line + "\n"))
    assert "holds a secret" in message and "run.toml:2" in message and "environment variable" in message
    assert "is not a key" not in message
    for secret in ("abc", "x1y2z3", "hf_a", "sk-p", "pa55word", "Bearer"):
        assert secret not in message


def test_secrets_in_overrides_and_in_broken_toml_are_not_repeated(run_file):
    assert "s3cr3t" not in refusal(run_file(MINIMAL), "--reward.0.api-key", "s3cr3t")
    assert "abcdefgh" not in refusal(run_file(MINIMAL), "sk-abcdefgh12345678")
    assert "abcdefgh" not in refusal(run_file("[[reward]]\napi_key = sk-abcdefgh12345678\n"))


@pytest.mark.parametrize("word", ["max_prompt_tokens = 9", 'system = "Give the token sk. Answer in <token>."'])
def test_ordinary_words_are_no_secrets(run_file, word):
    load(run_file(MINIMAL.replace('source = "prompts.jsonl"', f'source = "prompts.jsonl"\n{word}')))


TEXT = st.text(st.characters(blacklist_categories=("Cs",)), max_size=20)


@settings(max_examples=60, deadline=None)
@given(
    system=TEXT,
    stop=st.lists(TEXT.filter(bool), max_size=3),
    lr=st.floats(min_value=1e-12, max_value=1e6, allow_nan=False),
    weight=st.floats(allow_nan=False, allow_infinity=False),
    fallback=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    budget=st.just("auto") | st.integers(1, 2**40),
    nested=st.dictionaries(
        TEXT, st.booleans() | st.integers() | TEXT | st.lists(st.integers(), max_size=2), max_size=3
    ),
)
def test_a_dumped_config_reads_back_equal(tmp_path_factory, system, stop, lr, weight, fallback, budget, nested):
    config = RunConfig(
        model={"name_or_path": "m"},
        data={"system": system, "chat_template_kwargs": nested},
        rollout={"stop": stop},
        optim={"lr": lr},
        engine={"token_budget": budget},
        reward=[
            {"name": "a", "kind": "python", "weight": weight, "fallback": fallback},
            {"name": "b", "kind": "builtin"},
        ],
    )
    assert RunConfig.model_validate(tomllib.loads(dump(config))) == config


UNSET = {"reward.fallback", "reward.concurrency", *(f"watch.{limit}" for limit in LEVELS)}
UNSET |= {f"watch.phase_timeout.{phase}" for phase in PhaseTimeout.model_fields}
"""Without a value of their own as they come: TOML has no null."""


def test_a_dumped_config_is_a_run_file_with_every_key(run_file):
    config = load(run_file(MINIMAL), ["--lora.r", "0", "--grpo.kl.coef", "0"])
    text = dump(config)
    assert load(run_file(text, "resolved.toml")) == config
    written = tomllib.loads(text)
    for key in dotted_keys():
        section, _, rest = key.partition(".")
        at = written[section][0] if section == "reward" else written[section]
        *outer, last = rest.split(".")
        for name in outer:
            at = at[name]
        assert last in at or key in UNSET, key


def test_describe_shows_every_key_with_default_and_meaning():
    text = describe()
    for path, field in keys():
        assert ".".join(path) in text
        assert field.description and len(field.description) > 10, path
    assert 'optim.schedule: "constant", "linear" or "cosine"; default "constant"' in text
    assert "model.name_or_path: text in quotes that is not empty; required" in text


def test_describe_marks_what_this_version_refuses():
    entries = dict(line.strip().split(": ", 1) for line in describe().splitlines() if re.match(r"  [a-z_.]+: ", line))
    for key, (values, _) in available.NOT_YET.items():
        assert entries[key].endswith(f"({', '.join(map(literal, values))}: not in this version)")
    assert "not in this version" not in entries["optim.lr"] + entries["reward.function"] + entries["reward.name"]


def test_describe_one_table_one_key_and_no_such_name():
    assert "grpo.kl.coef" in describe("grpo") and "optim.lr" not in describe("grpo")
    assert describe("[grpo.kl]") == describe("grpo.kl") and "grpo.eps_low" not in describe("grpo.kl")
    assert describe("optim.lr").count("optim.") == 1
    with pytest.raises(Refused, match=r"Did you mean optim\?.*Tables: run, model"):
        describe("optm")


def test_field_at_finds_keys_and_nothing_else():
    assert field_at(("grpo", "kl", "coef")) is not None and field_at(("reward", 3, "weight")) is not None
    assert field_at(("grpo", "kl", "coef", "x")) is None and field_at(("nothing",)) is None


def test_recipes_by_name():
    assert {"a10-1.5b-lora", "first-run"} <= set(shipped_recipes.names())
    assert shipped_recipes.read("first-run.toml") == shipped_recipes.read("first-run")
    with pytest.raises(Refused, match=r"Did you mean first-run\? Recipes: .*a10-1.5b-lora"):
        shipped_recipes.read("firstrun")
    with pytest.raises(Refused, match="no such recipe"):
        shipped_recipes.read("../../etc/passwd")


def test_shipped_folders_are_found_in_a_wheel_and_in_a_checkout(tmp_path, monkeypatch):
    package = tmp_path / "site-packages" / "trainer"
    monkeypatch.setattr(shipped, "PACKAGE", package)
    assert shipped.ds_configs() == tmp_path / "site-packages" / "ds_configs"
    assert shipped.recipes() == tmp_path / "site-packages" / "launch" / "recipes"
    for name in ("ds_configs", "recipes"):
        (package / name).mkdir(parents=True)
    assert (shipped.ds_configs(), shipped.recipes()) == (package / "ds_configs", package / "recipes")
