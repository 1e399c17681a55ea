"""Rows become prompts: checked as a whole, counted, split; nothing silently."""

from pathlib import Path
from typing import Any

import pytest

from tests.prompt_loader import ANSWER, RENDERED, SYSTEM, USER, Loader, said, write
from trainer.data.prompts import split_off
from trainer.errors import Refused


@pytest.fixture
def load(tmp_path: Path) -> Loader:
    return Loader(tmp_path)


# What a row may hold


BAD_ROWS = {
    "null": ({"prompt": None}, "prompt: got null"),
    "empty": ({"prompt": ""}, 'prompt: got "", expected a prompt that is not blank'),
    "blank": ({"prompt": "   "}, 'prompt: got "   "'),
    "number": ({"prompt": 7}, "prompt: got the number 7, expected a string or a list of messages"),
    "list of strings": ({"prompt": ["a", "b"]}, 'prompt[0]: got "a"'),
    "empty list": ({"prompt": []}, "prompt: got an empty list"),
    "no role": ({"prompt": [{"content": "x"}]}, "prompt[0].role: got none"),
    "no content": ({"prompt": [SYSTEM, {"role": "user"}]}, "prompt[1].content: got none"),
    "blank content": ({"prompt": [{"role": "user", "content": " "}]}, 'prompt[0].content: got " "'),
    "content parts": ({"prompt": [{"role": "user", "content": [{"text": "x"}]}]}, "prompt[0].content: got the list"),
    "assistant last": ({"prompt": [USER, ANSWER]}, 'prompt[1].role: got "assistant"'),
    "system alone": ({"prompt": [SYSTEM]}, 'prompt[0].role: got "system"'),
    "unknown role": (
        {"prompt": [{"role": "bot", "content": "x"}]},
        'prompt[0].role: got "bot", expected one of system',
    ),
    "messages among strings": (
        {"prompt": [USER]},
        'prompt: got the list [{"role": "user", "content": "What is 2 + 3?"}], expected a string, as',
    ),
    "messages as text": ({"prompt": "[{'role': 'user', 'content': 'x'}]"}, "prompt: got messages written as text"),
    "already rendered": ({"prompt": RENDERED}, 'prompt: got a prompt that already holds "<|im_start|>assistant"'),
    "lone surrogate": ('{"prompt": "a\\ud83d"}', 'prompt: got "a\\ud83d", expected text without lone surrogates'),
    "surrogate elsewhere": ('{"prompt": "a", "meta": {"k": ["\\udc00"]}}', "meta: got"),
    "NUL": ({"prompt": "a\0b"}, 'prompt: got "a\\u0000b"'),
    "no column": ({"text": "a"}, "prompt: got no such column"),
    "not an object": ("[1]", "row: got the list [1], expected a JSON object"),
    "invalid JSON": ('{"prompt": "a"', "row: got invalid JSON at column 15"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_b93_a_bad_row_is_refused_with_its_number_or_left_out_with_a_count(load: Loader, name: str):
    row, problem = BAD_ROWS[name]
    rows = [{"prompt": "first"}, row, {"prompt": "third"}]
    message = load.refused(rows)
    assert f"{load.folder / 'train.jsonl'}" in message
    assert "1 of 3 rows cannot be used" in message
    assert f"row 2, {problem}" in message
    assert 'data.bad_rows = "skip"' in message
    prompts = load(rows, bad_rows="skip")
    assert [prompt.index for prompt in prompts.train] == [0, 2]
    assert said(prompts, "1 rows left out", 'data.bad_rows = "skip"', "1 x ")


def test_b93_all_bad_rows_are_one_message(load: Loader):
    rows = [{"prompt": None}] * 18 + [{"prompt": "good", "id": 1}] * 5 + [{"prompt": ""}] * 4
    message = load.refused(rows)
    assert "22 of 27 rows" in message
    assert "row 18, " in message and "row 25, " in message and "row 26, " not in message
    assert "and 2 more rows" in message
    assert "18 x prompt null, 4 x blank prompt" in message
    assert "columns: prompt, id" in message


def test_b93_a_file_without_one_usable_row_is_refused_even_when_skipping(load: Loader):
    assert "no prompt is left" in load.refused([{"prompt": ""}], bad_rows="skip")
    assert "row 1, row: got invalid JSON" in load.refused(["{"], bad_rows="skip")


def test_b93_repeated_and_damaged_rows_are_counted_not_refused(load: Loader):
    prompts = load([{"prompt": "same"}, {"prompt": "same"}, {"prompt": "lost \ufffd"}])
    assert len(prompts.train) == 3
    assert said(prompts, "1 training prompts repeat")
    assert said(prompts, "1 training prompts hold U+FFFD")


def test_the_seeds_rows_load_as_they_are(load: Loader):
    prompt = load([{"query": "What is 2 + 3?", "chosen": "", "rejected": "", "id": 0}]).train[0]
    assert prompt.columns == {"chosen": "", "rejected": "", "id": 0, "answer": ""}
    assert prompt.messages is None


# Length


LONG = "x y " * 2500 + "the end?"


@pytest.mark.parametrize("prompt", [LONG, [{"role": "user", "content": LONG}]], ids=["string", "messages"])
def test_b24_a_long_prompt_is_an_error_dropped_or_cut_at_its_beginning(load: Loader, prompt: Any):
    short = "short" if isinstance(prompt, str) else [{"role": "user", "content": "short"}]
    rows = [{"prompt": short, "answer": 1}, {"prompt": prompt, "answer": 2}]
    whole = load(rows, max_prompt_tokens=100_000).train[1].ids
    assert len(whole) > 5000

    message = load.refused(rows, max_prompt_tokens=32)
    assert f"row 2, prompt: got {len(whole)} tokens, expected at most 32 (data.max_prompt_tokens)" in message

    dropped = load(rows, max_prompt_tokens=32, overlong="drop")
    assert [prompt.columns["answer"] for prompt in dropped.train] == [1]
    assert said(dropped, "1 prompts longer than 32 tokens left out", "rows 2")

    cut = load(rows, max_prompt_tokens=32, overlong="truncate_left")
    assert cut.train[1].ids == whole[-32:]
    assert cut.train[1].text.endswith("the end?<|im_end|>\n<|im_start|>assistant\n")
    assert said(cut, "1 prompts longer than 32 tokens cut at their beginning", "rows 2")


def test_b24_the_limit_counts_the_template_and_not_the_tokenizers_limit(load: Loader, caplog: pytest.LogCaptureFixture):
    load.tokenizer.model_max_length = 4
    tokens = len(load([{"prompt": "hello"}]).train[0].ids)
    assert tokens > 4
    assert len(load([{"prompt": "hello"}], max_prompt_tokens=tokens).train) == 1
    assert f"got {tokens} tokens" in load.refused([{"prompt": "hello"}], max_prompt_tokens=tokens - 1)
    assert not caplog.records


def test_b24_long_and_bad_rows_are_one_message_and_skipping_bad_rows_drops_no_long_one(load: Loader):
    rows = [{"prompt": None}, {"prompt": LONG}, {"prompt": "ok"}]
    message = load.refused(rows, max_prompt_tokens=32)
    assert "2 of 3 rows" in message and "row 1, prompt: got null" in message and "row 2, prompt: got" in message
    assert "1 of 3 rows" in load.refused(rows, max_prompt_tokens=32, bad_rows="skip")
    assert "no prompt is left" in load.refused([{"prompt": LONG}], max_prompt_tokens=32, overlong="drop")


# Evaluation rows


def test_eval_fraction_holds_out_rows_by_the_seed(load: Loader):
    rows = [{"prompt": f"question {number}"} for number in range(20)]
    first, again, other = (load(rows, eval_fraction=0.1, seed=seed) for seed in (1, 1, 2))
    assert (len(first.train), len(first.eval)) == (18, 2)
    assert sorted(prompt.index for prompt in first.train + first.eval) == list(range(20))
    assert [prompt.index for prompt in first.eval] == [prompt.index for prompt in again.eval]
    assert [prompt.index for prompt in first.eval] != [prompt.index for prompt in other.eval]
    assert said(first, "2 of 20 prompts held out")


def test_a_split_that_leaves_one_side_empty_is_refused(load: Loader):
    prompts = load([{"prompt": f"question {number}"} for number in range(4)]).train
    for fraction in (0.01, 0.95):
        with pytest.raises(Refused, match=rf"data.eval_fraction = {fraction} of 4 prompts"):
            split_off(prompts, fraction, 0)


def test_an_eval_file_is_checked_like_the_training_file(load: Loader):
    other = write(load.folder / "eval.jsonl", [{"question": "a"}, {"question": "new"}])
    prompts = load([{"prompt": "a"}, {"prompt": "b"}], eval_source=other)
    assert [prompt.index for prompt in prompts.eval] == [0, 1]
    assert said(prompts, "1 of 2 evaluation prompts are also trained on")
    broken = write(load.folder / "eval.jsonl", [{"prompt": ""}])
    assert f'data.eval_source = "{broken}": 1 of 1 rows' in load.refused([{"prompt": "a"}], eval_source=broken)


def test_evaluating_on_the_training_rows_is_refused(load: Loader):
    source = str(load.folder / "train.jsonl")
    assert "would read the training rows" in load.refused([{"prompt": "a"}], eval_source=source)
    assert "without splits" in load.refused([{"prompt": "a"}], eval_split="test")
    assert "keep one" in load.refused([{"prompt": "a"}], eval_split="test", eval_fraction=0.5)
