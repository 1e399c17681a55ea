"""What a reward function is handed: TRL's keyword arguments, and nothing that its signature does not take.

prompts         one per completion: a string, or the list of messages where the row's prompt is a chat
completions     strings, or [{"role": "assistant", "content": text}] where the prompt is a chat
completion_ids  lists of the sampled token ids, end token included
<column>        every other column of the data, one value per completion
log_metric      log_metric(name, value): one number, averaged over the ranks
log_extra       log_extra(column, values): one value per completion, kept with the rollouts
trainer_state   .global_step, the rollout steps done so far, and .max_steps
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.batch import Completion, Prompt
from trainer.rewards.functions import did_you_mean

HANDED = ("prompts", "completions", "completion_ids", "log_metric", "log_extra", "trainer_state")
ASKED = "asked"
"""Beside them, for models that judge: one list of messages per completion, also where the prompt is a string, without
the policy's template. Handed only where it is a parameter by name, so that data may have a column of that name."""
# Columns that hold the right answer by common usage: empty is a fault of the data there, and may be meant elsewhere.
ANSWER_COLUMNS = frozenset({"answer", "chosen", "reference", "solution", "ground_truth"})


@dataclass(frozen=True)
class Signature:
    """The parameters of a reward function, as far as keywords reach them."""

    required: tuple[str, ...]
    accepted: frozenset[str]
    takes_any: bool
    positional_only: tuple[str, ...]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> "Signature":
        """ValueError or TypeError where Python cannot tell (some C functions)."""
        parameters = inspect.signature(function).parameters.values()
        by_keyword = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        return cls(
            required=tuple(p.name for p in by_keyword if p.default is p.empty),
            accepted=frozenset(p.name for p in by_keyword),
            takes_any=any(p.kind is p.VAR_KEYWORD for p in parameters),
            positional_only=tuple(p.name for p in parameters if p.kind is p.POSITIONAL_ONLY),
        )

    def takes(self, name: str) -> bool:
        return self.takes_any or name in self.accepted

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the data that a call cannot do without."""
        return tuple(name for name in self.required if name not in (*HANDED, ASKED))


def arguments(signature: Signature, completions: Sequence[Completion], **handed: Any) -> dict[str, Any]:
    """The keywords of one call; ``handed`` are log_metric, log_extra and trainer_state."""
    names = {name for c in completions for name in c.prompt.columns} | set(signature.columns)
    every: dict[str, Any] = {name: [c.prompt.columns.get(name) for c in completions] for name in names}
    every |= {
        "prompts": [_prompt(c.prompt) for c in completions],
        "completions": [c.text if c.prompt.messages is None else _chat(c.text) for c in completions],
        "completion_ids": [list(c.ids) for c in completions],
        **handed,
    }
    if ASKED in signature.accepted:
        every[ASKED] = [_asked(c.prompt) for c in completions]
    return {name: value for name, value in every.items() if signature.takes(name)}


def text_of(completion: str | list[dict[str, Any]]) -> str:
    """The text of a completion in either form in which functions get it."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def mismatches(signature: Signature, prompts: Sequence[Prompt], *, strict: bool) -> list[str]:
    """What keeps a function from being called on these data, each in words; empty when nothing does.

    ``strict``: every column that the function requires needs a value in each row, not the answer alone.
    """
    present = sorted({name for prompt in prompts for name in prompt.columns})
    found = []
    if signature.positional_only:
        found.append(f"takes {', '.join(signature.positional_only)} by position only; arguments are handed by keyword")
    elif not (signature.takes("completions") or signature.takes("completion_ids")):
        found.append("takes neither `completions` nor `completion_ids`, so it cannot see what it judges")
    shadowed = [name for name in present if name in HANDED and signature.takes(name)]
    if shadowed:
        found.append(f"the data have a column named {', '.join(shadowed)}, as an argument is; rename that column")
    for name in signature.columns:
        if name not in present:
            hint = did_you_mean(name, [*present, *HANDED])
            columns = ", ".join(present) or "none"
            found.append(
                f"needs the column {name!r}, which the data lack (columns present: {columns}){hint or '.'} "
                "Name a column of the data, or give the parameter a default value"
            )
        elif strict or name in ANSWER_COLUMNS:
            empty = [p.index + 1 for p in prompts if _is_empty(p.columns.get(name))]
            if empty:
                found.append(f"reads {name!r}, which is missing or empty in {in_rows(empty)}")
    return found


def in_rows(rows: Sequence[int]) -> str:
    """Row numbers from 1: `1 row: 7`, `25 rows: 1, 2, 3, ... and 5 more`."""
    shown = ", ".join(str(row) for row in rows[:20])
    more = f" and {len(rows) - 20} more" if len(rows) > 20 else ""
    return f"{len(rows)} row{'s' * (len(rows) > 1)}: {shown}{more}"


def _prompt(prompt: Prompt) -> str | list[dict[str, Any]]:
    # New dicts each time: a function that edits its messages must not edit the data set.
    return prompt.text if prompt.messages is None else [dict(message) for message in prompt.messages]


def _asked(prompt: Prompt) -> list[dict[str, Any]]:
    messages = prompt.messages or prompt.asked or ({"role": "user", "content": prompt.text},)
    return [dict(message) for message in messages]


def _chat(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip()) or (isinstance(value, list) and not value)
