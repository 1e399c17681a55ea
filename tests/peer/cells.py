"""What is compared with the peer: recorded rollouts, the settings of each cell, and our run file for them."""

import json
import random
from pathlib import Path
from typing import Any

from tests.dist.recorded import run_config, write_inputs
from trainer.config import RunConfig

EOS = 299
"""<|im_end|> of tests/tiny.py."""
LR = 1024.0
"""SGD: update / LR = gradient. A power of two divides exactly, and a large one keeps small gradients of weights near 1
from drowning in the rounding of the weight."""

BASE: dict[str, Any] = {
    "coef": 0.3,
    "ratio_weighted": True,
    "eps_low": 0.2,
    "eps_high": 0.28,
    "dual_clip": 0.0,
    "mask_truncated": False,
    "lora": False,
    "off_policy": True,
    "rollouts": "scored",
}
SWITCHES: dict[str, dict[str, Any]] = {
    "base": {},
    "no KL": {"coef": 0.0},
    "KL not weighted": {"ratio_weighted": False},
    "eps_low": {"eps_low": 0.3},
    "eps_high": {"eps_high": 0.45},
    "dual clip": {"dual_clip": 1.35},
    "on-policy": {"off_policy": False},
    "truncated masked": {"mask_truncated": True},
    "unscored row": {"coef": 0.0, "rollouts": "unscored"},
    "LoRA": {"lora": True},
}
UNREAD = {("cispo", "eps_low"), ("cispo", "dual clip")}
"""CISPO clips weights from above only: there is nothing that these switches could change, here or in TRL."""


def cells() -> list[dict[str, Any]]:
    return [
        {"loss_type": loss_type, "switch": name} | BASE | switch
        for loss_type in ("grpo", "dapo", "dr_grpo", "gspo", "cispo")
        for name, switch in SWITCHES.items()
        if (loss_type, name) not in UNREAD
    ]


def write_recordings(folder: Path) -> None:
    """``folder/model``, and one recorded step twice: ``unscored`` with a row that no reward scored, and ``scored``.

    What finished ends with EOS, which is how TRL tells it from what was cut. Each row's sampler is off by a shift of
    its own, so that ratios of whole sequences are clipped too.
    """
    write_inputs(folder)
    draw = random.Random(11)
    rows = [json.loads(line) for line in (folder / "rollouts-loss" / "step-000001.jsonl").read_text().splitlines()]
    for row in rows:
        shift = draw.gauss(0, 0.4)
        row["sampling_logps"] = [logp + shift for logp in row["sampling_logps"]]
        if row["finish"] == "stop":
            row["completion_ids"][-1] = EOS
    assert {row["finish"] for row in rows} == {"stop", "length"}
    write(folder / "unscored", rows)
    assert [row["rewards"]["score"] for row in rows].count(None) == 1
    for row in rows:
        row["rewards"]["score"] = 0.25 if row["rewards"]["score"] is None else row["rewards"]["score"]
    write(folder / "scored", rows)


def write(folder: Path, rows: list[dict[str, Any]]) -> None:
    folder.mkdir()
    (folder / "step-000001.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def cell_config(folder: Path, cell: dict[str, Any]) -> RunConfig:
    """The run file of a cell: temperature 0.8, micro-batches of 3 ragged completions, ZeRO-2."""
    fixed = {"estimator": "k3", "placement": "loss", "stage": 2, "micro": 3}
    sections = run_config(folder, **(cell | fixed)).model_dump(exclude_unset=True)
    sections["rollout"]["replay"] = str(folder / cell["rollouts"])
    sections["grpo"] |= {"eps_low": cell["eps_low"], "eps_high": cell["eps_high"]}
    if cell["dual_clip"]:
        sections["grpo"]["dual_clip"] = cell["dual_clip"]
    sections["optim"]["lr"] = LR
    return RunConfig.model_validate(sections)


def same_normaliser(cell: dict[str, Any], rows: list[dict[str, Any]]) -> float:
    """Our N of the step divided by TRL's: 1 unless a row is masked or unscored.

    The same in both: dapo and cispo divide by the tokens that the loss reads, grpo and gspo by completions, dr_grpo by
    completions times the token limit. Not the same: whether a completion counts that the loss does not read.
    - A masked (truncated) completion stays in TRL's count of grpo, gspo and dr_grpo as a zero, so that the gradient
      shrinks with the share of truncated completions. Ours divides by the trained completions.
    - A row that no reward could score has advantage 0 in both. TRL keeps it and its tokens in every count and, with
      beta > 0, pulls it to the reference; ours leaves it out of the loss. Hence no KL in that cell.
    """
    kept = [row for row in rows if not (cell["mask_truncated"] and row["finish"] == "length")]
    ours = [row for row in kept if row["rewards"]["score"] is not None]
    if cell["loss_type"] in ("dapo", "cispo"):
        return sum(len(row["completion_ids"]) for row in ours) / sum(len(row["completion_ids"]) for row in kept)
    return len(ours) / len(rows)
