"""One vocabulary everywhere: comparison, storage, the start adapter's base, and rows for every token."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen2Tokenizer

from tests.tiny import tiny_qwen2, tiny_tokenizer
from trainer.errors import Refused
from trainer.models.vocabulary import (
    Vocabulary,
    check_embedding_rows,
    check_same,
    difference,
    embedding_rows,
    start_adapter_base,
    vocabulary_of,
)


def with_added_token() -> Qwen2Tokenizer:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<answer>"])
    return tokenizer


def adapter(folder: Path, base: object) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": base}))
    return folder


def saved(folder: Path, tokenizer: Qwen2Tokenizer) -> str:
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_a_vocabulary_is_the_map_and_not_its_order() -> None:
    assert Vocabulary.of_tokens({"a": 0, "b": 1}) == Vocabulary.of_tokens({"b": 1, "a": 0})
    assert Vocabulary.of_tokens({"a": 0, "b": 1}).sha256 != Vocabulary.of_tokens({"a": 1, "b": 0}).sha256
    assert vocabulary_of(tiny_tokenizer()).size == 300


def test_s109_one_shifted_id_is_named() -> None:
    policy = vocabulary_of(tiny_tokenizer())
    swapped = dict(policy.tokens) | {"<|im_start|>": 299, "<|im_end|>": 298}
    assert difference(policy, Vocabulary.of_tokens(swapped)) == "'<|im_start|>' is 298 / 299, '<|im_end|>' is 299 / 298"
    assert difference(policy, vocabulary_of(tiny_tokenizer())) is None


def test_s109_an_added_token_counts_and_a_long_list_is_cut() -> None:
    policy, other = vocabulary_of(tiny_tokenizer()), vocabulary_of(with_added_token())
    check_same(policy, policy, "The reference")
    with pytest.raises(Refused) as refused:
        check_same(policy, other, "The reference")
    assert "The reference has another vocabulary than the policy: 301 tokens instead of 300" in str(refused.value)
    assert "'<answer>' is missing / 300" in str(refused.value)
    shifted = Vocabulary.of_tokens({token: number + 1 for token, number in policy.tokens.items()})
    assert difference(policy, shifted).endswith(" and 295 more")
    assert difference(policy, shifted, limit=1).count(" / ") == 1


def test_a_saved_vocabulary_comes_back_and_a_changed_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "vocabulary.json"
    vocabulary = Vocabulary.of_tokens({"a": 0, "Ġé\n": 1, "\u2581": 2, "\ud800": 3})
    vocabulary.save(file)
    assert Vocabulary.load(file) == vocabulary

    text = file.read_text()
    for broken, message in [
        (text.replace('"a": 0', '"a": 7'), "do not have the sha256"),
        (text.replace('"a": 0', '"a": true'), "expected .*token: id"),
        (text[:30], "line 1, column .*not JSON"),
        ("[1]", "got a list, expected a JSON object"),
    ]:
        file.write_text(broken)
        with pytest.raises(Refused, match=message) as refused:
            Vocabulary.load(file)
        assert str(refused.value).startswith(str(file))
    with pytest.raises(Refused, match="cannot be read"):
        Vocabulary.load(tmp_path / "none.json")


def test_an_adapter_on_the_policy_itself_needs_no_word(tmp_path: Path) -> None:
    base = saved(tmp_path / "base", tiny_tokenizer())
    assert start_adapter_base(adapter(tmp_path / "same", base), base) == (base, [])
    assert start_adapter_base(adapter(tmp_path / "hub", "org/model"), "org/model") == ("org/model", [])
    slash = f"{base}/"
    assert start_adapter_base(adapter(tmp_path / "slash", slash), base) == (slash, [])


def test_an_adapter_s_base_is_compared_by_vocabulary_where_both_lie_here(tmp_path: Path) -> None:
    base, twin = saved(tmp_path / "base", tiny_tokenizer()), saved(tmp_path / "twin", tiny_tokenizer())
    other = saved(tmp_path / "other", with_added_token())
    assert start_adapter_base(adapter(tmp_path / "a", base), twin) == (base, [])
    with pytest.raises(Refused, match=r"base of lora\.start_adapter, .*other, has another vocabulary[\s\S]*'<answer>'"):
        start_adapter_base(adapter(tmp_path / "b", other), base)
    (tmp_path / "empty").mkdir()
    with pytest.raises(Refused, match=r"empty: its tokenizer cannot be read"):
        start_adapter_base(adapter(tmp_path / "c", str(tmp_path / "empty")), base)


def test_an_adapter_s_base_elsewhere_is_told_by_name(tmp_path: Path) -> None:
    name, (note,) = start_adapter_base(adapter(tmp_path / "a", "org/other"), "org/model")
    assert name == "org/other" and "trained on org/other, the policy is org/model" in note
    name, (note,) = start_adapter_base(adapter(tmp_path / "b", None), "org/model")
    assert name == "" and "names no base model" in note


def test_a_folder_that_is_no_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"lora\.start_adapter = .*no adapter_config\.json there\. Fix"):
        start_adapter_base(tmp_path, "org/model")
    adapter(tmp_path / "adapter", "org/model")
    with pytest.raises(Refused, match=r"Did you mean .*/adapter\?"):
        start_adapter_base(str(tmp_path), "org/model")
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"r": 8,\n "base_model_name_or_path" "x"}')
    with pytest.raises(Refused, match=r"adapter_config\.json, line 2, column 28: not JSON"):
        start_adapter_base(tmp_path / "adapter", "org/model")
    with pytest.raises(Refused, match=r"base_model_name_or_path is 3"):
        start_adapter_base(adapter(tmp_path / "odd", 3), "org/model")


def test_b64_fewer_rows_than_tokens_are_refused_and_nothing_is_resized() -> None:
    tokenizer, model = tiny_tokenizer(), tiny_qwen2(vocab=298)
    with pytest.raises(Refused, match=r"2 tokens without a row .* 298 rows: '<\|im_start\|>' \(id 298\)"):
        check_embedding_rows(model, tokenizer)
    assert embedding_rows(model) == 298
    check_embedding_rows(tiny_qwen2(vocab=300), tokenizer)
    check_embedding_rows(tiny_qwen2(vocab=512), tokenizer)


def test_b64_rows_of_a_partitioned_embedding_are_its_whole_shape() -> None:
    model = tiny_qwen2(vocab=300)
    weight = model.get_input_embeddings().weight
    weight.data = torch.empty(0)  # what ZeRO-3 leaves on a rank
    weight.ds_shape = torch.Size([300, 32])
    assert embedding_rows(model) == 300
    check_embedding_rows(model, tiny_tokenizer())


def test_b64_the_smaller_of_two_embeddings_counts() -> None:
    def embedding(rows: int) -> SimpleNamespace:
        return SimpleNamespace(weight=torch.empty(rows, 2))

    model = SimpleNamespace(get_input_embeddings=lambda: embedding(300), get_output_embeddings=lambda: embedding(298))
    assert embedding_rows(model) == 298
    assert embedding_rows(get_peft_model(tiny_qwen2(), LoraConfig(r=2, target_modules="all-linear"))) == 300
