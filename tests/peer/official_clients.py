"""Sends requests that ours have been, given as JSON on stdin, through the services' own clients; prints what they read.

Run in an environment that has dashscope, ollama and openai: see test_services.py.
"""

import json
import sys
from typing import Any

import dashscope
import ollama
import openai


def main() -> None:
    address, requests = json.load(sys.stdin)
    read: dict[str, Any] = {}
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="k", max_retries=0)
    read["openai"] = client.chat.completions.create(**as_arguments(requests["openai"])).choices[0].message.content
    read["models"] = [model.id for model in client.models.list()]
    compatible = openai.OpenAI(base_url=f"{address}/compatible-mode/v1", api_key="k", max_retries=0)
    dashscope_chat = compatible.chat.completions.create(**as_arguments(requests["dashscope"]))
    read["dashscope"] = dashscope_chat.choices[0].message.content
    local = ollama.Client(address)
    read["ollama"] = local.chat(**requests["ollama"]).message.content
    shown = local.show(requests["ollama"]["model"]).modelinfo
    read["window"] = shown[f"{shown['general.architecture']}.context_length"]
    dashscope.base_http_api_url = f"{address}/api/v1"
    body = requests["rerank"]
    reranked = dashscope.TextReRank.call(model=body["model"], api_key="k", **body["input"], **body["parameters"])
    assert reranked.status_code == 200, reranked
    read["rerank"] = [[one.index, one.relevance_score] for one in reranked.output.results]
    json.dump(read, sys.stdout)


def as_arguments(body: dict[str, Any]) -> dict[str, Any]:
    """Fields that are no arguments of the client go along as they are."""
    more = {name: body[name] for name in ("chat_template_kwargs", "enable_thinking") if name in body}
    return {name: value for name, value in body.items() if name not in more} | {"extra_body": more}


if __name__ == "__main__":
    main()
