"""The doctor on live parts: a healthy tiny run has no cause, and of each broken part the right cause comes first."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trainer.collect
import trainer.minibatch
import trainer.update
from tests.tiny import tiny_qwen2, tiny_tokenizer
from tests.tiny_run import PROMPTS, RUN_FILE, run_config, start, step, write_run
from tools import lab_faults
from trainer.__main__ import main
from trainer.algorithm.loss import Objective
from trainer.batch import Completion, PackedRows
from trainer.doctor.finding import Diagnosis
from trainer.doctor.live import ask
from trainer.doctor.parts import Parts, load_parts
from trainer.output import Output
from trainer.record.run_dir import read_lines
from trainer.world import World

FULL = {"lora.r": 0, "rollout.max_new_tokens": 24}
"""All weights, so that the reference is a copy that can be broken alone."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has read its prompts, so that it is neither sure of everything nor of nothing."""
    model, tokenizer = tiny_qwen2(), tiny_tokenizer()
    rows = [tokenizer(f"{prompt} the answer is 42<|im_end|>")["input_ids"] for prompt in PROMPTS]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [297] * (longest - len(row)) for row in rows])
    labels = ids.where(torch.tensor([[place < len(row) for place in range(longest)] for row in rows]), -100)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(30):
        optimizer.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
    return write_run(tmp_path_factory.mktemp("run"), model)


@contextmanager
def loaded(
    folder: Path, world: World, settings: dict[str, Any] | None = None, reward: str = "spread"
) -> Iterator[Parts]:
    parts = load_parts(run_config(folder, FULL | (settings or {}), reward=reward), folder, world)
    yield parts
    parts.state.engine.close()


def first_cause(found: Diagnosis) -> str:
    return found.causes[0].cause if found.causes else "none"


@pytest.mark.parametrize(
    "settings",
    [
        {"lora.r": 4},
        {},
        {"model.dtype": "bf16"},
        {"grpo.kl.estimator": "exact", "grpo.loss_type": "gspo"},
        {"rollout.temperature": 0.7, "grpo.loss_type": "cispo", "model.attn": "eager"},
    ],
)
def test_a_healthy_run_has_no_cause(folder: Path, world: World, settings: dict[str, Any]) -> None:
    with loaded(folder, world, settings) as parts:
        found = ask(parts, "tiny")
    assert found.findings == [], found.text()
    assert len(found.fine) > 14 and set(found.not_checked) <= {"reference_weights", "recorded_step"}


def reference_theta(parts: Parts, patch: pytest.MonkeyPatch) -> None:
    rotary = parts.state.reference.copy.causal.model.rotary_emb  # type: ignore[union-attr]
    rotary.inv_freq = 10000.0 ** -((torch.arange(0, 8, 2) / 8) ** 0.5)


def reference_from_elsewhere(parts: Parts, patch: pytest.MonkeyPatch) -> None:
    other = tiny_qwen2(seed=7)
    parts.state.reference.copy.causal.load_state_dict(other.state_dict())  # type: ignore[union-attr]


def reference_shares_weights(parts: Parts, patch: pytest.MonkeyPatch) -> None:
    parts.state.reference.copy = None  # type: ignore[union-attr]


def dropout_on(parts: Parts, patch: pytest.MonkeyPatch) -> None:
    mlp = parts.state.policy.causal.get_decoder().layers[0].mlp
    mlp.down_proj = nn.Sequential(mlp.down_proj, nn.Dropout(0.2)).train()


def loss_inverted(parts: Parts, patch: pytest.MonkeyPatch) -> None:
    real = trainer.update.policy_objective

    def inverted(*arguments: Any, **options: Any) -> Objective:
        objective = real(*arguments, **options)
        return objective._replace(loss=-objective.loss)

    patch.setattr(trainer.update, "policy_objective", inverted)


def kl_inverted(parts: Parts, patch: pytest.MonkeyPatch) -> None:
    real = trainer.update.sampled_kl
    patch.setattr(trainer.update, "sampled_kl", lambda *arguments: -real(*arguments))


def kl_without_gradient(parts: Parts, patch: pytest.MonkeyPatch) -> None:
    real = trainer.update.sampled_kl
    patch.setattr(trainer.update, "sampled_kl", lambda logps, *rest: real(logps.detach(), *rest) + 0 * logps)


def coefficient_divided(parts: Parts, patch: pytest.MonkeyPatch) -> None:
    """As by the number of ranks."""
    real = trainer.update.sampled_kl
    patch.setattr(trainer.update, "sampled_kl", lambda *arguments: real(*arguments) / 4)


def mean_of_each_pass(parts: Parts, patch: pytest.MonkeyPatch) -> None:
    real = trainer.update.policy_objective

    def averaged(*arguments: Any, **options: Any) -> Objective:
        objective = real(*arguments, **options)
        return objective._replace(loss=objective.loss * 10 / len(objective.loss))

    patch.setattr(trainer.update, "policy_objective", averaged)


def sampled_hotter(parts: Parts, patch: pytest.MonkeyPatch) -> None:
    decoder = parts.state.decoder
    parts.state.decoder = replace(decoder, rollout=decoder.rollout.model_copy(update={"temperature": 1.6}))


def penalty_leaks(parts: Parts, patch: pytest.MonkeyPatch) -> None:
    decoder = parts.state.decoder
    parts.state.policy.generation_config.repetition_penalty = 1.7
    parts.state.decoder = replace(decoder, rollout=decoder.rollout.model_copy(update={"repetition_penalty": 1.7}))


def wrong_rows(change: Callable[[list[Completion], PackedRows], PackedRows]) -> Callable[..., None]:
    def broken(parts: Parts, patch: pytest.MonkeyPatch) -> None:
        for name in ("pack", "pack_groups"):
            real = getattr(trainer.minibatch, name)
            patch.setattr(
                trainer.minibatch,
                name,
                lambda completions, real=real, **options: change(completions, real(completions, **options)),
            )

    return broken


def without_ends(completions: list[Completion], rows: PackedRows) -> PackedRows:
    kept = ~torch.isin(rows.targets, torch.tensor([297, 299]))
    if not kept.any():
        return rows
    return rows._replace(score_at=rows.score_at[kept], targets=rows.targets[kept], completion=rows.completion[kept])


def with_prompts(completions: list[Completion], rows: PackedRows) -> PackedRows:
    """The second token of the first prompt is scored as well."""
    more = (rows.input_ids.new_zeros(1), rows.input_ids[0, 1:2], rows.completion[:1])
    old = (rows.score_at, rows.targets, rows.completion)
    at, targets, owner = (torch.cat(pair) for pair in zip(more, old, strict=True))
    return rows._replace(score_at=at, targets=targets, completion=owner)


def shifted_positions(completions: list[Completion], rows: PackedRows) -> PackedRows:
    """Stretched by the number of completions in the pass."""
    return rows._replace(position_ids=rows.position_ids * len(completions))


def nan_weights(parts: Parts, patch: pytest.MonkeyPatch) -> None:
    next(parts.state.policy.causal.parameters()).data[5] = torch.nan


def decodes_otherwise(parts: Parts, patch: pytest.MonkeyPatch) -> None:
    other = tiny_tokenizer()
    other.add_tokens(["zzz"])
    parts.state.decoder = replace(parts.state.decoder, tokenizer=other)


def groups_interleaved(parts: Parts, patch: pytest.MonkeyPatch) -> None:
    real = trainer.collect.group_advantages
    patch.setattr(
        trainer.collect, "group_advantages", lambda rewards, groups, **rest: real(rewards, groups.roll(1), **rest)
    )


def trains_at_another_theta(parts: Parts, patch: pytest.MonkeyPatch) -> None:
    lab_faults.trained_at_theta(5e5)(patch.setattr)


def kl_overflows(parts: Parts, patch: pytest.MonkeyPatch) -> None:
    lab_faults.k3_overflows(patch.setattr)


def gradient_overflows(parts: Parts, patch: pytest.MonkeyPatch) -> None:
    for weight in parts.state.policy.causal.parameters():
        weight.register_hook(lambda gradient: (gradient * 1e30).half().to(gradient))


BROKEN: dict[str, tuple[Callable[[Parts, pytest.MonkeyPatch], None], str]] = {
    "theta of the reference": (reference_theta, "rope_differs"),
    "reference of other weights": (reference_from_elsewhere, "reference_differs"),
    "reference is the policy": (reference_shares_weights, "reference_moves"),
    "dropout": (dropout_on, "dropout"),
    "sign of the loss": (loss_inverted, "loss_sign"),
    "sign of the kl": (kl_inverted, "kl_sign"),
    "kl without gradient": (kl_without_gradient, "kl_no_gradient"),
    "coefficient / ranks": (coefficient_divided, "coefficient_scaled"),
    "mean of each pass": (mean_of_each_pass, "normalisation"),
    "temperature": (sampled_hotter, "temperature_mismatch"),
    "pad is eos": (wrong_rows(without_ends), "end_not_trained"),
    "kl on the prompt": (wrong_rows(with_prompts), "kl_outside_response"),
    "positions": (wrong_rows(shifted_positions), "padding_changes_scores"),
    "nan": (nan_weights, "non_finite"),
    "another tokenizer decodes": (decodes_otherwise, "tokenizer_mismatch"),
    "interleaved groups": (groups_interleaved, "group_layout"),
    "theta of the training engine": (trains_at_another_theta, "rope_differs"),
    "k3 in half precision": (kl_overflows, "loss_overflow"),
    "gradients in half precision": (gradient_overflows, "gradient_overflow"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_the_right_cause_comes_first(folder: Path, world: World, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    break_it, cause = BROKEN[fault]
    with loaded(folder, world) as parts:
        break_it(parts, monkeypatch)
        found = ask(parts, fault)
    assert first_cause(found) == cause, found.text()
    assert found.causes[0].evidence


def test_a_leaked_penalty_is_named_with_its_value(folder: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with loaded(folder, world) as parts:
        penalty_leaks(parts, monkeypatch)
        (cause,) = ask(parts, "tiny").causes
    assert cause.cause == "filtered_sampling"
    assert cause.evidence["explained_by"] == "generation_config.json: repetition_penalty = 1.7"


@pytest.mark.parametrize(("reward", "cause"), [("constant", "reward_constant"), ("none", "unscored")])
def test_a_reward_that_teaches_nothing(folder: Path, world: World, reward: str, cause: str) -> None:
    with loaded(folder, world, reward=reward) as parts:
        assert first_cause(ask(parts, reward)) == cause


def test_a_recorded_first_step_is_done_again(folder: Path, world: World, tmp_path: Path) -> None:
    """Its gradient from its rollouts: the same, or divided by another count than here."""
    settings = FULL | {"run.dir": str(tmp_path / "run")}
    state = start(folder, world, settings)
    output = Output(state)
    output.begin(goes_on=False)
    output.step(*step(state))
    state.engine.close()
    metrics = tmp_path / "run" / "metrics.jsonl"
    (row,) = read_lines(metrics)
    with loaded(folder, world, settings) as parts:
        found = ask(parts, "tiny")
    assert found.findings == [] and f"recorded on 1 ranks {row['grad_norm']:.4g}" in found.fine["recorded_step"]
    metrics.write_text(json.dumps(row | {"grad_norm": row["grad_norm"] / 2}) + "\n")
    with loaded(folder, world, settings) as parts:
        (cause,) = ask(parts, "tiny").causes
    assert cause.cause == "normalisation" and cause.evidence["ranks"] == 1


def test_ids_of_another_tokenizer(folder: Path, world: World, tmp_path: Path) -> None:
    """The same tokens under other ids: everything loads, and the model reads nonsense."""
    write_run(tmp_path)
    (tmp_path / "model" / "model.safetensors").write_bytes((folder / "model" / "model.safetensors").read_bytes())
    file = tmp_path / "model" / "tokenizer.json"
    content = json.loads(file.read_text())
    vocab = content["model"]["vocab"]
    plain = [token for token, number in vocab.items() if number < 297]
    content["model"]["vocab"] = vocab | dict(
        zip(plain, (vocab[one] for one in [*plain[37:], *plain[:37]]), strict=True)
    )
    file.write_text(json.dumps(content))
    with loaded(tmp_path, world) as parts:
        found = ask(parts, "tiny")
    assert first_cause(found) == "tokenizer_mismatch", found.text()


def test_random_weights(folder: Path, world: World, tmp_path: Path) -> None:
    write_run(tmp_path)
    with loaded(tmp_path, world) as parts:
        assert first_cause(ask(parts, "tiny")) == "weights_not_loaded"


def test_the_command(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], world: World
) -> None:
    """Exit codes, --json, overrides, and what a run would be refused for."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr("trainer.doctor.live.connect", lambda *_, **__: world)
    monkeypatch.setattr("trainer.doctor.live.disconnect", lambda: None)
    Path("run.toml").write_text(RUN_FILE)
    assert main(["doctor", "run.toml", "--json", "--lora.r", "0"]) == 0
    said = capsys.readouterr().out
    found = json.loads(said[said.index("{") :])
    assert found["healthy"] and found["causes"] == [] and "kl_direction" in found["fine"]
    assert main(["doctor", "run.toml", "--rollout.max_new_tokens", "4000"]) == 1
    assert "1. rope_window" in capsys.readouterr().out
    assert main(["doctor", "absent.toml"]) == 2
    assert main(["doctor", "."]) == 2


def test_settings_that_filter_are_a_cause_of_their_own(folder: Path, world: World) -> None:
    with loaded(folder, world, {"rollout.repetition_penalty": 1.7}) as parts:
        (cause,) = ask(parts, "tiny").causes
    assert (cause.cause, cause.evidence["explained_by"]) == ("filtered_sampling", "the run's own settings")
