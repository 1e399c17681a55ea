"""The plan against storages counted on fake tensors: real widths, our own forward pass, its backward pass."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fake_pass import Cell, counted_peak
from tools.memory import CASES, compare
from trainer.plan.parts import training
from trainer.world import World

GIB = 2**30
WHAT = (
    "Peaks by trainer/plan. fake: a forward and backward pass in bf16 with ZeRO-2's state on one rank, storages "
    "counted on fake tensors. real: the second step of a run on a CPU in fp32, its peak_memory_gib. "
    "python -m pytest -m full tests/unit/test_plan_fake.py"
)

CELLS = (
    Cell("1.5B", "lora", 512, 128, 8, shared=True, checkpointing=False),
    Cell("1.5B", "lora", 512, 128, 8, shared=True, checkpointing=True),
    Cell("1.5B", "lora", 512, 128, 8, shared=False, checkpointing=False),
    Cell("1.5B", "lora", 512, 128, 8, shared=False, checkpointing=True),
    Cell("1.5B", "lora", 512, 1024, 8, shared=True, checkpointing=True),
    Cell("1.5B", "lora", 256, 256, 16, shared=True, checkpointing=False, groups=2),
    Cell("1.5B", "lora", 512, 256, 8, shared=True, checkpointing=False, exact=True),
    Cell("1.5B", "full", 512, 128, 8, shared=True, checkpointing=False),
    Cell("1.5B", "full", 512, 1024, 8, shared=True, checkpointing=True),
    Cell("1.5B", "full", 512, 256, 4, shared=False, checkpointing=True),
    Cell("1.5B", "4bit", 512, 128, 8, shared=True, checkpointing=False),
    Cell("7B", "lora", 512, 128, 8, shared=True, checkpointing=True),
    Cell("7B", "lora", 512, 128, 8, shared=True, checkpointing=False),
    Cell("7B", "lora", 512, 128, 4, shared=False, checkpointing=False),
    Cell("7B", "full", 512, 128, 4, shared=True, checkpointing=True),
    Cell("7B", "4bit", 512, 256, 16, shared=True, checkpointing=True, groups=2),
    Cell("7B", "4bit", 512, 512, 4, shared=False, checkpointing=True),
    Cell("7B", "4bit", 512, 1024, 8, shared=True, checkpointing=False),
)

QUICK = (
    Cell("1.5B", "full", 512, 128, 8, shared=True, checkpointing=False, layers=2),
    Cell("1.5B", "lora", 2048, 32, 32, shared=True, checkpointing=False, layers=4, exact=True),
    Cell("7B", "4bit", 512, 128, 4, shared=False, checkpointing=True, layers=2),
)
"""Of few layers, so that head and copies of keys weigh: full in the head's backward pass, LoRA with long prompts."""


def predicted(cell: Cell) -> dict[str, float]:
    """By part. The reference's states are those of all passes, the stand-in has those of one."""
    return {name: size for name, size in training(cell.settings()).items() if name != "reference"}


@pytest.mark.parametrize("cell", QUICK, ids=lambda cell: f"{cell.model}-{cell.mode}")
def test_few_layers_of_real_width(cell: Cell) -> None:
    assert sum(predicted(cell).values()) == pytest.approx(counted_peak(cell), rel=0.02)


def whole_models() -> list[dict[str, Any]]:
    found = []
    for cell in CELLS:
        plan, counted = sum(predicted(cell).values()), counted_peak(cell)
        held = sum(predicted(cell)[name] for name in ("weights", "gradients", "optimizer"))
        found.append(
            {
                "cell": vars(cell),
                "predicted_gib_by_part": {name: round(size / GIB, 3) for name, size in predicted(cell).items()},
                "predicted_gib": round(plan / GIB, 3),
                "counted_gib": round(counted / GIB, 3),
                "off": round(plan / counted - 1, 4),
                "off_without_what_the_engine_holds": round((plan - held) / (counted - held) - 1, 4),
            }
        )
    return found


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_whole_models_and_real_steps(
    tmp_path: Path, world: World, results: Callable[[str, dict[str, Any]], None]
) -> None:
    """Cells at full depth within 8 %; real steps of a 135M model, rollout and reference included, within 10 %."""
    fake = whole_models()
    real = [compare(name, tmp_path / name, world) for name in CASES if name.startswith("cpu")]
    results("plan", {"what": WHAT, "fake": fake, "real": real})
    assert max(abs(one["off"]) for one in fake) <= 0.08, fake
    assert max(abs(one["off"]) for one in real) <= 0.1, real
