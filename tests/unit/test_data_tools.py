"""``zero-grpo data``: what a source holds, other tools' forms as rows to train on and back, and no row lost."""

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

import trainer.data.sources
import trainer.data.text_files
from tests.prompt_loader import write
from tests.tiny import tiny_qwen2, tiny_tokenizer
from trainer.__main__ import main
from trainer.batch import Prompt
from trainer.config import RunConfig
from trainer.data.prompts import load_prompts
from trainer.data.sources import Source, read_blocks, read_rows
from trainer.errors import Refused

Run = Any


@pytest.fixture
def data(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command in an empty folder: (exit code, what was said)."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str]:
        code = main(["data", *words])
        return code, capsys.readouterr().out

    return run


def rows(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def prompts(source: str, **settings: Any) -> list[Prompt]:
    config = RunConfig(model={"name_or_path": "tiny"}, data={"source": source, "chat_template": "on", **settings})
    return load_prompts(config, tiny_tokenizer()).train


def asked(found: list[Prompt]) -> list[tuple[tuple[int, ...], Any]]:
    return [(one.ids, one.columns.get("answer")) for one in found]


SOURCES: dict[str, list[dict[str, Any]]] = {
    "seed": [{"query": f"什么是 {i}?", "chosen": f"{i} 是数", "rejected": "", "id": i} for i in range(4)],
    "raw": [{"query": f"What is {i}?", "reference_answer": str(i), "level": i} for i in range(4)],
    "trl": [{"prompt": [{"role": "user", "content": f"{i}?"}], "answer": str(i)} for i in range(4)],
    "numbers": [{"problem": f"{i} + 1", "solution": i + 1} for i in range(4)],
    "no answers": [{"prompt": f"{i}?"} for i in range(4)],
}


@pytest.mark.parametrize("to", ["prompt", "seed", "slime", "openai", "sharegpt"])
@pytest.mark.parametrize("name", SOURCES)
def test_there_and_back_are_the_same_prompts_and_answers(data: Run, name: str, to: str) -> None:
    source = write(Path("in.jsonl"), SOURCES[name])
    expected = asked(prompts(source))
    assert data("convert", source, "there.jsonl", "--to", to)[0] == 0
    assert data("convert", "there.jsonl", "back.jsonl")[0] == 0
    found = asked(prompts("back.jsonl"))
    if to == "seed" and name == "no answers":  # that form has no row without the column
        expected = [(ids, "") for ids, _ in expected]
    assert found == expected
    if to in ("prompt", "seed", "slime"):
        assert asked(prompts("there.jsonl")) == expected
    kept = {"prompt", "query", "problem", "answer", "chosen", "reference_answer", "solution"}
    for before, after in zip(SOURCES[name], rows("back.jsonl"), strict=True):
        assert {key: value for key, value in before.items() if key not in kept}.items() <= after.items()


def test_the_forms_have_the_columns_that_their_tools_read(data: Run) -> None:
    source = write(Path("in.jsonl"), [{"question": "1?", "answer": "a", "level": 3}])
    written = {
        "prompt": {"prompt": "1?", "answer": "a", "level": 3},
        "seed": {"query": "1?", "chosen": "a", "rejected": "", "id": 0, "level": 3},
        "slime": {"input": "1?", "label": "a", "level": 3},
        "openai": {
            "messages": [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "a"}],
            "level": 3,
        },
        "sharegpt": {"conversations": [{"from": "human", "value": "1?"}, {"from": "gpt", "value": "a"}], "level": 3},
    }
    for to, row in written.items():
        assert data("convert", source, "out.jsonl", "--to", to, "--force")[0] == 0
        assert rows("out.jsonl") == [row]


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".csv", ".parquet", ""])
def test_every_kind_of_source_is_converted(data: Run, ending: str) -> None:
    content = [{"question": "one,\ntwo", "answer": "a"}, {"question": "三", "answer": "b"}]
    path = Path(f"in{ending}")
    match ending:
        case ".jsonl":
            write(path, content)
        case ".json":
            path.write_text(json.dumps(content))
        case ".csv":
            path.write_text('question,answer\n"one,\ntwo",a\n三,b\n', encoding="utf-8")
        case ".parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(content), path)
        case _:
            datasets.Dataset.from_list(content).save_to_disk(path)
    assert data("convert", str(path), "out.jsonl")[0] == 0
    assert rows("out.jsonl") == [{"prompt": one["question"], "answer": one["answer"]} for one in content]


def test_chat_logs_become_prompts(data: Run) -> None:
    user, answer = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}
    parts = {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}
    source = write(Path("openai.jsonl"), [{"messages": [parts, answer]}, {"messages": [user, answer, user], "id": 1}])
    assert data("convert", source, "out.jsonl")[0] == 0
    assert rows("out.jsonl") == [{"prompt": [user], "answer": "hello"}, {"prompt": [user, answer, user], "id": 1}]
    # A label is the answer; what the assistant said is kept beside it.
    source = write(Path("labelled.jsonl"), [{"messages": [user, answer], "label": "7"}])
    assert data("convert", source, "labelled-out.jsonl")[0] == 0
    assert rows("labelled-out.jsonl") == [{"prompt": [user], "answer": "7", "completion": "hello"}]
    share = [
        {"system": "be brief", "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
        {"conversations": [{"from": "alien", "value": "hi"}]},
    ]
    code, said = data("convert", write(Path("share.jsonl"), share), "share-out.jsonl")
    assert code == 0 and 'row 2, conversations[0].from: got "alien"' in said
    assert rows("share-out.jsonl") == [{"prompt": [{"role": "system", "content": "be brief"}, user], "answer": "hello"}]
    session = [
        {"type": "session", "version": 3, "id": "s"},
        {"type": "message", "id": "a", "timestamp": "t", "message": parts},
        {"type": "message", "id": "b", "message": {"role": "assistant", "content": [{"type": "text", "text": "x"}]}},
    ]
    code, said = data("convert", write(Path("claw.jsonl"), session), "claw-out.jsonl")
    assert code == 0 and "2 entries are no message of the user" in said
    assert rows("claw-out.jsonl") == [{"prompt": "hi", "id": "a", "timestamp": "t"}]


BAD = [
    '{"question": "a", "answer": "1"}',
    "{oops",
    '{"question": null}',
    '{"question": "b"}',
    '{"question": "\\ud83d"}',
]


def test_b93_no_row_is_lost(data: Run) -> None:
    """What is not written is set aside whole, with its number and the reason."""
    code, said = data("convert", write(Path("in.jsonl"), BAD), "out.jsonl")
    assert code == 0 and "out.jsonl: 2 rows" in said and "out.rejected.jsonl: 3 rows" in said
    assert "row 3, question: got null, expected" in said
    aside = rows("out.rejected.jsonl")
    assert [(one["row"], one["field"], one["content"]) for one in aside] == [
        (2, "row", "{oops"),
        (3, "question", {"question": None}),
        (5, "question", {"question": "\ud83d"}),
    ]
    assert len(rows("out.jsonl")) + len(aside) == len(BAD)


def test_files_appear_whole_or_not_at_all(data: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(Path("in.jsonl"), BAD)
    assert data("convert", source, "out.jsonl")[0] == 0
    before = {path: path.read_bytes() for path in Path().iterdir()}
    code, said = data("convert", source, "out.jsonl")
    assert code == 2 and "out.jsonl and out.rejected.jsonl would be overwritten" in said
    only_bad = write(Path("bad.jsonl"), ["{"])
    for words in (
        [only_bad, "out.jsonl", "--force"],
        [source, source, "--force"],
        [write(Path("one.eval.jsonl"), BAD), "one.jsonl", "--force"],
        [write(Path("two.rejected.jsonl"), BAD), "two.jsonl", "--force"],
        [source, "no/out.jsonl"],
        [source, "o.csv"],
    ):
        assert data("convert", *words)[0] == 2
    with monkeypatch.context() as broken, pytest.raises(ZeroDivisionError):
        broken.setattr("trainer.data_tools.convert._shaped", lambda *_: 1 / 0)
        data("convert", source, "out.jsonl", "--force")
    for path in (only_bad, "one.eval.jsonl", "two.rejected.jsonl"):
        Path(path).unlink()
    assert {path: path.read_bytes() for path in before} == before and len(list(Path().iterdir())) == len(before)


def test_force_leaves_nothing_of_an_older_conversion(data: Run, tmp_path: Path) -> None:
    data("convert", write(Path("in.jsonl"), BAD), "out.jsonl")
    assert data("convert", write(Path("in.jsonl"), BAD[:1]), "out.jsonl", "--force")[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_the_share_held_out_is_that_of_training(data: Run) -> None:
    source = write(Path("in.jsonl"), [{"prompt": f"{i}?", "answer": str(i)} for i in range(20)])
    assert data("convert", source, "out.jsonl", "--eval-fraction", "0.2", "--seed", "7")[0] == 0
    config = RunConfig(model={"name_or_path": "tiny"}, data={"source": source, "eval_fraction": 0.2, "seed": 7})
    sets = load_prompts(config, tiny_tokenizer())
    assert [one["prompt"] for one in rows("out.eval.jsonl")] == [one.columns["answer"] + "?" for one in sets.eval]
    assert [one["prompt"] for one in rows("out.jsonl")] == [one.columns["answer"] + "?" for one in sets.train]


def test_columns_are_named_where_their_names_are_none_of_the_usual(data: Run) -> None:
    source = write(Path("in.jsonl"), [{"text": "a", "gold": "1", "output": "o"}])
    assert "no prompt column" in data("convert", source, "out.jsonl")[1]
    code, said = data("convert", source, "out.jsonl", "--prompt-column", "text", "--answer-column", "gold")
    assert code == 0 and rows("out.jsonl") == [{"prompt": "a", "answer": "1", "output": "o"}]
    # `output` is a usual name of an answer as well: the settings that are shown make it clear.
    assert "train on it: --data.source out.jsonl --data.answer_column answer" in said
    assert asked(prompts("out.jsonl", answer_column="answer"))[0][1] == "1"
    source = write(Path("in.jsonl"), [{"query": "a", "prompt": "b"}])
    assert (
        'the column "prompt" would be written twice'
        in data("convert", source, "x.jsonl", "--prompt-column", "query")[1]
    )


def test_what_json_cannot_hold_is_counted_or_set_aside(data: Run) -> None:
    content = [{"prompt": "a", "x": float("nan"), "b": None}, {"prompt": "b", "x": 1.0, "b": b"\x00"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(content), "in.parquet")
    code, said = data("convert", "in.parquet", "out.jsonl")
    assert code == 0 and "1 values that are NaN or infinite became null" in said
    assert "row 2, row: got a value of type bytes" in said
    assert rows("out.jsonl") == [{"prompt": "a", "x": None, "b": None}]


def test_check_says_how_rows_are_read(data: Run) -> None:
    content = [
        {"question": "2 + 2?", "answer": "4", "level": 1},
        {"question": "2 + 2?", "answer": "5"},
        {"question": "2 + 2?", "answer": "4"},
        {"question": "lost \ufffd", "answer": ""},
        {"question": "x" * 100, "answer": "y"},
    ]
    code, said = data("check", write(Path("in.jsonl"), content))
    assert code == 0
    assert "in.jsonl: 5 rows, 5 usable prompts" in said
    assert 'prompts from "question" (text), answers from "answer"; rewards also get: level' in said
    assert "characters a prompt: 6 to 100 (row 5), median 6, 95 % have 6 or fewer" in said
    assert "2 prompts repeat an earlier one, 1 of them with another answer: rows 2 = 1, 3 = 1" in said
    assert '1 rows without an answer in "answer": row 4' in said
    assert "1 prompts hold U+FFFD" in said and ": row 4" in said


def test_b93_check_lists_every_row_that_training_refuses(data: Run) -> None:
    content = [*BAD, '{"question": [{"role": "user", "content": "hi"}]}', *['{"question": ""}'] * 30]
    source = write(Path("in.jsonl"), content)
    code, said = data("check", source)
    assert code == 2
    with pytest.raises(Refused) as caught:
        prompts(source)
    refusal = str(caught.value)
    listed = refusal[refusal.index("  row 2") : refusal.index("  columns:")]
    assert listed.count("\n") == 22 and "30 x blank prompt" in listed
    assert listed in said, "the same rows, in the same words"
    assert "34 of 36 rows cannot be used" in said


def test_check_counts_tokens_against_limit_and_window(data: Run) -> None:
    tiny_qwen2().save_pretrained("model")
    tiny_tokenizer().save_pretrained("model")
    source = write(Path("in.jsonl"), [{"prompt": "ab"}, {"prompt": "x y " * 10}, {"prompt": "<|im_start|>assistant"}])
    code, said = data("check", source, "--tokenizer", "model", "--max-prompt-tokens", "40")
    lengths = [len(one.ids) for one in prompts(source, bad_rows="skip")]
    assert len(lengths) == 2 and lengths[0] < 40 < lengths[1]
    assert code == 2 and "row 3, prompt: got a prompt that already holds" in said
    assert f"tokens a prompt: {lengths[0]} to {lengths[1]} (row 2)" in said
    assert f"1 prompts are longer than data.max_prompt_tokens = 40: row 2. {lengths[1]} would hold them all" in said
    assert f"the model's window is 64 tokens: {64 - lengths[1]} are left" in said
    tops = [line.split()[1:3] for line in said.splitlines() if line.startswith("<=")]
    assert sum(int(count) for _, count in tops) == 2


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            {"conversations": [{"from": "human", "value": "a"}]},
            "like ShareGPT conversations. Fix: zero-grpo data convert",
        ),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            "Answers at the end of conversations are split off by: zero-grpo data convert in.jsonl",
        ),
    ],
)
def test_check_names_the_command_that_helps(data: Run, content: dict[str, Any], said: str) -> None:
    code, out = data("check", write(Path("in.jsonl"), [content]))
    assert code == 2 and said in out


@pytest.mark.parametrize("ending", [".jsonl", ".csv", ".parquet"])
def test_a_large_file_is_read_in_blocks(tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the size of a block, the numbers are those of the whole."""
    path = tmp_path / f"in{ending}"
    content = [{"prompt": f"{i}?"} for i in range(11)]
    match ending:
        case ".jsonl":
            write(path, [*content[:5], "{", *content[5:]])
        case ".csv":
            lines = [one["prompt"] for one in content]
            path.write_text("\n".join(["prompt", *lines[:5], "a,b", *lines[5:]]) + "\n")
        case _:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(content), path)
    whole = read_rows(Source(str(path)))
    monkeypatch.setattr(trainer.data.text_files, "BLOCK", 4)
    monkeypatch.setattr(trainer.data.sources, "BLOCK", 4)
    blocks = list(read_blocks(Source(str(path))))
    assert max(len(block.rows) for block in blocks) <= 4 and len(blocks) >= 3
    again = read_rows(Source(str(path)))
    assert again == whole and whole.rows == content


def test_a_check_in_blocks_is_that_of_the_whole(data: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which kind of prompts is the usual one is told by all of them, and a repeat may lie in another block."""
    monkeypatch.setattr(trainer.data.text_files, "BLOCK", 2)
    message = {"prompt": [{"role": "user", "content": "m"}]}
    source = write(Path("in.jsonl"), [message, message, {"prompt": "a"}, {"prompt": "b"}, {"prompt": "a"}])
    code, said = data("check", source)
    assert code == 2 and "2 of 5 rows cannot be used" in said and "2 x strings and messages mixed" in said
    assert "1 prompts repeat an earlier one, 0 of them with another answer: rows 5 = 3" in said


def test_the_usual_kind_of_prompt_is_that_of_the_good_rows(data: Run) -> None:
    """As training has it: blank prompts do not vote."""
    message = {"prompt": [{"role": "user", "content": "m"}]}
    source = write(Path("in.jsonl"), [message, message, {"prompt": "a"}, *[{"prompt": " "}] * 3])
    code, said = data("check", source)
    assert code == 2 and "4 of 6 rows cannot be used" in said and "1 x strings and messages mixed" in said


def test_messages_in_a_cell_of_a_csv_file_make_strings_beside_them_messages(data: Run) -> None:
    Path("in.csv").write_text('prompt,answer\nplain,1\n"[{""role"": ""user"", ""content"": ""listed""}]",2\n')
    assert data("convert", "in.csv", "out.jsonl")[0] == 0
    assert [one["prompt"][0]["content"] for one in rows("out.jsonl")] == ["plain", "listed"]


def test_a_file_that_cannot_be_read_is_refused(data: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("in.json", "in.jsonl", "in.csv"):
        source = write(Path(name), [{"prompt": "a"}])
        with monkeypatch.context() as broken:
            for function in ("open", "read_text", "read_bytes"):
                broken.setattr(Path, function, refuse_to_read)
            code, said = data("check", source)
        assert code == 2 and "cannot be read: Permission denied" in said, said


def refuse_to_read(*_: Any, **__: Any) -> Any:
    raise PermissionError(13, "Permission denied")
