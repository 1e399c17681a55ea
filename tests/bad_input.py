"""Runs that are wrong in one thing each: the change, the arguments after `train run.toml`, what the message says."""

import json
import os
import pickle
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from pyarrow.parquet import write_table
from safetensors.torch import load_file, save_file

from tests.tiny_run import RUN_FILE as RUN
from trainer.models.vocabulary import Vocabulary

Change = Callable[[Path], object]


def nothing(folder: Path) -> None:
    """The run file is as it should be; the arguments are not."""


def file(name: str, content: str | bytes) -> Change:
    def change(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)

    return change


def rows(*contents: Any) -> Change:
    lines = [one if isinstance(one, str) else json.dumps(one) for one in contents]
    return file("train.jsonl", "\n".join(lines) + "\n")


def run(text: str) -> Change:
    return file("run.toml", RUN + text)


def model(name: str, content: str | bytes) -> Change:
    return file(f"model/{name}", content)


def without(*names: str) -> Change:
    return lambda folder: [(folder / "model" / name).unlink() for name in names]


def config_with(**fields: Any) -> Change:
    def change(folder: Path) -> None:
        path = folder / "model/config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


def edited(name: str, edit: Callable[[dict[str, Any]], object]) -> Change:
    """Tensors of a safetensors file, changed in place."""

    def change(folder: Path) -> None:
        weights = load_file(folder / name)
        edit(weights)
        save_file(weights, folder / name, metadata={"format": "pt"})

    return change


def cut(name: str, to: int) -> Change:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:to])


def both(*changes: Change) -> Change:
    return lambda folder: [change(folder) for change in changes]


ADAPTER = {"base_model_name_or_path": "model", "peft_type": "LORA", "r": 16, "lora_alpha": 32, "task_type": "CAUSAL_LM"}


def adapter(folder: Path) -> None:
    """A whole adapter of `model`, on its query projections."""
    names = [f"base_model.model.model.layers.{layer}.self_attn.q_proj" for layer in range(2)]
    weights = {f"{name}.lora_A.weight": torch.zeros(16, 32) for name in names}
    weights |= {f"{name}.lora_B.weight": torch.zeros(32, 16) for name in names}
    (folder / "start").mkdir()
    save_file(weights, folder / "start/adapter_model.safetensors")
    (folder / "start/adapter_config.json").write_text(json.dumps(ADAPTER | {"target_modules": ["q_proj"]}))


def other_layers(weights: dict[str, Any]) -> None:
    for name in list(weights):
        weights[name.replace("layers.1", "layers.7")] = weights.pop(name)


RECORDED = {"group": 0, "index": 0, "row": 0, "prompt_ids": [1], "completion_ids": [2, 3], "sampling_logps": [-1, -1]}
RECORDED |= {"rewards": {"score": 1.0}, "finish": "stop"}


def recorded(*contents: Any) -> Change:
    lines = [one if isinstance(one, str) else json.dumps(one) for one in contents]
    return file("old/step-000001.jsonl", "\n".join(lines) + "\n")


def other_vocabulary(folder: Path) -> None:
    recorded(RECORDED)(folder)
    Vocabulary.of_tokens({"a": 0, "b": 1}).save(folder / "old/vocabulary.json")


def stale_lock(folder: Path) -> None:
    lock = folder / "extensions/py_cpu/cpu_adam/lock"
    file(str(lock.relative_to(folder)), "")(folder)
    os.utime(lock, (0, time.time() - 3600))


class Code:
    """Unpickled, it makes a folder."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("canary",)


def pickled(name: str) -> Change:
    return lambda folder: (folder / name).write_bytes(pickle.dumps({"weight": Code()}))


OWN_CODE = """
import os
os.mkdir("canary")
from transformers import PretrainedConfig
class Own(PretrainedConfig): model_type = "own"
"""


def model_with_code(folder: Path) -> None:
    own_code(folder / "model")


def own_code(model: Path) -> None:
    """Makes of a model's folder one whose code makes a folder."""
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own_code.Own"}}
    (model / "config.json").write_text(json.dumps(config))
    (model / "own_code.py").write_text(OWN_CODE)


def sharded(weight_map: Any) -> Change:
    """The weights as a first shard of two, and an index."""

    def change(folder: Path) -> None:
        (folder / "model/model.safetensors").rename(folder / "model/model-00001-of-00002.safetensors")
        model("model.safetensors.index.json", json.dumps({"weight_map": weight_map}))(folder)

    return change


def widened(weights: dict[str, Any]) -> None:
    for name in weights:
        weights[name] = torch.zeros(16, 48) if "lora_A" in name else torch.zeros(48, 16)


def with_nan(weights: dict[str, Any]) -> None:
    next(iter(weights.values()))[0, 0] = float("nan")


def adapter_config_with(**fields: Any) -> Change:
    return file("start/adapter_config.json", json.dumps(ADAPTER | {"target_modules": ["q_proj"]} | fields))


def megatron_code(folder: Path) -> None:
    """PEFT imports what begins with "megatron", and a folder beside the run file may be called so."""
    (folder / "megatron").mkdir()
    (folder / "megatron/code.py").write_text("import os\nos.mkdir('canary')\n")


def data_folder_with_a_script(folder: Path) -> None:
    (folder / "set").mkdir()
    (folder / "set/set.py").write_text("import os\nos.mkdir('canary')\n")


REPLAY = "--rollout.replay old --data.source= --run.steps 1"
START = "--lora.start_adapter start"
BAD_DEEPSPEED = json.dumps({"gradient_clipping": 0.5, "zero_optimization": {"stage": 2, "stag": 1}, "bf16": {}})
QUESTION = {"prompt": "1 + 1 =", "answer": "2"}

CASES: dict[str, tuple[Change, str, tuple[str, ...]]] = {
    # the run file
    "run file a directory": (lambda d: [(d / "run.toml").unlink(), (d / "run.toml").mkdir()], "", ("a directory",)),
    "run file missing": (lambda d: (d / "run.toml").rename(d / "run2.toml"), "", ("no such file", "run2.toml")),
    "run file binary": (file("run.toml", b"\x7fELF\0\0"), "", ("run.toml", "binary")),
    "run file in UTF-16": (file("run.toml", RUN.encode("utf-16")), "", ("UTF-16", "UTF-8")),
    "run file with a mark and a slip": (
        file("run.toml", "\ufeff" + RUN + "[lora]\nr = '8'\n"),
        "",
        ("lora.r", "quotes"),
    ),
    "run file not TOML": (file("run.toml", "run:\n  dir: out\n"), "", ("run.toml:1", "key = value")),
    "unknown key": (run("[optim]\nlearning_rat = 1.0\n"), "", ("optim.learning_rat", "optim.lr")),
    "peers' names": (
        run("[grpo]\nbeta = 0.1\n[lora]\ntarget_modules = ['q_proj']\n"),
        "",
        ("grpo.kl.coef", "lora.targets"),
    ),
    "no run.dir": (file("run.toml", RUN.replace('dir = "out"', "")), "", ("run.dir", "Fix")),
    "an argument": (nothing, "optim.lr 1", ("--section.key value",)),
    "allow without resume": (nothing, "--allow optim.lr", ("--allow", "--resume auto")),
    "no ranks": (nothing, "--gpus 0", ("--gpus 0", "1 or more")),
    "h7 hosts picked on the command line": (
        file("hosts", "worker-0 slots=2\n"),
        "--hostfile hosts --include worker-9@worker-0:2",
        ("--include", "'worker-9': no such host", "'worker-0:2': no slot 2"),
    ),
    "ranks in words": (nothing, "--gpus two", ("--gpus", "two")),
    # the run directory
    "run.dir a file": (file("out", ""), "", ("run.dir", "is a file")),
    "run.dir below a file": (file("out", ""), "--run.dir out/a", ("cannot be created", "is a file")),
    "run.dir in use": (file("out/run_status.json", "{}"), "", ("already holds a run",)),
    # the model
    "model path missing": (nothing, "--model.name_or_path ./nothing", ("./nothing", "no such folder")),
    "model of ollama": (
        nothing,
        "--model.name_or_path qwen2.5:7b-instruct-q4_k_m",
        ("ollama", "Qwen/Qwen2.5-7B-Instruct"),
    ),
    "model a GGUF file": (model("x.gguf", "GGUF"), "--model.name_or_path model/x.gguf", ('gguf_file = "x.gguf"',)),
    "model a broken GGUF file": (model("x.gguf", b"GGUF\3\0\0\0"), "--model.gguf_file x.gguf", ("model", "Fix")),
    "model a data file": (nothing, "--model.name_or_path train.jsonl", ("is a file", "folder")),
    "model an adapter": (adapter, "--model.name_or_path start", ("adapter", "lora.start_adapter")),
    "no config.json": (without("config.json"), "", ("no config.json",)),
    "broken config.json": (model("config.json", '{"model_type":'), "", ("config.json", "not a valid JSON")),
    "empty config.json": (model("config.json", "{}"), "", ("model_type",)),
    "unknown architecture": (model("config.json", '{"model_type": "qwen99"}'), "", ("qwen99",)),
    "weights of another quantiser": (
        config_with(quantization_config={"quant_method": "gptq", "bits": 4}),
        "--quant.bits 4",
        ("gptq", "Fix: the model as it was before"),
    ),
    "weights in fp4": (
        config_with(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}),
        "--quant.bits 4",
        ("bitsandbytes (fp4)", "quant.bits = 4"),
    ),
    "weights in 4 bits, unasked": (
        config_with(quantization_config={"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
        "",
        ("bitsandbytes", "Fix: quant.bits = 4"),
    ),
    "4 bits trained whole": (nothing, "--quant.bits 4 --lora.r 0", ("quant.bits = 4", "lora.r")),
    "other shapes": (config_with(intermediate_size=48), "", ("shape", "[32, 48]")),
    "no weights": (without("model.safetensors"), "", ("model.safetensors",)),
    "weights cut": (cut("model/model.safetensors", 5000), "", ("model", "Fix")),
    "weights of git-lfs": (
        model("model.safetensors", "version https://git-lfs.github.com/spec/v1\n"),
        "",
        ("git lfs pull",),
    ),
    "a tensor missing": (
        edited("model/model.safetensors", lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight")),
        "",
        ("lack 1 weights", "layers.1.mlp.up_proj"),
    ),
    "m1 a name that no model on the hub has": (nothing, "--model.name_or_path {}", ("'{}'", "OWNER/MODEL")),
    "m3 a shard missing": (
        sharded({"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}),
        "",
        ("1 of 2 files", "model-00002-of-00002.safetensors"),
    ),
    "m3 an index damaged": (sharded(["a"]), "", ("model.safetensors.index.json", "damaged")),
    "m3 an index of files elsewhere": (sharded({"a": "../train.jsonl"}), "", ("outside of its folder",)),
    "m4 weights in a pickle alone": (
        both(without("model.safetensors"), pickled("model/pytorch_model.bin")),
        "",
        ("pytorch_model.bin", "a pickle, which can hold code", "save_pretrained"),
    ),
    "m5 a model with code of its own": (model_with_code, "", ("model", "trust_remote_code", "Fix: ")),
    "m6 a tokenizer whose limit is text": (
        model("tokenizer_config.json", '{"model_max_length": "x", "tokenizer_class": "PreTrainedTokenizerFast"}'),
        "",
        ("model.name_or_path = model", "cannot load it"),
    ),
    "no tokenizer": (without("tokenizer.json", "tokenizer_config.json"), "", ("tokenizer.json",)),
    "broken tokenizer": (model("tokenizer.json", "{"), "", ("line 1 column 2",)),
    "broken generation config": (model("generation_config.json", "{"), "", ("generation_config.json",)),
    "fp16": (nothing, "--model.dtype fp16", ("model.dtype", "bf16")),
    "no such modules": (nothing, '--lora.targets ["c_attn"]', ("c_attn", "q_proj")),
    "flash attention": (nothing, "--model.attn flash_attention_2", ("flash_attn", "sdpa")),
    "window, before the weights are read": (without("model.safetensors"), "--rollout.max_new_tokens 100", ("> 64",)),
    "window": (nothing, "--rollout.max_new_tokens 100", ("> 64 tokens", "rollout.max_new_tokens = ")),
    # the adapter to start from
    "no adapter": (nothing, START, ("adapter_config.json",)),
    "broken adapter config": (file("start/adapter_config.json", "{"), START, ("line 1, column 2",)),
    "adapter without a type": (file("start/adapter_config.json", '{"r": 16, "lora_alpha": 32}'), START, ("peft_type",)),
    "adapter of another rank": (adapter, f"{START} --lora.r 8", ("lora.r = 16",)),
    "adapter without weights": (file("start/adapter_config.json", json.dumps(ADAPTER)), START, ("adapter_model",)),
    "adapter cut": (
        both(adapter, cut("start/adapter_model.safetensors", 900)),
        START,
        ("cannot load it", "base is model"),
    ),
    "adapter of another model": (
        both(adapter, edited("start/adapter_model.safetensors", other_layers)),
        START,
        ("names differ", "layers.1.self_attn", "base"),
    ),
    "a1 adapter of another width": (
        both(adapter, edited("start/adapter_model.safetensors", widened)),
        START,
        ("cannot load it", "base is model"),
    ),
    "a2 adapter of modules that are not there": (
        both(adapter, adapter_config_with(target_modules=["c_attn"])),
        START,
        ("cannot load it", "c_attn"),
    ),
    "a3 adapter in a pickle alone": (
        both(
            adapter,
            lambda folder: (folder / "start/adapter_model.safetensors").unlink(),
            pickled("start/adapter_model.bin"),
        ),
        START,
        ("no adapter_model.safetensors", "a pickle, which can hold code"),
    ),
    "a3 adapter with NaN": (
        both(adapter, edited("start/adapter_model.safetensors", with_nan)),
        START,
        ("lora.start_adapter = start", "not finite", "q_proj.lora_A"),
    ),
    "a4 adapter config that is no object": (
        both(adapter, file("start/adapter_config.json", "[1]")),
        START,
        ("object",),
    ),
    "a4 adapter whose base is a list": (
        both(adapter, adapter_config_with(base_model_name_or_path=["model"])),
        START,
        ("base_model_name_or_path",),
    ),
    "a4 adapter that names code": (
        both(adapter, adapter_config_with(megatron_config={"a": 1}, megatron_core="megatron.code"), megatron_code),
        START,
        ("lora.start_adapter = start", "'megatron.code' as megatron_core", "Fix: "),
    ),
    "a4 adapter that names PEFT's megatron": (
        both(adapter, adapter_config_with(megatron_config={"a": 1})),
        START,
        ("lora.start_adapter = start", "megatron_config"),
    ),
    # the data
    "d9 a folder with a loading script": (data_folder_with_a_script, "--data.source set", ("set",)),
    "no such file": (nothing, "--data.source trian.jsonl", ("trian.jsonl", "similar names: train.jsonl")),
    "no rows": (file("train.jsonl", ""), "", ("holds no rows",)),
    "b93 no prompt column": (rows({"text": "a"}), "", ("prompt, query, question", "Columns: text")),
    "b93 rows of all kinds": (
        rows(QUESTION, QUESTION, "no JSON", {"prompt": None}, {"prompt": " "}, {"prompt": 3}, {"prompt": ["a"]}),
        "",
        ("5 of 7 rows", "row 3, row: got invalid JSON", "row 4, prompt: got null", "row 7, prompt[0]", "by kind: "),
    ),
    "b93 messages of all kinds": (
        rows({"prompt": [{"role": "user"}]}, {"prompt": [{"role": "assistant", "content": "x"}]}, {"prompt": []}),
        "",
        ("row 1, prompt[0].content", "row 2, prompt[0].role", "row 3, prompt: got an empty list"),
    ),
    "b93 strings and messages": (
        rows(QUESTION, QUESTION, {"prompt": [{"role": "user", "content": "x"}]}),
        "",
        ("row 3", "a string, as in most rows"),
    ),
    "b93 half a character": (rows('{"prompt": "\\ud800"}'), "", ("row 1", "lone surrogates")),
    "b93 another column": (nothing, "--data.prompt_column promt", ("promt", 'Did you mean "prompt"?')),
    "not UTF-8": (file("train.jsonl", b'{"prompt": "\xc4\xe3"}\n'), "", ("line 1", "iconv")),
    "a table with a row too wide": (
        file("t.csv", "prompt,answer\na,b\nc,d,e\n"),
        "--data.source t.csv",
        ("row 2 (line 3)",),
    ),
    "no Parquet": (file("t.parquet", "PAR1"), "--data.source t.parquet", ("not readable as Parquet",)),
    "too few rows": (rows(QUESTION), "", ("rollout.prompts_per_step = 1",)),
    "a long prompt": (rows(*[QUESTION] * 5, {"prompt": "a b " * 900}), "", ("row 6", "data.max_prompt_tokens")),
    "all held out": (nothing, "--data.eval_fraction 0.99", ("data.eval_fraction", "at least 1")),
    "a split of a file": (nothing, "--data.split test", ("data.split", "single table")),
    "no such task": (nothing, "--data.source reasoning_gym:chain_summ", ("chain_summ", "chain_sum")),
    # rewards
    "no reward file": (nothing, "--reward.score.function reward.py:spread", ("no file", "rewards.py")),
    "no reward function": (nothing, "--reward.score.function rewards.py:spraed", ("did you mean 'spread'",)),
    "a reward that does not parse": (file("rewards.py", "def spread(:\n"), "", ("SyntaxError", "rewards.py:1")),
    "a reward that needs a package": (
        file("rewards.py", "import no_such_package\n"),
        "",
        ("no_such_package", "rewards.py:1"),
    ),
    "a reward that sees nothing": (file("rewards.py", "def spread(prompts): ...\n"), "", ("`completions`",)),
    "a reward of another column": (
        file("rewards.py", "def spread(completions, answr): ...\n"),
        "",
        ("needs the column 'answr'", "columns present"),
    ),
    "an answer missing": (
        rows(*[QUESTION] * 5, {"prompt": "2 + 2 ="}),
        "--reward.score.kind builtin --reward.score.function exact_match",
        ("'answer'", "1 row: 6"),
    ),
    "no such built-in": (nothing, "--reward.score.kind builtin --reward.score.function exact_mach", ("exact_match",)),
    # replay
    "nothing to replay": (nothing, REPLAY, ("step-000001.jsonl",)),
    "a recording cut": (recorded(RECORDED, json.dumps(RECORDED)[:60]), REPLAY, ("line 2", "not JSON")),
    "a recording of other rewards": (
        recorded(RECORDED | {"rewards": {"a": 1}}),
        REPLAY,
        ("row 1", "rewards a", "score"),
    ),
    "a recording of a larger model": (
        recorded(RECORDED | {"completion_ids": [2, 900]}),
        REPLAY,
        ("row 1", "token 900"),
    ),
    "a recording of another vocabulary": (other_vocabulary, REPLAY, ("another vocabulary", "300")),
    "a recording too short": (recorded(RECORDED), f"{REPLAY} --run.steps 9", ("run.steps = 1",)),
    # DeepSpeed
    "no such configuration": (nothing, "--engine.deepspeed zero4", ("zero3",)),
    "no such DeepSpeed file": (nothing, "--engine.deepspeed no.json", ("no.json", "zero2-offload")),
    "a DeepSpeed file with a comment": (
        file("ds.json", "{\n// x\n}"),
        "--engine.deepspeed ds.json",
        ("ds.json:2", "comments"),
    ),
    "a DeepSpeed file that disagrees": (
        file("ds.json", BAD_DEEPSPEED),
        "--engine.deepspeed ds.json",
        ("2 problems", "optim.max_grad_norm = 1", "stag is not a key", "the JSON is"),
    ),
    "a lock left by a build": (stale_lock, "--engine.deepspeed zero2-offload", ("cpu_adam/lock", "60 minutes", "rm ")),
    # hooks
    "no such hook": (nothing, '--hooks.before_rollout ["no_such_hooks:check"]', ("no_such_hooks", "PYTHONPATH")),
    "a hook that raises": (
        file("hooks_that_raise.py", "def check(context): raise ValueError('not today')\n"),
        '--hooks.before_rollout ["hooks_that_raise:check"]',
        ("hooks_that_raise:check", "not today", "line 1"),
    ),
}

DEEP = "[" * 900 + "]" * 900
"""Which parses, and which Python's own writers, pickle and copy cannot go through."""


def parquet(column: str, values: Any) -> Change:
    def change(folder: Path) -> None:
        write_table(pa.table({"prompt": [f"{n} + 1" for n in range(8)], column: values}), folder / "t.parquet")

    return change


def not_utf8() -> pa.Array:
    """Text of eight bytes that no UTF-8 holds."""
    ends = pa.py_buffer(struct.pack("<9i", *range(9)))
    return pa.Array.from_buffers(pa.string(), 8, [None, ends, pa.py_buffer(b"\xff" * 8)])


def template(text: str) -> Change:
    return model("chat_template.jinja", text + "{% for m in messages %}{{ m['content'] }}{% endfor %}")


def service(url: str) -> Change:
    python = 'kind = "python"\nfunction = "rewards.py:spread"'
    return file("run.toml", RUN.replace(python, f'kind = "openai"\nmodel = "m"\nurl = "{url}"'))


PARQUET, TEMPLATE = "--data.source t.parquet", "--data.chat_template on"
CASES |= {
    # values that parse and break what comes after
    "c2 a value nested without end": (nothing, f"--optim.lr {DEEP}", ("--optim.lr", "expected a finite number")),
    "c2 a table nested without end": (
        run(f"[data.chat_template_kwargs]\nx = {DEEP[700:-700]}\n"),
        "",
        ("run.toml", "nested too deeply"),
    ),
    "c2 epochs without end": (nothing, "--run.steps 0 --run.epochs 1e308", ("run.epochs", "<= 1000000")),
    "c2 a number of 400 digits": (nothing, f"--rollout.max_new_tokens {'1' * 400}", ("max_new_tokens", "64 bits")),
    "c2 a name too long": (nothing, f"--run.dir {'a' * 300}", ("run.dir", "longer than 255 bytes")),
    "c2 a resumed path too long": (nothing, f"--resume {'a' * 300}", ("--resume", "longer than 255 bytes")),
    "c7 a DeepSpeed file nested without end": (
        file("ds.json", '{"x": ' + DEEP + "}"),
        "--engine.deepspeed ds.json",
        ("ds.json", "nested too deeply"),
    ),
    "c7 a DeepSpeed file with a number of 400 digits": (
        file("ds.json", '{"gradient_clipping": ' + "1" * 400 + "}"),
        "--engine.deepspeed ds.json",
        ("ds.json", "an integer of 400 digits"),
    ),
    "d2 rows nested without end": (
        rows(QUESTION, QUESTION, '{"prompt": "a", "x": ' + DEEP + "}", '{"prompt": ' + "[" * 100_000),
        "",
        ("2 of 4 rows", "row 3, row", "row 4, row", "nested too deeply"),
    ),
    "d2 numbers of thousands of digits": (
        rows(QUESTION, '{"prompt": "a", "answer": ' + "1" * 400 + "}", '{"prompt": "a", "answer": ' + "1" * 5000 + "}"),
        "",
        ("row 2, row", "row 3, row", "write it as text"),
    ),
    "d5 text in Parquet that is not UTF-8": (parquet("x", not_utf8()), PARQUET, ("t.parquet", "utf-8")),
    "d5 dates in Parquet beyond the year 9999": (
        parquet("x", pa.array([2**30] * 8, pa.int32()).cast(pa.date32())),
        PARQUET,
        ("t.parquet", "not readable as Parquet"),
    ),
    "d5 a saved data set without its fields": (
        file("set/dataset_dict.json", "{}"),
        "--data.source set",
        ("load_from_disk",),
    ),
    "d1 a folder of nobody's": (nothing, "--data.source ~nosuchuser/x.jsonl", ("no such file or folder",)),
    "d8 a column of half a character": (rows(QUESTION, {"prompt": "a", "\ud800": 1}), "", ("row 2", "lone surrogates")),
    "m2 more layers than any model": (
        config_with(num_hidden_layers=10**6, layer_types=None),
        "",
        ("num_hidden_layers", "1000 or fewer"),
    ),
    "m6 a template that divides by zero": (template("{{ 1 / 0 }}"), TEMPLATE, ("chat template", "ZeroDivisionError")),
    "m6 a template that calls itself": (
        template("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"),
        TEMPLATE,
        ("chat template", "RecursionError"),
    ),
    "m6 a template without end": (
        template("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"),
        TEMPLATE,
        ("chat template", "no end within 2 s"),
    ),
    "a url that is no address": (service("http://\u2764.-x/v1"), "", ("score", "url = ")),
    "a recording of fewer completions": (recorded(RECORDED), REPLAY, ("holds 1 completions", "16")),
    "a recording that is a folder": (
        lambda folder: (folder / "old/step-000001.jsonl").mkdir(parents=True),
        REPLAY,
        ("step-000001.jsonl", "cannot be read"),
    ),
    "a recording that is not UTF-8": (file("old/step-000001.jsonl", b"\xff\n"), REPLAY, ("line 1", "not UTF-8")),
    "a recording of a place beyond all": (recorded(RECORDED | {"group": 10**30}), REPLAY, ("line 1", "field group")),
}
