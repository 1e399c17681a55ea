"""What comes from outside: JSON that is odd in a way that breaks what reads it next, and paths that no file has."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from trainer.__main__ import main
from trainer.checkpoint.card import read_records
from trainer.checkpoint.trained import find, stored_dtype
from trainer.doctor.records import read as read_recorded
from trainer.errors import NoCheckpoint, Refused
from trainer.launcher.hosts import read_hostfile
from trainer.outside import DEEPEST, NotJson, parsed, path_problem, read, too_deep
from trainer.record.run_dir import RunDirectory, read_lines
from trainer.world import connect


def nested(levels: int) -> str:
    return "[" * levels + "]" * levels


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "line 1, column 2"),
        (b'{"a": "\xff"}', "not UTF-8"),
        ("[" * 100_000, "nested too deeply"),
        (nested(DEEPEST + 1), "nested too deeply"),
        ('{"a":' * 500 + "0" + "}" * 500, "nested too deeply"),
        ("1" * 309, "an integer of 309 digits"),
        ('{"a": -' + "1" * 5000 + "}", "an integer of 5001 digits"),
    ],
)
def test_what_cannot_be_used_is_one_error(text: str | bytes, said: str) -> None:
    with pytest.raises(NotJson, match=said):
        parsed(text)


def test_what_can_be_used_is_read(tmp_path: Path) -> None:
    assert parsed("9" * 308) == int("9" * 308) and float(parsed("9" * 308)) > 0
    assert parsed("[" + "[]," * 500 + "1]")[-1] == 1  # beside each other, not inside
    assert parsed(nested(DEEPEST)) and not too_deep(parsed(nested(DEEPEST)))
    assert parsed(b"\xef\xbb\xbf[1]") == [1]
    (tmp_path / "a.json").write_text('{"a": NaN}')
    assert read(tmp_path / "a.json").keys() == {"a"}


@pytest.mark.parametrize("text", ['{"a": NaN}', "[Infinity]", "[1e999]", '{"a": 1, "a": 1}'])
def test_a_strict_reader_takes_no_odd_numbers_and_no_key_twice(text: str) -> None:
    assert parsed(text)
    with pytest.raises(NotJson):
        parsed(text, strict=True)


def test_a_number_beyond_floats_is_left_to_those_who_ask_for_a_range() -> None:
    assert parsed("1" + "0" * 400, strict=True, any_number=True) == 10**400
    assert parsed("1e999", strict=True, any_number=True) == float("inf")
    with pytest.raises(NotJson):
        parsed("1" * 5000, any_number=True)


def test_paths() -> None:
    assert [path_problem(path) for path in ("", "a/b", "a" * 255, "é" * 127, "/".join(["a" * 200] * 20))] == [""] * 5
    odd = ("a\0b", "a" * 256, "b/" + "é" * 128 + "/c", "\udcff", "a/" * 2048)
    assert all(map(path_problem, odd))


LONG = "a" * 300


@pytest.mark.parametrize(
    "words",
    [
        *(["report", LONG], ["report", "out", "--out", LONG], ["samples", LONG], ["doctor", LONG], ["hosts", LONG]),
        *(["export", LONG, "o"], ["export", "out", LONG], ["eval", "run.toml", "--checkpoint", LONG], ["plan", LONG]),
        *(["eval", LONG], ["train", "run.toml", "--resume", LONG], ["train", "run.toml", "--hostfile", LONG]),
        *(["preflight", LONG], ["data", "convert", "train.jsonl", LONG + ".jsonl"]),
    ],
)
def test_a_word_that_is_no_path_is_refused(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert "longer than 255 bytes" in capfd.readouterr().out


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK"])
def test_a_launcher_s_number_that_is_none(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "abc")
    with pytest.raises(Refused, match=f"the ranks cannot meet: .*{name}=abc"):
        connect("cpu", timeout_seconds=1)


@pytest.mark.parametrize("memory", ["inf", "nan", "-1"])
def test_a_card_without_end_is_refused(memory: str, run_here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "run.toml", f"--memory-gib={memory}"]) == 2
    assert "--memory-gib" in capfd.readouterr().out


def test_a_hostfile_without_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=1\n" * 200_000)
    with pytest.raises(Refused, match="larger than 1 MiB"):
        read_hostfile(tmp_path / "hosts")


DAMAGED = (
    *(b'{"a": 1}', b"[1]", b'{"step": "x"}', b'{"step": -1}', b'{"step": 1, "kl": ' + b"1" * 400 + b"}", b"\xff"),
    *(b"[" * 100_000, b'{"step": 1, "x": ' + b"[" * 900 + b"]" * 900 + b"}"),
)


def test_damaged_lines_are_passed_over_and_counted(tmp_path: Path) -> None:
    """Resuming, too, keeps what is a record."""
    rows = [b'{"step": 1, "kl": 0.5, "note": "text"}', *DAMAGED, b'{"step": 2, "kl": 0.25}', b'{"step": 3, "kl": 0.1}']
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(rows) + b'\n{"step": 4')
    notes: list[str] = []
    assert [row["step"] for row in read_lines(tmp_path / "metrics.jsonl", notes)] == [1, 2, 3]
    assert notes == [
        "metrics.jsonl: the last line is not complete yet and was passed over",
        f"metrics.jsonl: {len(DAMAGED)} lines are no JSON objects of a step and were passed over",
    ]
    RunDirectory(tmp_path).cut_after(2)
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2]


def test_the_doctor_says_what_it_passed_over(run_here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = run_here / "out"
    (out / "rollouts").mkdir(parents=True)
    (out / "config.toml").write_text((run_here / "run.toml").read_text())
    (out / "metrics.jsonl").write_bytes(b'{"step": 1, "kl": "text"}\n' + b"\n".join(DAMAGED) + b"\n")
    (out / "rollouts/step-abc.jsonl").write_text("{}\n")
    (out / "rollouts/step-000001.jsonl").write_text('{"step": 1, "reward": "text"}\n')
    (out / "rollouts/vocabulary.json").write_text('{"tokens": [1]}')
    found = read_recorded(out)
    assert (found.metrics, found.rollouts, found.tokens) == ([{"step": 1}], {}, {})
    assert main(["doctor", "out"]) in (0, 1)
    assert f"metrics.jsonl: {len(DAMAGED)} lines" in (said := capfd.readouterr().out)
    assert "step-000001.jsonl: 1 rows are not as a run writes them" in said


def test_weights_that_no_run_has_written_are_no_checkpoint(tmp_path: Path) -> None:
    for number, content in enumerate((None, b"", b"\x08" + b"\0" * 7 + b"{}", {"a": torch.zeros(1).half()}, {})):
        folder = tmp_path / str(number)
        folder.mkdir()
        if isinstance(content, dict):
            save_file(content, folder / "adapter_model.safetensors")
        elif content is not None:
            (folder / "adapter_model.safetensors").write_bytes(content)
        with pytest.raises(NoCheckpoint, match="no weights that a run has written"):
            stored_dtype(folder)


@pytest.mark.parametrize(
    "status", ["", "[]", "{}", '{"state": "done"}', '{"state": "done", "step": "x"}', "[" * 10_000]
)
def test_a_status_that_is_none_is_that_of_a_run_that_is_not_done(status: str, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[run]\n")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "run_status.json").write_text(status)
    with pytest.raises(NoCheckpoint, match="no finished adapter or model"):
        find(tmp_path, "export")


def test_an_evaluation_that_is_damaged_is_not_on_the_card(tmp_path: Path) -> None:
    (tmp_path / "eval").mkdir()
    whole = {"step": 2, "sampled": {"mean": 0.5, "stderr": 0.1}, "greedy": {"mean": 0.5, "stderr": None}}
    for number, content in enumerate((json.dumps(whole), "x", "[1]", '{"step": 1}', json.dumps(whole | {"greedy": 1}))):
        (tmp_path / f"eval/step-00000{number}.json").write_text(content)
    assert read_records(tmp_path).evaluations == [whole]
