"""The same runs through rlprobe's and rldoctor's doctors: this trainer's metrics under the names that theirs have.

Both lie in .cache/lab-peers, beside the environment and never in it: tools/lab_peers.sh.
"""

import math
import statistics
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tools.lab_run import ROOT
from trainer.doctor.records import Recorded
from trainer.record.rollout_rows import rollout_file
from trainer.record.run_dir import read_lines

PEERS = ROOT / ".cache" / "lab-peers"
Row = dict[str, Any]

PROBE = {
    "reward_mean": "reward_mean",
    "reward_std": "reward_std",
    "kl": "kl_mean",
    "kl_max": "kl_max",
    "entropy": "entropy_mean",
    "clip_fraction": "clip_fraction",
    "reward_group_std": "group_reward_std_mean",
    "zero_std_fraction": "zero_variance_group_frac",
    "loss": "loss",
    "lr": "lr",
    "grad_norm": "grad_norm",
    "completion_tokens_mean": "completion_len_mean",
    "truncated_fraction": "truncation_rate",
    "repetition": "repetition_rate",
    "seconds_rollout": "generation_time_s",
    "seconds_update": "optimization_time_s",
}
"""Ours -> ``rlprobe.schemas.StepRecord``."""
DOCTOR = {
    "reward_mean": "reward",
    "reward_std": "reward_std",
    "zero_std_fraction": "frac_reward_zero_std",
    "entropy": "entropy",
    "kl": "kl",
    "clip_fraction": "clip_ratio/region_mean",
    "grad_norm": "grad_norm",
    "lr": "learning_rate",
    "loss": "loss",
    "completion_tokens_mean": "completions/mean_length",
    "truncated_fraction": "completions/clipped_ratio",
    "tokens_per_second": "tokens_per_second",
}
"""Ours -> the keys of TRL's log, which ``rl_doctor`` reads."""


def installed() -> bool:
    if PEERS.is_dir() and str(PEERS) not in sys.path:
        sys.path.append(str(PEERS))
    return bool(find_spec("rlprobe") and find_spec("rl_doctor"))


def ask_all(run: Recorded, run_dir: Path) -> dict[str, list[str]]:
    """What each says, worst first; nothing where they are not installed."""
    return {"rlprobe": rlprobe(run, run_dir), "rldoctor": rldoctor(run)} if installed() else {}


def rlprobe(run: Recorded, run_dir: Path) -> list[str]:
    from rlprobe.doctor.engine import diagnose_view
    from rlprobe.doctor.runview import RunView
    from rlprobe.schemas import RunManifest, SampleRecord, StepRecord

    rollouts = {row["step"]: read_lines(rollout_file(run_dir, row["step"])) for row in run.metrics}
    records = [StepRecord(**_renamed(row, PROBE), **_of_the_rest(row, rollouts[row["step"]])) for row in run.metrics]
    samples = [
        SampleRecord(
            step=step,
            sample_id=f"{step}-{row['group']}-{row['index']}",
            group_id=str(row["group"]),
            prompt_text=row["prompt"],
            completion_text=row["completion"],
            reward_total=row["reward"],
            advantage=row["advantage"],
            completion_len=len(row["completion_ids"]),
            truncated=row["finish"] == "length",
        )
        for step, rows in rollouts.items()
        for row in rows
    ]
    manifest = RunManifest(run_id="lab", created_at="", algorithm="grpo")
    found = diagnose_view(RunView(manifest, records, samples_provider=lambda: samples))
    return [f"{one.severity} {one.signature_id} at {one.first_step}" for one in found]


def rldoctor(run: Recorded) -> list[str]:
    from rl_doctor import Severity, diagnose, run_from_records

    grpo, rollout = run.config.grpo, run.config.rollout
    config = {
        "algorithm": "grpo",
        "num_generations": rollout.num_generations,
        "max_new_tokens": rollout.max_new_tokens,
        "beta": grpo.kl.coef,
        "epsilon_low": grpo.eps_low,
        "epsilon_high": grpo.eps_high,
        "learning_rate": run.config.optim.lr,
    }
    if not run.metrics:
        return []
    found = diagnose(run_from_records([_renamed(row, DOCTOR) for row in run.metrics], config=config))
    return [f"{one.severity.label} {one.detector}" for one in found.problems if one.severity > Severity.INFO]


def _renamed(row: Row, names: dict[str, str]) -> Row:
    """With NaN where a step was refused: ours leaves out what does not exist, theirs log it."""
    found: Row = {"step": row["step"]} | {other: row[own] for own, other in names.items() if own in row}
    if "lr" in row and "grad_norm" not in row:
        found |= {names["grad_norm"]: math.nan} | ({} if "loss" in row else {names["loss"]: math.nan})
    return found


def _of_the_rest(row: Row, completions: Sequence[Row]) -> Row:
    """What rlprobe reads beside: advantages of the recorded completions, rewards one by one, and times."""
    seconds = sum(value for key, value in row.items() if key.startswith("seconds_"))
    parts = {key.removeprefix("reward/"): value for key, value in row.items() if key.startswith("reward/")}
    found: Row = {"step_time_s": seconds, "reward_components": parts, "eos_rate": 1 - row["truncated_fraction"]}
    advantages = [one["advantage"] for one in completions]
    found |= {"adv_std": statistics.pstdev(advantages)}
    found |= {"adv_zero_frac": sum(one == 0 for one in advantages) / len(advantages)}
    if "lr" in row and "grad_norm" not in row:
        found |= {"nan_count": 1}
    return found
