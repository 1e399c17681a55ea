"""This trainer's side of tools/bench.py, a process of its own: steps of the real ``grpo_step``, told one by one."""

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

import trainer.train
from tools.bench_inputs import Settings
from tools.bench_measure import Meter, cap_memory, gemm_rate
from tools.bench_side import answering, differences
from trainer.batch import Completion, PackedRows, Prompt
from trainer.collect import share
from trainer.config import RunConfig
from trainer.measure import Stopwatch
from trainer.models import flex_groups
from trainer.models.packing import pack, pack_groups
from trainer.models.scorer import TokenScorer
from trainer.preflight.prepare import check, load_models, start_engine
from trainer.rollout.decoder import Decoder
from trainer.rollout.graphs import Graphs
from trainer.rollout.hf import HfDecoder
from trainer.rollout.sampling import NoiseKey
from trainer.rollout.shared import SharedDecoder
from trainer.state import State
from trainer.world import connect

ENGINES: dict[str, type[Decoder]] = {"shared": SharedDecoder, "hf": HfDecoder}
LAPS = {"rollout": "rollout", "reference": "reference"}
"""Laps of the trainer's own stopwatch that are a phase here. Of the update, the engine's step parts the two halves."""


def run_config(settings: Settings, folder: Path) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"steps": 1_000_000},
            "model": {"name_or_path": str(folder / "model"), "dtype": settings.dtype},
            "lora": {"r": settings.lora},
            "data": {
                "source": str(folder / "prompts.jsonl"),
                "chat_template": "off",
                "max_prompt_tokens": settings.prompt,
            },
            "rollout": {
                "engine": settings.engine,
                "prompts_per_step": settings.prompts,
                "num_generations": settings.group,
                "max_new_tokens": settings.limit,
            },
            "reward": [{"name": "spread", "kind": "python", "function": "tools.bench_inputs:spread"}],
            "grpo": {"kl": {"coef": settings.beta}},
            "optim": {"lr": settings.lr, "warmup_steps": 0, "max_grad_norm": 1.0},
            "engine": {"device": "cpu" if settings.device == "cpu" else "auto", "gradient_checkpointing": "off"},
        }
    )


def serve(connection: Connection, settings: Settings, folder: Path) -> None:
    """Answers orders: a step as {"shared", "engine", "flops"} and, for curves, {"group", "prompt"}; or {"gemm"}."""
    with answering(connection, settings.threads):
        state = start(settings, folder)
        meter = Meter(state.world.device, settings.memory_gib)
        decoders = {name: as_engine(state.decoder, engine) for name, engine in ENGINES.items()}
        connection.send({})
        # What train() counts a step's memory with is part of a step's time.
        with state.memory, forced_lengths(settings.lengths, settings.limit), laps(state, meter):
            while (order := connection.recv()) is not None:
                if "gemm" in order:
                    connection.send(gemm(state, settings))
                    continue
                state.shared_prompts, state.decoder = order["shared"], decoders[order["engine"]]
                connection.send(step(state, meter, settings.lengths, order))


def start(settings: Settings, folder: Path) -> State:
    world = connect("cpu" if settings.device == "cpu" else "auto", timeout_seconds=3600)
    cap_memory(world.device, settings.memory_gib)
    checked = check(run_config(settings, folder), folder, world)
    return start_engine(checked, load_models(checked, world), world)


def as_engine(decoder: Decoder, engine: type[Decoder]) -> Decoder:
    return engine(**{field.name: getattr(decoder, field.name) for field in dataclasses.fields(Decoder)})


def step(state: State, meter: Meter, lengths: Sequence[Sequence[int]], order: dict[str, Any]) -> dict[str, Any]:
    """One measured step. ``order`` may ask for a smaller "group" than that of ``lengths``, and a shorter "prompt"."""
    group = order.get("group", len(lengths[0]))
    rollout = state.config.rollout.model_copy(update={"num_generations": group})
    state.config = state.config.model_copy(update={"rollout": rollout})
    prompts = [dataclasses.replace(prompt, ids=prompt.ids[: order.get("prompt")]) for prompt in state.prompts]
    meter.begin(count_flops=order["flops"])
    with every_kernel_by_itself() if order["flops"] else nullcontext():
        _, completions = trainer.train.grpo_step(state, share(prompts, state.world))
    measured = meter.end()
    state.step += 1
    found = [[len(c.ids) for c in completions if c.prompt.index == index] for index in range(len(prompts))]
    if found != (wanted := [list(one[:group]) for one in lengths]):
        raise RuntimeError(f"the completions have {found} tokens, not {wanted}")
    return measured


@contextmanager
def every_kernel_by_itself() -> Iterator[None]:
    """What a FLOP counter sees on a card: no replays, and attention by SDPA. While it looks on, torch compiles nothing
    and would make (L, L) scores of FlexAttention."""
    with patch.object(Graphs, "on", lambda *_: False), patch.object(flex_groups, "BLOCK", sys.maxsize):
        yield


@contextmanager
def laps(state: State, meter: Meter) -> Iterator[None]:
    """The trainer's stopwatch and its engine's step tell the meter when a phase ends."""

    class MeteredStopwatch(Stopwatch):
        def lap(self, phase: str) -> None:
            super().lap(phase)
            meter.lap(LAPS.get(phase, "other"))

    engine_step = state.engine.step

    def metered_step(learning_rate: float) -> Any:
        meter.lap("forward_backward")
        outcome = engine_step(learning_rate)
        meter.lap("optimizer")
        return outcome

    with (
        patch.object(trainer.train, "Stopwatch", MeteredStopwatch),
        patch.object(state.engine, "step", metered_step),
    ):
        yield


@contextmanager
def forced_lengths(lengths: Sequence[Sequence[int]], limit: int) -> Iterator[None]:
    """Completions end where ``lengths`` (by prompt and generation) say, whatever engine decodes.

    The stop token is the last of the vocabulary: the largest uniform draws it, and smaller ones are kept off it.
    """
    drawn = NoiseKey.uniforms

    def uniforms(key: NoiseKey, positions: int) -> np.ndarray:
        values = drawn(key, positions) * 0.99
        if (length := lengths[key.prompt][key.generation]) < limit:
            values[length - 1] = np.nextafter(1.0, 0.0)
        return values

    with patch.object(NoiseKey, "uniforms", uniforms):
        yield


def gemm(state: State, settings: Settings) -> dict[str, float]:
    """At the sizes of our own training pass over one group."""
    completions = sum(settings.lengths[0])
    causal = state.policy.causal
    rows = settings.prompt + completions - settings.group
    return gemm_rate(causal, rows, completions, causal.get_output_embeddings())


def score_fixed(connection: Connection, settings: Settings, folder: Path) -> None:
    """Log-probs of ``fixed.json`` and their gradient, written to ``folder/ours.pt``; how far the unshared pass is."""
    with answering(connection, settings.threads):
        settings = dataclasses.replace(settings, dtype="fp32", lora=0, beta=0.0)
        world = connect("cpu" if settings.device == "cpu" else "auto", timeout_seconds=3600)
        models = load_models(check(run_config(settings, folder), folder, world), world)
        completions = fixed_completions(folder)
        shared = gradients(models.scorer, pack_groups(completions, device=world.device), completions)
        pad = models.policy.tokenizer.pad_token_id
        unshared = gradients(models.scorer, pack(completions, pad_id=pad, device=world.device), completions)
        torch.save(shared, folder / "ours.pt")
        connection.send(differences(unshared, shared))


def fixed_completions(folder: Path) -> list[Completion]:
    return [
        Completion(
            group=number,
            generation=generation,
            prompt=Prompt(number, "", tuple(group["prompt"]), None, {}),
            ids=tuple(ids),
            sampling_logps=(0.0,) * len(ids),
            finish="length",
            text="",
            advantage=group["advantages"][generation],
        )
        for number, group in enumerate(json.loads((folder / "fixed.json").read_text()))
        for generation, ids in enumerate(group["completions"])
    ]


def gradients(scorer: TokenScorer, rows: PackedRows, completions: Sequence[Completion]) -> dict[str, Any]:
    """Log-probs of all completions in one vector, and the gradient of their sum by advantage."""
    scorer.zero_grad()
    logps = scorer(rows)["logps"]
    advantages = torch.tensor([c.advantage for c in completions], device=logps.device)
    (logps * advantages[rows.completion]).sum().backward()
    named = scorer.causal.named_parameters()
    return {
        "logps": logps.detach().cpu(),
        "gradient": {name: p.grad.cpu().clone() for name, p in named if p.grad is not None},
    }
