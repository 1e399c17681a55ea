"""What a run writes down, and what it reads back."""

import json
import math
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer import run_status
from trainer.batch import Completion, Prompt
from trainer.checkpoint.store import Store
from trainer.errors import Refused, printable
from trainer.record.console import BeforeAfter, before_after_table, progress_line, sample_block, shortened
from trainer.record.environment import collect
from trainer.record.metrics import Sums
from trainer.record.rollout_rows import FIELDS, read_rollouts, row
from trainer.record.run_dir import RunDirectory
from trainer.report.page import write_report

STATUS: dict[str, Any] = {"host": "a", "rank": 0, "pid": 1, "run_id": "r"}


def completion(group: int = 0, generation: int = 0, **columns: Any) -> Completion:
    prompt = Prompt(index=7, text="2 + 3 =", ids=(17, 18), messages=None, columns=columns)
    return Completion(
        group, generation, prompt, (5, 6), (-0.5, -0.25), "stop", "5", {"exact": 1.0, "judge": None}, 1.0, advantage=0.5
    )


def recorded(tmp_path: Path, *lines: str) -> Path:
    (tmp_path / "rollouts").mkdir(exist_ok=True)
    (tmp_path / "rollouts" / "step-000001.jsonl").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return tmp_path


def line(**changed: Any) -> str:
    return json.dumps(row(completion(), 1) | changed)


# The run directory


@pytest.mark.parametrize("left", ["config.toml", "metrics.jsonl", "run_status.json"])
def test_a_directory_that_holds_a_run_is_refused_and_left_alone(tmp_path: Path, left: str) -> None:
    (tmp_path / left).write_text("old")
    with pytest.raises(Refused, match=rf"run\.dir.*already holds a run \(found {left}\).*Fix: set run\.dir"):
        RunDirectory(tmp_path).create()
    assert [path.name for path in tmp_path.iterdir()] == [left]
    assert (tmp_path / left).read_text() == "old"


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(Refused, match="is a file, expected a directory"):
        RunDirectory(tmp_path / "run").create()
    with pytest.raises(Refused, match=r"cannot be created: .*run is a file"):
        RunDirectory(tmp_path / "run" / "below").create()


def test_metrics_drop_what_does_not_exist_and_refuse_what_is_not_a_number(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.append_metrics({"step": 1, "kl": None, "loss": 0.5})
    run.append_metrics({"step": 2, "loss": 0.25})
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match=r"step 3 .*'kl'"):
            run.append_metrics({"step": 3, "kl": bad})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(text) for text in lines] == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25}]


def test_rollouts_are_written_in_global_order_with_the_contract_fields(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.create()
    scattered = [row(completion(group, generation), 3) for group, generation in ((1, 1), (0, 1), (1, 0), (0, 0))]
    run.write_rollouts(3, scattered)
    written = [json.loads(text) for text in (tmp_path / "rollouts" / "step-000003.jsonl").read_text().splitlines()]
    assert [(one["group"], one["index"]) for one in written] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert list(written[0].items()) == [
        ("step", 3),
        ("group", 0),
        ("index", 0),
        ("row", 7),
        ("prompt", "2 + 3 ="),
        ("completion", "5"),
        ("prompt_ids", [17, 18]),
        ("completion_ids", [5, 6]),
        ("sampling_logps", [-0.5, -0.25]),
        ("rewards", {"exact": 1.0, "judge": None}),
        ("reward", 1.0),
        ("advantage", 0.5),
        ("finish", "stop"),
        ("columns", {}),
    ]


def test_a_row_of_another_shape_is_not_written(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.create()
    with pytest.raises(ValueError, match="a rollout row holds"):
        run.write_rollouts(1, [row(completion(), 1) | {"extra": 1}])
    assert not list((tmp_path / "rollouts").iterdir())


def test_status_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory(tmp_path)
    run.status("running", None, 3, "", **STATUS)
    before = (tmp_path / "run_status.json").read_text()

    def dies(source: Path, target: Path) -> None:
        assert json.loads(Path(source).read_text())["state"] == "done"
        assert Path(target).read_text() == before
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", dies)
    with pytest.raises(KeyboardInterrupt):
        run.status("done", 0, 4, "", **STATUS)
    status = json.loads((tmp_path / "run_status.json").read_text())
    assert list(status) == ["state", "exit_code", "step", "reason", "host", "rank", "pid", "run_id", "updated"]
    assert (status["state"], status["exit_code"], status["step"]) == ("running", None, 3)


def test_files_follow_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        RunDirectory(tmp_path).status("done", 0, 1, "", **STATUS)
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "run_status.json").stat().st_mode) == 0o640


# Rows, written and read


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    """Characters that end a line elsewhere (U+2028, U+0085) and a lone surrogate stay inside their row."""
    odd = "a\u2028b\x85c\nd\ud800 \u4e2d"
    first, second = row(completion(0, 0, odd=odd), 1), row(completion(0, 1), 1)
    first["completion"] = odd
    run = RunDirectory(tmp_path)
    run.create()
    run.write_rollouts(1, [first, second])
    assert read_rollouts(tmp_path, 1) == [first, second]
    assert read_rollouts(tmp_path / "rollouts", 1) == [first, second]
    assert "\u4e2d" in (tmp_path / "rollouts" / "step-000001.jsonl").read_text(encoding="utf-8")


def test_columns_that_json_cannot_hold_become_text() -> None:
    columns = row(completion(when=Path("/x"), score=math.nan, answer={"a": [1]}), 1)["columns"]
    assert columns == {"when": "/x", "score": "nan", "answer": {"a": [1]}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{not json", r"line 2: not JSON"),
        ("[]", r"line 2: expected an object, got list"),
        ("", r"line 2: empty"),
        (json.dumps({"group": 0}), r"line 2: field index, row, prompt_ids.* is missing; the row holds group"),
        (line(sampling_logps=[-0.5]), r"line 2: 2 completion_ids but 1 sampling_logps"),
        (line(sampling_logps=[-0.5, 0.5]), r"line 2: field sampling_logps: expected a list of finite log-prob"),
        (line(sampling_logps=[-0.5, math.nan]), r"line 2: field sampling_logps"),
        (line(completion_ids=[]), r"line 2: field completion_ids: expected a list of token ids with at least one"),
        (line(completion_ids=[1, "2"]), r"line 2: field completion_ids"),
        (line(finish="eos"), r'line 2: field finish: expected "stop" or "length", got \'eos\''),
        (line(rewards={"exact": "1"}), r"line 2: field rewards: expected finite numbers or null"),
        (line(group=True), r"line 2: field group: expected int"),
    ],
)
def test_a_recorded_row_that_cannot_be_replayed_is_named(tmp_path: Path, text: str, message: str) -> None:
    directory = recorded(tmp_path, line(), text, line())
    with pytest.raises(Refused, match=message) as refused:
        read_rollouts(directory, 1)
    assert "step-000001.jsonl" in str(refused.value)
    assert "line 1:" not in str(refused.value)


def test_many_bad_rows_are_shown_up_to_twenty(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"line 20: .*\n  and 5 more") as refused:
        read_rollouts(recorded(tmp_path, *["[]"] * 25), 1)
    assert "line 21" not in str(refused.value)


def test_a_missing_step_says_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"step 2.*holds 1 steps, step-000001 to step-000001.*lower run\.steps"):
        read_rollouts(recorded(tmp_path, line()), 2)
    with pytest.raises(Refused, match=r"holds no step-\*\.jsonl"):
        read_rollouts(tmp_path / "nowhere", 1)


def test_fields_are_written_once() -> None:
    assert len(set(FIELDS)) == len(FIELDS) == 14


# Sums


def test_b05_sums_add_over_parts_before_the_division() -> None:
    """3 over 12 tokens and 3 over 4 tokens: 6/16, not the mean of means 0.5; a part without tokens changes nothing."""
    sums = Sums()
    for count in (12, 4, 0):
        sums.add("kl", 3.0 if count else 0.0, count)
        sums.maximum("kl_max", count / 10)
    assert sums.means() == {"kl": 0.375, "kl_max": 1.2}


def test_a_mean_over_nothing_is_absent() -> None:
    sums = Sums()
    sums.add("kl", 0.0, 0)
    sums.add("loss", 2.0, 4)
    assert sums.totals == {"kl": (0.0, 0.0), "loss": (2.0, 4.0)}
    assert sums.means() == {"loss": 0.5}


def test_b90_sums_hold_floats_not_tensors() -> None:
    sums = Sums()
    sums.add("loss", torch.ones(1).sum(), torch.tensor(2))  # type: ignore[arg-type]
    sums.maximum("kl_max", torch.tensor(2.0))  # type: ignore[arg-type]
    assert [type(number) for number in (*sums.totals["loss"], sums.maxima["kl_max"])] == [float] * 3


# The console

METRICS = {
    "reward_mean": 0.312,
    "reward_std": 0.21,
    "kl": 0.0041,
    "loss": -0.0012,
    "grad_norm": 0.84,
    "completion_tokens_mean": 214.0,
    "truncated_fraction": 0.03,
    "tokens_per_second": 1900.0,
    "seconds_rollout": 11.2,
    "seconds_reward": 0.4,
    "seconds_update": 6.0,
}


def test_progress_line() -> None:
    assert progress_line(METRICS, 12, 500, 700.0) == (
        "step  12/500 | reward  0.312 ±0.210  | kl  0.0041 nats/tok | loss  -0.0012 | grad   0.840 | "
        "len   214 tok (  3% cut) |  1.9k tok/s |  11.2+6.4   s |  12 min left"
    )


def test_progress_line_has_one_width_and_a_dash_for_what_does_not_exist() -> None:
    partial = {key: value for key, value in METRICS.items() if key not in ("kl", "reward_mean", "reward_std")}
    lines = [
        progress_line(METRICS, 3, 500, 12.0),
        progress_line(partial, 499, 500, 7200.0),
        progress_line({}, 1, 500, 0),
    ]
    assert len({len(text) for text in lines}) == 1
    assert "kl       - nats/tok" in lines[1] and "reward      -" in lines[1] and "2.0 h left" in lines[1]


def test_text_from_a_model_cannot_steer_the_terminal() -> None:
    steering = "ok\x1b[2J\x07\r\x9b31m \u202edesrever\u2069 \ud800\u2028end\n\u4e2d\u6587 \U0001f600"
    shown = printable(steering)
    assert shown == ("ok\\x1b[2J\\x07\\r\\x9b31m \\u202edesrever\\u2069 \\ud800\\u2028end\n\u4e2d\u6587 \U0001f600")
    shown.encode("utf-8")


def test_sample_block_shows_both_with_reward_and_without_control_characters() -> None:
    best = row(completion(), 1) | {"completion": "\x1b[31m5\nsix"}
    worst = row(completion(), 1) | {"reward": None, "completion": "x" * 5000}
    block = sample_block(best, worst)
    assert "best: reward 1.000, row 7, 2 tok, finish stop" in block
    assert "  completion | \\x1b[31m5\n  completion | six" in block
    assert "worst: reward unscored" in block and "[... 4400 characters ...]" in block
    assert "\x1b" not in block


def test_a_short_text_is_not_shortened() -> None:
    assert shortened("x" * 600) == "x" * 600
    assert shortened("a" * 300 + "b" + "c" * 300) == "a" * 300 + " [... 1 characters ...] " + "c" * 300


def test_before_after_table_shows_values_errors_and_the_paired_difference() -> None:
    lines = before_after_table(
        [
            BeforeAfter("sampled", 0.25, 0.02, 0.75, 0.03, 0.025),
            BeforeAfter("greedy", 0.5, math.nan, 0.25, math.nan, math.nan),
        ],
        prompts=128,
    ).splitlines()
    assert "128 prompts" in lines[0]
    sampled = next(text for text in lines if "sampled" in text)
    assert "0.250 ± 0.020" in sampled and "0.750 ± 0.030" in sampled and "+0.500 ± 0.025" in sampled
    greedy = next(text for text in lines if "greedy" in text)
    assert "-0.250" in greedy and "nan" not in greedy


# The environment


def test_environment_records_versions_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    monkeypatch.setenv("HF_TOKEN", "hf-secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    environment = collect()
    text = json.dumps(environment)
    assert "secret" not in text
    assert environment["variables"]["OMP_NUM_THREADS"] == "1"
    assert environment["packages"]["deepspeed"].startswith("0.19.")
    assert environment["host"] and environment["cpu"]["cores"] >= 1


def test_outside_a_checkout_the_installation_says_what_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = {"url": "https://host/zero-grpo.git", "vcs_info": {"vcs": "git", "commit_id": "6b7ce31"}}
    info = tmp_path / "zero_grpo-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: zero-grpo\nVersion: 9.9\n")
    (info / "direct_url.json").write_text(json.dumps(record))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    environment = collect()
    assert "git" not in environment and "not a git repository" in environment["git_absent"]
    assert environment["packages"]["zero-grpo"] == "9.9" and environment["installed_from"] == record

    (info / "direct_url.json").unlink()  # as from a package index
    assert "installed_from" not in collect()


def test_without_git_the_reason_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    environment = collect()
    assert "git" not in environment and "No such file" in environment["git_absent"]


LINKED = ("rollouts", "samples", "histograms", "eval", "adapter", ".lock", "metrics.jsonl", ".config.toml.tmp")


@pytest.mark.parametrize("name", LINKED)
def test_s13_a_run_follows_no_link_out_of_its_directory(tmp_path: Path, name: str) -> None:
    """One that leads nowhere yet, too: what is appended would begin a file there."""
    directory = RunDirectory(tmp_path / "run")
    directory.path.mkdir()
    (directory.path / name).symlink_to(tmp_path / "elsewhere")
    for begin in (directory.create, directory.lock):
        with pytest.raises(Refused, match=f"run.dir: .*{name} is a link"):
            begin()
    assert not (tmp_path / "elsewhere").exists()


def test_s13_checkpoints_may_lie_on_another_disk(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "disk").mkdir()
    (tmp_path / "run/checkpoints").symlink_to(tmp_path / "disk")
    RunDirectory(tmp_path / "run").create()


def links(folder: Path, victim: Path, *names: str) -> None:
    victim.write_text("precious")
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).symlink_to(victim)


def test_s13_what_others_put_in_the_way_meanwhile_is_not_written_through(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    victim = tmp_path / "victim"
    links(
        directory.path, victim, ".config.toml.tmp", "rollouts/.step-000001.jsonl.tmp", "metrics.jsonl", "alarms.jsonl"
    )
    links(directory.path, victim, "checkpoints/.latest.tmp", ".report.html.tmp", ".run_status.json.tmp")
    directory.write_config("x = 1\n")
    directory.write_rollouts(1, [])
    for append in (directory.append_metrics, directory.append_alarm):
        with pytest.raises(OSError, match="symbolic links"):
            append({"step": 1})
    (directory.path / "metrics.jsonl").unlink()
    directory.append_metrics({"step": 1, "reward_mean": 0.5})
    Store(directory.path).point("latest", directory.path / "checkpoints/step-000001")
    write_report([directory.path])
    run_status.amend(directory.path, state="running")
    assert victim.read_text() == "precious" and (directory.path / "config.toml").read_text() == "x = 1\n"
    assert not any(path.is_symlink() for path in directory.path.rglob("*.tmp"))


@pytest.mark.parametrize(("mode", "warned"), [(0o755, 0), (0o775, 0), (0o777, 1), (0o1777, 0)])
def test_s13_a_directory_that_all_may_write_in_is_said(tmp_path: Path, mode: int, warned: int) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(mode)
    told = RunDirectory(tmp_path / "run").warnings()
    assert len(told) == warned and all("chmod o-w" in one for one in told)
    assert RunDirectory(tmp_path / "none").warnings() == []
