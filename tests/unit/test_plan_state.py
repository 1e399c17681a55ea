"""What DeepSpeed's engines hold, by stage, counted in real ones: all weights trained, on passes of a few tokens."""

import gc
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.tiny import TINY
from tests.tiny_run import start, step, write_run
from trainer.plan import state
from trainer.plan.parts import training
from trainer.plan.shape import shape_of
from trainer.preflight.memory import settings_of
from trainer.record.memory import PeakMemory
from trainer.rollout.rope_guard import Lengths
from trainer.world import World

CPU = torch.device("cpu")
SIZES = TINY | {"vocab_size": 300, "hidden_size": 256, "intermediate_size": 512}
SETTINGS = {
    "lora.r": 0,
    "optim.name": "adamw",
    "grpo.kl.coef": 0.0,
    "rollout.prompts_per_step": 1,
    "rollout.num_generations": 2,
    "rollout.max_new_tokens": 2,
}
BUCKET = 200_000
"""Elements; the largest weight has 131,072, all have 1.4 million."""


def forget() -> None:
    """Engines of other tests are rings of references, whose ends lie in modules of DeepSpeed."""
    for _ in range(3):
        gc.collect()


@pytest.mark.parametrize(
    ("stage", "dtype"), [(0, "fp32"), (1, "bf16"), (1, "fp32"), (2, "bf16"), (2, "fp32"), (3, "bf16")]
)
def test_an_engine_holds_what_is_planned(tmp_path: Path, world: World, stage: int, dtype: str) -> None:
    zero = {"stage": stage, "reduce_bucket_size": BUCKET} if stage else {"stage": 0}
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": zero}))
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True))
    folder = write_run(tmp_path, model)
    del model
    forget()
    before = PeakMemory(CPU).take_peak()
    run = start(folder, world, SETTINGS | {"engine.deepspeed": str(tmp_path / "ds.json"), "model.dtype": dtype})
    forget()
    memory = PeakMemory(CPU)
    held = memory.take_peak() - before
    with memory:
        step(run)
        step(run)
        peak = memory.take_peak() - before
    run.engine.close()

    shape = shape_of({"model_type": "qwen2", "tie_word_embeddings": True} | SIZES)
    assert shape is not None
    assert shape.total == sum(math.prod(one) for one in run.facts.trained.values())
    settings = settings_of(
        run.config,
        shape,
        zero,
        ranks=1,
        cuda=False,
        itemsize=2 if dtype == "bf16" else 4,
        lengths=Lengths(max(len(one.ids) for one in run.prompts), 2),
        shared=True,
    )
    assert held == pytest.approx(state.held_at_the_start(settings), rel=0.03)
    planned = sum(training(settings).values())
    assert peak == pytest.approx(planned, rel=0.1), (peak / shape.total, planned / shape.total)
    assert state.held_at_the_start(replace(settings, ranks=2)) < state.held_at_the_start(settings) or not stage
