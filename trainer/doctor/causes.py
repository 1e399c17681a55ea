"""Causes that the doctor can tell apart, beside those that an alarm suspects."""

from trainer.watch import causes as watch
from trainer.watch.causes import Cause

CAUSES: dict[str, Cause] = watch.CAUSES | {
    "refused": Cause(
        "the run would be refused before its first step",
        "what the message says; `zero-grpo preflight` repeats it",
    ),
    "non_finite": Cause(
        "weights, log-probs or gradients are NaN or infinite: what is sampled from them is one token for ever",
        "go on from a checkpoint from before; lower optim.lr, keep optim.max_grad_norm = 1, and use model.dtype = "
        '"bf16" or "fp32", since Qwen2 overflows in fp16',
    ),
    "loss_overflow": Cause(
        "the loss is NaN or infinite while the weights are finite: an exponential of log-probs overflows (the "
        "KL's, the ratio's)",
        "compute log-probs, ratio and KL in fp32 and bound the exponent before the exponential; lower optim.lr where "
        "the policy is far from its reference",
    ),
    "gradient_overflow": Cause(
        "the loss is finite and its gradient is not: it overflows in the backward pass",
        "hold gradients in bf16 or fp32 (model.dtype), not in fp16; with a loss scale of your own, lower it",
    ),
    "weights_not_loaded": Cause(
        "the model knows no more of its prompts than chance: its weights are random, not those of the checkpoint",
        "check that model.name_or_path is the trained checkpoint and holds all its weights",
    ),
    "rope_differs": Cause(
        "positions are rotated otherwise than the model's config says, or otherwise in policy and reference",
        "give policy and reference one config.json; look at rope_theta and [model.rope]",
    ),
    "rope_window": Cause(
        "prompt and completion together are longer than the RoPE window, so cached decoding and training disagree",
        "lower rollout.max_new_tokens or data.max_prompt_tokens, or set [model.rope] to yarn or linear",
    ),
    "reference_moves": Cause(
        "the reference is trained along with the policy, so the KL holds nothing back",
        "look at reference.mode and at what shares its weights",
    ),
    "padding_changes_scores": Cause(
        "a completion's log-probs depend on what else is in the batch: attention mask or positions are wrong",
        'check attention mask and positions of padded or packed rows; try model.attn = "eager"',
    ),
    "kl_wrong": Cause(
        "the KL is none: a policy that is its own reference, or a uniform reference, gives another value than it must",
        "check estimator and head: KL(p, p) = 0, KL(p, uniform) = ln V - H",
    ),
    "loss_sign": Cause(
        "the sign of the loss is wrong: a step makes completions of positive advantage less likely",
        "minimise -(advantage x ratio); never minimise reward - coefficient x KL",
    ),
    "kl_sign": Cause(
        "the sign of the KL term is wrong: a step takes the policy further away from the reference",
        "add coefficient x KL to a loss that is minimised; log-ratio of policy over reference, not the reverse",
    ),
    "no_gradient": Cause(
        "no gradient reaches the weights, so nothing is learned",
        "look at lora.targets, frozen parameters and engine.gradient_checkpointing, and score outside of no_grad",
    ),
    "kl_no_gradient": Cause(
        "the KL term has no gradient: it is logged, and never holds the policy back",
        "score the policy outside of no_grad, and reduce only detached copies over ranks",
    ),
    "normalisation": Cause(
        "the gradient depends on how completions are split into passes, or has another size than the loss says",
        "sum in each pass, and divide once by the count of the whole step over all ranks",
    ),
    "coefficient_scaled": Cause(
        "the KL coefficient in use is not the configured one, such as one divided by the number of ranks",
        "use grpo.kl.coef as it is: data-parallel engines average gradients, which scales nothing",
    ),
    "temperature_mismatch": Cause(
        "tokens are sampled at another temperature than they are scored at",
        "divide the logits by rollout.temperature in sampling, policy, old policy and reference alike",
    ),
    "reward_constant": Cause(
        "the reward is the same for every completion: nothing to compare, nothing to learn",
        "read completions beside their rewards; give partial credit, or take prompts that the model sometimes solves",
    ),
    "unscored": Cause(
        "many completions have no reward, so groups are small and their statistics are noise",
        "find out why the reward returns None or fails on them",
    ),
    "fallback_reward": Cause(
        "a made-up number stands for failed rewards, and the policy is trained on it",
        "leave out reward.fallback: what could not be scored then leaves statistics and loss",
    ),
    "stopped": Cause("the run ended before its last step", "what the reason says"),
}
