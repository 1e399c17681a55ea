"""From a row's prompt to the token ids that the model reads."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from trainer.config.sections import Data
from trainer.data.row_checks import Fault
from trainer.data.table import shown
from trainer.data.template import RENDER_ERRORS, Turns, probe_turns, render
from trainer.errors import Refused

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Renderer:
    """What data.chat_template and data.system come to for one tokenizer."""

    data: Data
    tokenizer: PreTrainedTokenizerBase
    turns: Turns | None
    """None where the tokenizer has no chat template, or data.chat_template is off."""
    strings: bool
    """Whether string prompts become a user message and are rendered; messages always are."""
    why: str
    """The reason for `strings`, for the user."""

    def refuse_unrenderable(self, messages: bool, label: str) -> None:
        """Raises Refused where the settings and the kind of prompts (`messages` or strings) exclude each other."""
        if messages and self.data.chat_template == "off":
            raise Refused(
                f'{label}: the prompts are messages, but data.chat_template = "off". '
                'Set it to "auto", or give string prompts.'
            )
        if messages and self.turns is None:
            raise Refused(
                f"{label}: the prompts are messages, but the tokenizer{of_name(self.tokenizer)} has no chat template.\n"
                "Use an instruct checkpoint, put the template of the model's family beside the tokenizer as "
                "chat_template.jinja, or give string prompts."
            )
        if self.data.system and not messages and not self.strings:
            raise Refused(
                f"data.system is given, but string prompts are not rendered: {self.why}.\n"
                'Remove data.system, or set data.chat_template = "on".'
            )

    def messages(self, prompt: Messages) -> Messages:
        """The row's messages with data.system before them, unless the row has a system message of its own."""
        # Parquet and `datasets` fill a key that only some messages have with null; templates and rewards see none.
        messages = [{name: value for name, value in message.items() if value is not None} for message in prompt]
        if self.data.system and not has_system(messages):
            messages.insert(0, {"role": "system", "content": self.data.system})
        return messages

    def as_asked(self, prompt: str) -> Messages:
        """A string prompt as the messages that are rendered of it."""
        return self.messages([{"role": "user", "content": prompt}])

    def text(self, prompt: str | Messages, field: str) -> str | Fault:
        """What the model reads."""
        if isinstance(prompt, str):
            if not self.strings:
                return prompt
            opening = self.turns.generation_prompt.strip() if self.turns else ""
            if opening and opening in prompt:
                expected = 'a bare question, or data.chat_template = "off" to take prompts as they are'
                return Fault(field, f"a prompt that already holds {shown(opening)}", expected, "already rendered")
        messages = self.as_asked(prompt) if isinstance(prompt, str) else self.messages(prompt)
        try:
            return render(self.tokenizer, messages, self.data.chat_template_kwargs)
        except RENDER_ERRORS as error:
            expected = f"messages that the chat template takes: {error}"
            return Fault(field, shown(prompt), expected, "refused by the chat template")

    @property
    def bos(self) -> int | None:
        """The bos that the tokenizer begins a text with; None where it only has one without using it (SmolLM2)."""
        bos = self.tokenizer.bos_token_id
        return bos if bos in self.tokenizer("")["input_ids"] else None

    def encode(self, texts: Sequence[str], rendered: bool) -> list[tuple[int, ...]]:
        """Token ids. No special token is added, since a rendered template is complete and no prompt may end in eos;
        but raw text gets the tokenizer's bos, unless it begins with it already.
        """
        # verbose: the tokenizer's own remark on long texts is about its model_max_length, which limits nothing here.
        encoded = self.tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        bos = None if rendered else self.bos
        return [tuple(ids) if bos is None or ids[:1] == [bos] else (bos, *ids) for ids in encoded]

    def cut(self, ids: tuple[int, ...], limit: int) -> tuple[int, ...]:
        """The last `limit` tokens, generation prompt included; a leading bos stays."""
        if limit > 1 and ids[0] == self.bos:
            return (ids[0], *ids[len(ids) - limit + 1 :])
        return ids[len(ids) - limit :]


def choose_renderer(data: Data, tokenizer: PreTrainedTokenizerBase, eos_ids: Collection[int]) -> Renderer:
    """Decides whether string prompts are rendered.

    A template alone does not make a chat model: Qwen2.5 Base ships the template of Instruct. What differs is the end
    token that the checkpoint declares, <|endoftext|> against <|im_end|>. So "auto" renders strings when the token that
    ends a turn of the template is one of `eos_ids` (the generation config's) or the tokenizer's own.

    Raises:
        Refused: data.chat_template = "on" without a template, or a template that cannot be rendered.
    """
    if data.chat_template == "off":
        return Renderer(data, tokenizer, None, strings=False, why='data.chat_template = "off"')
    turns = probe_turns(tokenizer, data.chat_template_kwargs)
    if turns is None:
        if data.chat_template == "on":
            raise Refused(f'data.chat_template = "on", but the tokenizer{of_name(tokenizer)} has no chat template.')
        return Renderer(data, tokenizer, None, strings=False, why="the tokenizer has no chat template")
    if data.chat_template == "on":
        return Renderer(data, tokenizer, turns, strings=True, why='data.chat_template = "on"')
    declared = {*eos_ids, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])}
    end = turns.end or "no special token"
    if turns.end_id in declared:
        why = f"a chat model: {end} ends a turn of its template and is an end token it declares"
        return Renderer(data, tokenizer, turns, strings=True, why=why)
    names = ", ".join(tokenizer.convert_ids_to_tokens(sorted(declared))) or "none"
    why = f"a base model: its template ends a turn with {end}, but its end token is {names}"
    return Renderer(data, tokenizer, turns, strings=False, why=f'{why}; data.chat_template = "on" would render')


def has_system(messages: Messages) -> bool:
    return any(message["role"] == "system" for message in messages)


def of_name(tokenizer: PreTrainedTokenizerBase) -> str:
    return f" of {tokenizer.name_or_path}" if tokenizer.name_or_path else ""
