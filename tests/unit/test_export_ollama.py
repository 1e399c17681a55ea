"""``zero-grpo export --ollama``: the Modelfile, and a GGUF file that a converter makes and transformers reads back."""

import re
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from jinja2 import Environment

from tests.qwen_tokenizer import QWEN25_CHATML
from tests.tiny import CHATML as TINY_CHATML
from tests.tiny import tiny_qwen2, tiny_tokenizer
from tests.tiny_run import run_config, write_run
from trainer.__main__ import main
from trainer.checkpoint.export import export
from trainer.checkpoint.ollama import CHATML, write_modelfile
from trainer.config import RunConfig, dump
from trainer.models.policy import Policy, load_config, load_policy, load_tokenizer

YARN = {"model.rope.type": "yarn", "model.rope.factor": 4.0}

CONVERTER = """
import argparse, sys
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM
from tests.tiny_gguf import write_gguf

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--outfile", type=Path)
parser.add_argument("--outtype", choices=["f32", "bf16"])
arguments = parser.parse_args()
model = AutoModelForCausalLM.from_pretrained(arguments.folder, dtype=torch.float32)
{change}
write_gguf(model, arguments.outfile)
"""
"""Stands in for llama.cpp's convert_hf_to_gguf.py, and takes its arguments."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"))


def policy_of(config: RunConfig, template: str | None = TINY_CHATML) -> Policy:
    torch.manual_seed(0)
    tokenizer = load_tokenizer(config.model)
    tokenizer.chat_template = template
    policy = load_policy(config.model, load_config(config.model)[0], config.lora, tokenizer, torch.float32)
    for name, parameter in policy.causal.named_parameters():
        if parameter.requires_grad and "lora_A" not in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return policy


def modelfile(folder: Path, out: Path, settings: dict[str, Any], template: str | None = TINY_CHATML) -> str:
    config = run_config(folder, {"data.chat_template": "on", "lora.r": 0} | settings)
    write_modelfile(policy_of(config, template), out, config)
    return (out / "Modelfile").read_text()


def go(template: str, messages: list[dict[str, str]]) -> str:
    """What Go's template engine makes of the few constructs in ours."""
    jinja = re.sub(r"\{\{- range \.Messages \}\}", "{% for m in messages %}", template)
    jinja = jinja.replace("{{ .Role }}", "{{ m.role }}").replace("{{ .Content }}", "{{ m.content }}")
    jinja = jinja.replace("{{ end }}", "{% endfor %}")
    return Environment(keep_trailing_newline=True).from_string(jinja).render(messages=messages)


def test_the_go_template_renders_what_the_chat_template_renders() -> None:
    tokenizer = tiny_tokenizer()
    for template in (TINY_CHATML, QWEN25_CHATML):
        tokenizer.chat_template = template
        roles = [("system", "Be brief."), ("user", "What is\n2 + 3?"), ("assistant", "5"), ("user", "Sure?")]
        messages = [{"role": role, "content": content} for role, content in roles]
        expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert go(CHATML, messages) == expected


def test_b19_the_modelfile_stops_and_samples_as_the_run_did(folder: Path, tmp_path: Path) -> None:
    settings = {"rollout.temperature": 0.7, "rollout.top_p": 0.9, "rollout.stop": ("User:", 'a "b" c', "\n\n")}
    text = modelfile(folder, tmp_path, settings)
    lines = text.splitlines()
    assert lines[0] == "FROM ./model.gguf" and f'TEMPLATE """{CHATML}"""' in text and "SYSTEM" not in text
    for expected in (
        "temperature 0.7",
        "top_p 0.9",
        "top_k 0",
        "repeat_penalty 1",
        'stop "<|im_end|>"',
        'stop "User:"',
    ):
        assert f"PARAMETER {expected}" in lines
    assert 'PARAMETER stop """a "b" c"""\n' in text and 'PARAMETER stop """\n\n"""\n' in text


@pytest.mark.parametrize(
    ("settings", "num_ctx"),
    [
        ({}, 64),
        (YARN, 256),
        (YARN | {"model.rope.factor": 128.0, "rollout.max_new_tokens": 32}, 4096),
        (YARN | {"model.rope.factor": 128.0, "data.max_prompt_tokens": 5000, "rollout.max_new_tokens": 100}, 5100),
        (YARN | {"model.rope.factor": 128.0, "data.max_prompt_tokens": 9000}, 8192),
    ],
    ids=str,
)
def test_num_ctx_holds_what_was_trained_and_no_more_than_the_window(
    folder: Path, tmp_path: Path, settings: dict[str, Any], num_ctx: int
) -> None:
    assert f"PARAMETER num_ctx {num_ctx}\n" in modelfile(folder, tmp_path, settings)


@pytest.mark.parametrize(
    ("settings", "template", "expected", "absent"),
    [
        ({"data.chat_template": "off"}, TINY_CHATML, 'TEMPLATE """{{ .Prompt }}"""', "SYSTEM"),
        ({"data.chat_template": "auto"}, None, 'TEMPLATE """{{ .Prompt }}"""', "SYSTEM"),
        (
            {},
            QWEN25_CHATML,
            'SYSTEM """You are Qwen, created by Alibaba Cloud. You are a helpful assistant."""',
            "GGUF",
        ),
        ({"data.system": "Be brief."}, QWEN25_CHATML, 'SYSTEM """Be brief."""', "You are Qwen"),
        ({}, TINY_CHATML.replace("'<|im_end|>\n'", "'<|im_end|>'"), "# The chat template is not ChatML", "TEMPLATE"),
        ({}, "{% for m in messages %}{{ m.content }}{% endfor %}", "# The chat template is not ChatML", "TEMPLATE"),
        ({}, "{{ raise_exception('no system here') }}", "# The chat template is not ChatML", "TEMPLATE"),
    ],
    ids=["off", "none", "qwen", "system", "no newline", "plain", "fails"],
)
def test_the_template_is_the_one_that_prompts_were_given_with(
    folder: Path, tmp_path: Path, settings: dict[str, Any], template: str | None, expected: str, absent: str
) -> None:
    text = modelfile(folder, tmp_path, settings, template)
    assert expected in text and absent not in text


def test_a_base_model_whose_prompts_were_not_rendered_says_so(folder: Path, tmp_path: Path) -> None:
    config = run_config(folder, {"data.chat_template": "auto", "lora.r": 0})
    policy = policy_of(config)
    policy.tokenizer.eos_token = "<|endoftext|>"
    write_modelfile(policy, tmp_path, config)
    text = (tmp_path / "Modelfile").read_text()
    assert "# String prompts were given without this template" in text and f'TEMPLATE """{CHATML}"""' in text


def test_an_adapter_has_a_base_beside_it(folder: Path, tmp_path: Path) -> None:
    config = run_config(folder)
    commands = write_modelfile(policy_of(config), tmp_path, config)
    assert (tmp_path / "Modelfile").read_text().startswith("FROM ./base.gguf\nADAPTER ./adapter.gguf\n")
    base, out = folder / "model", tmp_path
    assert commands == [
        f"python convert_hf_to_gguf.py {base} --outfile {out}/base.gguf --outtype f32",
        f"python convert_lora_to_gguf.py {out} --base {base} --outfile {out}/adapter.gguf --outtype f32",
        f"ollama create {out.name} -f {out}/Modelfile",
    ]
    hub = config.model.model_copy(update={"name_or_path": "Qwen/Qwen2.5-1.5B"})
    commands = write_modelfile(policy_of(config), tmp_path, config.model_copy(update={"model": hub}))
    assert commands[0].startswith("python convert_hf_to_gguf.py Qwen/Qwen2.5-1.5B --remote ")
    assert " --base-model-id Qwen/Qwen2.5-1.5B " in commands[1]


def finished(folder: Path, run_dir: Path, settings: dict[str, Any]) -> Path:
    """A run that is done, without having trained."""
    run_dir.mkdir()
    config = run_config(folder, settings)

    class Alone:
        is_main = True

        def agree(self, error: Exception | None) -> None:
            assert error is None

    class Whole:
        def gathered(self) -> Any:
            return torch.no_grad()

    engine: Any = Whole()
    world: Any = Alone()
    export(policy_of(config), engine, world, run_dir, config)
    (run_dir / "config.toml").write_text(dump(config))
    (run_dir / "run_status.json").write_text('{"state": "done", "step": 1}')
    return run_dir


def converted(run: Path, tmp_path: Path, change: str, *flags: str) -> int:
    converter = tmp_path / "convert_hf_to_gguf.py"
    converter.write_text(CONVERTER.format(change=change))
    return main(["export", str(run), str(tmp_path / "out"), "--gguf-converter", str(converter), *flags])


@pytest.fixture(autouse=True)
def tests_for_the_converter(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs in a process of its own, and imports tests.tiny_gguf."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


@pytest.mark.parametrize("settings", [{}, YARN | {"lora.r": 0}], ids=["merged", "full yarn"])
def test_i4_a_converted_file_is_the_model(folder: Path, tmp_path: Path, capsys: Any, settings: dict[str, Any]) -> None:
    run = finished(folder, tmp_path / "run", settings)
    assert converted(run, tmp_path, "", *(["--merge"] if not settings else [])) == 0
    said = capsys.readouterr().out
    assert "converted, read by transformers and compared: logits within" in said
    assert said.endswith(f"next:\n  ollama create out -f {tmp_path}/out/Modelfile\n")
    fields = gguf.GGUFReader(tmp_path / "out/model.gguf").fields
    # Ollama cuts num_ctx to what the file says.
    assert fields["qwen2.context_length"].contents() == (256 if settings else 64)


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        ("model.model.layers[0].mlp.up_proj.weight.data[0] *= 1.01", 3, "is not the exported model"),
        ('model.config.rope_parameters["rope_type"] = "default"', 3, r"RoPE scaling is \{\}, the policy's"),
        ('model.config.rope_parameters["factor"] = 2.0', 3, r"'factor': 2.0"),
        ('sys.exit("no such architecture")', 2, r"failed \(exit code 1\):[\s\S]*\nno such architecture[\s\S]*Fix"),
    ],
    ids=["weights", "no scaling", "other scaling", "fails"],
)
def test_i4_a_converted_file_that_is_not_the_model_is_an_error(
    folder: Path, tmp_path: Path, capsys: Any, change: str, code: int, said: str
) -> None:
    run = finished(folder, tmp_path / "run", YARN | {"lora.r": 0})
    assert converted(run, tmp_path, change) == code
    assert re.search(said, capsys.readouterr().out)


@pytest.mark.parametrize(
    ("flags", "said"),
    [((), "this is an adapter. Fix: add --merge"), (("--merge", "--gguf-converter", "nowhere.py"), "no such file")],
)
def test_a_converter_that_cannot_work_is_refused_before_the_model_is_loaded(
    folder: Path, tmp_path: Path, capsys: Any, flags: tuple[str, ...], said: str
) -> None:
    run = finished(folder, tmp_path / "run", {})
    assert converted(run, tmp_path, "", *flags) == 2
    assert said in capsys.readouterr().out and not (tmp_path / "out").exists()


def test_the_tiny_model_is_the_base(folder: Path) -> None:
    """What the tests above convert has an effect to lose."""
    merged = policy_of(run_config(folder)).causal
    ids = torch.arange(3, 43)[None]
    with torch.no_grad():
        apart = (merged(input_ids=ids).logits - tiny_qwen2()(input_ids=ids).logits).abs().max()
    assert apart > 1e-3
