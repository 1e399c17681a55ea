"""TRL's side of tools/bench.py, a process of its own: optimizer steps of GRPOTrainer.train(), told one by one.

What is changed of TRL, all of it here: the lengths of completions are forced; its phases are timed; and, in the variant
"compact", ``_use_triton`` says yes to add_fused_lm_head, so that only completion tokens reach the head. TRL does that
wherever Triton is; on a CPU it scores prompt tokens too and throws them away. Its kernels ask a name of their own and
stay those of the device.
"""

import dataclasses
import json
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, LogitsProcessor, LogitsProcessorList, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tools.bench_inputs import Settings, spread
from tools.bench_measure import Meter, cap_memory
from tools.bench_side import answering, differences

COMPACTION = "trl.trainer.utils._use_triton"


class Done(Exception):
    """No order is left."""


class ForcedLengths(LogitsProcessor):
    """Row r ends with the stop token as its ``lengths[r]``-th, and no earlier."""

    def __init__(self, lengths: list[int], limit: int, prompt: int, stop: int) -> None:
        self.prompt, self.stop = prompt, stop
        self.ending: dict[int, list[int]] = {}
        for row, length in enumerate(lengths):
            if length < limit:  # the others end with max_new_tokens
                self.ending.setdefault(length - 1, []).append(row)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, self.stop] = -torch.inf
        if rows := self.ending.get(input_ids.shape[1] - self.prompt):
            scores[rows] = -torch.inf
            scores[rows, self.stop] = 0.0
        return scores


class MeteredTrainer(GRPOTrainer):
    """GRPOTrainer whose phases end in laps of ``self.meter``."""

    meter: Meter
    lengths: list[int]

    def _generate_single_turn(self, *arguments: Any, **named: Any) -> Any:
        self.meter.lap("other")
        completion_ids, logps = super()._generate_single_turn(*arguments, **named)
        self.meter.lap("rollout")
        if (found := list(map(len, completion_ids))) != self.lengths:
            raise RuntimeError(f"the completions have {found} tokens, not {self.lengths}")
        return completion_ids, logps

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **named: Any) -> Any:
        if torch.is_grad_enabled():
            return super()._get_per_token_logps_and_entropies(*arguments, **named)
        self.meter.lap("other")
        scores = super()._get_per_token_logps_and_entropies(*arguments, **named)
        self.meter.lap("reference")
        return scores

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        inputs = super()._prepare_inputs(generation_batch)
        self.meter.lap("other")
        return inputs

    def training_step(self, *arguments: Any, **named: Any) -> Tensor:
        loss = super().training_step(*arguments, **named)
        self.meter.lap("forward_backward")
        return loss


class Steps(TrainerCallback):
    """Waits for an order before each optimizer step, and answers after it."""

    def __init__(self, connection: Connection, trainer: MeteredTrainer) -> None:
        self.connection, self.trainer = connection, trainer
        self.compaction: Any = None

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if (order := self.connection.recv()) is None:
            raise Done
        if order["checkpointing"]:
            self.trainer.model.gradient_checkpointing_enable(self.trainer.args.gradient_checkpointing_kwargs)
        else:
            self.trainer.model.gradient_checkpointing_disable()
        self.compaction = compaction(forced=order["compact"])
        self.compaction.start()
        self.trainer.meter.begin(count_flops=order["flops"])

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.trainer.meter.lap("optimizer")
        measured = self.trainer.meter.end()
        self.compaction.stop()
        self.connection.send(measured)


def compaction(*, forced: bool) -> Any:
    """Not forced, the name stays what it is."""
    from trl.trainer import utils

    return patch(COMPACTION, (lambda device: True) if forced else utils._use_triton)


def serve(connection: Connection, settings: Settings, folder: Path) -> None:
    """Answers orders {"compact", "checkpointing", "flops"}, each with one optimizer step."""
    with answering(connection, settings.threads):
        cap_memory(torch.device(settings.device, 0), settings.memory_gib)
        trainer = make_trainer(settings, folder)
        trainer.meter = Meter(trainer.accelerator.device, settings.memory_gib)
        trainer.lengths = [length for lengths in settings.lengths for length in lengths]
        forced = ForcedLengths(trainer.lengths, settings.limit, settings.prompt, trainer.processing_class.eos_token_id)
        generate = trainer.model.generate
        trainer.model.generate = lambda **named: generate(**named, logits_processor=LogitsProcessorList([forced]))
        trainer.add_callback(Steps(connection, trainer))
        connection.send({})
        with suppress(Done):
            trainer.train()


def make_trainer(settings: Settings, folder: Path) -> MeteredTrainer:
    """Micro-batches of one group. In bf16 TRL's own way: fp32 weights under autocast; with LoRA a frozen bf16 base."""
    prompts = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    base = "bfloat16" if settings.dtype == "bf16" and settings.lora else "float32"
    arguments = GRPOConfig(
        output_dir=str(folder / "trl"),
        model_init_kwargs={"dtype": base},
        num_generations=settings.group,
        max_completion_length=settings.limit,
        per_device_train_batch_size=settings.group,
        gradient_accumulation_steps=settings.prompts,
        beta=settings.beta,
        learning_rate=settings.lr,
        lr_scheduler_type="constant",
        max_steps=1_000_000,
        bf16=settings.dtype == "bf16",
        use_cpu=settings.device == "cpu",
        gradient_checkpointing=False,
        shuffle_dataset=False,
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        report_to="none",
    )
    lora = LoraConfig(r=settings.lora, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    return MeteredTrainer(
        model=str(folder / "model"),
        reward_funcs=spread,
        args=arguments,
        train_dataset=Dataset.from_list(prompts),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        peft_config=lora if settings.lora else None,
    )


def score_fixed(connection: Connection, settings: Settings, folder: Path) -> None:
    """How far TRL's log-probs of ``fixed.json`` and their gradient are from ``folder/ours.pt``, in both variants."""
    with answering(connection, settings.threads):
        settings = dataclasses.replace(settings, dtype="fp32", lora=0, beta=0.0)
        trainer = make_trainer(settings, folder)
        ours = torch.load(folder / "ours.pt")
        found = {}
        variants = {"trl": False} if settings.device == "cuda" else {"trl": False, "trl-compact": True}
        for name, forced in variants.items():
            with compaction(forced=forced):
                found[name] = differences(gradients(trainer, folder), ours)
        connection.send(found)


def gradients(trainer: GRPOTrainer, folder: Path) -> dict[str, Any]:
    """What bench_ours.gradients is there: completions in the same order, by TRL's own scoring."""
    device = trainer.accelerator.device
    groups = json.loads((folder / "fixed.json").read_text())
    rows = [(group["prompt"], torch.tensor(ids)) for group in groups for ids in group["completions"]]
    prompts = torch.tensor([prompt for prompt, _ in rows])
    completions = pad_sequence([ids for _, ids in rows], batch_first=True)
    mask = pad_sequence([torch.ones_like(ids) for _, ids in rows], batch_first=True)
    advantages = torch.tensor([one for group in groups for one in group["advantages"]], device=device)
    trainer.model.zero_grad()
    logps, _, _ = trainer._get_per_token_logps_and_entropies(
        trainer.model,
        torch.cat((prompts, completions), 1).to(device),
        torch.cat((torch.ones_like(prompts), mask), 1).to(device),
        completions.shape[1],
    )
    real = mask.bool().to(device)
    (logps * advantages[:, None])[real].sum().backward()
    named = trainer.model.named_parameters()
    return {
        "logps": logps[real].detach().cpu(),
        "gradient": {name: p.grad.cpu().clone() for name, p in named if p.grad is not None},
    }
