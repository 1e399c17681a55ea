"""What --probe makes of the hosts' answers; the answers of real hosts are in tests/cluster."""

import copy
import os
import time
from pathlib import Path
from typing import Any

import pytest

from trainer.__main__ import main
from trainer.errors import Refused
from trainer.launcher import reach, survey
from trainer.launcher.hosts import Host
from trainer.launcher.probe import _interface, look
from trainer.launcher.reach import PACKAGES, VERSIONS
from trainer.preflight import bandwidth
from trainer.world import World

HOSTS = [Host("a", 1), Host("b.example.com", 4), Host("c", 1)]
GIB = 2**30


@pytest.fixture(scope="module")
def answer() -> dict[str, Any]:
    """Of this machine."""
    question = {"paths": ["/"], "peer": "localhost", "port": 0, "facts": {"folder": str(Path.cwd())}}
    found = look(question | {"versions": VERSIONS})
    assert abs(time.time() - found["facts"]["clock"]) < 60
    found["facts"]["clock"] = 0.0
    assert len(found["machine"].split()) == 3
    found["machine"] = ""  # the hosts of these tests are all this one
    return found


def changed(answer: dict[str, Any], **facts: object) -> dict[str, Any]:
    other = copy.deepcopy(answer)
    other["facts"].update(facts)
    return other


def with_versions(answer: dict[str, Any], **versions: str) -> dict[str, Any]:
    return answer | {"versions": answer["versions"] | versions}


def test_a_host_tells_what_it_has(answer: dict[str, Any]) -> None:
    facts = answer["facts"]
    assert answer["versions"]["torch"].startswith("2.") and set(PACKAGES) < set(answer["versions"])
    assert facts["cores"] == len(os.sched_getaffinity(0)) and facts["memory"] > GIB / 4 and facts["disk"] > 0
    assert _interface("127.0.0.1") == "lo" and _interface("192.0.2.255") == ""


def test_hosts_that_agree_have_no_problem(answer: dict[str, Any]) -> None:
    answers = [answer, copy.deepcopy(answer), changed(answer, cores=64)]
    assert survey.problems(HOSTS, answers) == []
    lines = survey.compared(HOSTS, answers).splitlines()
    assert lines[0].split() == ["host", "a", "b.example.com", "c"] and lines[1].split() == ["slots", "1", "4", "1"]
    assert not any(line.startswith("!") for line in lines)
    torch = next(line for line in lines if line.startswith("torch ")).split()
    assert torch == ["torch", *[answer["versions"]["torch"]] * 3]


def test_what_differs_is_marked_and_named(answer: dict[str, Any]) -> None:
    other = with_versions(answer, torch="2.1", bitsandbytes="none", revision="")
    found = survey.problems(HOSTS, [answer, other, "not reachable: no route. Fix: a cable"])
    mine = answer["versions"]
    assert found == [
        "c: not reachable: no route. Fix: a cable",
        f"torch: {mine['torch']} on a; 2.1 on b.example.com. Fix: the same on every host",
        f"bitsandbytes: {mine['bitsandbytes']} on a; none on b.example.com. Fix: the same on every host",
    ]
    lines = survey.compared(HOSTS, [answer, other, "not reachable"]).splitlines()
    assert [line.split()[1] for line in lines if line.startswith("!")] == ["torch", "bitsandbytes"]
    assert lines[0].split() == ["host", "a", "b.example.com"]


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"clock": -90.0}, "b.example.com: its clock is -90 s off this one. Fix: let NTP set both"),
        ({"gpus": ["A10"] * 2}, "b.example.com: slots=4, but 2 GPU(s). Fix: b.example.com slots=2"),
        (
            {"gpus": ["A10"] * 4, "shared": GIB // 16},
            "b.example.com: /dev/shm has 0.06 GiB. Fix: docker run --shm-size=8g, or --ipc=host",
        ),
        (
            {"disk": None},
            f"b.example.com: has no folder {Path.cwd()}. Fix: start where every host has one, shared by all",
        ),
    ],
)
def test_what_keeps_a_host_from_training(answer: dict[str, Any], facts: dict[str, Any], expected: str) -> None:
    mates = changed(answer, gpus=["A10"] if "gpus" in facts else [])
    assert survey.problems(HOSTS, [mates, changed(answer, **facts), mates]) == [expected]


def test_a_host_without_cards_among_others(answer: dict[str, Any]) -> None:
    """Its driver does not answer, say."""
    with_cards = changed(answer, gpus=["A10"] * 4)
    (found,) = survey.problems(HOSTS, [with_cards, with_cards, answer])
    assert found == "c: slots=1, but 0 GPU(s). Fix: take it out of the hostfile, or repair its driver"


def test_the_cards_that_are_chosen_are_counted_by_their_numbers(answer: dict[str, Any]) -> None:
    (found,) = survey.problems([Host("a", 2, (1, 3))], [changed(answer, gpus=["A10"] * 3)])
    assert found.startswith("a: slots=4, but 3 GPU(s)")


def test_one_machine_under_two_names(answer: dict[str, Any]) -> None:
    answers = [answer | {"machine": machine} for machine in ("x", "y", "x")]
    said = "c: the same machine as a. Fix: one line for it, with all of its slots"
    assert survey.problems(HOSTS, answers) == [said]
    assert "\n! address " in survey.compared(HOSTS, answers)


def test_hosts_that_differ_start_nothing(answer: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As --probe says it, and every problem in one message."""
    other = with_versions(answer, deepspeed="0.1", revision="abc")
    answers = iter([answer | {"machine": "x"}, other, with_versions(answer, revision="") | {"machine": "x"}])
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(reach, "ask", lambda host, question: asked.append(question) or next(answers))
    with pytest.raises(Refused) as refused:
        reach.meet(HOSTS, [Path("/run.toml")], Path("/out/.launch/lease"), 0)
    mine = answer["versions"]
    assert str(refused.value).splitlines() == [
        "--hostfile: nothing was started.",
        "  c: the same machine as a. Fix: one line for it, with all of its slots.",
        f"  deepspeed: {mine['deepspeed']} on a, c; 0.1 on b.example.com. Fix: the same on every host.",
        f"  revision: {mine['revision']} on a; abc on b.example.com. Fix: the same on every host.",
    ]
    assert asked[0]["versions"] == VERSIONS


def test_the_same_model_on_every_host(tmp_path: Path) -> None:
    """By what decides a start: every setting, and the headers of the weights."""

    def told(folder: Path) -> str:
        return look({"paths": [], "peer": "localhost", "port": 0, "versions": VERSIONS | {"model": str(folder)}})[
            "versions"
        ]["model"]

    for name in ("a", "b"):
        write_weights(tmp_path / name, "config", 2**21)
        (tmp_path / name / "README.md").write_text(name)
    assert told(tmp_path / "a") == told(tmp_path / "b") and len(told(tmp_path / "a")) == 12
    seen = {told(tmp_path / "a"), told(tmp_path / "absent")}
    for config, size in (("config!", 2**21), ("config", 2**21 + 1)):
        write_weights(tmp_path / "b", config, size)
        seen.add(told(tmp_path / "b"))
    assert len(seen) == 4


def write_weights(folder: Path, config: str, size: int) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config)
    (folder / "model.safetensors").write_bytes(bytes(size))


@pytest.mark.parametrize(("ahead", "told"), [(0.0, 0.0), (30.0, 30.0), (-30.0, -30.0)])
def test_clocks_are_read_between_question_and_answer(
    answer: dict[str, Any], ahead: float, told: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(survey, "ask", lambda host, question: changed(answer, clock=time.time() + ahead))
    monkeypatch.setattr(survey, "check_tools", lambda: None)
    for one in survey.survey(HOSTS):
        assert not isinstance(one, str) and one["facts"]["clock"] == pytest.approx(told, abs=0.5)


def test_hosts_that_do_not_answer_end_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hosts").write_text("a slots=1\nb slots=2\n")
    monkeypatch.setattr(survey, "ask", lambda host, question: "not reachable: no route. Fix: a cable")
    monkeypatch.setattr(survey, "check_tools", lambda: None)
    assert main(["hosts", str(tmp_path / "hosts"), "--probe"]) == 2
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "refused: these hosts cannot train together:",
        "  a: not reachable: no route. Fix: a cable.",
        "  b: not reachable: no route. Fix: a cable.",
    ]


def test_what_probe_compares_is_what_was_chosen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hosts").write_text("a slots=1\nb slots=4\nc slots=1\n")
    asked: list[str] = []
    monkeypatch.setattr(survey, "ask", lambda host, _: asked.append(host.spec) or "not reachable: no. Fix: a cable")
    monkeypatch.setattr(survey, "check_tools", lambda: None)
    assert main(["hosts", str(tmp_path / "hosts"), "--include", "b:1,3@a", "--probe"]) == 2
    assert sorted(asked) == ["a", "b:1,3"] and "b         2  1-2  slot 1, 3\n" in capsys.readouterr().out


def test_without_ssh_nobody_is_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hosts").write_text("a slots=1\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["hosts", str(tmp_path / "hosts"), "--probe"]) == 2
    assert "refused: --hostfile: pdsh and ssh not found on PATH" in capsys.readouterr().out
    assert main(["hosts", str(tmp_path / "hosts"), "--model", "m"]) == 2
    assert "Fix: add --probe." in capsys.readouterr().out


def test_how_fast_hosts_all_reduce(answer: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The slowest counts; a ring sends twice the bytes but a share; one that cannot is named, and ends nothing."""
    asked: list[dict[str, Any]] = []

    def told(host: Host, question: dict[str, Any], script: str) -> dict[str, Any] | str:
        asked.append(question)
        return {"seconds": {"a": 0.1, "b.example.com": 0.2, "c": 0.1}[host.name], "backend": "gloo"}

    monkeypatch.setattr(reach, "ask", told)
    line = bandwidth.between(HOSTS, [answer] * 3)
    assert line == "all_reduce of 64 MiB, a rank on each host (gloo): 200 ms; each sends 0.45 GB/s (3.6 Gb/s)"
    assert sorted(one["RANK"] for one in asked) == ["0", "1", "2"] and {one["WORLD_SIZE"] for one in asked} == {"3"}
    assert bandwidth.between(HOSTS[:1], [answer]) == ""
    monkeypatch.setattr(reach, "ask", lambda *_: "no answer within 60 s. Fix: look")
    assert bandwidth.between(HOSTS, [answer] * 3).endswith("not measured (a: no answer within 60 s. Fix: look)")


def test_an_all_reduce_takes_time(world: World) -> None:
    assert 0 < world.all_reduce_seconds(2**16) < 5
