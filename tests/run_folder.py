"""A run directory without a run: records of any length and content, for what reads them."""

import json
import math
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HEALTHY = "First we add the tens, 20 + 30 = 50. Then the ones: 4 + 3 = 7. The answer is 57."

HOSTILE = {
    "script": "<script>document.title = 'taken'</script><img src=x onerror=\"document.title='taken'\">",
    "end of the data": "</script><script>document.title = 'taken'</script>",
    "comment": "<!-- <script> --><svg/onload=document.title='taken'>]]>&amp;&lt;",
    "escapes": "\x1b[31mred\x1b]0;title\x07\x9b2J \r over",
    "nul": "a\x00b",
    "directions": "\u202egnp.exe \u2066x\u2069 \u200f",
    "surrogate": "lone \ud800 and \udfff",
    "lines": "one\u2028two\u2029three\x85four",
    "template": "{{STYLE}} ${document.title = 'taken'} `x`",
}
"""Completions that try to leave their place, by what they try."""


def write_folder(
    folder: Path,
    steps: int,
    *,
    reward: Callable[[int], float] = lambda step: 0.25 + 0.5 * (1 - math.exp(-step / 40)),
    rows: list[dict[str, Any]] | None = None,
    rollouts_every: int = 1,
) -> Path:
    """Metrics of every step, the same rollout rows for each (as links to one file), two evaluations, an alarm."""
    rng = random.Random(0)
    for name in ("rollouts", "eval"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text('[run]\ndir = "runs/written"\n')
    (folder / "environment.json").write_text('{"python": "3.11"}\n')
    (folder / "run_status.json").write_text(json.dumps({"state": "running", "step": steps, "run_id": "0123"}))
    measured = [metrics(step, reward(step), rng) for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in measured))
    first = folder / "rollouts" / "step-000001.jsonl"
    lines = [json.dumps(one) + "\n" for one in (rows if rows is not None else [row(index=i) for i in range(4)])]
    first.write_text("".join(lines))
    for step in range(1 + rollouts_every, steps + 1, rollouts_every):
        os.link(first, folder / "rollouts" / f"step-{step:06d}.jsonl")
    for step, mean in ((0, 0.25), (steps, 0.7)):
        score = {"mean": mean, "stderr": 0.02, "per_prompt": [], "unscored": 0}
        record = {"step": step, "sampled": score, "greedy": score | {"mean": mean + 0.05}}
        (folder / "eval" / f"step-{step:06d}.json").write_text(json.dumps(record))
    alarm = {"alarm": "kl", "event": "raised", "signal": "kl", "value": 2.5, "limit": 2.0, "cause": "drift"}
    alarm |= {"step": steps // 2}
    (folder / "alarms.jsonl").write_text(json.dumps(alarm) + "\n")
    return folder


def strings(data: Any) -> Iterator[str]:
    """Every string in it, keys too."""
    if isinstance(data, str):
        yield data
    elif isinstance(data, dict):
        for key, value in data.items():
            yield from (key, *strings(value))
    elif isinstance(data, list):
        for value in data:
            yield from strings(value)


def metrics(step: int, reward: float, rng: random.Random) -> dict[str, float]:
    kl = 1e-4 * step
    names = ("loss", "entropy", "grad_norm", "tokens_per_second", "peak_memory_gib", "completion_tokens_mean")
    return {
        "step": step,
        "reward_mean": reward + rng.gauss(0, 0.02),
        "kl": kl,
        "kl_std": 3 * kl,
        "kl_max": 50 * kl,
        "truncated_fraction": 0.0,
        "seconds_rollout": 3.0,
        "seconds_update": 2.0,
        **{name: 1 + rng.random() for name in names},
    }


def row(completion: str = HEALTHY, reward: float | None = 0.5, *, index: int = 0, **changes: Any) -> dict[str, Any]:
    """A row of a rollout file."""
    return {
        "step": 1,
        "group": 0,
        "index": index,
        "row": 7,
        "prompt": "What is 24 + 33?",
        "completion": completion,
        "prompt_ids": [1, 2],
        "completion_ids": [3, 4, 5],
        "sampling_logps": [-0.5, -0.5, -0.5],
        "rewards": {"exact": reward},
        "reward": reward,
        "advantage": 0.0,
        "finish": "stop",
        "columns": {"answer": "57"},
    } | changes
