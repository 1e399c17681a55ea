"""Every source gives the same rows with their place in the file; what cannot be read is one message."""

import json
import time
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest

from trainer.batch import Prompt
from trainer.data.shapes import map_columns, reward_columns
from trainer.data.sources import Source, read_rows
from trainer.data.table import Table, numbered
from trainer.errors import Refused

CHAT = [{"role": "user", "content": "What is 2 + 3?"}]
ROWS: list[dict[str, Any]] = [{"prompt": "你好", "answer": "a"}, {"prompt": "two\nlines", "answer": "b"}]


def read(path: Path, **source: str) -> Table:
    return read_rows(Source(str(path), **source))


def refusal(name: str | Path, **source: str) -> str:
    with pytest.raises(Refused) as caught:
        read_rows(Source(str(name), **source))
    return str(caught.value)


def lines_of(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


# Files


def test_all_formats_give_the_same_rows(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text(lines_of(ROWS), encoding="utf-8")
    (tmp_path / "a.json").write_text(json.dumps(ROWS), encoding="utf-8")
    (tmp_path / "lines.json").write_text(lines_of(ROWS), encoding="utf-8")
    (tmp_path / "a.csv").write_text('prompt,answer\n你好,a\n"two\nlines",b\n', encoding="utf-8")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    for name in ("a.jsonl", "a.json", "lines.json", "a.csv", "a.parquet", "saved"):
        table = read(tmp_path / name)
        assert table.rows == ROWS, name
        assert table.numbers == [1, 2], name
        assert not table.unreadable, name


def test_json_lines_keep_the_line_and_the_row_number(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"prompt": "first"}\r\n\r\n{"prompt": "a\xe2\x80\xa8b"}\n[1, 2]\n{"prompt": "x",}\n{}'
    )
    table = read(path)
    assert table.rows == [{"prompt": "first"}, {"prompt": "a\u2028b"}, {}]
    assert (table.numbers, table.lines) == ([1, 2, 5], [1, 3, 6])
    array, broken = table.unreadable
    assert (array.row, array.line, array.got) == (3, 4, "the list [1, 2]")
    assert (broken.row, broken.line) == (4, 5)
    assert str(broken).startswith("row 4 (line 5), row: got invalid JSON at column 1")


def test_a_json_file_says_where_it_breaks_and_where_its_rows_are(tmp_path: Path):
    (tmp_path / "broken.json").write_text('[{"prompt": "a"},\n {"prompt": }]')
    assert "line 2, column 13" in refusal(tmp_path / "broken.json")
    (tmp_path / "nested.json").write_text('{"version": 1, "data": [{"prompt": "a"}]}')
    assert 'under "data"' in refusal(tmp_path / "nested.json")


def test_csv_rows_are_placed_by_their_first_line(tmp_path: Path):
    path = tmp_path / "a.csv"
    path.write_text('prompt,answer\r\n"a\r\nb",1\r\n\r\nonly one\r\nc,"2, 3"\r\n')
    table = read(path)
    assert table.rows == [{"prompt": "a\r\nb", "answer": "1"}, {"prompt": "c", "answer": "2, 3"}]
    assert (table.numbers, table.lines) == ([1, 3], [2, 6])
    assert str(table.unreadable[0]) == "row 2 (line 5), row: got 1 values, expected 2, one for each column"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"prompt,prompt\n1,2\n", 'the header names "prompt" twice'),
        (b'prompt\n"never closed\n', "starts at line 2 is not valid CSV"),
        (b"prompt\n", "holds no rows"),
        (b"", "holds no rows"),
        ("prompt\nok\n你好\n".encode("gb18030"), "line 3 is not UTF-8 (byte 0xc4)"),
        ("prompt\n".encode("utf-16"), "UTF-16"),
    ],
)
def test_csv_that_cannot_be_read(tmp_path: Path, content: bytes, said: str):
    (tmp_path / "a.csv").write_bytes(content)
    assert said in refusal(tmp_path / "a.csv")


def test_parquet_keeps_messages(tmp_path: Path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": CHAT}]), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet").rows == [{"prompt": CHAT}]
    (tmp_path / "text.parquet").write_text("no parquet")
    assert "not readable as Parquet" in refusal(tmp_path / "text.parquet")


def test_a_missing_file_names_the_folder_and_similar_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text(lines_of(ROWS))
    message = refusal("trian.jsonl")
    assert 'data.source = "trian.jsonl": no such file' in message
    assert str(tmp_path) in message
    assert "similar names: train.jsonl" in message
    assert "data files: train.jsonl" in refusal("no/such/folder/other.csv")


def test_what_is_no_data_file_is_refused_by_its_ending(tmp_path: Path):
    (tmp_path / "a.txt").write_text("hello")
    assert '".txt", expected one of .jsonl' in refusal(tmp_path / "a.txt")
    assert "data.source is empty" in refusal("")


def test_a_file_has_no_splits_and_no_configurations(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text(lines_of(ROWS))
    assert 'data.eval_split = "test"' in refusal(tmp_path / "a.jsonl", split="test", split_key="data.eval_split")
    assert 'data.config = "main"' in refusal(tmp_path / "a.jsonl", config="main")


# Folders and the hub


def test_a_saved_dict_has_its_splits(tmp_path: Path):
    splits = {"train": datasets.Dataset.from_list(ROWS), "validation": datasets.Dataset.from_list(ROWS[:1])}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    assert read(tmp_path / "saved", split="validation").rows == ROWS[:1]
    message = refusal(tmp_path / "saved", split="test", split_key="data.eval_split")
    assert 'data.eval_split = "test"' in message
    assert "train, validation" in message


def test_a_folder_of_data_files_is_read_by_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text(lines_of(ROWS), encoding="utf-8")
    assert read(tmp_path / "data").rows == ROWS
    assert "Name a file" in refusal(tmp_path / "data", split="test")


def test_a_hub_failure_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: None)
    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    message = refusal("openai/gsm8k", config="main", split="test", key="data.eval_source")
    assert 'data.eval_source = "openai/gsm8k" could not be loaded' in message
    assert 'Tried: datasets.load_dataset("openai/gsm8k", "main", split="test")' in message
    assert "Couldn't reach" in message
    assert 'datasets.load_dataset("openai/gsm8k", "main").save_to_disk("gsm8k")' in message
    assert str(tmp_path) in message


@pytest.fixture
def no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub refuses every connection; returns the cache of data sets, empty."""
    # The real client, on a port that nobody listens at.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


def test_a_hub_name_without_network_is_refused_at_once(no_network: Path):
    start = time.monotonic()
    message = refusal("openai/gsm8k", config="main")
    assert time.monotonic() - start < 5
    assert "no file or folder of that name, and the hub cannot be reached: [Errno 111] Connection refused" in message
    assert 'datasets.load_dataset("openai/gsm8k", "main").save_to_disk("gsm8k")' in message


def test_a_data_set_in_the_cache_needs_no_network(no_network: Path, monkeypatch: pytest.MonkeyPatch):
    (no_network / "owner___grade_school").mkdir(parents=True)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_list(ROWS))
    assert read("owner/GradeSchool").rows == ROWS


# reasoning-gym


def test_reasoning_gym_rows_are_the_same_on_every_rank():
    first, second = (read_rows(Source("reasoning_gym:chain_sum?size=3")).rows for _ in range(2))
    assert first == second
    assert len(first) == 3
    other = read_rows(Source("reasoning_gym:chain_sum?size=3&seed=1")).rows
    assert other[0]["question"] != first[0]["question"]


def test_reasoning_gym_rows_carry_what_scores_them():
    import reasoning_gym

    row = read_rows(Source("reasoning_gym:chain_sum?size=2&min_terms=3&max_terms=3&seed=4")).rows[1]
    assert row["entry"] == {name: row[name] for name in ("question", "answer", "metadata")}
    assert row["source"] == "reasoning_gym:chain_sum?seed=4&size=2&min_terms=3&max_terms=3"
    again = reasoning_gym.create_dataset("chain_sum", size=2, min_terms=3, max_terms=3, seed=4)
    assert again[1] == row["entry"]
    assert again.score_answer(row["answer"], row["entry"]) == 1.0


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("chain_sums", 'no task "chain_sums". Did you mean chain_sum'),
        ("chain_sum?sise=3", 'no argument "sise". Did you mean size?'),
        ("chain_sum?size=many", 'argument size: got "many"; Input should be a valid integer'),
        ("chain_sum?size=0", "argument size: got 0, expected at least 1"),
        ("chain_sum?size", 'got "size" after the question mark'),
        ("chain_sum?min_terms=5&max_terms=2", "refuses these arguments: max_terms must be >= min_terms"),
    ],
)
def test_reasoning_gym_mistakes_are_named(query: str, said: str):
    message = refusal(f"reasoning_gym:{query}")
    assert message.startswith(f"reasoning_gym:{query}: ")
    assert said in message


# Shapes


@pytest.mark.parametrize(
    ("row", "prompt", "answer"),
    [
        ({"query": "q", "chosen": "c", "rejected": "", "id": 0}, "query", "chosen"),
        ({"query": "q", "reference_answer": "r"}, "query", "reference_answer"),
        ({"question": "q", "answer": "a", "metadata": {}}, "question", "answer"),
        ({"messages": CHAT}, "messages", None),
    ],
)
def test_usual_shapes_are_recognised(row: dict[str, Any], prompt: str, answer: str | None):
    columns = map_columns(numbered([row], "t"))
    assert (columns.prompt, columns.answer) == (prompt, answer)
    kept = reward_columns(row, columns)
    assert kept == {name: value for name, value in row.items() if name != prompt} | (
        {"answer": row[answer]} if answer else {}
    )


def test_columns_that_could_each_be_meant_are_refused_until_one_is_named():
    table = numbered([{"problem": "p", "question": "q", "solution": "s", "answer": "a", "level": 3}], "t")
    with pytest.raises(Refused, match=r'problem and question .* data.prompt_column = "problem"'):
        map_columns(table)
    with pytest.raises(Refused, match=r'solution and answer .* data.answer_column = "solution"'):
        map_columns(table, "question")
    columns = map_columns(table, "question", "solution")
    assert reward_columns(table.rows[0], columns) == {"problem": "p", "solution": "s", "answer": "s", "level": 3}


def test_a_named_column_that_is_not_there_lists_those_that_are():
    table = numbered([{"Question": "q", "gold": "a"}], "t.csv")
    with pytest.raises(
        Refused, match=r'(?s)data.prompt_column = "question": .* mean "Question"\?\nColumns: Question, gold'
    ):
        map_columns(table, "question")
    with pytest.raises(Refused, match=r"(?s)no prompt column.*Columns: Question, gold"):
        map_columns(table)
    with pytest.raises(Refused, match="cannot be both"):
        map_columns(table, "gold", "gold")


def test_missing_answers_stay_missing():
    rows: list[dict[str, Any]] = [{"query": "q", "chosen": chosen} for chosen in ("yes", "", None, 0, "  ")] + [
        {"query": "q"}
    ]
    columns = map_columns(numbered(rows, "t"))
    prompts = [Prompt(place, "q", (1,), None, reward_columns(row, columns)) for place, row in enumerate(rows)]
    assert [prompt.columns["answer"] for prompt in prompts] == ["yes", "", None, 0, "  ", None]


@pytest.mark.parametrize("file", ["README.md", ".huggingface.yaml"])
@pytest.mark.parametrize(
    "path", ["http://127.0.0.1:9/x.jsonl", "/etc/passwd", "../secret.jsonl", "data/../../secret.jsonl", "~/x.jsonl"]
)
def test_d9_a_readme_leads_to_no_file_outside_of_its_folder(tmp_path: Path, file: str, path: str) -> None:
    (tmp_path / "secret.jsonl").write_text('{"prompt": "canary"}\n')
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"prompt": "inside"}\n')
    configs = "configs:\n- config_name: default\n  data_files:\n  - split: train\n    path: "
    mark = "---\n" if file == "README.md" else ""
    (folder / file).write_text(f"{mark}{configs}{path}\n{mark}")
    with pytest.raises(Refused, match=r"its README names .*, outside of the folder"):
        read_rows(Source(str(folder)))
    (folder / file).write_text(f"{mark}{configs}train.jsonl\n{mark}")
    assert [row["prompt"] for row in read_rows(Source(str(folder))).rows] == ["inside"]
