"""Each rule between keys fires, names both keys, and leaves the neighbour alone."""

import copy

import pytest

from trainer.config import RunConfig, warnings
from trainer.config.rules import RULES, broken

REWARD = {"name": "a", "kind": "python", "function": "rewards.py:f"}
GOOD = {
    "run": {"steps": 100},
    "model": {"name_or_path": "some/model"},
    "data": {"source": "prompts.jsonl"},
    "reward": [REWARD],
}


def config_with(**changes) -> RunConfig:
    """GOOD with dotted changes, `__` for a dot; None takes a key away. `reward` replaces the list."""
    tree = copy.deepcopy(GOOD)
    for name, value in changes.items():
        *outer, last = name.split("__")
        at = tree
        for part in outer:
            at = at.setdefault(part, {})
        if value is None:
            at.pop(last)
        else:
            at[last] = value
    return RunConfig.model_validate(tree)


def another(**changes) -> dict:
    return {**REWARD, **changes}


# rule, what breaks it, the keys that the message names, a neighbour that passes
CASES = [
    ("paths_can_be", {"run__dir": "a" * 256}, ["run.dir", "longer than 255 bytes"], {"run__dir": "a" * 255}),
    ("paths_can_be", {"model__name_or_path": "m\0"}, ["model.name_or_path", "NUL"], {"model__name_or_path": "m"}),
    ("paths_can_be", {"rollout__replay": "\udcff"}, ["rollout.replay", "not UTF-8"], {"rollout__replay": "\u00ff"}),
    (
        "paths_can_be",
        {"lora__start_adapter": "a/" * 2048},
        ["lora.start_adapter"],
        {"lora__start_adapter": "a/" * 2047},
    ),
    ("one_length", {"run__epochs": 1.0}, ["run.steps", "run.epochs"], {"run__steps": 0, "run__epochs": 0.5}),
    ("one_length", {"run__steps": 0}, ["run.steps", "run.epochs"], {"run__steps": 1}),
    (
        "warmup_fits",
        {"optim__schedule": "cosine", "optim__warmup_steps": 100},
        ["optim.warmup_steps", "run.steps"],
        {"optim__schedule": "cosine", "optim__warmup_steps": 99},
    ),
    (
        "data_source",
        {"data__source": ""},
        ["data.source", "rollout.replay"],
        {"data__source": "", "rollout__replay": "runs/a"},
    ),
    (
        "one_evaluation_set",
        {"data__eval_fraction": 0.1, "data__eval_split": "test"},
        ["data.eval_fraction", "data.eval_split"],
        {"data__eval_fraction": 0.1},
    ),
    (
        "one_evaluation_set",
        {"data__eval_fraction": 0.1, "data__eval_source": "eval.jsonl"},
        ["data.eval_fraction", "data.eval_source"],
        {"data__eval_source": "eval.jsonl"},
    ),
    (
        "evaluation_is_not_training",
        {"data__eval_split": "train"},
        ["data.eval_split", "data.split"],
        {"data__eval_split": "test"},
    ),
    (
        "evaluation_is_not_training",
        {"data__eval_source": "prompts.jsonl"},
        ["data.eval_source", "data.source"],
        {"data__eval_source": "eval.jsonl", "data__eval_split": "train"},
    ),
    (
        "evaluation_has_data",
        {"eval__every": 10},
        ["eval.every", "data.eval_fraction"],
        {"eval__every": 10, "data__eval_fraction": 0.1},
    ),
    (
        "evaluation_has_data",
        {"eval__best_metric": "sampled"},
        ["eval.best_metric", "eval.every"],
        {"eval__best_metric": "sampled", "eval__every": 10, "data__eval_fraction": 0.1},
    ),
    (
        "columns_differ",
        {"data__prompt_column": "answer"},
        ["data.prompt_column", "data.answer_column"],
        {"data__prompt_column": "q"},
    ),
    (
        "template_keys",
        {"data__chat_template": "off", "data__system": "s"},
        ["data.system", "data.chat_template"],
        {"data__system": "s"},
    ),
    (
        "template_keys",
        {"data__chat_template": "off", "data__chat_template_kwargs": {"a": 1}},
        ["data.chat_template_kwargs", "data.chat_template"],
        {"data__chat_template": "off"},
    ),
    (
        "optimizer_keys",
        {"optim__name": "sgd", "optim__betas": [0.9, 0.9]},
        ["optim.betas", "optim.name"],
        {"optim__name": "sgd"},
    ),
    ("optimizer_keys", {"optim__name": "sgd", "optim__eps": 1e-6}, ["optim.eps", "optim.name"], {"optim__eps": 1e-6}),
    (
        "offload_needs_adam",
        {"optim__name": "sgd", "engine__deepspeed": "zero2-offload"},
        ["optim.name", "engine.deepspeed"],
        {"engine__deepspeed": "zero2-offload"},
    ),
    (
        "offload_needs_adam",
        {"optim__name": "adamw8bit", "engine__deepspeed": "zero3-offload"},
        ['optim.name = "adamw8bit" cannot be offloaded', "CPU Adam", "without -offload"],
        {"optim__name": "adamw8bit"},
    ),
    (
        "deepspeed_name",
        {"engine__deepspeed": "zero2-ofload"},
        ["engine.deepspeed", "zero2-offload"],
        {"engine__deepspeed": "a/b.json"},
    ),
    (
        "one_batch_limit",
        {"engine__micro_batch": 4, "engine__token_budget": 4096},
        ["engine.token_budget", "engine.micro_batch"],
        {"engine__token_budget": 4096},
    ),
    (
        "hook_names",
        {"hooks__before_rollout": ["hooks.py"]},
        ["hooks.before_rollout"],
        {"hooks__before_rollout": ["a.b:c"]},
    ),
    (
        "half_precision",
        {"model__dtype": "fp16"},
        ["model.dtype", "bf16", "fp32"],
        {"model__dtype": "bf16", "engine__device": "cpu"},
    ),
    (
        "flash_attention",
        {"model__attn": "flash_attention_2", "engine__device": "cpu"},
        ["model.attn", "engine.device"],
        {"model__attn": "flash_attention_2"},
    ),
    (
        "flash_attention",
        {"model__attn": "flash_attention_2", "model__dtype": "fp32"},
        ["model.attn", "model.dtype"],
        {"model__attn": "flash_attention_2", "model__dtype": "bf16"},
    ),
    (
        "revision_of_a_folder",
        {"model__name_or_path": "/", "model__revision": "main"},
        ["model.revision", "model.name_or_path"],
        {"model__revision": "main", "model__gguf_file": "m.gguf"},
    ),
    (
        "rope_scaling",
        {"model__rope__factor": 2.0},
        ["model.rope.factor", "model.rope.type"],
        {"model__rope__factor": 0.0},
    ),
    (
        "rope_scaling",
        {"model__rope__type": "yarn"},
        ["model.rope.factor", "model.rope.type"],
        {"model__rope__type": "yarn", "model__rope__factor": 4},
    ),
    (
        "rope_scaling",
        {"model__rope__type": "linear", "model__rope__factor": 0.5},
        ["model.rope.factor", "model.rope.type"],
        {"model__rope__type": "linear", "model__rope__factor": 1.0},
    ),
    (
        "rope_scaling",
        {
            "model__rope__type": "linear",
            "model__rope__factor": 2.0,
            "model__rope__original_max_position_embeddings": 64,
        },
        ["model.rope.original_max_position_embeddings", "model.rope.type"],
        {"model__rope__type": "yarn", "model__rope__factor": 2.0, "model__rope__original_max_position_embeddings": 64},
    ),
    (
        "adapter_keys",
        {"lora__r": 0, "lora__start_adapter": "a"},
        ["lora.start_adapter", "lora.r"],
        {"lora__start_adapter": "a"},
    ),
    (
        "adapter_keys",
        {"lora__r": 0, "lora__alpha": 64.0},
        ["lora.alpha", "lora.r"],
        {"lora__r": 0, "lora__alpha": 32.0},
    ),
    (
        "adapter_targets",
        {"lora__targets": ["all-linear", "q_proj"]},
        ["lora.targets"],
        {"lora__targets": ["q_proj", "v_proj"]},
    ),
    (
        "adapter_targets",
        {"lora__targets": ["q_proj", "q_proj"]},
        ["lora.targets", "q_proj"],
        {"lora__targets": ["q_proj"]},
    ),
    (
        "quantised_weights_are_frozen",
        {"quant__bits": 4, "lora__r": 0},
        ["quant.bits", "lora.r"],
        {"quant__bits": 0, "lora__r": 0},
    ),
    ("quantised_weights_are_frozen", {"quant__double_quant": False}, ["quant.double_quant", "quant.bits"], {}),
    (
        "reference_of_4_bit",
        {"quant__bits": 4, "reference__mode": "cpu"},
        ["reference.mode", "quant.bits", '"auto"'],
        {"quant__bits": 4},
    ),
    (
        "reference_is_used",
        {"grpo__kl__coef": 0, "reference__mode": "cpu"},
        ["reference.mode", "grpo.kl.coef"],
        {"grpo__kl__coef": 0},
    ),
    (
        "reference_is_used",
        {"grpo__kl__coef": 0, "log__histogram_every": 5},
        ["log.histogram_every = 5", "grpo.kl.coef = 0"],
        {"log__histogram_every": 5},
    ),
    (
        "reference_adapter",
        {"reference__mode": "adapter", "lora__r": 0},
        ["reference.mode", "lora.r"],
        {"reference__mode": "adapter"},
    ),
    (
        "reference_device",
        {"reference__mode": "gpu", "engine__device": "cpu"},
        ["reference.mode", "engine.device"],
        {"reference__mode": "cpu", "engine__device": "cpu"},
    ),
    ("some_reward", {"reward": []}, ["[[reward]]", "rollout.replay"], {"reward": [], "rollout__replay": "runs/a"}),
    (
        "some_reward",
        {"reward": [another(weight=0)]},
        ["reward.weight"],
        {"reward": [another(weight=0), another(name="b")]},
    ),
    ("names_differ", {"reward": [REWARD, REWARD]}, ["reward.name", '"a"'], {"reward": [REWARD, another(name="A")]}),
    ("kind_has_its_keys", {"reward": [another(function="")]}, ["reward.a.kind", "reward.a.function"], {}),
    ("kind_has_its_keys", {"reward": [another(path="x")]}, ["reward.a.path", "reward.a.kind"], {}),
    (
        "kind_has_its_keys",
        {"reward": [another(pattern="x")]},
        ["reward.a.pattern", "reward.a.kind"],
        {"reward": [another(kind="builtin", function="regex", pattern="x")]},
    ),
    (
        "function_name",
        {"reward": [another(function="rewards.py")]},
        ["reward.a.function"],
        {"reward": [another(function="a.b:c")]},
    ),
    (
        "function_name",
        {"reward": [another(kind="builtin")]},
        ["reward.a.function", 'kind = "python"'],
        {"reward": [another(kind="builtin", function="exact_match")]},
    ),
    (
        "concurrency_has_calls",
        {"reward": [another(kind="embedding", path="m", concurrency=4)]},
        ["reward.a.concurrency = 4", "embedding"],
        {"reward": [another(concurrency=4)]},
    ),
    (
        "hang_outlasts_calls",
        {"watch__hang_timeout": 74.0},
        ["reward.a.timeout = 30", "watch.hang_timeout = 74", "more than 29.6 s", "Raise watch.hang_timeout to 75"],
        {"watch__hang_timeout": 75.0},
    ),
    (
        "hang_outlasts_calls",
        {"watch__phase_timeout": {"evaluate": 74.0}},
        ["more than 29.6 s", "0.4 of watch.phase_timeout.evaluate = 74 s", "Raise watch.phase_timeout.evaluate to 75"],
        {"watch__hang_timeout": 74.0, "watch__phase_timeout": {"evaluate": 75.0, "reward": 75.0}},
    ),
    ("key_variable", {"reward": [another(key_env="MY KEY")]}, ["reward.a.key_env"], {}),
    (
        "a_group_has_two",
        {"rollout__num_generations": 1},
        ["rollout.num_generations", "grpo.baseline"],
        {"rollout__num_generations": 2},
    ),
    ("dual_clip_above_clip", {"grpo__dual_clip": 1.2}, ["grpo.dual_clip", "grpo.eps_high"], {"grpo__dual_clip": 1.3}),
    (
        "dual_clip_above_clip",
        {"grpo__dual_clip": 3.0, "grpo__loss_type": "cispo"},
        ["grpo.dual_clip", "grpo.loss_type"],
        {"grpo__loss_type": "cispo"},
    ),
    (
        "k1_has_no_gradient",
        {"grpo__kl__estimator": "k1"},
        ["grpo.kl.estimator", "grpo.kl.placement"],
        {"grpo__kl__estimator": "k1", "grpo__kl__placement": "reward"},
    ),
    ("schedule_has_its_keys", {"grpo__kl__warmup_steps": 5}, ["grpo.kl.warmup_steps", "grpo.kl.schedule"], {}),
    (
        "schedule_has_its_keys",
        {"grpo__kl__schedule": "warmup_constant", "grpo__kl__warmup_steps": 5, "grpo__kl__min": 0.01},
        ["grpo.kl.min", "grpo.kl.schedule"],
        {"grpo__kl__schedule": "warmup_decay", "grpo__kl__warmup_steps": 5, "grpo__kl__min": 0.01},
    ),
    (
        "schedule_has_its_keys",
        {"grpo__kl__schedule": "warmup_constant"},
        ["grpo.kl.warmup_steps", "grpo.kl.schedule"],
        {"grpo__kl__schedule": "warmup_constant", "grpo__kl__warmup_steps": 5},
    ),
    (
        "schedule_has_its_keys",
        {"grpo__kl__schedule": "adaptive", "grpo__kl__target": 0.02},
        ["grpo.kl.horizon", "grpo.kl.schedule"],
        {"grpo__kl__schedule": "adaptive", "grpo__kl__target": 0.02, "grpo__kl__horizon": 100},
    ),
    (
        "schedule_has_its_keys",
        {"grpo__kl__schedule": "adaptive", "grpo__kl__horizon": 100},
        ["grpo.kl.target", "grpo.kl.schedule"],
        {},
    ),
    (
        "schedule_has_its_keys",
        {"grpo__kl__schedule": "adaptive", "grpo__kl__target": 0.02, "grpo__kl__horizon": 100, "grpo__kl__start": 0.01},
        ["grpo.kl.start", "grpo.kl.schedule"],
        {},
    ),
    (
        "schedule_order",
        {"grpo__kl__schedule": "warmup_decay", "grpo__kl__warmup_steps": 5, "grpo__kl__min": 0.05},
        ["grpo.kl.min", "grpo.kl.coef"],
        {"grpo__kl__schedule": "warmup_decay", "grpo__kl__warmup_steps": 5, "grpo__kl__min": 0.04},
    ),
    (
        "schedule_order",
        {"grpo__kl__schedule": "warmup_constant", "grpo__kl__warmup_steps": 5, "grpo__kl__start": 0.05},
        ["grpo.kl.start", "grpo.kl.coef"],
        {"grpo__kl__schedule": "warmup_constant", "grpo__kl__warmup_steps": 5, "grpo__kl__start": 0.03},
    ),
    (
        "schedule_of_nothing",
        {"grpo__kl__schedule": "adaptive", "grpo__kl__target": 0.02, "grpo__kl__horizon": 100, "grpo__kl__coef": 0},
        ["grpo.kl.coef", "grpo.kl.schedule"],
        {"grpo__kl__coef": 0},
    ),
    (
        "schedule_fits",
        {"grpo__kl__schedule": "warmup_decay", "grpo__kl__warmup_steps": 100},
        ["grpo.kl.warmup_steps", "run.steps"],
        {"grpo__kl__schedule": "warmup_decay", "grpo__kl__warmup_steps": 99},
    ),
    (
        "ratio_is_used",
        {"grpo__kl__ratio_weighted": False, "grpo__kl__placement": "reward"},
        ["grpo.kl.ratio_weighted", "grpo.kl.placement"],
        {"grpo__kl__ratio_weighted": False},
    ),
    (
        "rollback_changes_something",
        {"watch__on_garble": "rollback", "checkpoint__every": 0},
        ['watch.on_garble = "rollback"', "checkpoint.every = 0"],
        {"watch__on_garble": "rollback", "checkpoint__every": 1},
    ),
    (
        "rollback_changes_something",
        {"watch__on_alarm": "rollback", "rollout__replay": "runs/a"},
        ["watch.on_alarm", 'rollout.replay = "runs/a"'],
        {"watch__on_alarm": "stop", "rollout__replay": "runs/a"},
    ),
    ("stop_strings_differ", {"rollout__stop": ["a", "a"]}, ["rollout.stop"], {"rollout__stop": ["a", "b"]}),
    (
        "not_yet",
        {"rollout__engine": "vllm"},
        ['rollout.engine = "vllm" is not available in this version; use "shared" or "hf".'],
        {},
    ),
    *(
        (
            "address",
            {"reward": [{"name": "a", "kind": "http", "url": url, "key_env": "KEY"}]},
            ["reward.a.url", said],
            {"reward": [{"name": "a", "kind": "http", "url": right, "key_env": "KEY"}]},
        )
        for url, said, right in (
            ("file:///etc/passwd", "expected http://", "https://a.example/score"),
            ("a.example:8000", "expected http://", "https://a.example:8000"),
            ("https://me@a.example", "expected http://", "https://a.example"),
            ("https://a.example:port", "Port could not be cast", "https://a.example:1"),
            ("https://a.example/score?k=1", "without spaces, ?", "https://a.example/score"),
            ("http://10.0.0.5:8000", "in the clear", "http://127.0.0.1:8000"),
            ("http://localhost.a.example", "in the clear", "http://localhost:8000"),
            ("http://127.0.0.1.a.example", "in the clear", "http://[::1]:8000"),
        )
    ),
    (
        "key_is_named",
        {"reward": [{"name": "a", "kind": "openai", "model": "m"}]},
        ["reward.a.key_env", "OPENAI_API_KEY", "url"],
        {"reward": [{"name": "a", "kind": "openai", "model": "m", "url": "http://10.0.0.5:8000/v1"}]},
    ),
    (
        "key_is_named",
        {"reward": [{"name": "a", "kind": "dashcope", "model": "m"}]},
        ["reward.a.key_env", "DASHSCOPE_API_KEY"],
        {"reward": [{"name": "a", "kind": "dashcope", "model": "m", "key_env": "DASHSCOPE_API_KEY"}]},
    ),
]


def fired(config: RunConfig) -> dict[str, str]:
    return {rule.__name__: "\n".join(problem.text for problem in rule(config)) for rule in RULES if list(rule(config))}


def test_the_good_config_breaks_no_rule():
    assert broken(config_with()) == []


@pytest.mark.parametrize(("rule", "bad", "named", "neighbour"), CASES)
def test_rule(rule, bad, named, neighbour):
    said = fired(config_with(**bad))
    assert rule in said, said
    assert all(part in said[rule] for part in named), said[rule]
    assert rule not in fired(config_with(**neighbour))


def test_every_rule_has_a_case():
    assert {rule.__name__ for rule in RULES} == {case[0] for case in CASES}


def test_every_problem_points_at_a_key_that_exists():
    from trainer.config.fields import field_at

    for _, bad, _, _ in CASES:
        for problem in broken(config_with(**bad)):
            assert all(field_at(key) is not None for key in problem.keys), problem


def test_all_violations_are_collected():
    config = config_with(run__steps=0, grpo__kl__estimator="k1", reward=[], model__dtype="fp16")
    assert len(broken(config)) == 4


def test_a_key_env_that_is_a_key_is_not_repeated():
    (problem,) = [
        p
        for p in broken(config_with(reward=[another(kind="openai", model="m", key_env="a b c 123")]))
        if "key_env:" in p.text
    ]
    assert "123" not in problem.text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rollout__top_p": 0.9}, "rollout.top_p = 0.9"),
        ({"rollout__top_k": 20}, "rollout.top_k = 20"),
        ({"rollout__min_p": 0.1}, "rollout.min_p = 0.1"),
        ({"rollout__repetition_penalty": 1.1}, "rollout.repetition_penalty = 1.1"),
    ],
)
def test_b27_sampling_filters_warn_that_scored_is_not_sampled(change, said):
    (warning,) = warnings(config_with(**change))
    assert said in warning and "sampled from another distribution than the one that is scored" in warning


@pytest.mark.parametrize(
    ("change", "said", "neighbour"),
    [
        ({"lora__dropout": 0.1}, "lora.dropout", {"lora__dropout": 0.0}),
        ({"optim__lr": 1e-4}, "optim.lr = 0.0001 is high for LoRA", {"optim__lr": 5e-5}),
        ({"optim__lr": 2e-5, "lora__r": 0}, "high for full fine-tuning", {"optim__lr": 5e-6, "lora__r": 0}),
        ({"grpo__kl__coef": 0.5}, "grpo.kl.coef = 0.5 with optim.lr", {"grpo__kl__coef": 0.1}),
        ({"grpo__kl__coef": 0.5}, "grpo.kl.coef = 0.5 with optim.lr", {"grpo__kl__coef": 0.5, "optim__lr": 1e-5}),
        ({"run__steps": 5}, "optim.lr is reached. Lower optim.warmup_steps, or raise run.steps.", {"run__steps": 11}),
        (
            {"grpo__kl__schedule": "warmup_constant", "grpo__kl__warmup_steps": 100},
            "grpo.kl.coef is reached. Lower grpo.kl.warmup_steps, or raise run.steps.",
            {"grpo__kl__schedule": "warmup_constant", "grpo__kl__warmup_steps": 99},
        ),
        ({"grpo__mask_truncated": True}, "grpo.mask_truncated", {}),
        (
            {"grpo__kl__placement": "reward"},
            'only "k1"',
            {"grpo__kl__placement": "reward", "grpo__kl__estimator": "k1"},
        ),
        ({"grpo__loss_type": "gspo", "grpo__updates_per_rollout": 2}, "gspo", {"grpo__loss_type": "gspo"}),
        ({"model__dtype": "bf16", "engine__deepspeed": "zero0"}, "zero0", {"model__dtype": "bf16"}),
    ],
)
def test_warnings(change, said, neighbour):
    assert any(said in warning for warning in warnings(config_with(**change)))
    assert warnings(config_with(**neighbour)) == []
