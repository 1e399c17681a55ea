"""Rules that hold for every line of the source: no pickle from outside, no code of a model, no shell with data."""

import ast
import importlib.metadata
import importlib.util
import io
import json
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import peft
import pytest
from huggingface_hub import HfApi

from tests.tiny_run import RUN_FILE
from trainer.__main__ import main
from trainer.config.sections import Model
from trainer.errors import Refused
from trainer.launcher import say
from trainer.models.source import loaded
from trainer.quiet import quiet_libraries

ROOT = Path(__file__).parents[2]
SOURCES = {
    path.relative_to(ROOT).as_posix(): ast.parse(path.read_text("utf-8"))
    for folder in ("trainer", "launch")
    for path in (ROOT / folder).rglob("*.py")
}

PICKLES = {
    "trainer/rewards/processes.py": "calls for a process of our own, by its stdin; its answers are JSON",
    "trainer/rewards/worker.py": "those calls, in that process",
    "trainer/world.py": "what ranks tell each other, by a reader that finds records alone",
}
"""All that may import pickle, and what for."""
READS_CODE = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "multiprocessing"}
TELL = {"arguments_of", "arguments", "named", "own"}
"""Mappings that hold trust_remote_code, by the function or the name."""
RUNS_TEXT = {"eval", "exec", "compile", "__import__"}


def dotted(node: ast.AST) -> str:
    """a.b.c of an expression; "" of any other."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def given(call: ast.Call) -> dict[str | None, ast.expr]:
    """Keyword arguments; None for a mapping that is unpacked."""
    return {keyword.arg: keyword.value for keyword in call.keywords}


def faults(path: str, tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        where = f"{path}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            for name in names:
                if name.split(".")[0] in READS_CODE and path not in PICKLES:
                    yield f"{where} imports {name}"
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == "trust_remote_code" and _is_true(value):
                    yield f"{where} trusts remote code"
        if not isinstance(node, ast.Call):
            continue
        name, words = dotted(node.func), given(node)
        last = name.rpartition(".")[2]
        if name in RUNS_TEXT:
            yield f"{where} calls {name}"
        if _is_true(words.get("shell")) or name in ("os.system", "os.popen", "subprocess.getoutput"):
            yield f"{where} hands a line to a shell"
        if name == "torch.load" and not _is_true(words.get("weights_only")):
            yield f"{where} loads a pickle"
        if _is_true(words.get("allow_pickle")) or _is_true(words.get("trust_remote_code")):
            yield f"{where} trusts what it loads"
        unpacked = {ast.unparse(word.value) for word in node.keywords if word.arg is None}
        told = "trust_remote_code" in words or any(one.split("(")[0] in TELL for one in unpacked)
        if last in ("from_pretrained", "from_config") and name.startswith("Auto") and not told:
            yield f"{where} leaves trust_remote_code to be asked for"
        if "_object" in last and name.startswith("dist."):
            yield f"{where} {last} reads whatever arrives"


def _is_true(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def test_s1_s3_s5_s9_s11_no_source_runs_what_comes_from_outside() -> None:
    assert [fault for path, tree in SOURCES.items() for fault in faults(path, tree)] == []
    importers = {path for path, tree in SOURCES.items() if "pickle" in _imported(tree)}
    assert importers == set(PICKLES)


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from multiprocessing import Pool",
        "eval(text)",
        "subprocess.run(line, shell=True)",
        "os.system(line)",
        "torch.load(file)",
        "torch.load(file, weights_only=False)",
        "numpy.load(file, allow_pickle=True)",
        "AutoModel.from_pretrained(name)",
        "AutoModel.from_pretrained(name, **settings)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "arguments = {'trust_remote_code': True}",
        "dist.all_gather_object(values, value)",
    ],
)
def test_what_runs_code_would_be_seen(line: str) -> None:
    assert len(list(faults("trainer/x.py", ast.parse(line)))) == 1


PRINTERS = {
    "trainer/__main__.py": "recipes and keys, which are of this package",
    "trainer/launcher/speech.py": "say and report",
    "trainer/launcher/probe.py": "JSON for another process of ours",
    "trainer/preflight/bandwidth.py": "JSON for another process of ours",
}
"""All that may write to the terminal without launcher.say, and what."""


def test_s7_all_that_is_printed_goes_through_say() -> None:
    found = {
        path for path in SOURCES if re.search(r"std(out|err)\.write|(?<!\.)\bprint\(", (ROOT / path).read_text("utf-8"))
    }
    assert {path for path in found if path.startswith("trainer/")} == set(PRINTERS)


def test_s7_what_is_said_cannot_steer_the_terminal_or_fail_to_be_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Column names, keys, names of files: whoever made what is read chooses them. UTF-8 has no lone surrogates."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="strict", write_through=True)
    monkeypatch.setattr(sys, "stdout", stream)
    say("a\x1b]0;title\x07 \x9b2J \u202eb \ud800\n\tc 中文")
    assert stream.buffer.getvalue().decode() == "a\\x1b]0;title\\x07 \\x9b2J \\u202eb \\ud800\n\\tc 中文\n"


HOSTILE = "\x1b]0;p\x07\x9b2J\u202e"


def hostile_rows(folder: Path) -> list[str]:
    (folder / "rows.jsonl").write_text(json.dumps({HOSTILE + "\ud800": "x"}) + "\n")
    return ["data", "check", str(folder / "rows.jsonl")]


def hostile_hosts(folder: Path) -> list[str]:
    return ["hosts", str(folder / HOSTILE)]


def hostile_run_file(folder: Path) -> list[str]:
    (folder / "run.toml").write_text('"\\u001b]0;p\\u0007\\u009b2J\\u202e" = 1\n')
    return ["train", str(folder / "run.toml")]


def hostile_records(folder: Path) -> list[str]:
    (folder / "run_status.json").write_text(json.dumps({"state": "stopped", "reason": HOSTILE, "step": 1}))
    (folder / "config.toml").write_text(RUN_FILE)
    return ["doctor", str(folder)]


@pytest.mark.parametrize("made", [hostile_rows, hostile_hosts, hostile_run_file, hostile_records])
def test_s7_no_command_passes_on_what_steers_the_terminal(
    made: Any, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert main(made(tmp_path)) in (0, 1, 2)
    out, err = capfdbinary.readouterr()
    text = (out + err).decode("utf-8")
    assert not set(text) & {"\x1b", "\x07", "\x9b", "\u202e"} and "\\x1b" in text


def test_s3_no_library_fetches_code_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the package kernels is installed, bitsandbytes fetches and imports some while it is imported."""
    (kernels := ModuleType("kernels")).get_kernel = lambda *_, **__: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kernels", kernels)
    quiet_libraries()
    with pytest.raises(ImportError):
        importlib.import_module("kernels")
    assert importlib.util.find_spec("kernels") is None


def test_s2_deepspeed_unpickles_in_one_place_after_the_files_were_looked_into() -> None:
    """Its loading has weights_only off. The one way to it: engine.load, by restore, of what was just verified."""
    texts = {path: ast.unparse(tree) for path, tree in SOURCES.items()}
    assert {path for path, text in texts.items() if ".load_checkpoint(" in text} == {"trainer/engine.py"}
    assert {path for path, text in texts.items() if "engine.load(" in text} == {"trainer/checkpoint/resume.py"}
    restoring = {path for path, text in texts.items() if "resume.restore(" in text}
    assert restoring == {"trainer/run.py", "trainer/train.py"}
    for path, verified in (("trainer/run.py", "_found("), ("trainer/train.py", ".go_back()")):
        assert texts[path].index(verified) < texts[path].index("resume.restore(")


def test_s5_s14_no_script_evaluates_data_or_ends_by_name() -> None:
    for path in [path for folder in ("launch", "tools") for path in (ROOT / folder).glob("*.s[hb]*")]:
        text = path.read_text()
        found = re.search(r"\beval\b|\bpkill\b|\bkillall\b|StrictHostKeyChecking|\bcurl\b.*\|\s*(ba)?sh", text)
        assert not found, (path, found)


def test_s14_nothing_is_ended_by_name_and_host_keys_are_checked() -> None:
    for path in SOURCES:
        text = (ROOT / path).read_text("utf-8")
        code = "\n".join(line for line in text.splitlines() if not line.strip().startswith("#"))
        assert not re.search(r"[\"'](pkill|killall)\b|StrictHostKeyChecking|UserKnownHostsFile|ssh-keygen", code), path


def test_s15_floors_are_above_known_faults() -> None:
    """torch: CVE-2025-32434 and CVE-2026-24747, by which weights_only ran code, are mended in 2.10."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    floors = {}
    for line in wanted:
        name, floor = re.match(r"([\w-]+)>=([\d.]+)", line).groups()  # type: ignore[union-attr]
        floors[name] = tuple(map(int, floor.split(".")))
    assert floors["torch"] >= (2, 10) and floors["transformers"] >= (5,) and floors["safetensors"] >= (0, 6)


def pinned(file: str) -> dict[str, str]:
    """Name -> version."""
    lines = re.findall(r"^([\w.-]+)==([^\s\\]+)", (ROOT / file).read_text(), re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in lines}


def test_s15_every_locked_release_has_hashes_and_is_the_one_installed() -> None:
    locked, hashed = pinned("requirements.lock"), pinned("requirements.hashes")
    assert hashed == {name: version for name, version in locked.items() if name != "torch"}
    releases = re.split(r"^(?=[\w.-]+==)", (ROOT / "requirements.hashes").read_text(), flags=re.MULTILINE)[1:]
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}", release) for release in releases)
    installed = {name: importlib.metadata.version(name).partition("+")[0] for name in locked}
    assert installed == locked


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("named", ["other/model--code.Own", ["other/model--code.Own", None]], ids=str)
@pytest.mark.parametrize("is_local", [True, False])
def test_s3_a_pinned_commit_does_not_lead_to_another_repository(
    file: str, named: Any, is_local: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    folder = tmp_path / "models--owner--model/snapshots" / commit
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / file).write_text(json.dumps({"auto_map": {"AutoConfig": named}}))
    for place in ("huggingface_hub.constants.HF_HUB_CACHE", "transformers.utils.hub.constants.HF_HUB_CACHE"):
        monkeypatch.setattr(place, str(tmp_path))
    name = str(folder) if is_local else "owner/model"
    model = Model(name_or_path=name, trust_remote_code=True, revision="" if is_local else commit)
    with pytest.raises(Refused, match=r"model\.trust_remote_code: .*other/model--code\.Own.*Fix: "):
        loaded(model, lambda: "loaded")
    (folder / file).write_text(json.dumps({"auto_map": {"AutoConfig": "code.Own"}}))
    assert loaded(model, lambda: "loaded") == "loaded"


def test_s3_peft_imports_by_no_other_key_of_an_adapter() -> None:
    """models/source.py refuses megatron_core; auto.py is of AutoPeftModel, which is not used."""
    package = Path(peft.__file__).parent
    found = {
        path.relative_to(package).as_posix() for path in package.rglob("*.py") if "import_module" in path.read_text()
    }
    assert found == {"tuners/lora/tp_layer.py", "auto.py"}
    assert "AutoPeft" not in "".join((ROOT / path).read_text("utf-8") for path in SOURCES)


@pytest.mark.parametrize(
    ("files", "is_refused"),
    [
        (["config.json", "pytorch_model.bin"], True),
        (["pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"], True),
        (["pytorch_model.bin", "model.safetensors"], False),
        (["pytorch_model.bin", "model-00001-of-00002.safetensors"], False),
        (["config.json"], False),  # a mirror that lists little: the loader says what it meets
    ],
)
def test_a_model_on_the_hub_in_pickles_alone_is_refused(
    files: list[str], is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in files])
    monkeypatch.setattr(HfApi, "model_info", lambda *_, **__: listed)
    model = Model(name_or_path="no-such-owner/model")
    if is_refused:
        with pytest.raises(Refused, match=r"pytorch_model\.bin, a pickle, which can hold code"):
            loaded(model, lambda: "loaded")
    else:
        assert loaded(model, lambda: "loaded") == "loaded"
    assert loaded(model, lambda: "loaded", key="reward.judge.path") == "loaded"  # read by torch's weights-only reader


@pytest.mark.parametrize("revision", ["", "main", "v1.0", "abc1234", "A" * 40, "0123456789abcdef" * 2])
def test_s3_code_of_a_model_is_run_at_a_pinned_commit_alone(revision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HfApi, "model_info", lambda *_, **__: SimpleNamespace(siblings=None))
    with pytest.raises(Refused, match=r"trust_remote_code.*Fix: all 40 digits of it as model\.revision"):
        loaded(Model(name_or_path="owner/model", trust_remote_code=True, revision=revision), lambda: "loaded")
    pinned = Model(
        name_or_path="owner/model", trust_remote_code=True, revision="0123456789abcdef0123456789abcdef01234567"
    )
    assert loaded(pinned, lambda: "loaded") == "loaded"
    assert loaded(Model(name_or_path="owner/model", revision=revision), lambda: "loaded") == "loaded"
