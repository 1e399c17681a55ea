"""Damage to what a user hands over, seeded: lines, single characters, values of a JSON tree, headers, whole files."""

import json
import random
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
from pyarrow.parquet import write_table

from tests.bad_input import ADAPTER, adapter, not_utf8
from tests.tiny_run import RUN_FILE
from trainer.checkpoint import manifest
from trainer.config import dump, load

Mutation = Callable[[Path, random.Random], str]
"""Changes a run's folder, and says what it has done."""

ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 7, 10**9, 10**30, -(2**63), 0.0, -0.5, 1e-300, 1e300, float("nan"), float("inf")),
    *("", " ", "auto", "\0", "../..", "/", "a" * 5000, "中文", "\u202e", "$(touch x)", "%s", "{}", "~nosuchuser/x"),
    *("\ud800", "\x1b[2J\x1b]0;x\x07", "a\0b"),
    *([], [[]], [None], [0, "a"], {}, {"a": 1}, {"\ud800": 1}, {"\x1b[2J": 1}),
    *("@deep", "@deeper", "@endless", "@400", "@5000", "@-400"),
)
RAW = {
    "@deep": "[" * 90 + "]" * 90,
    "@deeper": "[" * 450 + "]" * 450,
    "@endless": '{"a":' * 900 + "0" + "}" * 900,
    "@400": "1" * 400,
    "@5000": "1" * 5000,
    "@-400": "-" + "1" * 400,
}
"""What no writer of Python's writes, by what stands for it in ODD."""
WORDS = (
    "[",
    "]",
    "{",
    "}",
    '"',
    "'''",
    "=",
    ",",
    "\\",
    "\\u",
    "\t",
    "\r",
    "\x00",
    "#",
    "nan",
    "1e999",
    "\ufeff",
    "é",
    "\ud800",
    "\x1b[2J",
    "[" * 100_000,
    '{"a":' * 5000,
    "1" * 5000,
)


def dumped(tree: Any) -> str:
    text = json.dumps(tree)
    for name, raw in RAW.items():
        text = text.replace(f'"{name}"', raw)
    return text


def in_text(raw: bytes, dice: random.Random) -> tuple[bytes, str]:
    """A line deleted, doubled, moved or cut, a character changed, something odd put in, or an end that is missing."""
    lines = raw.split(b"\n")
    at = dice.randrange(len(lines))
    kind = dice.choice(("delete", "double", "swap", "cut", "flip", "insert", "truncate", "byte"))
    if kind == "delete":
        del lines[at]
    elif kind == "double":
        lines.insert(at, lines[at])
    elif kind == "swap":
        other = dice.randrange(len(lines))
        lines[at], lines[other] = lines[other], lines[at]
    elif kind == "cut":
        lines[at] = lines[at][: dice.randrange(len(lines[at]) + 1)]
    elif kind == "truncate":
        return raw[: dice.randrange(len(raw))], kind
    else:
        place = dice.randrange(len(raw))
        put = dice.choice(WORDS).encode("utf-8", "surrogatepass") if kind == "insert" else bytes([dice.randrange(256)])
        return raw[:place] + put + raw[place + (kind != "insert") :], f"{kind} {put!r} at {place}"
    return b"\n".join(lines), f"{kind} line {at + 1}"


def in_tree(tree: Any, dice: random.Random) -> str:
    """One value or key of a parsed JSON, in place."""
    holder, key, path = _place(tree, dice)
    if key is None:
        return "nothing"
    kind = dice.choice(("delete", "odd", "odd", "odd", "wrap", "rename", "near"))
    value = holder[key]
    if kind == "delete":
        del holder[key]
    elif kind == "wrap":
        holder[key] = [value]
    elif kind == "rename" and isinstance(holder, dict):
        holder[f"{key}x"] = holder.pop(key)
    elif kind == "near" and isinstance(value, int | float) and not isinstance(value, bool):
        holder[key] = dice.choice((value + 1, value - 1, -value, value * 2, value / 2, str(value)))
    else:
        holder[key] = dice.choice(ODD)
    return f"{kind} {path}" + (f" = {holder[key]!r:.60}" if kind in ("odd", "near") and key in _keys(holder) else "")


def _keys(holder: Any) -> Any:
    return holder if isinstance(holder, dict) else range(len(holder))


def _place(tree: Any, dice: random.Random) -> tuple[Any, Any, str]:
    """A branch at any depth, long lists no likelier than what stands beside them: holder, key and path."""
    keys, path = list(_keys(tree)), ""
    if not keys:
        return tree, None, path
    while True:
        key = dice.choice(keys)
        path += f".{key}"
        below = list(_keys(tree[key])) if isinstance(tree[key], dict | list) else []
        if not below or dice.random() < 0.4:
            return tree, key, path
        tree, keys = tree[key], below


def text_of(name: str) -> Mutation:
    def mutate(folder: Path, dice: random.Random) -> str:
        changed, said = in_text((folder / name).read_bytes(), dice)
        (folder / name).write_bytes(changed)
        return f"{name}: {said}"

    return mutate


def tree_of(name: str) -> Mutation:
    def mutate(folder: Path, dice: random.Random) -> str:
        tree = json.loads((folder / name).read_text())
        said = in_tree(tree, dice)
        (folder / name).write_text(dumped(tree))
        return f"{name}: {said}"

    return mutate


def run_value(folder: Path, dice: random.Random) -> str:
    """Another value for a key of a run file that holds every key."""
    lines = (folder / "run.toml").read_text().split("\n")
    at = dice.choice([n for n, line in enumerate(lines) if re.match(r"\w+ = ", line) and "run.dir" not in line])
    key = lines[at].partition(" = ")[0]
    odd = dice.choice([value for value in ODD if value is not None])
    lines[at] = f"{key} = " + re.sub(r"\bNaN\b", "nan", dumped(odd)).replace("Infinity", "inf").replace(
        '"a": 1', "a = 1"
    )
    (folder / "run.toml").write_text("\n".join(lines))
    return f"run.toml: {lines[at]:.80}"


def row_of(name: str) -> Mutation:
    """A value of a row, or a column more, of a file of one object a line."""

    def mutate(folder: Path, dice: random.Random) -> str:
        lines = (folder / name).read_text().rstrip("\n").split("\n")
        at = dice.randrange(len(lines))
        row = [json.loads(lines[at])]
        if dice.random() < 0.2:
            row[0]["more"] = odd = dice.choice(ODD)
            said = f"more = {odd!r:.60}"
        else:
            said = in_tree(row, dice)
        lines[at] = dumped(row[0]) if row else ""
        (folder / name).write_text("\n".join(lines) + "\n")
        return f"{name}, row {at + 1}: {said}"

    return mutate


def file_of(*names: str) -> Mutation:
    """One of these files gone, empty, a folder, or another one's."""

    def mutate(folder: Path, dice: random.Random) -> str:
        name = dice.choice(names)
        kind = dice.choice(("gone", "empty", "folder", "other"))
        raw = (folder / dice.choice(names)).read_bytes()
        (folder / name).unlink()
        if kind == "folder":
            (folder / name).mkdir()
        elif kind != "gone":
            (folder / name).write_bytes(b"" if kind == "empty" else raw)
        return f"{name}: {kind}"

    return mutate


COLUMNS: tuple[pa.Array, ...] = (
    pa.array([2**30] * 8, pa.int32()).view(pa.date32()),
    *(
        pa.array([number] * 8, pa.int64()).view(kind)
        for number in (2**43, -(2**43))
        for kind in (pa.date64(), pa.timestamp("s"), pa.timestamp("ms"), pa.duration("s"), pa.time64("us"))
    ),
    not_utf8(),
    pa.array([b"\xff"] * 8),
    pa.array([float("nan")] * 8),
    pa.array([None] * 8),
    pa.array([[[[1]]]] * 8),
    pa.array(["\x1b[2J\0"] * 8),
)
"""Of types and values that Python may not hold, or that no prompt is."""


def parquet_column(folder: Path, dice: random.Random) -> str:
    """A column more, or another one in the place of prompts or answers."""
    column, name = dice.choice(COLUMNS), dice.choice(("prompt", "answer", "x", "\x1b[2J"))
    prompts = [f"{n} + 1" for n in range(8)]
    write_table(pa.table({"prompt": prompts} | {name: column}), folder / "t.parquet")
    return f"t.parquet: {name!r} of {column.type}"


TEMPLATE_WORDS = (
    *(
        "{{ 1 / 0 }}",
        "{{ 10 ** 5000 }}",
        "{{ [][5].x }}",
        "{{ messages[99].content }}",
        "{{ a.b.c }}",
        "{{ ''.__class__ }}",
    ),
    *("{% for i in range(10 ** 9) %}{% endfor %}", "{% for i in range(99999) %}{% for j in range(99999) %}"),
    *("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ raise_exception('\x1b[2J') }}", "{{ 'a' * 10 ** 8 }}"),
    *("{% endfor %}", "{{", "}}", "{%", "{{ messages }}", "{{ raise_exception('\\ud800') }}", "{% include 'x' %}"),
)


def template(folder: Path, dice: random.Random) -> str:
    path = folder / "model/chat_template.jinja"
    text, word = path.read_text(), dice.choice(TEMPLATE_WORDS)
    # Where a statement ends, or anywhere.
    ends = [found.end() for found in re.finditer(r"[}%]\}", text)]
    at = dice.choice(ends) if dice.random() < 0.8 else dice.randrange(len(text))
    path.write_text(text[:at] + word + text[at:])
    return f"chat_template.jinja: {word!r} at {at}"


def header(name: str) -> Mutation:
    """The JSON at the head of a safetensors file, its length told rightly; or the length itself."""

    def mutate(folder: Path, dice: random.Random) -> str:
        raw = (folder / name).read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        tree, rest = json.loads(raw[8 : 8 + length]), raw[8 + length :]
        if dice.random() < 0.2:
            told = dice.choice((0, 1, length - 1, length + 1, 2**63, 2**64 - 1))
            (folder / name).write_bytes(struct.pack("<Q", told) + raw[8:])
            return f"{name}: a header of {told} bytes"
        if dice.random() < 0.2:
            text, said = in_text(raw[8 : 8 + length], dice)
        else:
            said = in_tree(tree, dice)
            text = dumped(tree).encode()
        (folder / name).write_bytes(struct.pack("<Q", len(text)) + text + rest)
        return f"{name}, header: {said}"

    return mutate


CHECKPOINT = "out/checkpoints/step-000002"


def damaged(folder: Path, dice: random.Random) -> str:
    """A file of the checkpoint lost, cut, flipped, empty, or in another's place."""
    files = sorted(path for path in (folder / CHECKPOINT).rglob("*") if path.is_file())
    path, other = dice.sample(files, 2)
    kind = dice.choice(("delete", "cut", "flip", "empty", "swap", "extra", "folder"))
    if kind == "delete":
        path.unlink()
    elif kind == "swap":
        held = path.read_bytes()
        shutil.copyfile(other, path)
        other.write_bytes(held)
    elif kind == "extra":
        (path.parent / "extra.pt").write_bytes(b"\x80\x04.")
    elif kind == "folder":
        path.unlink()
        path.mkdir()
    else:
        raw = path.read_bytes()
        at = dice.randrange(len(raw)) if raw else 0
        changed = {
            "cut": raw[:at],
            "empty": b"",
            "flip": raw[:at] + bytes([raw[at] ^ 1 << dice.randrange(8)]) + raw[at + 1 :],
        }
        path.write_bytes(changed[kind])
    return f"{path.relative_to(folder)}: {kind}"


def resigned(folder: Path, dice: random.Random) -> str:
    """Manifest or progress changed by somebody who then put every hash right."""
    place = folder / CHECKPOINT
    path = place / manifest.NAME
    record = json.loads(path.read_text())
    if dice.random() < 0.5:
        said = in_tree(record, dice)
    else:
        name = dice.choice([name for name in record["files"] if name.endswith(".json")])
        tree = json.loads((place / name).read_text())
        said = f"{name}: {in_tree(tree, dice)}"
        (place / name).write_text(dumped(tree))
        record["files"][name] = [(place / name).stat().st_size, manifest.file_sha256(place / name)]
    record.pop("sha256", None)
    record["sha256"] = manifest._own_hash(record)
    path.write_text(json.dumps(record))
    return f"signed anew, {said}"


def hosts(folder: Path, dice: random.Random) -> str:
    changed = (folder / "hosts.txt").read_bytes()
    said = ""
    for _ in range(dice.randint(1, 3)):
        changed, more = in_text(changed, dice) if changed else (changed, "")
        said += f"{more}; "
    (folder / "hosts.txt").write_bytes(changed)
    return f"hosts.txt: {said}"


DEEPSPEED = {
    "zero_optimization": {
        "stage": 2,
        "reduce_bucket_size": 500000,
        "allgather_bucket_size": 500000,
        "overlap_comm": False,
    },
    "bf16": {"enabled": False},
    "gradient_clipping": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "comms_logger": {"enabled": False},
}
HOSTS = "# two hosts\nworker-0 slots=4\nworker-1.example.com slots=4 # the second\n10.0.0.3 slots=2\nfd00::1 slots=1\n"

DATA = ("train", "run.toml", "--run.steps", "1", "--data.source")
ROLLOUTS = "out/rollouts/step-000001.jsonl"
RECORDS: tuple[Mutation, ...] = (
    text_of("out/metrics.jsonl"),
    row_of("out/metrics.jsonl"),
    row_of("out/metrics.jsonl"),
    row_of("out/alarms.jsonl"),
    text_of("out/rollouts/step-000002.jsonl"),
    row_of("out/rollouts/step-000002.jsonl"),
    row_of("out/rollouts/step-000002.jsonl"),
    tree_of("out/rollouts/vocabulary.json"),
    text_of("out/run_status.json"),
    tree_of("out/run_status.json"),
    tree_of("out/environment.json"),
    tree_of("out/eval/step-000002.json"),
    tree_of("out/histograms/step-000002.json"),
    text_of("out/config.toml"),
    file_of("out/metrics.jsonl", "out/alarms.jsonl", "out/run_status.json", "out/config.toml"),
)


def without_checkpoints(mutation: Mutation) -> Mutation:
    def mutate(folder: Path, dice: random.Random) -> str:
        shutil.rmtree(folder / "out/checkpoints")
        return mutation(folder, dice)

    return mutate


RESULT = (
    without_checkpoints(header("out/adapter/adapter_model.safetensors")),
    without_checkpoints(text_of("out/adapter/adapter_model.safetensors")),
    without_checkpoints(tree_of("out/adapter/adapter_config.json")),
    without_checkpoints(tree_of("out/run_status.json")),
    without_checkpoints(file_of("out/adapter/adapter_model.safetensors", "out/adapter/adapter_config.json")),
)

KINDS: dict[str, tuple[tuple[Mutation, ...], tuple[str, ...]]] = {
    "run file": ((text_of("run.toml"), run_value, run_value), ("preflight", "run.toml")),
    "DeepSpeed JSON": (
        (text_of("ds.json"), tree_of("ds.json"), tree_of("ds.json")),
        ("preflight", "run.toml", "--engine.deepspeed", "ds.json"),
    ),
    "hostfile": ((hosts,), ("hosts", "hosts.txt")),
    "data set": (
        (text_of("train.jsonl"), row_of("train.jsonl"), row_of("train.jsonl")),
        ("train", "run.toml", "--run.steps", "1"),
    ),
    "Parquet": ((text_of("t.parquet"), parquet_column, parquet_column), (*DATA, "t.parquet")),
    "saved data set": (
        (
            tree_of("set/state.json"),
            tree_of("set/dataset_info.json"),
            text_of("set/state.json"),
            text_of("set/data-00000-of-00001.arrow"),
            file_of("set/state.json", "set/dataset_info.json", "set/data-00000-of-00001.arrow"),
        ),
        (*DATA, "set"),
    ),
    "chat template": (
        (text_of("model/chat_template.jinja"), template, template, template),
        ("preflight", "run.toml", "--data.chat_template", "on"),
    ),
    "model folder": (
        (
            text_of("model/config.json"),
            tree_of("model/config.json"),
            tree_of("model/config.json"),
            tree_of("model/generation_config.json"),
            tree_of("model/tokenizer_config.json"),
            text_of("model/tokenizer.json"),
            tree_of("model/tokenizer.json"),
            header("model/model.safetensors"),
        ),
        ("preflight", "run.toml"),
    ),
    "adapter": (
        (
            text_of("start/adapter_config.json"),
            tree_of("start/adapter_config.json"),
            header("start/adapter_model.safetensors"),
            header("start/adapter_model.safetensors"),
        ),
        ("train", "run.toml", "--lora.start_adapter", "start", "--run.steps", "1"),
    ),
    "checkpoint": ((damaged, resigned), ("train", "run.toml", "--resume", "auto")),
    "checkpoint, its sizes alone": (
        (damaged, resigned),
        ("train", "run.toml", "--resume", "auto", "--checkpoint.verify", "size"),
    ),
    "replay": (
        (
            text_of(ROLLOUTS),
            row_of(ROLLOUTS),
            row_of(ROLLOUTS),
            tree_of("out/rollouts/vocabulary.json"),
            file_of(ROLLOUTS, "out/rollouts/vocabulary.json"),
        ),
        ("train", "run.toml", "--rollout.replay", "out", "--data.source=", "--run.dir", "again", "--run.steps", "1"),
    ),
    "records, resumed": (RECORDS, ("train", "run.toml", "--resume", "auto", "--run.steps", "3")),
    "records, report": (RECORDS, ("report", "out")),
    "records, samples": (RECORDS, ("samples", "out")),
    "records, doctor": (RECORDS, ("doctor", "out")),
    "records, export": ((*RECORDS, *RESULT), ("export", "out", "exported")),
}
"""What is damaged, and the command that reads it."""


def write_inputs(folder: Path) -> None:
    """Beside a written run: what the mutations change, all of it right."""
    (folder / "run.toml").write_text(RUN_FILE)
    (folder / "run.toml").write_text(dump(load(str(folder / "run.toml"), [])))
    (folder / "ds.json").write_text(json.dumps(DEEPSPEED, indent=1))
    (folder / "hosts.txt").write_text(HOSTS)
    adapter(folder)
    (folder / "start/adapter_config.json").write_text(json.dumps(ADAPTER | {"target_modules": ["q_proj"]}, indent=1))
    table = {"prompt": [f"{n} + 1" for n in range(8)], "answer": [str(n) for n in range(8)]}
    write_table(pa.table(table), folder / "t.parquet")
    datasets.Dataset.from_dict(table).save_to_disk(folder / "set")


EVALUATION = {"step": 2, "sampled": {"mean": 0.5, "stderr": 0.1}, "greedy": {"mean": 0.5, "stderr": None}}
HISTOGRAM = {
    "step": 2,
    "edges": [-1.0, 0.0, 1.0],
    "counts": [3, 4],
    "readings": [{"reading": "near 0", "holds": True, "numbers": "all"}],
}


def write_records(folder: Path) -> None:
    """Beside what the run in ``out`` has written: what it would have, had it run longer."""
    for name, record in (("eval", EVALUATION), ("histograms", HISTOGRAM)):
        (folder / "out" / name).mkdir(exist_ok=True)
        (folder / "out" / name / "step-000002.json").write_text(json.dumps(record))
