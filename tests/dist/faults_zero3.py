"""Cells of faults.py about ZeRO-3: decoding, gathering and exporting partitioned weights on two ranks."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deepspeed
import numpy as np
import torch

from tests.tiny import tiny_qwen2
from tests.tiny_run import distance, start, step, weights
from trainer.batch import Prompt
from trainer.checkpoint.export import export
from trainer.config.grpo import Rollout
from trainer.rollout.decoder import Group
from trainer.rollout.hf import HfDecoder
from trainer.rollout.sampling import NoiseKey
from trainer.world import World

Found = dict[str, Any]


def ranks_stop_at_different_lengths(folder: Path, world: World) -> Found:
    """Stage 3: uniforms near 1 draw the last token of the vocabulary, an end token, at once; of 0.5 never do."""
    state = start(folder, world, {"engine.deepspeed": "zero3", "rollout.max_new_tokens": 20})

    def uniforms(self: NoiseKey, positions: int) -> np.ndarray:
        return np.full(positions, 1 - 1e-12 if world.rank == 0 else 0.5)

    with patch.object(NoiseKey, "uniforms", uniforms):
        _, completions = step(state)
    metrics, _ = step(state)
    return {"lengths": sorted({len(one.ids) for one in completions}), "next": metrics["completion_tokens_mean"]}


def references_of_a_full_policy(folder: Path, world: World) -> Found:
    """KL and weights after two steps, by where the reference lies. Rank 1 has less to do: it runs fillers."""
    found: Found = {}
    base = {"lora.r": 0, "rollout.prompts_per_step": 3, "engine.micro_batch": 2, "engine.deepspeed": "zero3"}
    for mode in ("auto", "cpu", "zero3"):
        state = start(folder, world, base | {"grpo.kl.estimator": "exact", "reference.mode": mode})
        assert state.reference is not None
        kl = [step(state)[0]["kl"] for _ in range(2)]
        after = weights(state)
        found[mode] = {
            "kind": state.reference.kind,
            "kl": kl,
            "sum": sum(float(w.double().sum()) for w in after.values()),
        }
        state.engine.close()
    return found


@contextmanager
def counted_gathers() -> Iterator[list[int]]:
    """Counts DeepSpeed's calls of its backend's collectives that gather parameters."""
    count, backend = [0], deepspeed.comm.comm.cdb
    with ExitStack() as stack:
        for name in [name for name in dir(backend) if name.startswith(("all_gather", "broadcast"))]:
            real = getattr(backend, name)
            if callable(real):

                def counting(*arguments: Any, real: Any = real, **keywords: Any) -> Any:
                    count[0] += 1
                    return real(*arguments, **keywords)

                stack.enter_context(patch.object(backend, name, counting))
        yield count


def gathers_of_a_rollout(folder: Path, world: World) -> Found:
    """All-gathers of a rollout of 2 and of 6 tokens, and of one in which the hooks of ZeRO-3 are left in place."""
    state = start(folder, world, {"engine.deepspeed": "zero3"})
    decoder = state.decoder
    groups = [Group(world.rank, state.prompts[world.rank])]
    found: Found = {}

    def decode(tokens: int) -> None:
        replace(decoder, rollout=Rollout(max_new_tokens=tokens), stop_ids=()).generate(groups, step=0, generations=1)

    for tokens in (2, 6):
        with counted_gathers() as count, state.engine.gathered():
            decode(tokens)
        found[str(tokens)] = count[0]
        with counted_gathers() as count:
            decode(tokens)
        found[f"{tokens} with hooks"] = count[0]
    metrics, _ = step(state)
    return found | {"grad_norm": metrics["grad_norm"]}


def stage_3_is_the_model_that_was_saved(folder: Path, world: World) -> Found:
    """Gathered weights, and greedy tokens, against a plain model."""
    plain = tiny_qwen2()
    prompts = [Prompt(row, "", tuple(range(5 + row, 12 + 2 * row)), None, {}) for row in range(2)]
    groups = [Group(row, prompt) for row, prompt in enumerate(prompts)]
    state = start(folder, world, {"engine.deepspeed": "zero3", "lora.r": 0})
    whole = weights(state, everything=True)
    with state.engine.gathered():
        rows = state.decoder.generate(groups, step=0, generations=0, greedy=1)
    expected = HfDecoder(plain, state.policy.tokenizer, state.config.rollout, state.decoder.stop_ids, 0).generate(
        groups, step=0, generations=0, greedy=1
    )
    state.engine.close()
    return {
        "apart": distance(whole, dict(plain.named_parameters())),
        "tokens": [row.ids for row in rows],
        "expected": [row.ids for row in expected],
    }


def exported_from_stage_3(folder: Path, world: World) -> Found:
    found: Found = {}
    for lora in (4, 0):
        state = start(folder, world, {"engine.deepspeed": "zero3", "lora.r": lora})
        step(state)
        target = export(state.policy, state.engine, world, folder / "exported", state.config)
        trained = weights(state)
        if world.is_main:
            torch.save(trained, folder / f"{target.name}.pt")
        found[target.name] = str(target)
        state.engine.close()
    return found
