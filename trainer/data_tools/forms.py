"""Rows of chat tools as rows of a prompt and an answer: OpenAI messages, ShareGPT, OpenClaw sessions."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from trainer.data.row_checks import Fault
from trainer.data.shapes import ANSWER_NAMES, PROMPT_NAMES
from trainer.data.table import Table, shown

Form = Literal["plain", "openai", "sharegpt", "openclaw"]
Row = dict[str, Any]

NAMES: dict[Form, str] = {
    "plain": "one prompt a row",
    "openai": "OpenAI messages",
    "sharegpt": "ShareGPT conversations",
    "openclaw": "an OpenClaw session",
}
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
"""ShareGPT's own and those of its descendants."""
CONVERSATIONS = "conversations"
TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of the parts of a message that are text."""


def form_of(columns: Iterable[str]) -> Form:
    """Told by the names of the columns."""
    names = set(columns)
    if {"type", "message"} <= names:
        return "openclaw"
    if CONVERSATIONS in names and not names & set(PROMPT_NAMES):
        return "sharegpt"
    return "openai" if "messages" in names and names & set(PROMPT_NAMES) == {"messages"} else "plain"


def plain(table: Table, form: Form) -> tuple[Table, int]:
    """The rows with a prompt, and with an answer where a conversation ends with one; and how many entries of a log were
    no query."""
    if form == "plain":
        return table, 0
    kept: list[tuple[int, Row]] = []
    problems = list(table.unreadable)
    passed_over = 0
    for place, row in enumerate(table.rows):
        made: Row | Fault | None
        match form:
            case "openai":
                made = _openai(row)
            case "sharegpt":
                made = _sharegpt(row)
            case "openclaw":
                made = _openclaw(row)
        if made is None:
            passed_over += 1
        elif isinstance(made, Fault):
            problems.append(table.problem(place, *made))
        else:
            kept.append((place, made))
    numbers = [table.numbers[place] for place, _ in kept]
    lines = None if table.lines is None else [table.lines[place] for place, _ in kept]
    return Table(table.label, [row for _, row in kept], numbers, lines, problems), passed_over


def as_messages(prompt: str | list[Row]) -> list[Row]:
    """A prompt that is a string, as the user's message."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _openai(row: Row) -> Row:
    """What is wrong with messages is told later, where all prompts are checked."""
    messages = row.get("messages")
    rest = {name: value for name, value in row.items() if name != "messages"}
    if not isinstance(messages, list):
        return {"prompt": messages, **rest}
    return _answered([_flat(message) for message in messages], rest)


def _sharegpt(row: Row) -> Row | Fault:
    turns = row.get(CONVERSATIONS)
    if not isinstance(turns, list) or not turns:
        return Fault(CONVERSATIONS, shown(turns), 'a list of turns {"from", "value"}', "no conversation")
    messages = []
    for place, turn in enumerate(turns):
        field = f"{CONVERSATIONS}[{place}]"
        if not isinstance(turn, Mapping) or not isinstance(turn.get("value"), str):
            return Fault(field, shown(turn), 'a turn {"from", "value"} of text', "turn without text")
        role = SHAREGPT_ROLES.get(str(turn.get("from")))
        if role is None:
            expected = f"one of {', '.join(SHAREGPT_ROLES)}"
            return Fault(f"{field}.from", shown(turn.get("from")), expected, "unknown role")
        messages.append({"role": role, "content": turn["value"]})
    rest = {name: value for name, value in row.items() if name != CONVERSATIONS}
    if isinstance(rest.get("system"), str) and messages[0]["role"] != "system":
        system = rest.pop("system")
        messages[:0] = [{"role": "system", "content": system}] if system.strip() else []
    return _answered(messages, rest)


def _openclaw(row: Row) -> Row | Fault | None:
    """A user's message, by itself; None for every other entry of the session."""
    message = row.get("message")
    if row.get("type") != "message" or not isinstance(message, Mapping) or message.get("role") != "user":
        return None
    prompt = _flat(dict(message)).get("content")
    if not isinstance(prompt, str):
        return Fault("message.content", shown(prompt), "text", "message without text")
    return {"prompt": prompt, **{name: row[name] for name in ("id", "timestamp") if name in row}}


def _answered(messages: list[Any], rest: Row) -> Row:
    """The assistant's last turn is the answer; beside an answer of the row's own it is kept as `completion`."""
    last = messages[-1] if messages else None
    if not isinstance(last, Mapping) or last.get("role") != "assistant" or len(messages) == 1:
        return {"prompt": messages, **rest}
    own = any(rest.get(name) not in (None, "") for name in ANSWER_NAMES)
    return {"prompt": messages[:-1], "completion" if own else "answer": last.get("content"), **rest}


def _flat(message: Any) -> Any:
    """A message whose content is parts of text, with their text; anything else as it is."""
    if not isinstance(message, Mapping) or not isinstance(message.get("content"), list):
        return message
    parts = message["content"]
    texts = [part.get("text") for part in parts if isinstance(part, Mapping) and part.get("type") in TEXT_PARTS]
    if len(texts) != len(parts) or not all(isinstance(text, str) for text in texts):
        return message
    return {**message, "content": "".join(map(str, texts))}
