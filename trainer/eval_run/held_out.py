"""The held-out evaluation of a checkpoint, an exported folder or the base, as a run makes it."""

import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.checkpoint.trained import Source, check_base, find, load_source
from trainer.config import RunConfig
from trainer.errors import NoCheckpoint, Refused
from trainer.evaluate import Evaluation, Measures, Score, rise
from trainer.launcher import say
from trainer.models.policy import Policy, load_policy
from trainer.preflight.prepare import Checked, check, make_decoder, ready_to_decode
from trainer.record.console import plain_table, preflight_block, with_error
from trainer.record.memory import PeakMemory
from trainer.rollout.hooks import HookContext, run_hooks
from trainer.train import held_out, together
from trainer.world import World, connect, disconnect

BASE = "base"
"""What ``--checkpoint`` and ``--against`` call the model that the run begins with."""


def eval_run(config: RunConfig, folder: Path, checkpoint: str, against: str, *, own_code: bool, as_json: bool) -> int:
    """Evaluates ``checkpoint``, and ``against`` where it is given; says so, and writes nothing. ``folder``: where the
    run file lies; ``own_code``: that a whole model among them brings may run."""
    world = connect(config.engine.device, timeout_seconds=config.watch.hang_timeout)
    try:
        with redirect_stdout(sys.stderr if as_json else sys.stdout):
            asked = [checkpoint, *([against] if against else [])]
            sources = together(world, lambda: [_source(one) for one in asked])
            checked = together(world, lambda: check(_for_evaluation(config), folder, world))
            if world.is_main:
                say(preflight_block([*checked.prompts.warnings, *checked.prompts.notes]))
            results = [_evaluate(checked, source, world, own_code=own_code) for source in sources]
        if world.is_main:
            names = [_name(source) for source in sources]
            say(json.dumps(_record(config, names, results)) if as_json else _text(config, names, results))
        return 0
    finally:
        disconnect()


def _source(asked: str) -> Source | None:
    """None is the base. Else a checkpoint, a run directory, ``checkpoints/best`` of one, or an exported folder."""
    path = Path(asked)
    if asked == BASE:
        return None
    if path.is_file() and path.name in ("best", "latest"):
        path = path.parent / path.read_text(encoding="utf-8").strip()
    if any((path / name).is_file() for name in ("adapter_config.json", "config.json")):
        return Source(path, path.parent, path.parent / "config.toml", None, None)
    if not path.exists():
        raise NoCheckpoint(
            f"{asked}: not there. Expected a checkpoint (RUN_DIR/checkpoints/step-000010), a run directory, an "
            f'exported adapter or model, or "{BASE}".'
        )
    return find(path, "eval")


def _for_evaluation(config: RunConfig) -> RunConfig:
    """Without what only training needs: its trackers, and an engine for its number of ranks."""
    if not (config.data.eval_fraction or config.data.eval_source or config.data.eval_split):
        raise Refused(
            "eval: the run file holds no prompts out. Expected data.eval_fraction, data.eval_split or "
            "data.eval_source. Fix: name one, for example --data.eval_source held-out.jsonl."
        )
    if config.rollout.replay:
        raise Refused("eval: rollout.replay trains on recorded completions and reads no prompts. Fix: take it out.")
    log = config.log.model_copy(update={"report_to": ()})
    engine = config.engine.model_copy(update={"deepspeed": "zero2"})
    return config.model_copy(update={"log": log, "engine": engine})


def _evaluate(checked: Checked, source: Source | None, world: World, *, own_code: bool) -> Evaluation:
    notes: list[str] = []
    here = replace(checked, notes=notes)
    step = (source and source.step) or 0
    if world.is_main:
        say(f"loading {_name(source)} ...")
    policy = together(world, lambda: _load(checked, source, own_code=own_code))
    _, stops, unshared = together(world, lambda: ready_to_decode(here, policy, world))
    lengths = checked.lengths
    context = HookContext(0, policy.causal, None, policy.tokenizer, lengths.prompt, lengths.new, world.rank)
    notes += together(world, lambda: run_hooks(checked.hooks, context))
    decoder = make_decoder(here, policy, stops, PeakMemory(world.device), world, shared_prompts=not unshared)
    if world.is_main:
        say(preflight_block(notes))
        say(f"evaluating {_name(source)} on {len(checked.prompts.eval)} prompts ...")
    told = len(notes)
    result = held_out(checked.config, world, decoder, checked.rewards, checked.prompts.eval, step, notes)
    if world.is_main and notes[told:]:
        say(preflight_block(notes[told:]))
    return result


def _load(checked: Checked, source: Source | None, *, own_code: bool) -> Policy:
    config = checked.config
    if source is None:
        return load_policy(
            config.model, checked.model_config, config.lora, checked.tokenizer, checked.dtype, config.quant
        )
    policy = load_source(source, config, checked.dtype, config.quant, own_code=own_code)
    check_base(source, config, policy)
    return policy


def _name(source: Source | None) -> str:
    if source is None:
        return BASE
    return str(source.weights) + ("" if source.step is None else f" (step {source.step})")


def _measures(result: Evaluation) -> dict[str, Measures]:
    """By name; of the single rewards where there are several."""
    return {"reward": result.total} | (result.parts if len(result.parts) > 1 else {})


def _scores(measures: Measures) -> dict[str, Score]:
    passed = {f"pass@{k}": score for k, score in measures.pass_at.items()}
    return {"sampled": measures.sampled, "greedy": measures.greedy, **passed}


def _text(config: RunConfig, names: Sequence[str], results: Sequence[Evaluation]) -> str:
    rollout, generations = config.rollout, config.eval.num_generations
    title = f"Held-out evaluation, {len(results[0].greedy.per_prompt)} prompts (± one standard error)"
    unscored = [
        f"{score.unscored} {kind} unscored: {name}"
        for name, result in zip(names, results, strict=True)
        for kind, score in (("samples", result.sampled), ("greedy answers", result.greedy))
        if score.unscored
    ]
    lines = [
        "",
        plain_table(title, *(_one(results[0]) if len(results) == 1 else _two(*results))),
        *(f"{role}: {name}" for role, name in zip(("checkpoint", "against"), names, strict=False)),
        f"{generations} samples a prompt at T = {rollout.temperature:g} and one greedy answer, of at most "
        f"{rollout.max_new_tokens} tokens; errors are clustered by prompt, those of a difference paired by prompt",
        f"pass@k: the chance that one of k samples is correct: a reward of at least {config.eval.correct_at:g} "
        "(eval.correct_at)",
        *unscored,
    ]
    return "\n".join(lines)


Cells = tuple[list[str], list[list[str]]]
"""Header and rows of a table."""


def _one(result: Evaluation) -> Cells:
    """A column for each reward."""
    columns = {name: _scores(measures) for name, measures in _measures(result).items()}
    rows = [
        [kind, *(with_error(scores[kind].mean, scores[kind].stderr) for scores in columns.values())]
        for kind in columns["reward"]
    ]
    return ["", *columns], rows


def _two(result: Evaluation, other: Evaluation) -> Cells:
    """A row for each reward and kind, with the difference."""
    before = _measures(other)
    rows = []
    for name, measures in _measures(result).items():
        for kind, score in _scores(measures).items():
            against = _scores(before[name])[kind]
            difference, error = rise(against, score)
            cells = [with_error(one.mean, one.stderr) for one in (score, against)]
            rows.append([f"{name}, {kind}", *cells, with_error(difference, error, sign="+")])
    return ["", "checkpoint", "against", "difference"], rows


def _record(config: RunConfig, names: Sequence[str], results: Sequence[Evaluation]) -> dict[str, Any]:
    """One object: what was evaluated, and, against another, every difference with its error."""
    found: dict[str, Any] = {
        "prompts": len(results[0].greedy.per_prompt),
        "num_generations": config.eval.num_generations,
        "temperature": config.rollout.temperature,
        "checkpoint": {"weights": names[0], **results[0].record()},
    }
    if len(results) > 1:
        result, other = results
        before = _measures(other)
        found["against"] = {"weights": names[1], **other.record()}
        found["difference"] = {
            name: {
                kind: [None if value != value else value for value in rise(_scores(before[name])[kind], score)]
                for kind, score in _scores(measures).items()
            }
            for name, measures in _measures(result).items()
        }
    return found
