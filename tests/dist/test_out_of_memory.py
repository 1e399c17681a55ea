"""One of two ranks runs out of memory while the other waits for it: both end with 3, by the words of the one."""

import json
from pathlib import Path

from tests.dist.test_launch import RUN, ZERO_GRPO, left, run
from tests.tiny_run import write_run

RUNS_OUT = """
import torch

import trainer.update

def check(context):
    if context.step == 1 and context.world_rank == 1:
        trainer.update.forward = lambda *_: torch.empty(1 << 50, dtype=torch.uint8)
"""
"""A petabyte, asked of the real allocator in the training pass of step 2."""


def test_a_rank_out_of_memory_ends_both_with_its_message(tmp_path: Path) -> None:
    write_run(tmp_path)
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "runs_out.py").write_text(RUNS_OUT)
    ended = run(
        tmp_path,
        *ZERO_GRPO,
        *("--gpus", "2", "--checkpoint.every", "1", "--hooks.before_rollout", '["runs_out:check"]'),
        *("--engine.gradient_checkpointing", "on", "--engine.micro_batch", "4"),
    )
    assert (ended.code, ended.err) == (3, ""), ended.out
    assert "Traceback" not in ended.out and ended.out.count("out of memory") == 1
    said = ended.out[ended.out.index("the newest checkpoint is that of step 1") :]
    assert "stopped: out of memory in the training pass, step 2, on rank 1 (cpu, host " in said
    assert "1048576.00 GiB asked for." in said and "Fix: engine.micro_batch = 2" in said
    status = json.loads((tmp_path / "out/run_status.json").read_text())
    assert (status["state"], status["exit_code"], status["step"], status["rank"]) == ("stopped", 3, 1, 1)
    assert "out of memory in the training pass" in status["reason"] and left(tmp_path) == []
    assert (tmp_path / "out/checkpoints/step-000001/MANIFEST.json").is_file()
