"""The hostfile's grammar, line by line, and that a hostile line runs nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_run import RUN_FILE
from trainer.__main__ import main
from trainer.errors import Refused
from trainer.launcher.hosts import Host, read_hostfile, selected, table

ROOT = Path(__file__).parents[2]

GOOD = {
    "one": ("w0 slots=1", [("w0", 1)]),
    "two": ("w0 slots=4\nw1 slots=2\n", [("w0", 4), ("w1", 2)]),
    "most slots": ("w0 slots=16", [("w0", 16)]),
    "blank lines": ("\n\nw0 slots=4\n\n\t \n", [("w0", 4)]),
    "comments": ("# hosts\n  # of us\nw0 slots=4\n", [("w0", 4)]),
    "trailing comment": ("w0 slots=4 # the first\nw1 slots=4# next", [("w0", 4), ("w1", 4)]),
    "commented hosts": ("#w0 slots=4\nw1 slots=4", [("w1", 4)]),
    "tabs and spaces": ("\t w0 \t slots=4 \t", [("w0", 4)]),
    "CRLF": ("w0 slots=4\r\n\r\nw1 slots=4\r\n", [("w0", 4), ("w1", 4)]),
    "BOM": ("\ufeffw0 slots=4\n", [("w0", 4)]),
    "BOM and comment": ("\ufeff# hosts\nw0 slots=4\n", [("w0", 4)]),
    "domain": ("gpu-1.cluster.example.com slots=8", [("gpu-1.cluster.example.com", 8)]),
    "underscore": ("gpu_1 slots=8", [("gpu_1", 8)]),
    "IPv4": ("10.0.0.1 slots=8", [("10.0.0.1", 8)]),
    "IPv6": ("fd00::1 slots=8\n::1 slots=1", [("fd00::1", 8), ("::1", 1)]),
    "capitals": ("GPU1 slots=8", [("GPU1", 8)]),
    "non-ASCII comment": ("w0 slots=4 # 主机", [("w0", 4)]),
}

BAD = {
    "no slots": ("w0", "no slots. Fix: w0 slots=N"),
    "colon": ("w0:4", "'w0:4' is not a host name. Fix: NAME slots=N"),
    "port": ("w0:22 slots=4", "the port for ssh stands in ~/.ssh/config"),
    "spaced": ("w0 slots = 4", "got 'slots = 4'"),
    "no number": ("w0 slots=", "slots=: expected a whole number of 1 to 16"),
    "zero": ("w0 slots=0", "slots=0: expected"),
    "negative": ("w0 slots=-1", "slots=-1: expected"),
    "plus": ("w0 slots=+4", "slots=+4: expected"),
    "word": ("w0 slots=two", "slots=two: expected"),
    "letter after": ("w0 slots=4x", "slots=4x: expected"),
    "fraction": ("w0 slots=4.5", "slots=4.5: expected"),
    "underscored": ("w0 slots=1_0", "slots=1_0: expected"),
    "too many": ("w0 slots=17", "slots=17: expected"),
    "huge": ("w0 slots=" + "9" * 5000, "expected a whole number"),
    "full-width digit": ("w0 slots=\uff14", "slots=\uff14: expected"),
    "Arabic digit": ("w0 slots=٤", "slots=٤: expected"),
    "capital key": ("w0 SLOTS=2", "got 'SLOTS=2'"),
    "MPI's other key": ("w0 max_slots=8 slots=4", "got 'max_slots=8 slots=4'"),
    "two keys": ("w0 slots=4 slots=4", "got 'slots=4 slots=4'"),
    "only slots": ("slots=4", "'slots=4' is not a host name"),
    "two hosts": ("w0,w1 slots=2", "Fix: a line for each host"),
    "range": ("w[0-3] slots=2", "Fix: a line for each host"),
    "file of names": ("^/tmp/hosts slots=2", "'^/tmp/hosts' is not a host name"),
    "user": ("root@w0 slots=2", "the user for ssh stands in ~/.ssh/config"),
    "trailing dot": ("w0. slots=2", "'w0.' is not a host name"),
    "trailing hyphen": ("w0- slots=2", "'w0-' is not a host name"),
    "non-ASCII name": ("wörker slots=2", "'wörker' is not a host name"),
    "look-alike": ("w\u043e slots=2", "is not a host name"),
    "no-break space": ("w0\u00a0slots=2", "is not a host name"),
    "NUL": ("w0\0 slots=2", r"'w0\x00' is not a host name"),
    "line separator": ("w0 slots=2\u2028w1 slots=2", "expected slots=N alone"),
    "form feed": ("w0 slots=2\fw1 slots=2", "expected slots=N alone"),
    "zone": ("fe80::1%eth0 slots=2", "is not a host name"),
    "too long": ("w" * 254 + " slots=2", "is not a host name"),
    "percent": ("%h slots=2", "'%h' is not a host name"),
}
HOSTILE = (
    "-oProxyCommand=touch$IFS$PWD/canary slots=2",
    "-oProxyCommand=./touch_canary slots=2",
    "--help slots=2",
    "-w0 slots=2",
    "w0;touch${IFS}canary slots=2",
    "w0&touch${IFS}canary& slots=2",
    "w0|touch${IFS}canary slots=2",
    "$(touch${IFS}canary) slots=2",
    "`touch${IFS}canary` slots=2",
    "w0 slots=$(touch${IFS}canary)",
    "w0 slots=2;touch${IFS}canary",
    "w0 slots=2 ; touch canary",
    "w0 slots=2 $(touch canary)",
    "w0>canary slots=2",
    "'w0 slots=2",
    '"w0" slots=2',
    "w0\\ slots=2",
    "exec:w0 slots=2",
    "../canary slots=2",
    "~root slots=2",
    "* slots=2",
)


def hostfile(folder: Path, text: str) -> Path:
    path = folder / "hosts.txt"
    path.write_bytes(text.encode())
    return path


@pytest.mark.parametrize(("text", "expected"), GOOD.values(), ids=GOOD.keys())
def test_b79_good(text: str, expected: list[tuple[str, int]], tmp_path: Path) -> None:
    assert read_hostfile(hostfile(tmp_path, text)) == [Host(*host) for host in expected]


@pytest.mark.parametrize(("line", "words"), BAD.values(), ids=BAD.keys())
def test_b79_bad_line_is_shown_with_its_number_and_reason(line: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(Refused) as refused:
        read_hostfile(hostfile(tmp_path, f"# first\nfine slots=1\n{line}\n"))
    shown = repr(line) if len(line) <= 100 else f"{line[:100]!r}..."
    assert f"line 3: {shown}: " in str(refused.value) and words in str(refused.value) and "Fix: " in str(refused.value)
    assert len(str(refused.value)) < 600


def test_b79_all_bad_lines_in_one_message(tmp_path: Path) -> None:
    with pytest.raises(Refused) as refused:
        read_hostfile(hostfile(tmp_path, "w0\r\nw1 slots=2\r\nw2 slots=x\r\n"))
    assert "line 1: 'w0': no slots" in str(refused.value) and "line 3: 'w2 slots=x': " in str(refused.value)
    assert "line 2" not in str(refused.value)


@pytest.mark.parametrize("second", ["w0 slots=2", "W0 slots=4"])
def test_b79_a_host_twice_in_any_case(second: str, tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"line 3: .* is already in line 1\. Fix: one line a host"):
        read_hostfile(hostfile(tmp_path, f"w0 slots=4\nw1 slots=4\n{second}\n"))


@pytest.mark.parametrize("text", ["", "\n\n", "# w0 slots=4\n  # more\n", "\ufeff"])
def test_b79_no_host(text: str, tmp_path: Path) -> None:
    with pytest.raises(Refused, match="it names no host"):
        read_hostfile(hostfile(tmp_path, text))


def test_b79_another_encoding(tmp_path: Path) -> None:
    (tmp_path / "hosts.txt").write_text("w0 slots=4\n", encoding="utf-16")
    with pytest.raises(Refused, match=r"line 1: not UTF-8 text. Fix: save the file as UTF-8"):
        read_hostfile(tmp_path / "hosts.txt")


def test_b79_a_missing_file_never_means_this_machine(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.toml").write_text(RUN_FILE)
    run_dir = tmp_path / "out"
    missing = tmp_path / "absent"
    for path, reason in ((missing, "No such file"), (tmp_path, "Is a directory")):
        assert main(["train", str(tmp_path / "run.toml"), "--hostfile", str(path), "--run.dir", str(run_dir)]) == 2
        out, err = capfd.readouterr()
        assert out.startswith(f"\nrefused: hostfile {path}: cannot be read: {reason}") and "--gpus N" in out and not err
    assert not run_dir.exists()


FILE = [Host("w0", 4), Host("w1", 4), Host("fd00::1", 2)]


@pytest.mark.parametrize(
    ("include", "exclude", "left"),
    [
        ("", "", FILE),
        ("w1@w0:2,0", "", [Host("w0", 2, (0, 2)), Host("w1", 4)]),
        ("w0:3", "", [Host("w0", 1, (3,))]),
        ("w0:0,1,2,3@fd00::1", "", [Host("w0", 4), Host("fd00::1", 2)]),
        ("w0:1@w0:1,3", "", [Host("w0", 2, (1, 3))]),
        ("", "w1", [Host("w0", 4), Host("fd00::1", 2)]),
        ("", "w0:1@w1@fd00::1", [Host("w0", 3, (0, 2, 3))]),
    ],
)
def test_include_and_exclude(include: str, exclude: str, left: list[Host]) -> None:
    assert selected(FILE, include, exclude) == left


@pytest.mark.parametrize(
    ("include", "exclude", "said"),
    [
        ("w0", "w1", "--include and --exclude: one of them"),
        ("w2@w0:4", "", "  'w2': no such host. The file has w0, w1, fd00::1.\n  'w0:4': no slot 4. w0 has 0 to 3."),
        ("", "W0", "'W0': no such host"),
        ("w0:", "", "'' are no slots. Fix: w0:0,2, say."),
        ("w0:1-2", "", "'1-2' are no slots"),
        ("w0:-1", "", "'-1' are no slots"),
        ("w0,w1", "", "'w0,w1': no such host"),
        ("w0@", "", "'': no such host"),
        ("w0:$(touch x)", "", "are no slots"),
        ("fd00::1:0", "", "takes no slots of an IPv6 address"),
        ("", "w0@w1@fd00::1", "no host is left"),
    ],
)
def test_a_choice_of_what_is_not_there(include: str, exclude: str, said: str) -> None:
    with pytest.raises(Refused) as refused:
        selected(FILE, include, exclude)
    assert said in str(refused.value)


def test_hosts_prints_hosts_slots_and_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["hosts", str(hostfile(tmp_path, "worker-0 slots=4\nw1 slots=1\nw2 slots=2\n"))]) == 0
    expected = (
        "host      slots  ranks\nworker-0      4  0-3\nw1            1  4\nw2            2  5-6\n3 host(s), 7 rank(s)\n"
    )
    assert capfd.readouterr().out == expected
    assert main(["hosts", str(hostfile(tmp_path, "w0\n"))]) == 2
    assert table([Host("a", 1)]).endswith("1 host(s), 1 rank(s)")


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """ssh and pdsh that leave a mark when they are called, whatever with."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("ssh", "pdsh", "touch_canary"):
        (folder / name).write_text(f"#!/bin/sh\n: > '{tmp_path}/canary'\nexit 255\n")
        (folder / name).chmod(0o755)
    (tmp_path / "run.toml").write_text(RUN_FILE)
    return folder


@pytest.mark.parametrize("line", HOSTILE)
def test_b79_a_hostile_line_runs_nothing(
    line: str, tools: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tools.parent
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.chdir(folder)
    path = hostfile(folder, f"fine slots=1\n{line}\n")
    before = sorted(folder.rglob("*"))
    assert main(["train", "run.toml", "--hostfile", str(path)]) == 2
    assert f"line 2: {line!r}: " in capfd.readouterr().out
    assert sorted(folder.rglob("*")) == before


def test_b79_all_hostile_lines_from_a_shell_run_nothing(tools: Path) -> None:
    folder = tools.parent
    path = hostfile(folder, "\n".join(HOSTILE))
    ended = subprocess.run(
        [sys.executable, "-m", "trainer", "train", "run.toml", "--hostfile", path],
        cwd=folder,
        env=os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stderr) == (2, "")
    assert ended.stdout.count("\n  line ") == len(HOSTILE)
    assert not (folder / "canary").exists() and not (folder / "out").exists()


def test_the_mark_would_be_seen(
    tools: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A good hostfile does reach ssh; its failure is the host's."""
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.chdir(tools.parent)
    assert main(["train", "run.toml", "--hostfile", str(hostfile(tools.parent, "w0 slots=1"))]) == 2
    assert "w0: not reachable: ssh failed without a word. Fix: " in capfd.readouterr().out
    assert (tools.parent / "canary").exists() and not (tools.parent / "out").exists()


def test_b82_missing_tools_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.toml").write_text(RUN_FILE)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert main(["train", "run.toml", "--hostfile", str(hostfile(tmp_path, "w0 slots=1"))]) == 2
    assert "pdsh and ssh not found on PATH" in capfd.readouterr().out
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("more", [("--gpus", "2"), ("--hostfile", "hosts")])
def test_a_rank_starts_no_ranks(
    more: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nor does a pod whose environment makes it one, without a word."""
    (tmp_path / "run.toml").write_text(RUN_FILE)
    monkeypatch.setenv("RANK", "0")
    assert main(["train", str(tmp_path / "run.toml"), "--run.dir", str(tmp_path / "out"), *more]) == 2
    out = capfd.readouterr().out
    assert out.startswith(f"\nrefused: {more[0]}: RANK=0 is set") and "env -u RANK" in out
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--gpus", "2", "--hostfile", "h"), "--gpus and --hostfile: one of them"),
        (("--gpus", "2", "--master_port", "99999"), "expected a port, 1 to 65535"),
        (("--gpus", "2", "--include", "w0"), "they choose hosts of a --hostfile, and there is none"),
    ],
)
def test_flags_that_cannot_be(
    arguments: tuple[str, ...], words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.toml").write_text(RUN_FILE)
    assert main(["train", str(tmp_path / "run.toml"), "--run.dir", str(tmp_path / "out"), *arguments]) == 2
    assert words in capfd.readouterr().out
