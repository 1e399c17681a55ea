"""What DeepSpeed is given, and what a DeepSpeed JSON may say beside a run file."""

import ast
import importlib.util
import json
import re
from pathlib import Path

import pytest

from trainer.config import RunConfig
from trainer.config.deepspeed_json import others, resolve, zero
from trainer.config.shipped import DEEPSPEED, ds_configs
from trainer.errors import Refused


def run_config(**changes) -> RunConfig:
    """16 completions a step; dotted changes with `__` for the dot."""
    tree = {"model": {"name_or_path": "m"}, "run": {"steps": 40}, "rollout": {"prompts_per_step": 2}}
    for name, value in changes.items():
        section, key = name.split("__")
        tree.setdefault(section, {})[key] = value
    return RunConfig.model_validate(tree)


@pytest.fixture
def user_json(tmp_path):
    def write(content) -> str:
        file = tmp_path / "mine.json"
        file.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return str(file)

    return write


@pytest.fixture
def resolved(user_json):
    def call(content, *, world_size=1, dtype="bf16", hidden_size=64, **changes):
        config = run_config(engine__deepspeed=user_json(content), **changes)
        return resolve(config, world_size, dtype=dtype, hidden_size=hidden_size)

    return call


@pytest.fixture
def refusal(resolved):
    def call(content, **keywords) -> str:
        with pytest.raises(Refused) as caught:
            resolved(content, **keywords)
        return str(caught.value)

    return call


ZERO2 = {"zero_optimization": {"stage": 2}}


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("name", DEEPSPEED)
def test_shipped_configs_resolve_to_the_numbers_of_the_run(name, dtype):
    got = resolve(run_config(engine__deepspeed=name, optim__max_grad_norm=0.0), 4, dtype=dtype, hidden_size=64)
    assert got["zero_optimization"]["stage"] == int(name[4])
    assert (got["train_batch_size"], got["train_micro_batch_size_per_gpu"], got["gradient_accumulation_steps"]) == (
        4,
        1,
        1,
    )
    # Absent would clip at 1.0.
    assert got["gradient_clipping"] == 0.0
    assert got["zero_allow_untested_optimizer"] is True and got["wall_clock_breakdown"] is False
    assert got["steps_per_print"] > 10**6
    assert got["zero_force_ds_cpu_optimizer"] is name.endswith("-offload")
    assert got["bf16"]["enabled"] is (dtype == "bf16") and got["fp16"]["enabled"] is False
    sums_in_fp32 = dtype == "bf16" and name != "zero0"
    assert got.get("data_types") == ({"grad_accum_dtype": "fp32"} if sums_in_fp32 else None)
    assert got["bf16"].get("check_grad_overflow") is (True if dtype == "bf16" else None)
    assert got["communication_data_type"] == "fp32"
    assert "auto" not in json.dumps(got)


@pytest.mark.parametrize("name", DEEPSPEED)
def test_b13_shipped_configs_do_not_overlap_the_reduction(name):
    got = resolve(run_config(engine__deepspeed=name), 1, dtype="fp32", hidden_size=64)
    assert got["zero_optimization"]["overlap_comm"] is False


def test_shipped_configs_hold_nothing_that_the_run_file_owns():
    for file in ds_configs().glob("*.json"):
        assert set(json.loads(file.read_text())) == {"zero_optimization"}, file.name
    assert {file.stem for file in ds_configs().glob("*.json")} == set(DEEPSPEED)


def test_every_key_of_the_shipped_configs_has_its_reason():
    readme = (ds_configs() / "README.md").read_text()
    for file in ds_configs().glob("*.json"):
        for key in json.loads(file.read_text())["zero_optimization"]:
            assert f"`{key}" in readme, (file.name, key)


HF_AUTO = {
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}


def test_b74_the_hugging_face_json_with_auto_everywhere_is_resolved(resolved):
    got = resolved(HF_AUTO, world_size=2, optim__max_grad_norm=0.3)
    assert "auto" not in json.dumps(got)
    assert got["gradient_clipping"] == 0.3 and got["bf16"]["enabled"] is True and got["fp16"] == {"enabled": False}
    sizes = got["zero_optimization"]
    assert sizes["reduce_bucket_size"] == 64 * 64
    assert sizes["stage3_prefetch_bucket_size"] == 3686  # int(0.9 * 64 * 64)
    assert sizes["stage3_param_persistence_threshold"] == 640
    assert sizes["overlap_comm"] is True  # the user's own word stays
    assert "optimizer" not in got and "scheduler" not in got


@pytest.mark.parametrize(
    "path",
    [
        "zero_optimization.stage",
        "zero_optimization.sub_group_size",
        "zero_optimization.allgather_bucket_size",
        "zero_optimization.stage3_max_live_parameters",
        "zero_optimization.contiguous_gradients",
        "zero_optimization.offload_optimizer",
        "zero_optimization.offload_optimizer.device",
        "zero_optimization.offload_optimizer.pin_memory",
        "optimizer.params.freeze_step",
        "scheduler.params.cycle_min_lr",
        "aio.block_size",
    ],
)
def test_b74_auto_that_nothing_answers_is_refused_by_its_path(refusal, path):
    block: dict = {"zero_optimization": {"stage": 2}}
    *outer, last = path.split(".")
    at = block
    for name in outer:
        at = at.setdefault(name, {})
    at[last] = "auto"
    assert re.search(rf"^  {re.escape(path)} is ", refusal(block), re.M)


def test_b74_auto_sizes_without_a_hidden_size_are_refused_by_their_path(refusal):
    message = refusal(HF_AUTO, hidden_size=0)
    assert message.count('is "auto", which needs the hidden size') == 3
    assert "zero_optimization.stage3_prefetch_bucket_size" in message


@pytest.mark.parametrize(
    ("block", "changes", "said"),
    [
        ({"gradient_clipping": 0.5}, {}, ["gradient_clipping is 0.5", "optim.max_grad_norm = 1"]),
        ({"train_batch_size": 32}, {}, ["train_batch_size is 32", "16 completions", "rollout.prompts_per_step = 2 x"]),
        ({"train_micro_batch_size_per_gpu": 4}, {}, ["engine.micro_batch = 0", "engine.token_budget"]),
        ({"train_micro_batch_size_per_gpu": 4}, {"engine__micro_batch": 2}, ["is 4", "engine.micro_batch = 2"]),
        ({"gradient_accumulation_steps": 3}, {"engine__micro_batch": 2}, ["is 3", "8 (16 completions"]),
        ({"gradient_accumulation_steps": 3}, {"engine__micro_batch": 5}, ["no whole number"]),
        ({"gradient_accumulation_steps": True}, {}, ["gradient_accumulation_steps is true"]),
        ({"optimizer": {"type": "Lamb"}}, {}, ['optimizer.type is "Lamb"', 'optim.name = "adamw"']),
        ({"optimizer": {"type": "AdamW"}}, {"optim__name": "sgd"}, ["optimizer.type", 'optim.name = "sgd"']),
        ({"optimizer": {"params": {"lr": 1e-4}}}, {}, ["optimizer.params.lr is 0.0001", "optim.lr = 2e-05"]),
        (
            {"optimizer": {"params": {"betas": [0.9, 0.95]}}},
            {},
            ["optimizer.params.betas", "optim.betas = [0.9, 0.999]"],
        ),
        (
            {"optimizer": {"params": {"weight_decay": 0.01}}},
            {},
            ["optimizer.params.weight_decay", "optim.weight_decay = 0"],
        ),
        ({"optimizer": {"params": {"adam_w_mode": False}}}, {}, ["optimizer.params.adam_w_mode is false"]),
        (
            {"optimizer": {"params": {"max_grad_norm": 1}}},
            {},
            ["optimizer.params.max_grad_norm", "no key of the run file"],
        ),
        ({"optimizer": "AdamW"}, {}, ['optimizer is "AdamW", expected an object']),
        ({"optimizer": {"params": 3}}, {}, ["optimizer.params is 3"]),
        (
            {"scheduler": {"type": "OneCycle"}},
            {},
            ['scheduler.type is "OneCycle"', 'optim.schedule = "constant"', "WarmupLR"],
        ),
        ({"scheduler": {"params": {"warmup_num_steps": 5}}}, {}, ["warmup_num_steps is 5", "optim.warmup_steps = 10"]),
        ({"scheduler": {"params": {"warmup_type": "log"}}}, {}, ["warmup_type", "linear"]),
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 41}}},
            {"optim__schedule": "linear"},
            ["total_num_steps is 41", "40 updates"],
        ),
    ],
)
def test_numbers_that_disagree_name_both_sides(refusal, block, changes, said):
    message = refusal(ZERO2 | block, **changes)
    assert all(part in message for part in said), message


def test_numbers_that_agree_are_accepted(resolved):
    block = ZERO2 | {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 2e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"total_num_steps": 40, "warmup_num_steps": 10, "warmup_type": "linear", "warmup_min_lr": 0},
        },
        "bf16": {"enabled": True},
        "fp16": {"enabled": False},
    }
    got = resolved(block, world_size=2, engine__micro_batch=4, optim__schedule="linear")
    assert (got["train_batch_size"], got["train_micro_batch_size_per_gpu"], got["gradient_accumulation_steps"]) == (
        2,
        1,
        1,
    )


def test_accumulation_of_one_is_deepspeeds_default_and_says_nothing(resolved):
    assert resolved(ZERO2 | {"gradient_accumulation_steps": 1})["gradient_accumulation_steps"] == 1


TRIANGLE = ZERO2 | {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 8}


def test_b75_triangle_for_two_ranks_on_one_asks_for_the_launcher(refusal):
    message = refusal(TRIANGLE, engine__micro_batch=1)
    assert "16 = 1 x 8 x 2 fits 2 ranks; this job has 1" in message
    assert "Was the launcher used?" in message and "--gpus" in message
    # Where each number comes from.
    assert "gradient_accumulation_steps is 8" in message and "engine.micro_batch = 1" in message


def test_b75_same_triangle_on_two_ranks_is_right(resolved):
    assert resolved(TRIANGLE, world_size=2, engine__micro_batch=1)["train_batch_size"] == 2


def test_b75_on_several_ranks_nobody_asks_for_the_launcher(refusal):
    message = refusal(TRIANGLE, world_size=4, engine__micro_batch=1)
    assert "fits 2 ranks; this job has 4" in message and "Was the launcher used?" not in message


def test_b75_triangle_that_fits_no_number_of_ranks(refusal):
    message = refusal(TRIANGLE | {"train_batch_size": 18})
    assert "18 is no multiple of 1 x 8" in message


def test_b77_offload_with_another_optimizer_is_refused(refusal):
    block = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    message = refusal(block, optim__name="sgd")
    assert (
        "zero_optimization.offload_optimizer" in message and 'optim.name = "sgd"' in message and "CPU Adam" in message
    )


def test_b77_offload_with_adamw_insists_on_cpu_adam(resolved):
    block = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    assert resolved(block)["zero_force_ds_cpu_optimizer"] is True
    block["zero_optimization"]["offload_optimizer"]["device"] = "none"
    assert resolved(block, optim__name="sgd")["zero_force_ds_cpu_optimizer"] is False
    block["zero_optimization"]["offload_optimizer"] = None
    assert resolved(block)["zero_force_ds_cpu_optimizer"] is False


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ({"stage": 4}, ["zero_optimization.stage is 4", "0, 1, 2 or 3"]),
        ({"stage": True}, ["zero_optimization.stage is true"]),
        ({"stage": "2"}, ['zero_optimization.stage is "2"']),
        (
            {"stage": 2, "overlap_com": True},
            ["zero_optimization.overlap_com is not a key", "Did you mean overlap_comm?"],
        ),
        ({"stage": 2, "reduce_bucket_size": "5e8"}, ["reduce_bucket_size", "without quotes"]),
        ({"stage": 2, "reduce_bucket_size": 1.5}, ["reduce_bucket_size is 1.5"]),
        ({"stage": 2, "overlap_comm": 1}, ["overlap_comm is 1", "true or false"]),
        ({"stage": 2, "offload_param": {"device": "cpu"}}, ["offload_param needs ZeRO stage 3"]),
        ({"stage": 0, "offload_optimizer": {"device": "cpu"}}, ["offload_optimizer needs ZeRO stage 1"]),
        ({"stage": 2, "offload_optimizer": "cpu"}, ['offload_optimizer is "cpu"', '{"device": "cpu"}']),
        ({"stage": 2, "offload_optimizer": {"device": "nvme"}}, ["offload_optimizer.device", "not supported"]),
        ({"stage": 2, "offload_optimizer": {"devise": "cpu"}}, ["offload_optimizer.devise", "Did you mean device?"]),
        ({"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}, ["offload_optimizer.ratio is 0.5"]),
        ({"stage": 2, "cpu_offload": True}, ["zero_optimization.cpu_offload", "offload_optimizer"]),
        ({"stage": 2, "zenflow": {}}, ["zero_optimization.zenflow"]),
        ({"stage": 3, "zero_quantized_gradients": True}, ["zero_quantized_gradients", "rounds gradients"]),
        ({"stage": 3, "zero_quantized_weights": True}, ["zero_quantized_weights"]),
        ({"stage": 1, "compute_grad_norm": False}, ["compute_grad_norm", "clipping needs the norm"]),
        ([2], ["zero_optimization is [2], expected an object"]),
    ],
)
def test_zero_block(refusal, block, said):
    message = refusal({"zero_optimization": block})
    assert all(part in message for part in said), message


def test_stage_3_has_no_copies_to_compare(refusal, resolved):
    message = refusal({"zero_optimization": {"stage": 3}}, watch__checksum_every=5)
    assert "zero_optimization.stage is 3" in message and "watch.checksum_every = 0, or stage 2" in message
    assert resolved({"zero_optimization": {"stage": 2}}, watch__checksum_every=5)


def test_b57_shards_are_not_added_up(refusal, resolved):
    """-0.0 + 0.0 is 0.0: a sum changes the bytes of packed weights."""
    block = {"zero_optimization": {"stage": 3, "stage3_use_all_reduce_for_fetch_params": True}}
    assert "changes packed 4-bit weights" in refusal(block, quant__bits=4)
    resolved(block)


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ({"prescale_gradients": True}, "prescale_gradients is true"),
        ({"gradient_predivide_factor": 2.0}, "gradient_predivide_factor is 2.0"),
        ({"gradient_allreduce_op": "sum"}, 'gradient_allreduce_op is "sum"'),
        ({"communication_data_type": "bf16"}, 'communication_data_type is "bf16"'),
        ({"managed_gradient_accumulation": False}, "managed_gradient_accumulation is false"),
        ({"sparse_gradients": True}, "sparse_gradients is true"),
        ({"wall_clock_breakdown": True}, "wall_clock_breakdown is true"),
        ({"torch_autocast": {"enabled": True}}, "torch_autocast is refused"),
        ({"amp": {"enabled": True}}, "amp is"),
        ({"data_efficiency": {"enabled": True}}, "data_efficiency is refused"),
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, "engine.gradient_checkpointing"),
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel is refused"),
        ({"wandb": {"enabled": True}}, "log.report_to"),
        (
            {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
            "bf16.bf16_master_weights_and_grads is true",
        ),
        ({"bf16": {"check_grad_overflow": False}}, "bf16.check_grad_overflow is false"),
        ({"bf16": {"enable": True}}, "bf16.enable is not a key"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, 'data_types.grad_accum_dtype is "bf16"'),
        ({"data_types": {"param_dtype": "fp32"}}, 'data_types.param_dtype is "fp32"'),
        ({"train_bath_size": 16}, "Did you mean train_batch_size?"),
        ({"zero_optimisation": {}}, "Did you mean zero_optimization?"),
        ({"bfloat16": {"enabled": True}}, "bfloat16 is not a key"),
    ],
)
def test_what_would_change_the_mathematics_is_refused(refusal, block, said):
    assert said in refusal(ZERO2 | block)


@pytest.mark.parametrize(
    "block",
    [
        {"prescale_gradients": False, "gradient_predivide_factor": 1.0, "gradient_allreduce_op": "mean"},
        {"communication_data_type": "fp32", "sparse_gradients": False, "managed_gradient_accumulation": True},
        {"torch_autocast": {"enabled": False}, "wandb": {"enabled": False}, "data_efficiency": {"enabled": False}},
        {"activation_checkpointing": {"partition_activations": False, "number_checkpoints": None, "profile": "auto"}},
        {"data_types": {"grad_accum_dtype": "fp32", "param_dtype": "bf16", "keep_in_fp32_modules": "auto"}},
        {"zero_allow_untested_optimizer": False, "steps_per_print": 10, "dump_state": False},
    ],
)
def test_what_changes_nothing_is_accepted(resolved, block):
    got = resolved(ZERO2 | block)
    assert got["zero_allow_untested_optimizer"] is True and got["communication_data_type"] == "fp32"


def test_b78_both_precisions_enabled(refusal):
    message = refusal(ZERO2 | {"fp16": {"enabled": True}, "bf16": {"enabled": True}})
    assert "bf16.enabled and fp16.enabled are both true" in message and "model.dtype" in message


def test_b78_fp16_is_refused_with_its_reason(refusal):
    assert "fp16.enabled is true: fp16 is refused" in refusal(ZERO2 | {"fp16": {"enabled": True}}, dtype="fp32")


@pytest.mark.parametrize(("enabled", "dtype"), [(True, "fp32"), (False, "bf16")])
def test_b78_bf16_that_disagrees_names_both_sides(refusal, enabled, dtype):
    message = refusal(ZERO2 | {"bf16": {"enabled": enabled}}, dtype=dtype)
    assert f"bf16.enabled is {str(enabled).lower()}" in message
    assert f'model.dtype = "auto", which is {dtype} on this device' in message


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bf16_master_weights_are_refused_with_both_keys_and_the_numbers(refusal, stage):
    bf16 = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    message = refusal({"bf16": bf16, "zero_optimization": {"stage": stage}}, optim__lr=1e-6)
    for part in ("bf16.bf16_master_weights_and_grads", "optim.lr = 1e-06", "steps under 3.1e-05", "adamw8bit"):
        assert part in message
    assert "bf16.bf16_optimizer_states is true" in message


def test_stage_0_in_bf16_cannot_sum_in_fp32(refusal):
    block = {"zero_optimization": {"stage": 0}, "data_types": {"grad_accum_dtype": "fp32"}}
    assert "DeepSpeed cannot do it in stage 0" in refusal(block)


WORST = {
    "train_batch_size": 7,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 3,
    "gradient_clipping": 5,
    "optimizer": {"type": "Lamb", "params": {"lr": 1, "foo": 2}, "bar": 1},
    "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0}},
    "fp16": {"enabled": True, "loss_scale": 0},
    "bf16": {"enabled": True, "immediate_grad_update": True},
    "data_types": {"grad_accum_dtype": "fp16"},
    "zero_optimization": {
        "stage": 7,
        "overlap_com": True,
        "sub_group_size": "auto",
        "offload_optimizer": {"device": "nvme"},
    },
    "prescale_gradients": True,
    "torch_autocast": {"enabled": True},
    "nonsense": 1,
}


def test_all_contradictions_in_one_message_with_a_json_that_is_accepted(refusal, resolved):
    message = refusal(WORST)
    problems, _, corrected = message.partition("the JSON is:\n")
    for path in (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "optimizer.type",
        "optimizer.params.lr",
        "optimizer.params.foo",
        "optimizer.bar",
        "scheduler.type",
        "scheduler.params.cycle_min_lr",
        "fp16.enabled",
        "bf16.enabled",
        "bf16.immediate_grad_update",
        "data_types.grad_accum_dtype",
        "zero_optimization.stage",
        "zero_optimization.overlap_com",
        "zero_optimization.sub_group_size",
        "zero_optimization.offload_optimizer.device",
        "prescale_gradients",
        "torch_autocast",
        "nonsense",
    ):
        assert re.search(rf"^  {re.escape(path)} ", problems, re.M), path
    assert resolved(json.loads(corrected))["zero_optimization"]["stage"] == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", ["mine.json:1", "not valid JSON"]),
        ('{\n"a": 1,\n}', ["mine.json:3", "not valid JSON"]),
        ('{\n// stage\n"zero_optimization": {}}', ["mine.json:2", "JSON has no comments"]),
        ("[1]", ["expected an object"]),
        ('{"zero_optimization": {"stage": 1, "stage": 2}}', ['the key "stage" is given twice']),
        ('{"gradient_clipping": NaN}', ["NaN is no number"]),
        ('{"gradient_clipping": 1e999}', ["1e999 is no number"]),
        ('{"gradient_clipping": ' + "1" * 5000 + "}", ["mine.json"]),
        ("[" * 5000, ["mine.json"]),
    ],
)
def test_files_that_are_no_json(refusal, text, said):
    message = refusal(text)
    assert all(part in message for part in said), message


def test_missing_json_and_a_directory(tmp_path):
    for path, said in (
        (tmp_path / "no.json", "there is no such DeepSpeed configuration"),
        (tmp_path, "cannot be read"),
    ):
        with pytest.raises(Refused, match=said):
            resolve(run_config(engine__deepspeed=str(path)), 1, dtype="fp32")


def test_a_byte_order_mark_is_read(resolved):
    assert resolved("\ufeff" + json.dumps(ZERO2))["zero_optimization"]["stage"] == 2


def deepspeed_source(relative: str) -> ast.Module:
    """Source of the installed DeepSpeed, read without importing it."""
    spec = importlib.util.find_spec("deepspeed")
    assert spec is not None and spec.origin is not None
    return ast.parse((Path(spec.origin).parent / relative).read_text(encoding="utf-8"))


def model_fields(module: ast.Module, name: str) -> set[str]:
    """The JSON names of a pydantic model: the alias where a field has one."""
    found = set()
    (model,) = [node for node in module.body if isinstance(node, ast.ClassDef) and node.name == name]
    for node in model.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            keywords = node.value.keywords if isinstance(node.value, ast.Call) else []
            alias = next((word.value.value for word in keywords if word.arg == "alias"), None)
            found.add(alias or node.target.id)
    return found


def test_the_zero_keys_are_those_of_the_installed_deepspeed():
    known = zero.KEYS | zero.NEUTRAL.keys() | zero.DEPRECATED.keys()
    fields = model_fields(deepspeed_source("runtime/zero/config.py"), "DeepSpeedZeroConfig")
    assert fields <= known, fields - known
    removed = {"mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param"}
    assert known - fields == removed


def test_the_offload_keys_are_those_of_the_installed_deepspeed():
    module = deepspeed_source("runtime/zero/offload_config.py")
    assert model_fields(module, "DeepSpeedZeroOffloadOptimizerConfig") == zero.OFFLOAD_KEYS["offload_optimizer"]
    assert model_fields(module, "DeepSpeedZeroOffloadParamConfig") == zero.OFFLOAD_KEYS["offload_param"]


def test_the_keys_that_deepspeed_has_removed_are_known():
    (removed,) = [
        node.value
        for node in deepspeed_source("runtime/config.py").body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_REMOVED_TOP_LEVEL_CONFIG_KEYS"
    ]
    names = {key.value for key in removed.keys}
    assert names - {"graph_harvesting"} <= others.NEUTRAL.keys() | others.BLOCKS.keys()
