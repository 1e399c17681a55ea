"""The page of a run and its rollouts in the terminal: what is read, what is kept, and that nothing written gets out."""

import json
import math
import random
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.run_folder import HEALTHY, HOSTILE, row, strings, write_folder
from tests.unit.test_metrics_table import table
from trainer.__main__ import main
from trainer.errors import Refused
from trainer.report.curves import CHARTS, MOST_POINTS, OTHERS, arranged, charts, thinned
from trainer.report.marks import marked_share, pieces
from trainer.report.page import embedded, page, write_report
from trainer.report.read import Run, read_run, read_runs
from trainer.report.rollouts import MOST_ROWS, choose, steps_to_read
from trainer.report.signature import reversals, signature
from trainer.report.terminal import show


def data_of(text: str) -> dict[str, Any]:
    """What a page embeds, as a browser reads it: up to the first end of the element."""
    return json.loads(text.split('id="data">')[1].split("</script")[0])


# Reading a run directory


def test_a_run_that_goes_on_is_read(tmp_path: Path) -> None:
    """A torn last line, a step that was done again, a line of another kind, a nesting bomb."""
    lines = [
        '{"step": 1, "kl": 0.5}',
        "[1, 2]",
        '{"step": 2, "kl": 0.25}',
        '{"step": 3, "kl": ' + "[" * 100_000,
        '{"step": 2, "kl": 0.125, "loss": NaN}',
        '{"step": 3, "lo',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    run = read_run(tmp_path)
    assert run.column("kl") == [(1, 0.5), (2, 0.125)] and run.column("loss") == []
    assert run.notes == [
        "metrics.jsonl: the last line is not complete yet and was passed over",
        "metrics.jsonl: 2 lines are no JSON objects of a step and were passed over",
    ]
    assert "step" in page([run])  # nothing but metrics is there


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=rf"{tmp_path} holds no run: expected a directory with metrics\.jsonl"):
        read_run(tmp_path)


def test_a_run_that_has_just_begun_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[run]\n")
    assert data_of(page([read_run(tmp_path)]))["charts"] == []


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    paths = [write_folder(tmp_path / name / "out", 2) for name in ("a", "b")]
    assert [run.name for run in read_runs(paths)] == ["a/out", "b/out"]


# Curves


def test_every_metric_has_a_chart_of_its_group() -> None:
    keys = [key.replace("NAME", "exact") for key in table() if key != "step"]
    placed = {key: chart.group for chart, found in arranged(keys) for key in found}
    assert sorted(placed) == sorted(keys)
    assert [key for key, group in placed.items() if group == OTHERS] == []


def test_a_signal_that_no_chart_names_gets_one(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "kl": 1, "mine": 2}\n')
    assert [(c["group"], c["title"]) for c in charts([read_run(tmp_path)])][-1] == (OTHERS, "mine")
    assert all(chart.title and chart.unit for chart in CHARTS)


def test_long_curves_keep_their_extremes() -> None:
    """One spike in 10,000 steps is on the page, and each bucket's mean is that of its steps."""
    curve = [(step, 100.0 if step == 7777 else float(step % 2)) for step in range(1, 10_001)]
    thin = thinned(curve)
    assert len(thin["s"]) <= MOST_POINTS and max(thin["hi"]) == 100 and min(thin["lo"]) == 0
    assert (thin["s"][0], thin["e"][-1]) == (1, 10_000)
    assert all(after == before + 1 for before, after in zip(thin["e"], thin["s"][1:], strict=False))
    at = next(i for i, end in enumerate(thin["e"]) if end >= 7777)
    assert thin["m"][at] == pytest.approx((11 + 100) / 25, abs=1e-4) and thin["m"][0] == pytest.approx(0.52)
    assert thinned(curve[:MOST_POINTS]).keys() == {"s", "m"}


def test_held_out_points_stand_in_the_reward_chart_with_their_errors(tmp_path: Path) -> None:
    reward, *others = charts([read_run(write_folder(tmp_path, 3))])
    assert [(one["key"], one["s"], one["m"], one["error"]) for one in reward["points"]] == [
        ("held-out, sampled", [0, 3], [0.25, 0.7], [0.02, 0.02]),
        ("held-out, greedy", [0, 3], [0.3, 0.75], [0.02, 0.02]),
    ]
    assert not any(chart["points"] for chart in others)


def test_several_runs_share_a_chart_a_signal(tmp_path: Path) -> None:
    made = charts(read_runs([write_folder(tmp_path / name, 3) for name in "ab"]))
    assert all(len({one["key"] for one in chart["series"]}) == 1 for chart in made)
    assert [one["run"] for chart in made if chart["series"][0]["key"] == "kl" for one in chart["series"]] == [0, 1]


# The shape of the reward curve


def curve(steps: int, shape: Any, noise: float = 0.02) -> list[tuple[int, float]]:
    rng = random.Random(1)
    return [(step, shape(step) + rng.gauss(0, noise)) for step in range(1, steps + 1)]


def documents(step: int) -> float:
    """The curve that the document describes: 0.25 to 0.65 in 200 steps, 0.68 to step 800, then above 0.72."""
    return 0.25 + 0.4 * min(step, 200) / 200 + 0.03 * (step > 200) + 0.0002 * max(step - 800, 0)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (documents, "climb, plateau, breakthrough"),
        (lambda step: 0.5, "plateau"),
        (lambda step: 0.2 + 0.0005 * step, "climb"),
        (lambda step: 0.8 - 0.0005 * step, "fall"),
        (lambda step: 0.3 + 0.3 * (step % 150) / 150, "saw-tooth"),
        (lambda step: 0.2 + 0.6 * (1 - math.exp(-step / 60)), "climb, plateau"),
    ],
)
def test_a_curve_has_its_shape(shape: Any, words: str) -> None:
    assert signature(curve(1200, shape)).words == words


def test_the_phases_are_where_they_are_with_their_levels() -> None:
    climb, plateau, breakthrough = signature(curve(1200, documents)).phases
    assert climb.last == pytest.approx(200, abs=30) and breakthrough.first == pytest.approx(800, abs=60)
    assert (climb.start, climb.end) == (pytest.approx(0.25, abs=0.02), pytest.approx(0.66, abs=0.03))
    assert (plateau.start, plateau.end) == (pytest.approx(0.68, abs=0.01), pytest.approx(0.68, abs=0.01))
    assert breakthrough.end == pytest.approx(0.76, abs=0.01)


def test_the_documents_numbers_stand_beside_the_curves() -> None:
    numbers = "\n".join(signature(curve(1200, documents)).numbers)
    assert re.search(r"up to step 200: 0\.2\d+ to 0\.6\d+, .*0\.25 to 0\.65", numbers)
    assert re.search(r"from there to step 800: 0\.6\d+ to 0\.6\d+, ± 0\.02.*0\.68 ± 0\.03", numbers)
    assert "last quarter: 0.7" in numbers and "below 0.3" in numbers


def test_noise_alone_is_a_plateau_and_no_saw() -> None:
    for noise in (0.02, 0.2):
        assert signature(curve(400, lambda step: 0.3, noise)).words == "plateau"
    assert signature(curve(500, lambda step: 0.0, 0)).words == "plateau"


def test_a_short_run_has_no_shape_yet() -> None:
    assert signature(curve(19, documents)).words == "too short to tell"


def test_only_turns_of_that_size_count() -> None:
    assert reversals([0, 1, 0.9, 2, 0, 0.1, 3], 0.5) == 2
    assert reversals([0, 1, 0.9, 2, 0, 0.1, 3], 0.05) == 4
    assert reversals([1, 0, 1], 0.5) == 1


# Garbled parts


@pytest.mark.parametrize(
    ("text", "kind", "marked"),
    [
        ("fine \ufffd\ufffd fine", "replacement", "\ufffd\ufffd"),
        ("so \u2581\u2581\u2581\u2581", "marker", "\u2581\u2581\u2581\u2581"),
        ("\u0120the\u0120answer\u010a\u0120is", "marker", "\u0120the\u0120answer\u010a\u0120is"),
        ("it is " + "so so " * 8 + "done", "loop", " " + "so so " * 8),
        ("it is " + "9" * 40, "loop", "9" * 40),
        ("a\x1b[2J", "control", "\\x1b"),
        ("a\u202eb", "control", "\\u202e"),
    ],
)
def test_garbled_parts_are_marked(text: str, kind: str, marked: str) -> None:
    found = [part for part in pieces(text) if part[0]]
    assert found == [(kind, marked)]


@pytest.mark.parametrize(
    "text",
    [
        HEALTHY,
        "\u56e0\u4e3a 2 + 3 = 5\uff0c\u6240\u4ee5\u7b54\u6848\u662f\u4e94\u3002",
        "| a | b |\n|-----|-----|\n" + "=" * 60 + "\n" + " " * 50 + "x\n\t\ty",
        "\U0001f468\u200d\U0001f469\u200d\U0001f467 \u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645",
        "no, no, no: never again. \\frac{1}{2} 1000000000",
        "cut within a character \ufffd",
    ],
)
def test_healthy_text_has_no_marks(text: str) -> None:
    assert pieces(text) == (("", text),) and marked_share(pieces(text)) == 0


def test_the_middle_of_a_long_text_is_left_out() -> None:
    parts = pieces("a b\n" * 250_000)
    assert parts[1] == ("cut", "[996,000 characters left out]") and len(parts[0][1]) == 3000


# Which rollouts


def test_the_extremes_of_a_long_run_are_kept(tmp_path: Path) -> None:
    rng = random.Random(0)
    rows = [row(reward=rng.random(), index=i) for i in range(64)]
    run = read_run(write_folder(tmp_path, 300, rows=rows))
    worst, best = (row(reward=value, index=99) for value in (-5.0, 5.0))
    garbled = row("\u2581" * 50, 0.6, index=98)
    middle = tmp_path / "rollouts" / "step-000150.jsonl"
    middle.unlink()
    middle.write_text("".join(json.dumps(one) + "\n" for one in (worst, best, garbled)))  # 150 has the alarm

    chosen = choose(run, 0, 1)
    assert len(chosen.rows) <= MOST_ROWS
    assert chosen.rows[0]["reward"] == -5 and max(one["reward"] for one in chosen.rows) == 5
    assert [one["marked"] for one in chosen.rows if one["index"] == 98] == [1.0]
    for step in (1, 300):
        assert sum(one["step"] == step for one in chosen.rows) == 64
    assert "rollouts of 60 of 300 recorded steps were read" in chosen.notes[0]
    assert f"{len(chosen.rows):,} of the {59 * 64 + 3:,} completions" in chosen.notes[1]


def test_a_short_run_is_shown_whole(tmp_path: Path) -> None:
    chosen = choose(read_run(write_folder(tmp_path, 5)), 0, 1)
    assert (len(chosen.rows), chosen.notes) == (20, [])


def test_the_steps_that_are_read_are_those_that_tell_most(tmp_path: Path) -> None:
    run = Run(tmp_path, rollouts={step: tmp_path for step in range(1, 1001)}, alarms=[{"step": 333}, {"step": 5000}])
    run.metrics = [{"step": step, "reward_mean": -1.0 if step == 444 else float(step == 555)} for step in run.rollouts]
    steps = steps_to_read(run, 60)
    assert len(steps) == 60 and {1, 1000, 333, 444, 555} <= set(steps)
    assert max(after - before for before, after in pairwise(steps)) < 60


def test_unscored_rows_come_last_and_lines_that_are_no_rows_are_counted(tmp_path: Path) -> None:
    run = read_run(write_folder(tmp_path, 1, rows=[row(reward=None), row(reward=1.0), {"completion": 3}]))
    chosen = choose(run, 0, 1)
    assert [one["reward"] for one in chosen.rows] == [1.0, None]
    assert chosen.notes == ["1 lines of rollout files are no rows and were passed over"]


# The page


def test_a_page_of_10000_steps_stays_small(tmp_path: Path) -> None:
    """64 long completions a step, of which one is of 1 MB."""
    rng = random.Random(0)
    words = [f"{rng.random():.3f}" for _ in range(200)]
    rows = [row(" ".join(rng.choices(words, k=700)), rng.random(), index=i) for i in range(63)]
    rows.append(row("x" * 2**20, 0.0, index=63))
    out = write_report([write_folder(tmp_path, 10_000, rows=rows, rollouts_every=5)])
    assert out == tmp_path / "report.html" and 10**6 < out.stat().st_size < 8 * 10**6
    made = data_of(out.read_text("utf-8"))
    assert made["runs"][0]["steps"] == [1, 10_000, 10_000]
    assert any("of 2000 recorded steps" in note for note in made["runs"][0]["notes"])
    assert any(one["completion"][1][0] == "cut" for one in made["rollouts"] if len(one["completion"]) > 1)


def test_what_a_model_wrote_cannot_leave_the_data(tmp_path: Path) -> None:
    rows = [row(text, index=i, prompt=text, columns={text: text}) for i, text in enumerate(HOSTILE.values())]
    text = page([read_run(write_folder(tmp_path, 2, rows=rows))])
    assert text.split('id="data">')[1].split("<")[0].isascii()
    assert text.count("<script") == 2 and text.count("</script") == 2
    assert "taken'</" not in text
    shown = {one["index"]: one for one in data_of(text)["rollouts"]}
    for index, said in enumerate(HOSTILE.values()):
        parts = shown[index]["completion"]
        unescaped = "".join(part for kind, part in parts if kind != "control")
        assert unescaped == "".join(char for char in said if char in unescaped)
        assert all(char in "\n\t" or char.isprintable() for said in strings(shown[index]) for char in said)
    assert shown[4]["completion"] == [["", "a"], ["control", "\\x00"], ["", "b"]]


def test_numbers_that_json_does_not_have_become_null() -> None:
    assert embedded({"a": [math.nan, math.inf, 1.5], "b": "</script>&\u2028"}) == (
        '{"a":[null,null,1.5],"b":"\\u003c/script\\u003e\\u0026\\u2028"}'
    )


def test_the_page_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    text = page([read_run(write_folder(tmp_path, 2))])
    assert set(re.findall(r"\w+://[^\"'\s)]*", text)) == {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert not re.search(r"\b(src|href)=|@import|url\(|fetch\(|innerHTML|insertAdjacent|document\.write|eval\(", text)
    assert "default-src 'none'" in text and "unsafe" not in text


def test_alarms_and_settings_are_on_the_page(tmp_path: Path) -> None:
    (run,) = data_of(page([read_run(write_folder(tmp_path, 10))]))["runs"]
    (alarm,) = run["alarms"]
    assert (alarm["step"], alarm["signal"], alarm["cause"], alarm["message"]) == (5, "kl", "drift", "2.5 (limit 2)")
    assert '"value": 2.5' in alarm["more"]
    assert 'dir = "runs/written"' in run["config"] and '"python": "3.11"' in run["environment"]
    assert run["status"]["state"] == "running"


def test_the_command_writes_and_names_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(write_folder(tmp_path / name, 2)) for name in "ab"]
    assert main(["report", *runs]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/a/report.html\n"
    assert main(["report", *runs, "--out", str(tmp_path / "both.html")]) == 0
    assert len(data_of((tmp_path / "both.html").read_text("utf-8"))["runs"]) == 2
    assert main(["report", str(tmp_path / "c")]) == 2
    assert main(["report", runs[0], "--out", str(tmp_path / "no" / "page.html")]) == 2
    assert "--out: cannot write" in capsys.readouterr().out


# In the terminal


def test_samples_are_of_the_last_step_or_the_worst_of_one(tmp_path: Path) -> None:
    rows = [row(f"answer {value}", value, index=i) for i, value in enumerate((0.5, None, -1.0, 0.25))]
    folder = write_folder(tmp_path, 3, rows=rows)
    lines = show(folder, None, 2, worst=False).splitlines()
    assert lines[0] == f"step 3 of {folder}: 2 of 4 completions, in order"
    assert [line for line in lines if "completion |" in line] == [f"  completion | answer {v}" for v in (0.5, None)]
    assert "reward unscored (exact unscored), group 0.1, row 7, 3 tok, finish stop" in lines
    worst = show(folder, 2, 9, worst=True)
    assert re.findall(r"answer (\S+)", worst) == ["-1.0", "0.25", "0.5", "None"]


def test_nothing_reaches_the_terminal_raw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row(text, index=i, prompt=text, rewards={text: 1.0}) for i, text in enumerate(HOSTILE.values())]
    assert main(["samples", str(write_folder(tmp_path, 1, rows=rows)), "--count", "99"]) == 0
    shown = capsys.readouterr().out
    assert all(char == "\n" or char.isprintable() for char in shown)
    assert "\\x1b[31mred" in shown and "\\u202egnp.exe" in shown and "a\\x00b" in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--step", "9"], r"--step 9: .* has no rollouts of that step; it has 2 steps, 1 to 2"),
        (["--count", "0"], r"--count 0: expected how many"),
        (["--nothing"], r"zero-grpo samples: it takes no --nothing"),
    ],
)
def test_what_cannot_be_shown_is_refused(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["samples", str(write_folder(tmp_path, 2)), *words]) == 2
    assert re.search(said, capsys.readouterr().out)
