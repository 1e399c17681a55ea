"""Worker: faults that need two ranks, each as a cell of one launch. Rank 0 writes {cell: [what rank 0 found, rank 1]}.

Usage, under a launcher: faults.py FOLDER RESULTS.json
"""

import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import trainer.train
from tests.dist.faults_zero3 import (
    exported_from_stage_3,
    gathers_of_a_rollout,
    ranks_stop_at_different_lengths,
    references_of_a_full_policy,
    stage_3_is_the_model_that_was_saved,
)
from tests.tiny_run import distance, ragged, start, step, weights
from trainer.errors import RunEnd
from trainer.interrupts import leave
from trainer.measure import all_reduced
from trainer.output import Output
from trainer.ranks import compare_weights
from trainer.record.metrics import Sums
from trainer.rollout.decoder import Group
from trainer.rollout.hooks import HookContext
from trainer.state import State
from trainer.world import World, connect, disconnect

Found = dict[str, Any]
RUN = {"grpo.kl.coef": 0.2, "optim.lr": 0.1}
"""Of the run that is repeated, and made by one rank: a larger rate would blow up the rounding of five steps."""
SMALL = {"rollout.max_new_tokens": 4}
STAGES = ("zero0", "zero1", "zero2", "zero3")


def metrics_over_ranks(folder: Path, world: World) -> Found:
    """V3: sums of 3 over 12 tokens and 3 over 4; then one rank without tokens; then none at all."""
    found = []
    for counts in ((12, 4), (12, None), (0, 0)):
        sums, count = Sums(), counts[world.rank]
        if count is not None:
            sums.add("kl", 3.0 if count else 0.0, count)
            sums.maximum("kl_max", world.rank)
        found.append(all_reduced(world, sums).means())
    return {"means": found}


def stages_agree(folder: Path, world: World) -> Found:
    """Three steps under every stage: gradient norms, and how far the weights are from those of stage 0."""
    found: Found = {"norms": [], "weights": []}
    for stage in STAGES:
        state = start(folder, world, {"engine.deepspeed": stage, "grpo.kl.coef": 0.5}, away=0.05)
        before = weights(state)
        norms = [step(state)[0]["grad_norm"] for _ in range(3)]
        after = weights(state)
        found["norms"].append(norms)
        found["weights"].append(after)
        found["moved"] = distance(before, after)
        state.engine.close()
    return found | {"weights": [distance(found["weights"][0], after) for after in found["weights"]]}


def nonfinite_is_refused(folder: Path, world: World) -> Found:
    """A good step, a step whose gradient is infinite on rank 1 alone, a good step: by stage and precision."""
    found: Found = {}
    real = trainer.train.set_advantages

    def poison(state: State, completions: list[Any]) -> None:
        real(state, completions)
        if world.rank == 1:
            completions[0].advantage = float("inf")

    for stage in STAGES:
        for dtype in ("fp32", "bf16"):
            settings = {"engine.deepspeed": stage, "model.dtype": dtype, "optim.name": "adamw"} | SMALL
            state = start(folder, world, settings | {"rollout.prompts_per_step": 2})
            step(state)
            before = weights(state)
            with patch.object(trainer.train, "set_advantages", poison):
                metrics, _ = step(state)
            refused = weights(state)
            good, _ = step(state)
            found[f"{stage} {dtype}"] = {
                "moved by the refused step": distance(before, refused),
                "moved by the good step": distance(refused, weights(state)),
                "note": state.notes[-1],
                "has norm": ["grad_norm" in metrics, "grad_norm" in good],
                "finite": all(bool(torch.isfinite(weight).all()) for weight in weights(state).values()),
            }
            state.engine.close()
    return found


def nonfinite_ends_all_ranks(folder: Path, world: World) -> Found:
    state = start(folder, world, {"watch.max_nonfinite_steps": 1})
    with patch.object(trainer.train, "micro_batch_loss", spoilt(world)):
        return ended(lambda: step(state))


def spoilt(world: World) -> Callable[..., torch.Tensor]:
    """The losses are finite and are measured; their gradient on rank 1 is not."""
    real = trainer.train.micro_batch_loss

    def loss(*arguments: Any, **keywords: Any) -> torch.Tensor:
        value = real(*arguments, **keywords)
        return value * (float("nan") if world.rank == 1 else 1.0)

    return loss


def a_flipped_bit(folder: Path, world: World) -> Found:
    """In an adapter, then in the frozen base, of rank 1; before and after a step of healthy ranks."""
    found: Found = {}
    for dtype, stage in (("fp32", "zero0"), ("bf16", "zero2")):
        for part in ("lora_A", "embed_tokens"):
            state = start(folder, world, {"model.dtype": dtype, "engine.deepspeed": stage} | SMALL)
            step(state)
            state.at_boundary()
            healthy = ended(lambda state=state: compare_weights(state))
            weight = next(p for name, p in state.policy.causal.named_parameters() if part in name)
            if world.rank == 1:
                words = weight.data.flatten().view(torch.int16)
                words[7] ^= 1
            found[f"{dtype} {part}"] = {
                "healthy": healthy,
                "flipped": ended(lambda state=state: compare_weights(state)),
                "kept": state.boundary is not None,
            }
            state.engine.close()
    return found


def a_slow_rank(folder: Path, world: World) -> Found:
    """Four steps in which rank 1 decodes for 0.3 s longer."""
    real = trainer.train.sample

    def sample(*arguments: Any) -> Any:
        time.sleep(0.3 * world.rank)
        return real(*arguments)

    state = start(folder, world, SMALL)
    with patch.object(trainer.train, "sample", sample):
        ratios = [step(state)[0]["slowest_rank_ratio"] for _ in range(4)]
    state.engine.close()
    return {"ratios": ratios, "notes": [note for note in state.notes if "is slow" in note]}


def run_repeats(folder: Path, world: World) -> Found:
    """The same run twice, with run directories, to be compared with each other and with a run of one rank."""
    for name in ("first", "second"):
        settings = RUN | {"run.dir": str(folder / name)}
        state = start(folder, world, settings, away=0.05)
        output = Output(state)
        output.begin(goes_on=False)
        for _ in range(5):
            output.step(*step(state))
        trained = weights(state)
        state.engine.close()
    return {"sums": [float(trained[name].double().sum()) for name in sorted(trained)]}


def every_row_keeps_its_advantage(folder: Path, world: World) -> Found:
    """Rewards are row numbers; micro-batches of 2 and of all rows."""
    found: Found = {"advantages": {}}
    for micro in (2, 64):
        state = start(folder, world, ragged(folder) | {"engine.micro_batch": micro})
        metrics, completions = step(state)
        found["advantages"] = {f"{one.group}.{one.generation}": one.advantage for one in completions}
        found[f"weights {micro}"] = weights(state)
        found[f"norm {micro}"] = metrics["grad_norm"]
        state.engine.close()
    return {
        "advantages": found["advantages"],
        "apart": distance(found.pop("weights 2"), found.pop("weights 64")),
        "norm": found["norm 64"],
    }


def uneven_work(folder: Path, world: World) -> Found:
    """Five prompts, so that rank 0 has three; and rewards that score no group of one rank, or none at all."""
    found: Found = {}
    for stage in ("zero2", "zero3"):
        for reward in ("spread", "even_prompts", "none"):
            settings = {"engine.deepspeed": stage, "rollout.prompts_per_step": 5, "engine.micro_batch": 4} | SMALL
            state = start(folder, world, settings, reward=reward)
            if reward == "even_prompts":  # groups in order of the rows: rank 0 has rows 0, 2, 4, rank 1 has 1, 3
                groups = [Group(row, state.prompts[row]) for row in range(5)][world.rank :: world.size]
                metrics, completions = trainer.train.grpo_step(state, groups)
            else:
                metrics, completions = step(state)
            trained = weights(state)
            found[f"{stage} {reward}"] = {
                "sums": [float(trained[name].double().sum()) for name in sorted(trained)],
                "moved": any(bool(weight.any()) for name, weight in trained.items() if "lora_B" in name),
                "unscored here": sum(one.reward is None for one in completions),
                "rows": len(completions),
                "unscored_fraction": metrics["unscored_fraction"],
                "notes": state.notes[-2:],
            }
            state.engine.close()
    return found


def one_rank_ends_the_run(folder: Path, world: World) -> Found:
    """A reward that fails on rank 1 alone, and weights of rank 1 that are NaN: all ranks stop with one message."""
    state = start(folder, world, {"rollout.prompts_per_step": 2}, reward="broken_on_odd_prompts")
    groups = [Group(world.rank, state.prompts[world.rank])]
    found = {"reward": ended(lambda: trainer.train.grpo_step(state, groups))}
    state.engine.close()
    state = start(folder, world)
    if world.rank == 1:
        with torch.no_grad():
            state.policy.causal.model.norm.weight.fill_(float("nan"))
    found["weights"] = ended(lambda: step(state))
    state.engine.close()
    return found


def ended(work: Callable[[], object]) -> Found:
    try:
        work()
    except RunEnd as end:
        return {"kind": type(end).__name__, "message": str(end)}
    return {"kind": "went on", "message": ""}


def hooks_see_the_longest_prompt_of_all_ranks(folder: Path, world: World) -> Found:
    state = start(folder, world, {"rollout.prompts_per_step": 2})
    seen: list[HookContext] = []
    state.hooks.append(seen.append)
    trainer.train.grpo_step(state, [Group(world.rank, state.prompts[world.rank])])
    return {"longest": seen[0].longest_prompt, "own": len(state.prompts[world.rank].ids)}


CELLS = (
    metrics_over_ranks,
    stages_agree,
    nonfinite_is_refused,
    nonfinite_ends_all_ranks,
    a_flipped_bit,
    a_slow_rank,
    run_repeats,
    every_row_keeps_its_advantage,
    uneven_work,
    ranks_stop_at_different_lengths,
    references_of_a_full_policy,
    gathers_of_a_rollout,
    stage_3_is_the_model_that_was_saved,
    exported_from_stage_3,
    one_rank_ends_the_run,
    hooks_see_the_longest_prompt_of_all_ranks,
)


def main() -> None:
    folder, results = (Path(argument) for argument in sys.argv[1:3])
    world = connect("cpu", timeout_seconds=60)
    found: Found = {}
    for cell in CELLS:
        try:
            mine: Found = cell(folder, world)
        except Exception:  # the other cells are worth having all the same
            mine = {"failed": traceback.format_exc()[-2000:]}
        found[cell.__name__] = world.gather_objects(mine)
    if world.is_main:
        results.write_text(json.dumps(found, indent=1))
    disconnect()


if __name__ == "__main__":
    main()
    leave(0)
