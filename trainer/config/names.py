"""What other trainers call things, and where it is here: TRL, HF TrainingArguments, OpenRLHF, verl, slime, PEFT.

A name is looked up whole, then by its ending: `actor_rollout_ref.rollout.n`, `rollout.n`, `n`.
"""

import difflib
from collections.abc import Sequence

from trainer.config.fields import dotted_keys

# Theirs -> ours. What follows the key says how the meaning differs, or which value to write.
PEERS: dict[str, str] = {
    # TRL GRPOConfig
    "beta": "grpo.kl.coef",
    "max_completion_length": "rollout.max_new_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "num_iterations": "grpo.updates_per_rollout",
    "epsilon": "grpo.eps_low, and grpo.eps_high for the upper side",
    "epsilon_high": "grpo.eps_high",
    "delta": "grpo.dual_clip",
    "use_bias_correction_kl": "grpo.kl.ratio_weighted",
    "importance_sampling_level": 'grpo.loss_type = "gspo" for sequence-level ratios',
    "mask_truncated_completions": "grpo.mask_truncated",
    "reward_weights": "reward.weight, one in each [[reward]] table",
    "reward_funcs": "reward.function, one [[reward]] table for each",
    "generation_batch_size": "rollout.prompts_per_step, counted in prompts and over all ranks",
    "num_generations_eval": "eval.num_generations",
    "use_vllm": "rollout.engine",
    "vllm_mode": "rollout.engine",
    "log_completions": "log.samples_every",
    "disable_dropout": "lora.dropout, which is 0 by default",
    "shuffle_dataset": "data.seed; prompts are always shuffled",
    # TRL ModelConfig and ScriptArguments, PEFT, bitsandbytes
    "model_name_or_path": "model.name_or_path",
    "model_revision": "model.revision",
    "torch_dtype": "model.dtype",
    "attn_implementation": "model.attn",
    "rope_scaling": "model.rope.type and model.rope.factor",
    "rope_scaling_type": "model.rope.type",
    "rope_scaling_factor": "model.rope.factor",
    "use_peft": "lora.r, 0 for full fine-tuning",
    "lora_r": "lora.r",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "lora_target_modules": "lora.targets",
    "target_modules": "lora.targets",
    "adapter_name_or_path": "lora.start_adapter",
    "load_in_4bit": "quant.bits = 4",
    "bnb_4bit_quant_type": "quant.type",
    "bnb_4bit_use_double_quant": "quant.double_quant",
    "use_bnb_nested_quant": "quant.double_quant",
    "dataset_name": "data.source",
    "dataset_config": "data.config",
    "dataset_train_split": "data.split",
    "dataset_test_split": "data.eval_split",
    # HF TrainingArguments
    "output_dir": "run.dir",
    "max_steps": "run.steps",
    "num_train_epochs": "run.epochs",
    "per_device_train_batch_size": (
        "engine.micro_batch; the batch itself is rollout.prompts_per_step x rollout.num_generations"
    ),
    "learning_rate": "optim.lr",
    "lr_scheduler_type": "optim.schedule",
    "adam_beta1": "optim.betas",
    "adam_beta2": "optim.betas",
    "adam_epsilon": "optim.eps",
    "max_grad_norm": "optim.max_grad_norm",
    "warmup_ratio": "optim.warmup_steps, in steps",
    "bf16": 'model.dtype = "bf16"',
    "fp16": 'model.dtype = "bf16" or "fp32"',
    "deepspeed": "engine.deepspeed",
    "gradient_checkpointing": "engine.gradient_checkpointing",
    "use_cpu": 'engine.device = "cpu"',
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "eval_steps": "eval.every",
    "metric_for_best_model": "eval.best_metric",
    "load_best_model_at_end": "eval.best_metric",
    "logging_steps": "log.every",
    "report_to": "log.report_to",
    "seed": "run.seed",
    "data_seed": "data.seed",
    "ddp_timeout": "watch.hang_timeout",
    # OpenRLHF: the flat names of its releases up to 0.9, then the dotted ones
    "pretrain": "model.name_or_path",
    "save_path": "run.dir",
    "ckpt_path": "run.dir",
    "prompt_data": "data.source",
    "input_key": "data.prompt_column",
    "label_key": "data.answer_column",
    "apply_chat_template": "data.chat_template",
    "prompt_max_len": "data.max_prompt_tokens",
    "generate_max_len": "rollout.max_new_tokens",
    "n_samples_per_prompt": "rollout.num_generations",
    "rollout_batch_size": "rollout.prompts_per_step",
    "micro_rollout_batch_size": "engine.token_budget",
    "micro_train_batch_size": "engine.micro_batch",
    "init_kl_coef": "grpo.kl.coef",
    "kl_estimator": "grpo.kl.estimator",
    "kl_target": "grpo.kl.target",
    "kl_horizon": "grpo.kl.horizon",
    "use_kl_loss": "grpo.kl.placement",
    "actor_learning_rate": "optim.lr",
    "eps_clip": "grpo.eps_low, and grpo.eps_high for the upper side",
    "eps_clip_low_high": "grpo.eps_low and grpo.eps_high",
    "advantage_estimator": "grpo.baseline",
    "num_episodes": "run.epochs",
    "max_epochs": "grpo.updates_per_rollout",
    "zero_stage": 'engine.deepspeed, "zero0" to "zero3"',
    "adam_offload": 'engine.deepspeed = "zero2-offload" or "zero3-offload"',
    "flash_attn": 'model.attn = "flash_attention_2"',
    "remote_rm_url": "reward.url",
    "reward_pretrain": "reward.path",
    "reward_model_name_or_path": "reward.path",
    "l2": "optim.weight_decay",
    "adam_betas": "optim.betas",
    "lr_warmup_ratio": "optim.warmup_steps, in steps",
    "max_norm": "optim.max_grad_norm",
    "max_ckpt_num": "checkpoint.keep",
    "lora_rank": "lora.r",
    "lora.rank": "lora.r",
    "actor.model_name_or_path": "model.name_or_path",
    "actor.eps_clip": "grpo.eps_low, and grpo.eps_high for the upper side",
    "actor.dual_clip": "grpo.dual_clip",
    "algo.kl.init_coef": "grpo.kl.coef",
    "algo.kl.use_loss": "grpo.kl.placement",
    "algo.advantage.estimator": "grpo.baseline",
    "algo.advantage.no_std_norm": 'grpo.scale_rewards = "none"',
    "ckpt.output_dir": "run.dir",
    "ckpt.save_steps": "checkpoint.every",
    "ckpt.max_num": "checkpoint.keep",
    "data.prompt_dataset": "data.source",
    "data.prompt_split": "data.split",
    "data.max_len": "data.max_prompt_tokens and rollout.max_new_tokens",
    "ds.lora.rank": "lora.r",
    "eval.dataset": "data.eval_source",
    "eval.split": "data.eval_split",
    "ref.offload": "reference.mode",
    "reward.remote_url": "reward.url",
    "rollout.batch_size": "rollout.prompts_per_step",
    "train.micro_batch_size": "engine.micro_batch",
    "train.max_tokens_per_gpu": "engine.token_budget",
    "train.num_episodes": "run.epochs",
    # verl
    "actor_rollout_ref.model.path": "model.name_or_path",
    "actor_rollout_ref.rollout.name": "rollout.engine",
    "lora_adapter_path": "lora.start_adapter",
    "rollout.n": "rollout.num_generations",
    "data.train_files": "data.source",
    "data.val_files": "data.eval_source",
    "data.train_batch_size": "rollout.prompts_per_step",
    "data.prompt_key": "data.prompt_column",
    "data.max_response_length": "rollout.max_new_tokens",
    "response_length": "rollout.max_new_tokens",
    "filter_overlong_prompts": 'data.overlong = "drop"',
    "data.truncation": "data.overlong",
    "ppo_mini_batch_size": "grpo.updates_per_rollout; an update is over the whole rollout",
    "ppo_micro_batch_size_per_gpu": "engine.micro_batch",
    "ppo_max_token_len_per_gpu": "engine.token_budget",
    "ppo_epochs": "grpo.updates_per_rollout",
    "kl_loss_coef": "grpo.kl.coef",
    "kl_loss_type": 'grpo.kl.estimator; low_var_kl is "k3", kl is "k1", mse is "k2"',
    "kl_coef": "grpo.kl.coef",
    "kl_penalty": "grpo.kl.estimator",
    "kl_ctrl.type": "grpo.kl.schedule",
    "target_kl": "grpo.kl.target",
    "use_kl_in_reward": 'grpo.kl.placement = "reward"',
    "adv_estimator": "grpo.baseline",
    "norm_adv_by_std_in_grpo": 'grpo.scale_rewards = "group" or "none"',
    "clip_ratio": "grpo.eps_low, and grpo.eps_high for the upper side",
    "clip_ratio_low": "grpo.eps_low",
    "clip_ratio_high": "grpo.eps_high",
    "clip_ratio_c": "grpo.dual_clip",
    "loss_agg_mode": 'grpo.loss_type; token-mean is "dapo", seq-mean-token-mean is "grpo"',
    "grad_clip": "optim.max_grad_norm",
    "lr_warmup_steps": "optim.warmup_steps",
    "enable_gradient_checkpointing": "engine.gradient_checkpointing",
    "custom_reward_function.path": "reward.function",
    "custom_reward_function.name": "reward.function",
    "trainer.total_epochs": "run.epochs",
    "total_training_steps": "run.steps",
    "trainer.default_local_dir": "run.dir",
    "trainer.save_freq": "checkpoint.every",
    "trainer.test_freq": "eval.every",
    "trainer.logger": "log.report_to",
    # slime (Megatron's optimizer names included)
    "hf_checkpoint": "model.name_or_path",
    "ref_load": "model.name_or_path; the reference is the model that training starts from",
    "save": "run.dir",
    "save_interval": "checkpoint.every",
    "num_rollout": "run.steps",
    "num_epoch": "run.epochs",
    "num_steps_per_rollout": "grpo.updates_per_rollout",
    "rollout_max_prompt_len": "data.max_prompt_tokens",
    "rollout_max_response_len": "rollout.max_new_tokens",
    "rollout_temperature": "rollout.temperature",
    "rollout_top_p": "rollout.top_p",
    "rollout_top_k": "rollout.top_k",
    "rollout_stop": "rollout.stop",
    "rollout_seed": "run.seed",
    "micro_batch_size": "engine.micro_batch",
    "max_tokens_per_gpu": "engine.token_budget",
    "use_unbiased_kl": "grpo.kl.ratio_weighted",
    "eps_clip_high": "grpo.eps_high",
    "eps_clip_c": "grpo.dual_clip",
    "disable_grpo_std_normalization": 'grpo.scale_rewards = "none"',
    "lr": "optim.lr",
    "lr_decay_style": "optim.schedule",
    "clip_grad": "optim.max_grad_norm",
    "rm_type": "reward.kind",
    "rm_url": "reward.url",
    "custom_rm_path": "reward.function",
    "eval_prompt_data": "data.eval_source",
    "eval_interval": "eval.every",
    "n_samples_per_eval_prompt": "eval.num_generations",
    "load_debug_rollout_data": "rollout.replay",
    "use_wandb": 'log.report_to = ["wandb"]',
}

# Theirs, with nothing of the kind here, and why.
ABSENT: dict[str, str] = {
    "gradient_accumulation_steps": (
        "it follows from the batch: rollout.prompts_per_step x rollout.num_generations is one update, "
        "engine.micro_batch or engine.token_budget only says how much of it is in memory at a time"
    ),
    "train_batch_size": (
        "an update is over the whole rollout: rollout.prompts_per_step x rollout.num_generations completions"
    ),
    "global_batch_size": (
        "an update is over the whole rollout: rollout.prompts_per_step x rollout.num_generations completions"
    ),
    "steps_per_generation": "an update is over the whole rollout; grpo.updates_per_rollout repeats it",
    "load_in_8bit": "weights are 4-bit (quant.bits) or not quantised",
    "sync_ref_model": "the reference is the model that training starts from",
    "entropy_coef": "the loss has no entropy term; the entropy is measured",
    "entropy_coeff": "the loss has no entropy term; the entropy is measured",
    "gamma": "a completion has one reward, there is nothing to discount",
    "lambd": "a completion has one reward, there is no value model",
    "critic_learning_rate": "GRPO has no critic",
    "resume_from_checkpoint": "it is asked for on the command line: --resume auto, or --resume PATH",
    "resume": "it is asked for on the command line: --resume auto, or --resume PATH",
    "hostfile": "hosts are the launcher's: zero-grpo train RUN.toml --hostfile H",
    "num_processes": "the launcher sets it: zero-grpo train RUN.toml --gpus N",
    "n_gpus_per_node": "the launcher sets it: zero-grpo train RUN.toml --gpus N",
    "nnodes": "hosts are the launcher's: zero-grpo train RUN.toml --hostfile H",
    "dataloader_num_workers": "prompts are read and tokenised once, before the first rollout",
    "tensor_model_parallel_size": "ranks are data-parallel; engine.deepspeed shards the model",
    "vllm_gpu_memory_utilization": "decoding shares the policy's weights",
    "gpu_memory_utilization": "decoding shares the policy's weights",
}

# Values under other names, by our key.
VALUES: dict[str, dict[str, str]] = {
    "grpo.kl.estimator": {"low_var_kl": "k3", "low_var_kl+": "k3", "kl": "k1", "mse": "k2", "full": "exact"},
    "grpo.loss_type": {"token-mean": "dapo", "seq-mean-token-mean": "grpo", "bnpo": "dapo", "drgrpo": "dr_grpo"},
    "grpo.baseline": {"rloo": "leave_one_out", "grpo": "mean", "loo": "leave_one_out"},
    "grpo.scale_rewards": {"std": "group"},
    "model.dtype": {"bfloat16": "bf16", "float32": "fp32", "float16": "bf16", "torch.bfloat16": "bf16", "half": "bf16"},
    "model.attn": {"flash_attention": "flash_attention_2", "fa2": "flash_attention_2"},
    "optim.name": {"adam": "adamw", "adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_8bit": "adamw8bit"},
    "optim.schedule": {"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine"},
    "grpo.kl.schedule": {"fixed": "constant"},
    "data.overlong": {"left": "truncate_left", "filter": "drop"},
    "rollout.engine": {"transformers": "hf"},
}


def answer(path: Sequence[str]) -> str:
    """What to write instead of an unknown key, as a sentence; "" where nothing comes to mind."""
    names = [name.lower().replace("-", "_") for name in path]
    ours = dotted_keys()
    for start in range(len(names)):
        name = ".".join(names[start:])
        if name in PEERS:
            return f"Use {PEERS[name]}."
        if name in ABSENT:
            return f"There is no such key: {ABSENT[name]}."
        if name in ours and start > 0:
            return f"Use {name}."
    elsewhere = [key for key in ours if key.rsplit(".", 1)[-1] == names[-1]]
    if elsewhere:
        return f"Did you mean {' or '.join(elsewhere)}?"
    leaves = {key.rsplit(".", 1)[-1]: key for key in reversed(ours)}
    siblings = {key.rsplit(".", 1)[-1]: key for key in ours if key.rpartition(".")[0] == ".".join(names[:-1])}
    for candidates in (siblings, leaves):
        close = difflib.get_close_matches(names[-1], candidates, n=1, cutoff=0.7)
        if close:
            return f"Did you mean {candidates[close[0]]}?"
    close = difflib.get_close_matches(names[-1], PEERS, n=1, cutoff=0.85)
    return f"Use {PEERS[close[0]]}." if close else ""
