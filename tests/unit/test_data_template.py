"""Prompts are rendered as the model was taught, and end tokens are all found (B19, B41)."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors
from transformers import GenerationConfig, PreTrainedTokenizerBase

from tests.prompt_loader import RENDERED, SYSTEM, USER, Loader, said
from tests.qwen_tokenizer import qwen25_tokenizer
from tests.tiny import tiny_tokenizer
from trainer.data.stops import declared_eos, stop_ids


@cache
def qwen(instruct: bool) -> PreTrainedTokenizerBase:
    return qwen25_tokenizer(instruct)


@pytest.fixture
def load(tmp_path: Path) -> Loader:
    return Loader(tmp_path)


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
    assert prompt.messages == (USER,)
    message = load.refused([{"prompt": [USER]}], chat_template_kwargs={"tokenize": True})
    assert "chat_template_kwargs: tokenize is set by the trainer" in message


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
    load.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    assert load([{"prompt": [{"role": "user", "content": "a"}]}]).train[0].ids == (bare.ids[1], 299)
    cut = load([{"prompt": "abcdef"}], chat_template="off", max_prompt_tokens=3, overlong="truncate_left").train[0]
    assert load.tokenizer.convert_ids_to_tokens(list(cut.ids)) == ["<|im_start|>", "e", "f"]


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
