"""The same step by TRL's GRPOTrainer: from recorded tokens and rewards to its own masks, advantages, reference, loss.

TRL takes recorded completions through its ``rollout_func`` and rewards through a reward function. Only the old
log-probs are handed to ``compute_loss``: TRL reads a sampler's own for vLLM alone. What a cell is in TRL's words:

- ``cispo``: TRL's epsilon_high is the bound of the ratio itself (ScaleRL's eps_max), ours is 1 + grpo.eps_high.
- ``gspo`` is loss_type "grpo" with importance_sampling_level "sequence".
- grpo.dual_clip is ``delta``: for a negative advantage both are the loss max(min(r, delta), clip(r)) |A|.
- grpo.kl.ratio_weighted is ``use_bias_correction_kl``, with the gradient through the ratio in both (k3).
- grpo and gspo divide by completions, dr_grpo by completions x max_completion_length, dapo and cispo by tokens, in
  both; ``same_normaliser`` says which completions count.
- Advantages: (r - mean) / (std + 1e-4), std with ddof 1, in both; TRL computes them in float32.
- TRL pads prompts on the left and gives no position_ids: positions are shifted, which rotary attention does not see.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import split_tensor_dict

from tests.dist.recorded import GENERATIONS, GROUPS, MAX_NEW_TOKENS


class TrlStep(NamedTuple):
    loss: float
    advantages: list[float]
    gradient: dict[str, Tensor]


def trl_step(cell: dict[str, Any], rows: list[dict[str, Any]], folder: Path, start: dict[str, Tensor]) -> TrlStep:
    """Loss and gradient of all rows, accumulated group by group. ``start``: the trained weights, by name."""
    trainer = make_trainer(cell, rows, folder)
    model: PreTrainedModel = trainer.model.get_base_model() if cell["lora"] else trainer.model
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert set(named) == set(start)
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(start[name])
    trainer.model.train()
    inputs = trainer._generate_and_score_completions(list(trainer.train_dataset))
    assert "old_per_token_logps" not in inputs
    if cell["off_policy"]:
        sampled = [torch.tensor(row["sampling_logps"]) for row in rows]
        inputs["old_per_token_logps"] = pad_sequence(sampled, batch_first=True)
    trainer.current_gradient_accumulation_steps = GROUPS
    loss = 0.0
    for part in split_tensor_dict(inputs, GROUPS):
        part_loss = trainer.compute_loss(trainer.model, part)
        part_loss.backward()
        loss += float(part_loss.detach().double())
    return TrlStep(loss, inputs["advantages"].tolist(), {name: parameter.grad for name, parameter in named.items()})


def make_trainer(cell: dict[str, Any], rows: list[dict[str, Any]], folder: Path) -> GRPOTrainer:
    """A trainer with the cell's settings whose rollout is the recorded one."""

    def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        return {
            "prompt_ids": [row["prompt_ids"] for row in rows],
            "completion_ids": [row["completion_ids"] for row in rows],
            "logprobs": [row["sampling_logps"] for row in rows],
        }

    def recorded_reward(score: list[float | None], **_: Any) -> list[float | None]:
        return score

    loss_type = cell["loss_type"]
    arguments = GRPOConfig(
        output_dir=str(folder / "trl"),
        loss_type="grpo" if loss_type == "gspo" else loss_type,
        importance_sampling_level="sequence" if loss_type == "gspo" else "token",
        epsilon=cell["eps_low"],
        epsilon_high=cell["eps_high"] + (1.0 if loss_type == "cispo" else 0.0),
        delta=cell["dual_clip"] or None,
        beta=cell["coef"],
        use_bias_correction_kl=cell["ratio_weighted"],
        mask_truncated_completions=cell["mask_truncated"],
        scale_rewards="group",
        num_generations=GENERATIONS,
        max_completion_length=MAX_NEW_TOKENS,
        temperature=0.8,
        per_device_train_batch_size=GENERATIONS,
        gradient_accumulation_steps=GROUPS,
        # TRL's defaults are bf16 and checkpointing; these are what is compared: fp32 on the CPU.
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to="none",
    )
    adapter = LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        reward_funcs=recorded_reward,
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": "", "score": row["rewards"]["score"]} for row in rows]),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        peft_config=adapter if cell["lora"] else None,
        rollout_func=rollout,
    )
