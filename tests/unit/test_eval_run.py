"""``zero-grpo eval``: the run's own numbers again, bit for bit, of every kind of weights; nothing is written."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import trainer.eval_run.held_out
from tests.bad_input import own_code
from tests.tiny_run import start, step, write_run
from trainer.__main__ import main
from trainer.checkpoint.export import export
from trainer.checkpoint.save import Checkpoints
from trainer.config import dump
from trainer.evaluate import Evaluation
from trainer.train import held_out
from trainer.world import World

SETTINGS: dict[str, Any] = {"optim.lr": 5.0, "data.eval_fraction": 0.5, "run.steps": 2, "eval.correct_at": 0.5}
KINDS: dict[str, dict[str, Any]] = {"lora": {}, "full": {"lora.r": 0, "optim.lr": 0.5}}
NAME = {"lora": "adapter", "full": "model"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, world: World) -> Path:
    """A finished run of each kind with its evaluations of step 0, 1 and 2, and checkpoints of 1 and 2."""
    folder = write_run(tmp_path_factory.mktemp("run"))
    for name, settings in KINDS.items():
        run_dir = folder / name
        (run_dir / "eval").mkdir(parents=True)
        state = start(folder, world, SETTINGS | settings | {"run.dir": str(run_dir)})
        saved = Checkpoints(state.config, state.policy, state.engine, world, state.facts, "a-run")
        for number in range(3):
            if number:
                step(state)
                saved.save(number, {}, {})
            own = held_out(state.config, world, state.decoder, state.rewards, state.eval_prompts, number, [])
            (run_dir / f"eval/step-{number:06d}.json").write_text(json.dumps(own.record()))
        saved.keep_best(saved.store.folder(1))
        export(state.policy, state.engine, world, run_dir, state.config)
        # The reward file is looked for beside the run file.
        (folder / f"{name}.toml").write_text(dump(state.config))
        (run_dir / "config.toml").write_text(dump(state.config))
        (run_dir / "run_status.json").write_text(json.dumps({"state": "done", "step": 2}))
        state.engine.close()
    return folder


@pytest.fixture
def evaluated(folder: Path, world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    monkeypatch.setattr(trainer.eval_run.held_out, "connect", lambda device, timeout_seconds: world)
    monkeypatch.setattr(trainer.eval_run.held_out, "disconnect", lambda: None)

    def run(kind: str, *words: str) -> tuple[int, str]:
        code = main(["eval", str(folder / f"{kind}.toml"), *words])
        return code, capsys.readouterr().out

    return run


def own(folder: Path, kind: str, number: int) -> dict[str, Any]:
    return json.loads((folder / kind / f"eval/step-{number:06d}.json").read_text())


def numbers(found: dict[str, Any]) -> dict[str, Any]:
    return {name: found[name] for name in ("sampled", "greedy", "pass_at", "parts")}


@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_are_those_of_the_run_itself(folder: Path, evaluated: Any, kind: str) -> None:
    files = sorted(folder.rglob("*"))
    run_dir = folder / kind
    places = {
        "checkpoints/step-000001": 1,
        "checkpoints/best": 1,
        "checkpoints/step-000002": 2,
        ".": 2,
        NAME[kind]: 2,
    }
    for place, number in places.items():
        code, out = evaluated(kind, "--checkpoint", str(run_dir / place), "--json")
        found = json.loads(out)
        assert code == 0 and found["prompts"] == 4
        assert numbers(found["checkpoint"]) == numbers(own(folder, kind, number)), place
    assert own(folder, kind, 1)["sampled"] != own(folder, kind, 2)["sampled"]
    assert sorted(folder.rglob("*")) == files, "nothing is written"


def test_the_base_is_step_0_and_a_difference_is_paired(folder: Path, evaluated: Any) -> None:
    code, out = evaluated(
        "lora", "--checkpoint", str(folder / "lora/checkpoints/step-000002"), "--against", "base", "--json"
    )
    found = json.loads(out)
    assert code == 0
    assert numbers(found["against"]) == numbers(own(folder, "lora", 0))
    assert numbers(found["checkpoint"]) == numbers(own(folder, "lora", 2))
    before, after = (Evaluation.of(own(folder, "lora", number)) for number in (0, 2))
    mean, _ = found["difference"]["reward"]["sampled"]
    assert mean == pytest.approx(after.sampled.mean - before.sampled.mean) and mean != 0
    _, out = evaluated("lora", "--checkpoint", "base", "--against", str(folder / "lora"))
    (row,) = [line for line in out.splitlines() if line.startswith("│ reward, sampled")]
    assert f"{-mean:+.3f} ±" in row


def test_what_the_terminal_shows(folder: Path, evaluated: Any) -> None:
    _, out = evaluated("lora", "--checkpoint", str(folder / "lora"), "--eval.num_generations", "2")
    assert "Held-out evaluation, 4 prompts (± one standard error)\n" in out
    assert "│ pass@2" in out and "pass@4" not in out
    assert "a reward of at least 0.5 (eval.correct_at)" in out
    assert f"checkpoint: {folder}/lora/checkpoints/step-000002/adapter (step 2)" in out


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--checkpoint", "nowhere"], 5, "nowhere: not there. Expected a checkpoint"),
        (["--data.eval_fraction", "0"], 2, "eval: the run file holds no prompts out"),
        (["--checkpoint", "."], 5, "is neither a checkpoint"),
        (["--lora.r", "0", "--checkpoint", "lora/adapter"], 2, "is an adapter, and the run file trains whole models"),
    ],
)
def test_a_mistake_is_one_message(
    folder: Path, evaluated: Any, monkeypatch: pytest.MonkeyPatch, words: list[str], code: int, said: str
) -> None:
    monkeypatch.chdir(folder)
    found, out = evaluated("lora", *words)
    assert found == code and said in out and "Traceback" not in out


def test_s3_the_run_file_says_that_code_of_its_own_model_may_run_and_no_other(
    folder: Path, evaluated: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint's whole model may be anyone's."""
    foreign = Path(shutil.copytree(folder / "full/model", tmp_path / "theirs"))
    own_code(foreign)
    text = (folder / "full.toml").read_text()
    (folder / "trusting.toml").write_text(text.replace("trust_remote_code = false", "trust_remote_code = true"))
    monkeypatch.chdir(tmp_path)
    code, out = evaluated("trusting", "--checkpoint", str(foreign))
    assert code == 2 and "--model.trust_remote_code true on the command line" in out
    assert not (tmp_path / "canary").exists()
    assert evaluated("trusting", "--checkpoint", str(foreign), "--model.trust_remote_code", "true")[0] == 2
    assert (tmp_path / "canary").is_dir()
