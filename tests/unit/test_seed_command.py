"""launch/train_grpo.py: the seed document's command makes the run file that it should; its recipes load and are warned
of."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import train_grpo
import train_grpo_flags

from trainer.config import RunConfig, load, shipped, warnings
from trainer.config.fields import field_at
from trainer.errors import Refused
from trainer.rewards.builtin import BUILTINS

ROOT = Path(__file__).parents[2]

# Section 4.3 of the document, without its line continuations.
DOCUMENT = (
    'torchrun --nproc_per_node=4 --master_port=29500 train_grpo.py --model_name_or_path "Qwen/Qwen2.5-1.5B" '
    '--reward_model_name_or_path "BAAI/bge-m3" --dataset_name "your_dataset_dir" '
    '--output_dir "./qwen25-grpo-checkpoint" --per_device_train_batch_size 4 --gradient_accumulation_steps 4 '
    "--learning_rate 2e-5 --num_train_epochs 3 --logging_steps 10 --save_steps 500 --eval_steps 500 --bf16 "
    '--ddp_timeout 180000000 --kl_loss_coef 0.5 --max_new_tokens 128 --rope_scaling_type "dynamic" '
    '--rope_scaling_factor 2.0 --report_to "none" --seed 42'
)
FLAGS = shlex.split(DOCUMENT.split("train_grpo.py ")[1])
MEANT = {
    "run.dir": "./qwen25-grpo-checkpoint",
    "run.seed": 42,
    "run.epochs": 3,
    "run.steps": 0,
    "model.name_or_path": "Qwen/Qwen2.5-1.5B",
    "model.dtype": "bf16",
    "model.rope.type": "dynamic",
    "model.rope.factor": 2.0,
    "lora.r": 0,
    "data.source": "your_dataset_dir",
    "data.seed": 42,
    "rollout.prompts_per_step": 8,
    "rollout.num_generations": 8,
    "rollout.max_new_tokens": 128,
    "grpo.kl.coef": 0.5,
    "grpo.kl.schedule": "constant",
    "optim.lr": 2e-5,
    "engine.micro_batch": 4,
    "watch.hang_timeout": 180000000,
    "checkpoint.every": 500,
    "eval.every": 0,
    "log.every": 10,
    "log.report_to": (),
}


def value(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = getattr(config, name)
    return config


def made(flags: list[str], ranks: int = 4) -> tuple[RunConfig, train_grpo.RunFile]:
    wrong: list[str] = []
    read, keys = train_grpo_flags.read(flags, wrong)
    run_file = train_grpo.translate(read, keys, ranks, wrong)
    _, config = train_grpo.check(run_file, keys, wrong)
    return config, run_file


def said_of(*flags: str, ranks: int = 4) -> str:
    """The one message that refuses the document's command with other flags after it."""
    with pytest.raises(Refused) as refused:
        made([*FLAGS, *flags], ranks)
    return str(refused.value)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, and no training."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr(train_grpo, "main", lambda argv: pytest.fail("it trains"))
    return tmp_path


def test_the_documents_command_makes_this_run_file() -> None:
    config, _ = made(FLAGS)
    assert {key: value(config, key) for key in MEANT} == MEANT


def test_64_completions_are_8_prompts_in_groups_of_8_and_it_says_so() -> None:
    config, run_file = made(FLAGS)
    assert config.completions_per_step == 64
    (batch,) = [remark for remark in run_file.remarks if "completions a step" in remark]
    assert "4 a device x 4 accumulated x 4 rank(s) = 64" in batch and "G = 8" in batch and "8 prompt(s) a step" in batch


@pytest.mark.parametrize(
    ("ranks", "more", "prompts", "generations"),
    [(1, [], 2, 8), (2, [], 4, 8), (4, ["--num_generations", "16"], 4, 16), (3, ["--num_generations", "2"], 24, 2)],
)
def test_the_batch_follows_ranks_and_group(ranks: int, more: list[str], prompts: int, generations: int) -> None:
    config, _ = made([*FLAGS, *more], ranks)
    assert (config.rollout.prompts_per_step, config.rollout.num_generations) == (prompts, generations)
    assert config.engine.micro_batch == 4


@pytest.mark.parametrize(
    ("accumulation", "ranks", "group", "fix"), [(1, 1, 8, 2), (1, 3, 8, 2), (3, 1, 8, 2), (1, 2, 16, 2)]
)
def test_b75_completions_that_make_no_whole_groups_are_refused(
    accumulation: int, ranks: int, group: int, fix: int
) -> None:
    flags = ["--num_generations", str(group), "--gradient_accumulation_steps"]
    said = said_of(*flags, str(accumulation), ranks=ranks)
    assert f"= {4 * accumulation * ranks} completions a step, which are no whole groups of {group}" in said
    assert f"Use --gradient_accumulation_steps {fix}," in said
    made([*FLAGS, *flags, str(fix)], ranks)


def test_hyphens_and_equals_signs_say_the_same() -> None:
    hyphens = [re.sub(r"(?<=\w)_", "-", word) if word.startswith("--") else word for word in FLAGS]
    equals = re.sub(r"(--\w+) (?!--)(\S+)", r"\1=\2", " ".join(FLAGS)).split()
    assert hyphens != FLAGS and len(equals) < len(FLAGS)
    assert made(hyphens) == made(FLAGS)
    assert made(equals) == made(FLAGS)


@pytest.mark.parametrize(
    "given", [["--local_rank=3"], ["--local-rank=3"], ["--local_rank", "3"], ["--local-rank", "3"]]
)
def test_b82_local_rank_is_taken_in_every_spelling(given: list[str]) -> None:
    assert made([*given, *FLAGS]) == made(FLAGS)
    assert made([*FLAGS, *given]) == made(FLAGS)


def test_the_rollout_settings_of_the_document_are_flags_too() -> None:
    more = (
        "--do_sample True --temperature 0.7 --top_p 0.9 --repetition_penalty 1.1 --kl_loss_coef_schedule warmup_decay"
    )
    keys = "--grpo.kl.start 0.01 --grpo.kl.min 0.1 --grpo.kl.warmup-steps 200"
    config, _ = made([*FLAGS, *more.split(), *keys.split()])
    assert (config.rollout.temperature, config.rollout.top_p, config.rollout.repetition_penalty) == (0.7, 0.9, 1.1)
    kl = config.grpo.kl
    assert (kl.coef, kl.schedule, kl.start, kl.min, kl.warmup_steps) == (0.5, "warmup_decay", 0.01, 0.1, 200)


@pytest.mark.parametrize(
    ("flags", "r", "targets"),
    [
        ("", 0, ("all-linear",)),
        ("--lora_r 8 --lora_target_modules q_proj v_proj", 8, ("q_proj", "v_proj")),
        ("--use_peft", 16, ("all-linear",)),
        ("--use_peft --lora_r 4 --lora-target-modules q_proj,v_proj", 4, ("q_proj", "v_proj")),
        ("--lora.r 2", 2, ("all-linear",)),
    ],
)
def test_all_weights_are_trained_unless_a_lora_flag_is_given(flags: str, r: int, targets: tuple[str, ...]) -> None:
    config, run_file = made([*FLAGS, *flags.split()])
    assert (config.lora.r, config.lora.targets) == (r, targets)
    assert any("All weights are trained" in remark for remark in run_file.remarks) == (r == 0)


@pytest.mark.parametrize(("flag", "dtype"), [("--bf16", "bf16"), ("--bf16=False", "fp32"), ("--fp16 false", "bf16")])
def test_switches_stand_alone_or_with_a_value(flag: str, dtype: str) -> None:
    assert made([*FLAGS, *flag.split()])[0].model.dtype == dtype


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--learning_rat 1", "--learning_rat is not a flag of this command. Did you mean --learning_rate?"),
        ("--kl-los-coef 1", "Did you mean --kl_loss_coef?"),
        ("--beta 0.1", "--beta is not a flag of this command. Use grpo.kl.coef."),
        ("--entropy_coef 0.1", "the loss has no entropy term"),
        ("--seed", "--seed: expected one value, got 0."),
        ("--seed 1 2", "--seed: expected one value, got 2."),
        ("--seed abc", '--seed: run.seed = "abc": expected a whole number >= 0'),
        ("--learning_rate -1", "--learning_rate: optim.lr = -1: expected a finite number > 0."),
        ("--learning_rate nan", "--learning_rate: optim.lr = nan: expected a finite number"),
        ("--top_p 2", "--top_p: rollout.top_p = 2: expected a finite number > 0 and <= 1."),
        ("--save_steps 0.5", "--save_steps: checkpoint.every = 0.5: expected a whole number"),
        ("--bf16 maybe", "--bf16 maybe: expected true or false."),
        ("--do_sample false", "--do_sample false: expected true."),
        ("--fp16", '--fp16: model.dtype = "fp16" is refused'),
        ("--load_in_4bit", "quant.bits = 4 with lora.r = 0: quantised weights cannot be trained."),
        ("--report_to mlflow", "--report_to: log.report_to"),
        ("--rope_scaling_type ntk", "--rope_scaling_type: model.rope.type = "),
        ("--num_generations 1", "--num_generations: rollout.num_generations = 1: a completion alone"),
        ("--num_generations 0", "--num_generations 0: expected a whole number >= 1."),
        ("--gradient_accumulation_steps x", "--gradient_accumulation_steps x: expected a whole number >= 1."),
        ("--max_steps 5", "--num_train_epochs: run.steps = 5 and run.epochs = 3 are both given."),
        ("--optim.lrr 1", "optim.lrr is not a key. Did you mean optim.lr?"),
        ("--nothing.lr 1", "there is no table [nothing]"),
        ("--reward_function rewards.py", "--reward_function: reward.score.function = "),
    ],
)
def test_a_wrong_flag_or_value_is_named(flags: str, said: str) -> None:
    assert said in said_of(*flags.split())


def test_a_word_without_a_flag_is_named() -> None:
    with pytest.raises(Refused, match=r"train\.jsonl: expected a flag"):
        made(["train.jsonl", *FLAGS])


def test_all_mistakes_are_one_message() -> None:
    said = said_of("--beta", "1", "--seed", "x", "--top_p", "2", "--optim.lrr", "1")
    assert all(part in said for part in ("--beta", "run.seed", "rollout.top_p", "optim.lrr"))


@pytest.mark.parametrize("missing", ["model_name_or_path", "dataset_name", "output_dir", "num_train_epochs"])
def test_what_is_missing_is_named_by_its_flag(missing: str) -> None:
    place = FLAGS.index(f"--{missing}")
    with pytest.raises(Refused, match=rf"--{missing}|run\.epochs"):
        made(FLAGS[:place] + FLAGS[place + 2 :])


def test_a_secret_is_neither_repeated_nor_written(here: Path) -> None:
    secret = "hf_abcdefghijklmnopqrst"
    for flags in (["--hub_token", secret], ["--model_name_or_path", secret], [secret]):
        with pytest.raises(Refused) as refused:
            train_grpo.start([*flags, *(FLAGS[2:] if "--model_name_or_path" in flags else FLAGS)])
        assert secret not in str(refused.value)
    assert list(here.iterdir()) == []


NO_REWARD = [word for word in FLAGS if word not in ("--reward_model_name_or_path", "BAAI/bge-m3")]


def test_without_a_reward_it_says_so_and_the_run_file_lies_there(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Refused) as refused:
        train_grpo.start(NO_REWARD)
    said, shown = str(refused.value), capsys.readouterr().out
    assert (
        "there is no reward: what is a completion worth?" in said and "--reward_model_name_or_path BAAI/bge-m3" in said
    )
    assert "--reward_function rewards.py:score" in said and "watch.hang_timeout = 180000000 s are 5.7 years" in said
    named = re.search(r"name of a built-in: (.+?)\.", said)
    assert named and set(named[1].split(", ")) <= set(BUILTINS)

    text = (here / "qwen25-grpo-checkpoint.toml").read_text("utf-8")
    assert [path.name for path in here.iterdir()] == ["qwen25-grpo-checkpoint.toml"]
    assert text in shown and "Saved as qwen25-grpo-checkpoint.toml." in shown
    assert "--eval_steps 500 is set aside: your_dataset_dir is no saved folder" in shown
    assert 'function = "rewards.py:score"' in text and "lr = 2e-05  # --learning_rate" in text
    (here / "whole.toml").write_text(re.sub(r"^# (?=\[\[|\w+ = )", "", text, flags=re.MULTILINE), "utf-8")
    assert load("whole.toml").reward[0].function == "rewards.py:score"


def test_with_a_reward_it_trains_on_what_it_saved(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[list[str]] = []
    monkeypatch.setattr(train_grpo, "main", lambda argv: trained.append(list(argv)) or 3)
    (here / "code").mkdir()
    flags = [*FLAGS, "--reward_function", "code/mine.py:judge", "--output_dir", "runs/a"]
    assert train_grpo.start(flags) == 3
    assert trained == [["train", "runs/a.toml"]]
    config = load("runs/a.toml")
    assert config == made(flags)[0]
    (reward, _) = config.reward
    assert (reward.kind, reward.function) == ("python", "../code/mine.py:judge")  # as seen from the run file
    assert train_grpo.start([*flags, "--reward_function", "last_number"]) == 3
    (reward, _) = load("runs/a.toml").reward
    assert (reward.kind, reward.function) == ("builtin", "last_number")


def test_the_encoder_is_the_reward_and_beside_a_function_added_to_it(here: Path) -> None:
    config, run_file = made(FLAGS)
    (encoder,) = config.reward
    assert (encoder.name, encoder.kind, encoder.path) == ("similarity", "embedding", "BAAI/bge-m3")
    assert any(
        "the cosine of completion and reference answer, by it. No projection." in one for one in run_file.remarks
    )
    config, run_file = made([*FLAGS, "--reward_function", "exact_match"])
    assert [reward.name for reward in config.reward] == ["score", "similarity"]
    assert any("added to --reward_function exact_match" in remark for remark in run_file.remarks)


def test_a_folder_with_a_classifier_is_a_reward_model(here: Path) -> None:
    (here / "judge").mkdir()
    (here / "judge/config.json").write_text('{"architectures": ["Qwen2ForSequenceClassification"]}')
    flags = [{"BAAI/bge-m3": "judge"}.get(word, word) for word in FLAGS]
    config, run_file = made(flags)
    assert [(reward.kind, reward.path) for reward in config.reward] == [("model", "judge")]
    assert any("the score of this reward model" in remark for remark in run_file.remarks)


def test_a_run_and_a_file_of_somebody_elses_are_left_alone(here: Path) -> None:
    file = here / "qwen25-grpo-checkpoint.toml"
    file.write_text("[run]\n")
    with pytest.raises(Refused, match="did not write it"):
        train_grpo.start(FLAGS)
    assert file.read_text() == "[run]\n"
    file.unlink()
    (here / "qwen25-grpo-checkpoint").mkdir()
    (here / "qwen25-grpo-checkpoint/run_status.json").write_text("{}")
    with pytest.raises(Refused, match="already holds a run"):
        train_grpo.start(FLAGS)
    assert not file.exists()


@pytest.mark.parametrize(("given", "resume"), [([], "auto"), (["auto"], "auto"), (["a/step-000001"], "a/step-000001")])
@pytest.mark.parametrize("flag", ["--resume_from_checkpoint", "--resume"])
def test_a_run_is_gone_on_with(
    here: Path, monkeypatch: pytest.MonkeyPatch, flag: str, given: list[str], resume: str
) -> None:
    (here / "qwen25-grpo-checkpoint").mkdir()
    (here / "qwen25-grpo-checkpoint/run_status.json").write_text("{}")
    monkeypatch.setattr(train_grpo, "main", lambda argv: argv == ["train", "qwen25-grpo-checkpoint.toml", *expected])
    expected = ["--resume", resume]
    assert train_grpo.start([*FLAGS, "--reward_function", "exact_match", flag, *given]) is True


@pytest.mark.parametrize("folder", [".", "./", "sub/..", "/"])
def test_the_run_file_lies_beside_any_folder(here: Path, folder: str) -> None:
    _, run_file = made([*FLAGS, "--output_dir", folder])
    resolved = Path(folder).resolve()
    assert run_file.path.name == f"{resolved.name}.toml" and run_file.path.parent.resolve() == resolved.parent


def test_only_rank_0_speaks_and_every_rank_writes(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train_grpo, "RANK", 1)
    with pytest.raises(Refused):
        train_grpo.start(NO_REWARD)
    assert capsys.readouterr().out == ""
    assert [path.name for path in here.iterdir()] == ["qwen25-grpo-checkpoint.toml"]


@pytest.mark.parametrize(
    ("listing", "more", "every", "split"),
    [
        ({"splits": ["train", "eval"]}, [], 500, "eval"),
        ({"splits": ["train", "test"]}, [], 0, ""),
        ({"splits": ["train", "test"]}, ["--dataset_test_split", "test"], 500, "test"),
        ({"no": "splits"}, [], 0, ""),
        ({"no": "splits"}, ["--data.eval-fraction", "0.1"], 500, ""),
    ],
)
def test_the_evaluation_takes_the_split_of_the_documents_conversion(
    here: Path, listing: dict[str, Any], more: list[str], every: int, split: str
) -> None:
    (here / "your_dataset_dir").mkdir()
    (here / "your_dataset_dir/dataset_dict.json").write_text(json.dumps(listing))
    config, run_file = made([*FLAGS, *more])
    assert (config.eval.every, config.data.eval_split) == (every, split)
    assert any("--eval_steps 500 is set aside" in remark for remark in run_file.remarks) == (every == 0)


def test_every_flag_has_a_key_that_exists_and_is_in_the_help() -> None:
    keys = [key for key, _ in train_grpo_flags.SETTINGS.values()]
    keys += [choice[0] for choices in train_grpo_flags.SWITCHES.values() for choice in choices.values() if choice]
    assert [key for key in keys if field_at(key.split(".")) is None] == []
    assert [flag for flag in train_grpo_flags.FLAGS if f"--{flag} " not in train_grpo_flags.usage()] == []


# Of seed.toml: setting, what the start says of it, its value in the safe twin.
UNSAFE = [
    ("rollout.max_new_tokens", 128, "a longer answer is cut off", 512),
    ("rollout.temperature", 0.7, "completions of a prompt come out alike", 1.0),
    ("rollout.top_p", 0.9, "so importance ratios and KL are biased", 1.0),
    ("rollout.repetition_penalty", 1.1, "the loops that the policy itself would write stay unseen", 1.0),
    ("optim.lr", 2e-5, "is high for full fine-tuning (lora.r = 0)", 1e-6),
    ("grpo.kl.coef", 0.5, "grpo.kl.coef = 0.5 with optim.lr = 2e-05", 0.04),
    ("grpo.kl.start", 0.01, "the policy leaves the reference while the pull is weak", 0.0),
    ("watch.hang_timeout", 180000000.0, "180000000 s are 5.7 years", 1800.0),
]


def recipe(name: str) -> RunConfig:
    return load(str(shipped.recipes() / f"{name}.toml"))


@pytest.mark.parametrize(("key", "unsafe", "said", "safe"), UNSAFE)
def test_each_unsafe_setting_of_the_seed_is_warned_of(key: str, unsafe: float, said: str, safe: float) -> None:
    seed = recipe("seed")
    assert (value(seed, key), value(recipe("seed-corrected"), key)) == (unsafe, safe)
    (warning,) = [sentence for sentence in warnings(seed) if said in sentence]
    assert f"{key} = " in warning
    section, name = key.rsplit(".", 1)
    tree = seed.model_dump()
    at = tree
    for part in section.split("."):
        at = at[part]
    at[name] = safe if key != "grpo.kl.start" else 0.1
    mended = warnings(RunConfig.model_validate(tree))
    assert warning not in mended and len(mended) <= len(warnings(seed)) - 1


def test_the_seed_has_no_other_warning_and_its_twin_has_none() -> None:
    assert len(warnings(recipe("seed"))) == len(UNSAFE)
    assert warnings(recipe("seed-corrected")) == []


def test_the_recipe_is_the_command_with_what_the_document_sets_elsewhere() -> None:
    command, seed = made(FLAGS)[0], recipe("seed")
    elsewhere = {"run.dir", "data.source", "eval.every", "grpo.kl.schedule"}
    assert {key: value(seed, key) for key in MEANT.keys() - elsewhere} == {
        key: value(command, key) for key in MEANT.keys() - elsewhere
    }
    kl = seed.grpo.kl
    assert (kl.schedule, kl.start, kl.warmup_steps, kl.min) == ("warmup_decay", 0.01, 200, 0.1)
    assert (seed.data.eval_fraction, seed.eval.every, seed.log.samples_every) == (0.1, 500, 100)


def test_short_answers_longer_limits_and_a_day_are_not_warned_of() -> None:
    tree = recipe("seed-corrected").model_dump()
    for section, key, fine in [("rollout", "max_new_tokens", 32), ("watch", "hang_timeout", 86400.0)]:
        tree[section][key] = fine
    tree["rollout"]["temperature"] = 0.8
    assert warnings(RunConfig.model_validate(tree)) == []


def test_the_recipes_score_with_the_documents_encoder() -> None:
    for name in ("seed", "seed-corrected"):
        reward = recipe(name).reward[0]
        assert (reward.kind, reward.path) == ("embedding", "BAAI/bge-m3")
