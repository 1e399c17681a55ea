"""The tokenizer's chat template: rendering, and what a probe of it reveals."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from trainer.errors import Refused
from trainer.limit import Overdue, call_within

RENDER_ERRORS = (
    *(jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError),
    *(RuntimeError, MemoryError),  # RuntimeError: a macro that calls itself
)
"""What a template may raise on messages that it was not written for."""
SECONDS_TO_RENDER = 2.0
"""Of the probe; a real template takes milliseconds."""

OWNED_ARGUMENTS = ("tokenize", "add_generation_prompt", "continue_final_message", "return_dict", "return_tensors")

QUESTION, ANSWER = "probe-question", "probe-answer"


@dataclass(frozen=True)
class Turns:
    """How a chat template begins and ends the assistant's turn, read off a rendered probe."""

    generation_prompt: str
    """What is added for the model to answer: `<|im_start|>assistant\\n`."""
    end: str
    """What follows the answer, stripped: `<|im_end|>`."""
    end_id: int | None
    """The special token that ends the answer; None where the tokenizer has no single token for it."""


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[dict[str, Any]],
    arguments: dict[str, Any],
    *,
    add_generation_prompt: bool = True,
) -> str:
    """The messages as the model reads them, special tokens spelled out. Raises RENDER_ERRORS."""
    text = tokenizer.apply_chat_template(
        list(messages), tokenize=False, add_generation_prompt=add_generation_prompt, **arguments
    )
    assert isinstance(text, str)
    return text


def probe_turns(tokenizer: PreTrainedTokenizerBase, arguments: dict[str, Any]) -> Turns | None:
    """None for a tokenizer without a chat template.

    Raises:
        Refused: the template cannot render one question and its answer.
    """
    if not tokenizer.chat_template:
        return None
    owned = [name for name in arguments if name in OWNED_ARGUMENTS]
    if owned:
        raise Refused(f"data.chat_template_kwargs: {', '.join(owned)} is set by the trainer and cannot be given.")
    question = [{"role": "user", "content": QUESTION}]
    answered = [*question, {"role": "assistant", "content": ANSWER}]
    try:
        whole, asked, opened = call_within(
            SECONDS_TO_RENDER,
            lambda: (
                render(tokenizer, answered, arguments, add_generation_prompt=False),
                render(tokenizer, question, arguments, add_generation_prompt=False),
                render(tokenizer, question, arguments),
            ),
        )
    except (*RENDER_ERRORS, Overdue) as error:
        why = f"no end within {SECONDS_TO_RENDER:g} s" if isinstance(error, Overdue) else error
        raise Refused(
            f"the chat template of {tokenizer.name_or_path or 'the tokenizer'} cannot render a question and an answer: "
            f"{type(error).__name__}: {why}\n"
            'Correct the template, or give string prompts with data.chat_template = "off".'
        ) from error
    end = whole.rpartition(ANSWER)[2].strip() if ANSWER in whole else ""
    ids = tokenizer(end, add_special_tokens=False)["input_ids"]
    special = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return Turns(
        generation_prompt=opened.removeprefix(asked) if opened.startswith(asked) else "",
        end=end,
        end_id=next((token_id for token_id in ids if token_id in special), None),
    )
