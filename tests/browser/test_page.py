"""The page of a run in a real browser: charts and table are there, and what a model wrote stays text."""

import json
from pathlib import Path

import pytest

from tests.browser.chromium import CHROMIUM, opened
from tests.run_folder import HOSTILE, row, write_folder
from trainer.record.kl_histogram import EDGES, record
from trainer.report.page import page
from trainer.report.read import read_run, read_runs

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed (apt-get install chromium)")

LOOK = """
const plots = [...document.querySelectorAll(".charts .plot")];
const press = (key) => plots[0].dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
const tip = () => [...plots[0].querySelectorAll(".tip:not([hidden]) div")].map((line) => line.textContent);
const rows = () => [...document.querySelectorAll(".rollouts tr.row")];
const labels = [...document.querySelectorAll(".controls label")];
const set = (name, value) => {
  const input = labels.find((one) => one.textContent.startsWith(name)).querySelector("input, select");
  input.value = value;
  input.dispatchEvent(new Event("input"));
};
const found = { charts: plots.length, wide: document.documentElement.scrollWidth - window.innerWidth };
const title = (plot) => plot.querySelector("svg[role=img] > title").textContent;
const labelled = (plot) => [...plot.querySelectorAll("svg > text")].some((text) => text.textContent === "step");
found.named = plots.filter((plot) => title(plot).includes("steps 0 to")).length;
found.axes = plots.filter(labelled).length;
found.alarms = document.querySelectorAll(".charts line.alarm").length;
plots[0].focus();
press("Home");
found.first = tip();
press("ArrowRight");
press("ArrowRight");
found.third = tip();
found.follows = plots[1].querySelector("line.cursor").getAttribute("visibility");
plots[0].blur();
found.gone = tip();
found.rows = rows().length;
found.worst = rows()[0].textContent;
set("reward from", "0.9");
found.rewarded = rows().length;
set("reward from", "");
set("text", "NEEDLE");
found.searched = rows().length;
rows()[0].click();
found.detail = document.querySelector(".detail").textContent;
found.expanded = document.querySelector(".open[aria-expanded=true]") !== null;
set("text", "");
set("order", "most garbled first");
found.garbled = rows()[0].querySelector("mark").textContent;
set("order", "best reward first");
found.best = rows()[0].textContent;
found.background = getComputedStyle(document.body).backgroundColor;
found.bands = document.querySelectorAll("svg .band").length;
found.bars = document.querySelectorAll("svg .bar").length;
return found;
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    rows = [row(f"answer {value}", value, index=i) for i, value in enumerate((0.0, 0.25, 0.5, 1.0))]
    rows += [row("a needle \u2581\u2581\u2581\u2581", 0.75, index=4), row("unscored", None, index=5)]
    folder = write_folder(tmp_path / "run", 12, rows=rows)
    counts = [0] * (len(EDGES) - 1)
    counts[90], counts[120] = 30, 10
    (folder / "histograms").mkdir()
    histogram = record(10, counts, {"kl": 0.01, "kl_std": 0.02, "kl_max": 0.5})
    (folder / "histograms" / "step-000010.json").write_text(json.dumps(histogram))
    return folder


def test_charts_table_and_keys_work(run: Path, tmp_path: Path) -> None:
    seen = opened(page([read_run(run)]), tmp_path, probe=LOOK, width=600)
    found = seen.probed
    assert seen.console == []
    assert found["charts"] == found["named"] == found["axes"] == found["alarms"] == 11
    assert found["wide"] <= 0 and found["bands"] == 0
    assert found["first"][0] == "step 1" and found["first"][1].startswith("reward_mean0.2")
    assert found["third"][0] == "step 3" and found["follows"] == "visible" and found["gone"] == []
    assert found["rows"] == 25 and "answer 0" in found["worst"]
    assert found["rewarded"] == 12 and found["searched"] == 12 and found["expanded"]
    assert all(text in found["detail"] for text in ("What is 24 + 33?", "exact 0.75", '"answer": "57"'))
    assert found["garbled"] == "\u2581" * 4 and "answer 1" in found["best"]
    assert found["background"] == "rgb(255, 255, 255)" and found["bars"] == 2


def test_two_runs_are_laid_over_each_other_also_in_the_dark(run: Path, tmp_path: Path) -> None:
    other = write_folder(tmp_path / "other", 900)
    seen = opened(page(read_runs([run, other])), tmp_path, probe=LOOK, dark=True)
    found = seen.probed
    assert seen.console == [] and found["background"] == "rgb(20, 23, 27)"
    assert found["charts"] == 13 and found["bands"] == 13  # a chart a signal; the longer run in buckets
    step, one, two, *held_out, alarm = found["first"]
    assert step == "step 1" and one.startswith("run0.2") and two.startswith("other0.2") and " to 0." in two
    assert [line.split(",")[0] for line in held_out] == ["run", "run", "other", "other"]
    assert alarm == "alarm at 6: kl, drift"


def test_what_a_model_wrote_is_shown_and_does_nothing(tmp_path: Path) -> None:
    rows = [row(text, index=i, prompt=text, columns={text: text}) for i, text in enumerate(HOSTILE.values())]
    rows.append(row("<script>document.title = 'taken'</script>" * 25_000, 0.0, index=50))  # one line of 1 MB
    folder = write_folder(tmp_path / "<b>run", 3, rows=rows)
    (folder / "config.toml").write_text("dir = \"</script><script>document.title = 'taken'</script>\"")
    alarm = {"step": 2, "signal": HOSTILE["script"], "message": HOSTILE["end of the data"]}
    (folder / "alarms.jsonl").write_text(json.dumps(alarm) + "\n")
    open_all = """
    document.querySelectorAll(".rollouts tr.row").forEach((one) => one.click());
    const said = [...document.querySelectorAll(".detail pre")].map((one) => one.textContent);
    return { title: document.title, images: document.images.length, scripts: document.scripts.length, said,
             inside: document.querySelectorAll(".detail pre *:not(mark):not(.cut)").length };
    """
    seen = opened(page([read_run(folder)]), tmp_path, probe=open_all)
    assert seen.console == []
    assert seen.probed["title"] == "<b>run · zero-grpo" and seen.probed["images"] == 0 and seen.probed["inside"] == 0
    assert seen.probed["scripts"] == 3  # data, page, probe
    assert HOSTILE["script"] in seen.probed["said"] and HOSTILE["end of the data"] in seen.probed["said"]
    assert "a\\x00b" in seen.probed["said"] and "lone \\ud800 and \\udfff" in seen.probed["said"]
    assert any("characters left out" in text for text in seen.probed["said"])


def test_the_policy_stops_what_is_not_the_pages_own(tmp_path: Path) -> None:
    """Were the embedding broken, the browser would still run nothing of it."""
    text = page([read_run(write_folder(tmp_path / "run", 2))])
    broken = text.replace("</body>", "<script>document.title = 'taken'</script><img src=x onerror=alert(1)></body>")
    seen = opened(broken, tmp_path)
    assert "<title>run · zero-grpo</title>" in seen.document
    assert sum("Content Security Policy" in line for line in seen.console) >= 2


def test_a_run_that_has_just_begun_opens(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[run]\n")
    seen = opened(page([read_run(tmp_path)]), tmp_path)
    assert seen.console == [] and "No step is done yet." in seen.document
