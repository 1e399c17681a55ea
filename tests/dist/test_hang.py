"""A rank that hangs, in every phase of a step and in three ways: it is named, and soon."""

import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import pytest

from tests.dist.launch import Rank, run_ranks
from tests.tiny_run import run_config, write_run
from trainer.config import dump

PHASES = ("rollout", "reward", "reference", "backward", "update", "save", "save.after_shard")
WAYS = {"stop": "stopped by a signal", "spin": "computing", "gil": "computing"}
HANG_TIMEOUT = 4


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_a_hang_in_every_phase_is_named_soon(tmp_path: Path, results: Any) -> None:
    write_run(tmp_path)
    settings: dict[str, Any] = {
        "run.steps": 5,
        "grpo.kl.coef": 0.04,
        "checkpoint.every": 1,
        "rollout.max_new_tokens": 4,
        "watch.hang_timeout": float(HANG_TIMEOUT),
        "log.rollouts_every": 0,
    }
    (tmp_path / "run.toml").write_text(dump(run_config(tmp_path, settings)))

    def start(folder: Path, *more: str, **fault: str) -> list[Rank]:
        folder.mkdir(exist_ok=True)
        worker = [str(Path(__file__).with_name("hung.py")), str(folder / "time"), "train", "run.toml"]
        worker += ["--reward.score.timeout", "1", "--run.dir", str(folder / "out")]
        return run_ranks([*worker, *more], 2, 29743, folder=tmp_path, timeout=60, **fault)

    def weights(folder: Path) -> bytes:
        return (folder / "out/adapter/adapter_model.safetensors").read_bytes()

    unharmed = start(tmp_path / "unharmed")
    assert unharmed[0].code == 0, unharmed[0].output[-3000:]
    seconds = []
    resumed = 0
    for number, (phase, way) in enumerate(itertools.product(PHASES, WAYS)):
        rank = number % 2
        folder = tmp_path / f"{number}"
        fault = {"ZERO_GRPO_TEST": "1", "ZERO_GRPO_FAULT": f"{way}@rank{rank}:step2:phase={phase}"}
        ranks = start(folder, **fault)
        seconds.append(time.time() - float((folder / f"time.{rank}").read_text()))
        said = "".join(one.output for one in ranks)
        name = phase.partition(".")[0]
        assert f"lost: rank {rank} of host " in said and f"rank {1 - rank} of host" not in said, said[-3000:]
        assert f" hangs in phase {name} of step 2: no sign of life" in said and f" is {WAYS[way]}. " in said
        assert all(one.code in (4, -9) for one in ranks) and "Traceback" not in said, said[-3000:]
        found = json.loads((folder / "out/run_status.json").read_text())
        assert (found["state"], found["exit_code"], found["rank"]) == ("lost", 4, rank)
        if phase in ("backward", "save.after_shard"):
            assert all(one.code == 0 for one in start(folder, "--resume", "auto"))
            assert weights(folder) == weights(tmp_path / "unharmed")
            resumed += 1
    results(
        "hangs",
        {
            "hangs": len(seconds),
            "named_with_rank_and_phase": len(seconds),
            "resumed_to_equal_bits": resumed,
            "phases": PHASES,
            "ways": list(WAYS),
            "hang_timeout_seconds": HANG_TIMEOUT,
            "until_all_ranks_had_ended": {
                "median_seconds": round(statistics.median(seconds), 1),
                "p95_seconds": round(statistics.quantiles(seconds, n=20)[-1], 1),
                "most_seconds": round(max(seconds), 1),
            },
        },
    )
