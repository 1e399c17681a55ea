"""A Modelfile, by which Ollama serves the result as the run sampled it."""

from pathlib import Path

from trainer.checkpoint.gguf import MODEL, outtype
from trainer.config import Data, Model, Rollout, RunConfig
from trainer.data.rendering import choose_renderer
from trainer.data.stops import declared_eos, stop_ids
from trainer.data.template import RENDER_ERRORS, render
from trainer.models.policy import Policy
from trainer.models.rope import window

BASE, ADAPTER = "base.gguf", "adapter.gguf"
USUAL_WINDOW = 4096
"""Tokens of Ollama's own num_ctx on small machines; less is only set where the model holds less."""

CHATML = """{{- range .Messages }}<|im_start|>{{ .Role }}
{{ .Content }}<|im_end|>
{{ end }}<|im_start|>assistant
"""
"""As a Go template. Ollama puts its system message first among the messages."""


def write_modelfile(policy: Policy, folder: Path, config: RunConfig) -> list[str]:
    """Writes ``Modelfile``; returns the commands that make the files it names and hand it to Ollama."""
    lines = [f"FROM ./{MODEL}"] if policy.peft is None else [f"FROM ./{BASE}", f"ADAPTER ./{ADAPTER}"]
    lines += ["", *_template(policy, config.data)]
    lines += ["", *_parameters(policy, config)]
    (folder / "Modelfile").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return [*_conversions(policy, folder, config.model), f"ollama create {folder.name} -f {folder / 'Modelfile'}"]


def _template(policy: Policy, data: Data) -> list[str]:
    tokenizer = policy.tokenizer
    if data.chat_template == "off" or not tokenizer.chat_template:
        return ["# The run gave its prompts as they are, without a chat template.", 'TEMPLATE """{{ .Prompt }}"""']
    default = _chatml_system(policy, data)
    if default is None:
        return ["# The chat template is not ChatML: Ollama takes it from the GGUF file, where the converter puts it."]
    lines = [f'TEMPLATE """{CHATML}"""']
    if not choose_renderer(data, tokenizer, declared_eos(tokenizer, policy.generation_config)).strings:
        lines.insert(
            0, '# String prompts were given without this template: where yours are, TEMPLATE """{{ .Prompt }}""".'
        )
    system = data.system or default
    return [*lines, f'SYSTEM """{system}"""'] if system else lines


def _chatml_system(policy: Policy, data: Data) -> str | None:
    """The system message that the chat template adds by itself ("" for none); None where it is not ChatML."""

    def chatml(*messages: tuple[str, str]) -> str:
        turns = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages)
        return f"{turns}<|im_start|>assistant\n"

    talk = [("system", "probe-system"), ("user", "one"), ("assistant", "two"), ("user", "three")]
    try:
        rendered, alone = (
            render(
                policy.tokenizer,
                [{"role": role, "content": content} for role, content in messages],
                data.chat_template_kwargs,
            )
            for messages in (talk, talk[1:])
        )
    except RENDER_ERRORS:
        return None
    before = alone.removesuffix(chatml(*talk[1:]))
    default = before.removeprefix("<|im_start|>system\n").removesuffix("<|im_end|>\n")
    added = [("system", default)] if before else []
    return default if rendered == chatml(*talk) and alone == chatml(*added, *talk[1:]) else None


def _parameters(policy: Policy, config: RunConfig) -> list[str]:
    rollout, limit = config.rollout, window(policy.causal.config)
    ids = stop_ids(policy.tokenizer, policy.generation_config).ids
    stops = [str(policy.tokenizer.convert_ids_to_tokens(one)) for one in ids] + list(rollout.stop)
    need = config.data.max_prompt_tokens + rollout.max_new_tokens
    return [
        *(f"PARAMETER stop {_quoted(stop)}" for stop in stops),
        f"# Trained with up to {config.data.max_prompt_tokens} + {rollout.max_new_tokens} tokens. {limit.rule}.",
        f"PARAMETER num_ctx {min(max(need, USUAL_WINDOW), limit.limit)}",
        "# As the run sampled. Ollama's own values (0.8, 40, 0.9, 1.1) are another distribution than the trained one.",
        *_sampling(rollout),
    ]


def _sampling(rollout: Rollout) -> list[str]:
    values = {
        "temperature": rollout.temperature,
        "top_k": rollout.top_k,
        "top_p": rollout.top_p,
        "min_p": rollout.min_p,
        "repeat_penalty": rollout.repetition_penalty,
    }
    return [f"PARAMETER {name} {value:g}" for name, value in values.items()]


def _quoted(text: str) -> str:
    return f'"""{text}"""' if '"' in text or "\n" in text else f'"{text}"'


def _conversions(policy: Policy, folder: Path, model: Model) -> list[str]:
    """With llama.cpp's own scripts."""
    if policy.peft is None:
        return [f"python convert_hf_to_gguf.py {folder} --outfile {folder / MODEL} --outtype {outtype(policy)}"]
    here = folder / "base" if model.gguf_file else Path(model.name_or_path)
    remote = "" if here.is_dir() else " --remote"
    base = f"--base {here}" if here.is_dir() else f"--base-model-id {model.name_or_path}"
    return [
        f"python convert_hf_to_gguf.py {here}{remote} --outfile {folder / BASE} --outtype {outtype(policy)}",
        f"python convert_lora_to_gguf.py {folder} {base} --outfile {folder / ADAPTER} --outtype f32",
    ]
