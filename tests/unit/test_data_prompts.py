"""Rows become prompts: checked as a whole, rendered as the model was taught, counted, split; nothing silently."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors
from transformers import GenerationConfig, PreTrainedTokenizerBase

from tests.qwen_tokenizer import qwen25_tokenizer
from tests.tiny import tiny_tokenizer
from trainer.config import RunConfig
from trainer.data.prompts import PromptSets, load_prompts, split_off
from trainer.data.stops import declared_eos, stop_ids
from trainer.errors import Refused

USER = {"role": "user", "content": "What is 2 + 3?"}
SYSTEM = {"role": "system", "content": "Think first."}
ANSWER = {"role": "assistant", "content": "5"}
RENDERED = "<|im_start|>user\nWhat is 2 + 3?<|im_end|>\n<|im_start|>assistant\n"


@cache
def qwen(instruct: bool) -> PreTrainedTokenizerBase:
    return qwen25_tokenizer(instruct)


def write(path: Path, rows: list[Any]) -> str:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


class Loader:
    """Loads rows with data settings; the tokenizer may be replaced."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizer: PreTrainedTokenizerBase = tiny_tokenizer()

    def __call__(self, rows: list[Any], eos_ids: tuple[int, ...] = (), **data: Any) -> PromptSets:
        source = write(self.folder / "train.jsonl", rows)
        config = RunConfig(model={"name_or_path": "tiny"}, data={"source": source, **data})
        return load_prompts(config, self.tokenizer, eos_ids=eos_ids)

    def refused(self, rows: list[Any], **data: Any) -> str:
        with pytest.raises(Refused) as caught:
            self(rows, **data)
        return str(caught.value)


@pytest.fixture
def load(tmp_path: Path) -> Loader:
    return Loader(tmp_path)


def said(prompts: PromptSets, *words: str) -> bool:
    return any(all(word in note for word in words) for note in prompts.notes)


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


# The chat template


def test_rendered_ids_are_the_templates_own(load: Loader):
    string, messages = (load([{"prompt": prompt}]).train[0] for prompt in (USER["content"], [USER]))
    expected = load.tokenizer.apply_chat_template([USER], add_generation_prompt=True)["input_ids"]
    assert list(string.ids) == list(messages.ids) == expected
    assert string.text == messages.text == RENDERED
    assert messages.messages == (USER,)


def test_b41_messages_without_a_template_are_refused(load: Loader):
    load.tokenizer.chat_template = None
    load.tokenizer.name_or_path = "some/base-model"
    message = load.refused([{"prompt": [USER]}])
    assert "the tokenizer of some/base-model has no chat template" in message
    assert "chat_template.jinja" in message
    assert 'data.chat_template = "on"' in load.refused([{"prompt": "x"}], chat_template="on")


def test_b41_the_first_prompt_is_shown_with_its_ids(load: Loader):
    prompts = load([{"prompt": USER["content"]}, {"prompt": "second"}])
    assert said(prompts, "first prompt", repr(RENDERED), " ".join(map(str, prompts.train[0].ids)))


def test_auto_renders_strings_for_qwen_instruct_but_not_for_base(load: Loader):
    # Both ship the same template; only the end token tells them apart.
    for instruct, text in ((True, "<|im_start|>system\nYou are Qwen"), (False, "What is 2 + 3?")):
        load.tokenizer = qwen(instruct)
        prompts = load([{"prompt": "What is 2 + 3?"}])
        assert prompts.train[0].text.startswith(text)
        assert said(prompts, "string prompts", "chat model" if instruct else "base model")
        assert load([{"prompt": [USER]}]).train[0].text.startswith("<|im_start|>system")
    forced = load([{"prompt": "What is 2 + 3?"}], chat_template="on")
    assert forced.train[0].text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    load.tokenizer = qwen(True)
    assert load([{"prompt": "What is 2 + 3?"}], chat_template="off").train[0].text == "What is 2 + 3?"


def test_auto_knows_a_chat_model_by_the_generation_configs_end_token(load: Loader):
    # Gemma's and Phi's tokenizers name another eos than the one that ends a turn.
    load.tokenizer.eos_token = "<|endoftext|>"
    assert load([{"prompt": "x"}]).train[0].text == "x"
    assert load([{"prompt": "x"}], eos_ids=(297, 299)).train[0].text.endswith("assistant\n")


def test_off_takes_rendered_strings_as_they_are_and_refuses_messages(load: Loader):
    prompt = load([{"prompt": RENDERED}], chat_template="off").train[0]
    assert list(prompt.ids) == load.tokenizer.apply_chat_template([USER], add_generation_prompt=True)["input_ids"]
    assert 'data.chat_template = "off"' in load.refused([{"prompt": [USER]}], chat_template="off")


def test_data_system_comes_first_unless_the_row_has_its_own(load: Loader):
    prompts = load([{"prompt": [USER]}, {"prompt": [SYSTEM, USER]}], system="Be brief.")
    first, own = prompts.train
    assert first.messages == ({"role": "system", "content": "Be brief."}, USER)
    assert first.text.startswith("<|im_start|>system\nBe brief.<|im_end|>")
    assert own.messages == (SYSTEM, USER)
    assert "Be brief" not in own.text
    assert said(prompts, "1 rows keep their own system message")
    string = load([{"prompt": "x"}], system="Be brief.").train[0]
    assert string.text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nx")
    assert "data.system" in load.refused([{"prompt": "x"}], system="Be brief.", chat_template="off")


def test_template_arguments_reach_the_template_and_null_keys_do_not(load: Loader):
    load.tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% if m.name is defined %}!{{ m.name }}{% endif %}<|im_end|>{% endfor %}"
        "{% if style %}{{ style }}{% endif %}"
    )
    prompt = load([{"prompt": [{**USER, "name": None}]}], chat_template_kwargs={"style": "short"}).train[0]
    assert prompt.text == "What is 2 + 3?<|im_end|>short"
    assert "tokenize" in load.refused([{"prompt": [USER]}], chat_template_kwargs={"tokenize": True})


def test_a_row_that_the_template_refuses_is_a_bad_row(load: Loader):
    load.tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
        "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    )
    message = load.refused([{"prompt": [USER]}, {"prompt": [SYSTEM, USER]}])
    assert "row 2, prompt: got the list" in message
    assert "no system here" in message


def test_bos_comes_once(load: Loader):
    load.tokenizer.bos_token = "<|im_start|>"
    load.tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 298), ("<|im_end|>", 299)]
    )
    bare, given = load([{"prompt": "a"}, {"prompt": "<|im_start|>a"}], chat_template="off").train
    assert bare.ids == given.ids == (298, load.tokenizer.convert_tokens_to_ids("a"))
    assert load([{"prompt": [USER]}]).train[0].ids[:2] == (298, load.tokenizer.convert_tokens_to_ids("user"))
    cut = load([{"prompt": "abcdef"}], chat_template="off", max_prompt_tokens=3, overlong="truncate_left").train[0]
    assert load.tokenizer.convert_ids_to_tokens(list(cut.ids)) == ["<|im_start|>", "e", "f"]


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


# End tokens


def test_b19_the_stop_set_is_the_union_and_a_note_names_what_differs():
    tokenizer = tiny_tokenizer()
    stops = stop_ids(tokenizer, GenerationConfig(eos_token_id=[3, 5]))
    assert stops.ids == (3, 5, 299)
    assert any("299 (<|im_end|>)" in note and "3 (" in note and "5 (" in note for note in stops.notes)
    assert declared_eos(tokenizer, GenerationConfig(eos_token_id=[3, 5])) == (3, 5, 299)
    for same in (None, GenerationConfig(), GenerationConfig(eos_token_id=299)):
        assert stop_ids(tokenizer, same).ids == (299,)
        assert stop_ids(tokenizer, same).notes == []


@pytest.mark.parametrize(("instruct", "generation"), [(True, [151645, 151643]), (False, 151643), (False, None)])
def test_b19_qwen25_stops_at_both_of_its_end_tokens(instruct: bool, generation: Any):
    stops = stop_ids(qwen(instruct), GenerationConfig(eos_token_id=generation))
    assert stops.ids == (151643, 151645)
    assert any("<|im_end|>" in note for note in stops.notes)


def test_b19_a_template_whose_turns_end_in_plain_text_is_named():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }} [STOP]\n{% endfor %}"
    stops = stop_ids(tokenizer, None)
    assert stops.ids == (299,)
    assert any("[STOP]" in note and "rollout.stop" in note for note in stops.notes)
    tokenizer.chat_template = "{{ raise_exception('broken') }}"
    assert any("broken" in note for note in stop_ids(tokenizer, None).notes)
    tokenizer.chat_template = tokenizer.eos_token = None
    assert any("no end token is known" in note for note in stop_ids(tokenizer, None).notes)


def test_the_rebuilt_qwen_tokenizer_is_the_real_one():
    # Ids from the published tokenizer. U+2581 is two byte-level tokens here, not a word mark.
    tokenizer = qwen(True)
    assert len(tokenizer) == 151665
    assert tokenizer("\u2581")["input_ids"] == [10417, 223]
    assert tokenizer("Hello, world!")["input_ids"] == [9707, 11, 1879, 0]
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [151643, 151644, 151645]
