"""The rows of rollouts/step-000001.jsonl: one object a completion, the same fields written and read."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.errors import Refused
from trainer.outside import NotJson, parsed

if TYPE_CHECKING:  # it imports torch, which takes seconds, and the run directory is checked before anything else
    from trainer.batch import Completion

FIELDS = (
    "step",
    "group",  # the prompt's place in the step
    "index",  # the completion's place in its group
    "row",  # the prompt's row in the data set
    "prompt",
    "completion",
    "prompt_ids",
    "completion_ids",
    "sampling_logps",
    "rewards",
    "reward",
    "advantage",
    "finish",
    "columns",
)

REPLAYED = ("group", "index", "row", "prompt_ids", "completion_ids", "sampling_logps", "rewards", "finish")
"""What a replay cannot do without."""

SHOWN_PROBLEMS = 20
MOST = 2**31 - 1
"""Of a place: what a tensor of them holds everywhere."""


def rollout_file(run_dir: Path, step: int) -> Path:
    return run_dir / "rollouts" / f"step-{step:06d}.jsonl"


def row(completion: Completion, step: int) -> dict[str, Any]:
    """One completion as a JSON object; a column that JSON cannot hold is written as its text."""
    prompt = completion.prompt
    return {
        "step": step,
        "group": completion.group,
        "index": completion.generation,
        "row": prompt.index,
        "prompt": prompt.text,
        "completion": completion.text,
        "prompt_ids": list(prompt.ids),
        "completion_ids": list(completion.ids),
        "sampling_logps": list(completion.sampling_logps),
        "rewards": dict(completion.rewards),
        "reward": completion.reward,
        "advantage": completion.advantage,
        "finish": completion.finish,
        "columns": {name: json_safe(value) for name, value in (prompt.columns | completion.extra).items()},
    }


def json_safe(value: Any) -> Any:
    try:
        return parsed(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        return str(value)


def read_rollouts(directory: Path, step: int) -> list[dict[str, Any]]:
    """The recorded rows of one step in global order. Refused, all problems in one message, when it cannot be replayed.

    directory: a run directory, or the folder that holds the step files.
    """
    path = rollout_file(directory, step)
    if not path.exists():
        path = directory / path.name
    if not path.exists():
        raise Refused(
            f"rollout.replay: no recorded rollouts for step {step}: neither {rollout_file(directory, step)} nor {path} "
            f"exists. {recorded_steps(directory)} Fix: give a run directory that holds this step, or lower run.steps."
        )
    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    try:
        # Not splitlines(): a completion may hold U+2028 or U+0085, which JSON does not escape.
        lines = path.read_bytes().rstrip(b"\n").split(b"\n")
    except OSError as error:
        raise Refused(f"rollout.replay: {path} cannot be read: {error.strerror}.") from error
    for number, line in enumerate(lines, start=1):
        if not line:
            problems.append(f"line {number}: empty")
            continue
        try:
            recorded = parsed(line)
        except NotJson as error:
            problems.append(f"line {number}: not JSON ({error.reason}{error.place_in_line})")
            continue
        problem = replay_problem(recorded)
        if problem:
            problems.append(f"line {number}: {problem}")
        else:
            rows.append(recorded)
    if problems:
        more = f"\n  and {len(problems) - SHOWN_PROBLEMS} more" if len(problems) > SHOWN_PROBLEMS else ""
        raise Refused(
            f"rollout.replay: {path} cannot be replayed:\n  "
            + "\n  ".join(problems[:SHOWN_PROBLEMS])
            + more
            + "\nFix: replay a file that a run has written, unchanged."
        )
    return sorted(rows, key=lambda recorded: (recorded["group"], recorded["index"]))


def replay_problem(recorded: Any) -> str:
    """What keeps this row from being replayed; empty when nothing does."""
    if not isinstance(recorded, dict):
        return f"expected an object, got {type(recorded).__name__}"
    missing = [name for name in REPLAYED if name not in recorded]
    if missing:
        return f"field {', '.join(missing)} is missing; the row holds {', '.join(recorded) or 'nothing'}"
    for name in ("group", "index", "row"):
        if type(recorded[name]) is not int or not 0 <= recorded[name] <= MOST:
            return f"field {name}: expected int, from 0 to {MOST}, got {recorded[name]!r:.60}"
    kinds: dict[str, type] = {"rewards": dict, "prompt": str, "completion": str, "columns": dict}
    for name, kind in kinds.items():
        if name in recorded and not isinstance(recorded[name], kind):
            return f"field {name}: expected {kind.__name__}, got {recorded[name]!r:.60}"
    for name in ("prompt_ids", "completion_ids"):
        ids = recorded[name]
        if not (isinstance(ids, list) and ids and all(type(token) is int and token >= 0 for token in ids)):
            return f"field {name}: expected a list of token ids with at least one entry, got {str(ids)[:60]}"
    logps = recorded["sampling_logps"]
    # Rounding can leave the log of a probability of 1 a hair above 0.
    if not (isinstance(logps, list) and all(is_number(logp) and logp <= 1e-4 for logp in logps)):
        return f"field sampling_logps: expected a list of finite log-probabilities, got {str(logps)[:60]}"
    if len(logps) != len(recorded["completion_ids"]):
        return f"{len(recorded['completion_ids'])} completion_ids but {len(logps)} sampling_logps"
    if recorded["finish"] not in ("stop", "length"):
        return f'field finish: expected "stop" or "length", got {recorded["finish"]!r:.60}'
    if not all(score is None or is_number(score) for score in recorded["rewards"].values()):
        return f"field rewards: expected finite numbers or null by name, got {recorded['rewards']!r:.60}"
    return ""


def is_whole(recorded: Any) -> bool:
    """A row as a run writes it: what a replay needs, with what came of it."""
    return (
        not replay_problem(recorded)
        and recorded.keys() >= {"completion", "reward", "advantage"}
        and is_number(recorded["advantage"])
        and (recorded["reward"] is None or is_number(recorded["reward"]))
    )


def is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def recorded_steps(directory: Path) -> str:
    files = sorted(directory.glob("step-*.jsonl")) or sorted((directory / "rollouts").glob("step-*.jsonl"))
    if not files:
        return f"{directory} holds no step-*.jsonl."
    return f"{files[0].parent} holds {len(files)} steps, {files[0].stem} to {files[-1].stem}."
