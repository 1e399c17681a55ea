"""Judges: OpenAI-compatible servers, DashScope's compatible mode, Ollama's own API."""

import json
import re
from collections.abc import Sequence
from typing import Any, Protocol

from trainer.errors import Refused, Stopped
from trainer.launcher import say
from trainer.rewards.services import judge, replies
from trainer.rewards.services.breaker import ServiceError
from trainer.rewards.services.budget import BYTES_PER_TOKEN, Budget, bytes_as_units
from trainer.rewards.services.http import Http, Rejected
from trainer.rewards.services.judge import REPLY_TOKENS, SCHEMA, TOP, Row
from trainer.rewards.services.service import Scored

TEMPLATE_TOKENS = 64
"""What a chat template adds to two messages; those seen take 10 to 40."""


class Chat(Protocol):
    """How one API takes a conversation."""

    http: Http

    async def reply(self, messages: list[dict[str, str]], window: int | None) -> Any:
        """What the model said."""

    async def longest(self) -> int | None:
        """The longest window (tokens) that it can have; None where it does not say."""

    def window(self, longest: int | None, wanted: int) -> int | None:
        """The window that requests get."""


class OpenAiChat:
    """/chat/completions, as OpenAI, vLLM, SGLang, llama.cpp and transformers serve have it."""

    def __init__(self, http: Http, model: str, path: str, optional: dict[str, Any]) -> None:
        """``optional``: fields that a server may not know; what it names in an error is left out from then on."""
        self.http, self.model, self._path = http, model, path
        self._optional: dict[str, Any] = {"temperature": 0, "seed": 0, "max_tokens": REPLY_TOKENS} | optional

    async def reply(self, messages: list[dict[str, str]], window: int | None) -> Any:
        left_out: list[str] = []
        while True:
            sent = {name: value for name, value in self._optional.items() if name not in left_out}
            body = {"model": self.model, "messages": messages, "stream": False} | sent
            try:
                told = await self.http.offer(f"{self._path}/chat/completions", body)
            except Rejected as rejected:
                if not (named := _named(rejected.body, list(sent))):
                    raise rejected.final from None
                left_out += named
                continue
            self._leave_out(left_out)
            if replies.field(told, "choices", 0, "message", "content") is None:
                raise ServiceError(f"the judge said nothing: {replies.shown(told['choices'][0])}")
            if told["choices"][0].get("finish_reason") == "length":
                raise ServiceError(f"the judge's reply was cut after {REPLY_TOKENS} tokens")
            return told["choices"][0]["message"]["content"]

    def _leave_out(self, names: Sequence[str]) -> None:
        """For good, of a server that has taken a request without them."""
        for name in names:
            if self._optional.pop(name, None) is not None:  # the first of several calls at a time says so
                say(f"{self.http.label}: {self.model} takes no {name!r}, so requests go without it from now on")

    async def longest(self) -> int | None:
        """vLLM and SGLang say max_model_len, llama.cpp meta.n_ctx; others do not say."""
        try:
            told = await self.http.get(f"{self._path}/models")
            models = replies.field(told, "data")
            (entry,) = [entry for entry in models if replies.field(entry, "id") == self.model]
        except (ServiceError, Stopped, ValueError, TypeError):  # a server need not have the path; a judge will tell
            return None
        meta = entry.get("meta") if isinstance(entry.get("meta"), dict) else {}
        for found in (entry.get("max_model_len"), meta.get("n_ctx")):  # n_ctx_train is the model's, not the server's
            if isinstance(found, int) and found > 0:
                return found
        return None

    def window(self, longest: int | None, wanted: int) -> int | None:
        return longest


def _named(body: str, names: Sequence[str]) -> list[str]:
    """The fields that an error names: as text in quotes, as in "param" or "loc". What it repeats of the request, which
    has them all, says nothing; nor do words of a prompt."""
    if "context" in body:
        return []
    try:
        said = json.dumps(_without_input(replies.parsed(body)))
    except ValueError:
        said = body
    quoted = set(re.findall(r"['\"`](\w+)(?:\.\w+)*\\?['\"`]", said))
    # Those of two words stand in no prompt, and some servers name them without quotes.
    return [name for name in names if name in quoted or ("_" in name and re.search(rf"\b{name}\b", said))]


def _without_input(told: Any) -> Any:
    """An error without the request that FastAPI repeats in it."""
    if isinstance(told, dict):
        return {"": [_without_input(value) for name, value in told.items() if name not in ("input", "body")]}
    return [_without_input(value) for value in told] if isinstance(told, list) else told


class OllamaChat:
    """/api/chat with a window of its own in each request: the server's default is 4096 tokens, and what is longer it
    cuts without a word."""

    def __init__(self, http: Http, model: str) -> None:
        self.http, self.model = http, model

    async def reply(self, messages: list[dict[str, str]], window: int | None) -> Any:
        options = {"temperature": 0, "seed": 0, "num_predict": REPLY_TOKENS, "num_ctx": window}
        body = {"model": self.model, "messages": messages, "format": SCHEMA, "options": options}
        told = await self.http.post("/api/chat", body | {"stream": False, "think": False})
        content = replies.field(told, "message", "content")
        if told.get("done") is not True or told.get("done_reason") == "length":
            raise ServiceError(f"the judge's reply was cut after {REPLY_TOKENS} tokens")
        return content

    async def longest(self) -> int | None:
        told = await self.http.post("/api/show", {"model": self.model})
        family = replies.field(told, "model_info", "general.architecture")
        longest = told["model_info"].get(f"{family}.context_length")
        return longest if isinstance(longest, int) and longest > 0 else None

    def window(self, longest: int | None, wanted: int) -> int | None:
        # One size for the whole run: with every other one Ollama loads the model anew.
        rounded = -(-wanted // 1024) * 1024
        return rounded if longest is None else min(longest, rounded)


class Judge:
    """A chat model that grades each completion from 0 to 10; the reward is a tenth of that."""

    def __init__(self, chat: Chat, criterion: str, budget: Budget) -> None:
        self.chat, self.criterion, self.budget = chat, criterion, budget

    def batches(self, rows: Sequence[Row]) -> list[list[int]]:
        return [[place] for place in range(len(rows))]

    async def score(self, rows: Sequence[Row]) -> list[Scored]:
        (row,) = rows
        parts, cut = self.budget.fit({name: judge.harmless(text) for name, text in row.parts().items()}, self._kept())
        told = await self.chat.reply(judge.messages(self.criterion, parts), self.budget.window)
        try:
            return [Scored(replies.judged(told, TOP), cut)]
        except ServiceError as wrong:
            return [Scored(wrong, cut)]

    async def prepare(self, prompt_tokens: int, new_tokens: int) -> list[str]:
        where = f"{self.chat.http.label}, {self.chat.http.url}"
        try:
            longest = await self.chat.longest()
        except ServiceError as failure:
            raise Refused(f"{where}: {failure}") from None
        except Stopped as stopped:
            raise Refused(str(stopped)) from None
        by_bytes = self.budget.starts is bytes_as_units
        own = self._kept() // (BYTES_PER_TOKEN if by_bytes else 1)
        if longest is not None and longest < (need := prompt_tokens + new_tokens + own):
            raise Refused(
                f"{where}: its window holds {longest} tokens; the longest prompt ({prompt_tokens}), a completion"
                f" ({new_tokens}) and the judge's own text ({own}) are {need}. Serve it with a longer one, take another"
                " model, or lower data.max_prompt_tokens or rollout.max_new_tokens."
            )
        # For a reference answer beside, and a tokenizer that makes more tokens of the same text.
        wanted = int((prompt_tokens + 2 * new_tokens) * (BYTES_PER_TOKEN if by_bytes else 1.25)) + self._kept()
        self.budget.window = self.chat.window(longest, wanted)
        if self.budget.window is None:
            return [f"{where}: it does not say how long its window is, so nothing is cut to fit it"]
        unit = (
            "bytes, since no token is shorter (its tokenizer's folder as `path` counts tokens)"
            if by_bytes
            else "tokens"
        )
        return [
            f"{where}: window of {self.budget.window} tokens; what is longer is cut in its middle, counted in {unit}"
        ]

    def _kept(self) -> int:
        """Units of the request that are not the row's: rules, fences, template and reply."""
        fixed = judge.messages(self.criterion, dict.fromkeys(("Request", "Reference answer", "Response"), ""))
        text = "\n".join(message["content"] for message in fixed)
        return len(self.budget.starts(text)) + TEMPLATE_TOKENS + REPLY_TOKENS
