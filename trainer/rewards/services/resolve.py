"""From a [[reward]] section to the service that it names."""

from trainer.config.grpo import Reward
from trainer.rewards.services.batch import OwnServer, Rerank
from trainer.rewards.services.budget import Budget, bytes_as_units, tokens_of
from trainer.rewards.services.chat import Chat, Judge, OllamaChat, OpenAiChat
from trainer.rewards.services.http import Http
from trainer.rewards.services.judge import SCHEMA
from trainer.rewards.services.service import Backend, Service

OPENAI, DASHSCOPE, OLLAMA = "https://api.openai.com/v1", "https://dashscope.aliyuncs.com", "http://localhost:11434"
DASHSCOPE_PATHS = ("/compatible-mode/v1", "/api/v1")
"""What people paste behind DashScope's host; the kind of the model decides which is used."""
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "grade", "strict": True, "schema": SCHEMA}}


def service(section: Reward) -> Service:
    """Refused where its key or its tokenizer is missing. Nothing is sent yet."""
    return Service(section.name, _backend(section))


def _backend(section: Reward) -> Backend:
    budget = Budget(tokens_of(section.path) if section.path else bytes_as_units)
    if section.kind == "http":
        return OwnServer(_http(section, section.url), section.model)
    if section.kind == "ollama":
        chat: Chat = OllamaChat(_http(section, (section.url or OLLAMA).rstrip("/")), section.model)
    elif section.kind == "openai":
        # A judge that thinks first would spend its few tokens on that.
        optional = {"response_format": JSON_SCHEMA, "chat_template_kwargs": {"enable_thinking": False}}
        chat = OpenAiChat(_http(section, (section.url or OPENAI).rstrip("/")), section.model, "", optional)
    else:
        http = _http(section, _host(section.url or DASHSCOPE))
        if "rerank" in section.model:
            return Rerank(http, section.model, budget)
        optional = {"response_format": {"type": "json_object"}, "enable_thinking": False}
        chat = OpenAiChat(http, section.model, DASHSCOPE_PATHS[0], optional)
    return Judge(chat, section.prompt, budget)


def _http(section: Reward, url: str) -> Http:
    label = f"reward {section.name!r} ({section.kind})"
    return Http(label, url, section.key_env, timeout=section.timeout, retries=section.retries)


def _host(url: str) -> str:
    url = url.rstrip("/")
    for path in DASHSCOPE_PATHS:
        url = url.removesuffix(path)
    return url
