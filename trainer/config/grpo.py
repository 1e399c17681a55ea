"""The sections of a run file that are the algorithm: rollout, reward, grpo and its KL term."""

from typing import Annotated, Literal

from pydantic import Field

from trainer.config.section import Section, Texts


class Rollout(Section):
    engine: Literal["hf", "shared", "vllm"] = Field(
        default="shared",
        description="What decodes. shared: the same samples in half the time. hf: transformers' generate, to compare.",
    )
    prompts_per_step: int = Field(
        default=8, ge=1, description="Prompts of a step, over all ranks. Need not divide by the number of ranks."
    )
    num_generations: int = Field(
        default=8,
        ge=1,
        description="Completions a prompt: the group whose mean is the baseline. 8: half of it leaves a noisy mean.",
    )
    max_new_tokens: int = Field(
        default=512, ge=1, description="Longest completion (tokens). 128 cuts most answers that reason."
    )
    temperature: float = Field(
        default=1.0,
        gt=0,
        description="Divides the logits, in sampling and in scoring alike. 1: the model's own distribution.",
    )
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="Nucleus of the sampling. 1: off, so that sampled = scored."
    )
    top_k: int = Field(default=0, ge=0, description="Tokens kept in the sampling. 0: off, so that sampled = scored.")
    min_p: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Least probability kept, relative to the best token. 0: off, so that sampled = scored.",
    )
    repetition_penalty: float = Field(default=1.0, gt=0, description="1: off, so that sampled = scored.")
    stop: Texts = Field(default=(), description="Strings that end a completion, beside the model's own end token.")
    replay: str = Field(
        default="",
        description="Directory of recorded rollouts to train on instead of sampling; recorded rewards are used.",
    )


RewardKind = Literal["python", "builtin", "model", "embedding", "openai", "dashscope", "dashcope", "ollama", "http"]
SERVICE_CALLS_AT_A_TIME = 64
"""256 completions at 0.2 s a call take a second, and 8 ranks hold 512 connections."""
OLLAMA_CALLS_AT_A_TIME = 4
"""It computes one or a few at a time, and the others wait while their time runs."""


class Reward(Section):
    name: str = Field(
        pattern=r"^[A-Za-z][A-Za-z0-9_-]*$", description="Name in metrics and rollouts: letters, digits, _ and -."
    )
    kind: RewardKind = Field(
        description=(
            "python: a function of yours. builtin: one that ships. embedding: cosine with the answer. model: a reward"
            " model. openai (any server of that API), dashscope (also spelled dashcope), ollama: a judge. http: a"
            " server of yours."
        )
    )
    weight: float = Field(
        default=1.0, description="Weight in the sum of rewards; below 0 for a penalty, 0 to record only."
    )
    max_unscored: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description=(
            "Share of a rank's completions of a step on which the function may fail (an exception, no answer in time);"
            " more ends the run, after five pauses with another try each where a service was away. A failed score is"
            " never replaced by a number of ours. None, returned for a row that the function does not apply to, is no"
            " failure."
        ),
    )
    fallback: float | None = Field(
        default=None,
        description=(
            "Score of a completion that could not be scored. Absent: the completion leaves the statistics and the loss."
        ),
    )
    timeout: float = Field(
        default=30.0,
        gt=0,
        description="Seconds one call may take. Services: with all its tries and the pauses between.",
    )
    concurrency: int | None = Field(
        default=None,
        ge=1,
        description=(
            "Calls at a time of a rank, one completion each. Services: 64 when absent, ollama: 4. python, builtin:"
            " absent, one call with all completions, in this process; given, so many worker processes (of an async"
            " function: calls), in which a call that outlasts timeout is killed, stuck C code too, and a crash costs"
            " one row."
        ),
    )
    retries: int = Field(default=2, ge=0, description="Further tries after a failed call.")
    function: str = Field(
        default="",
        description='python: "module:callable" or "file.py:callable", a file beside the run file. builtin: its name.',
    )
    pattern: str = Field(default="", description="builtin regex: Python regular expression to find in the completion.")
    target: int = Field(default=0, ge=0, description="builtin length: tokens that score 1.")
    limit: int = Field(default=0, ge=0, description="builtin length: tokens up to which a completion scores 1.")
    path: str = Field(
        default="",
        description=(
            "Folder, seen from where you start, or hub name. embedding: of a sentence encoder, whose cosine of"
            " completion and answer is the score. model: of a sequence-classification model of one output. openai,"
            " dashscope, ollama: of the judge's tokenizer."
        ),
    )
    url: str = Field(default="", description="Services: where they listen. http: where items are posted to.")
    model: str = Field(default="", description="Services: the name of the model.")
    prompt: str = Field(
        default="", description="openai, dashscope, ollama: what the judge is to look at, in a sentence or more."
    )
    key_env: str = Field(
        default="",
        description="Services: the environment variable that holds the key. The key itself never stands in a run file.",
    )

    @property
    def calls_at_a_time(self) -> int:
        """Of a service."""
        return self.concurrency or (OLLAMA_CALLS_AT_A_TIME if self.kind == "ollama" else SERVICE_CALLS_AT_A_TIME)


class Kl(Section):
    coef: float = Field(
        default=0.04,
        ge=0,
        description=(
            "Weight of the KL term; the peak of a schedule. 0.04: the GRPO paper's; 0.01 suits verifiable rewards. 0:"
            " no reference model at all."
        ),
    )
    estimator: Literal["k1", "k2", "k3", "exact"] = Field(
        default="k3",
        description=(
            "Estimator of KL(policy || reference) per token. k3: never negative, low variance. exact: over the whole"
            " vocabulary."
        ),
    )
    placement: Literal["loss", "reward"] = Field(
        default="loss",
        description=(
            "loss: a term of the loss, as in the paper. reward: subtracted from each reward before the group"
            " statistics."
        ),
    )
    schedule: Literal["constant", "warmup_constant", "warmup_decay", "adaptive"] = Field(
        default="constant",
        description=(
            "constant: coef. warmup_constant: from start to coef. warmup_decay: then down to 0, not below min."
            " adaptive: steered towards target."
        ),
    )
    start: float = Field(default=0.0, ge=0, description="Coefficient at step 0 of the two warm-up schedules.")
    min: float = Field(
        default=0.0, ge=0, description="Floor of warmup_decay, which falls to 0 at the end of the run without one."
    )
    warmup_steps: int = Field(default=0, ge=0, description="Steps from start to coef in the two warm-up schedules.")
    target: float = Field(default=0.0, ge=0, description="adaptive: the KL to hold (nats per response token).")
    horizon: int = Field(
        default=0,
        ge=0,
        description="adaptive: completions over which an error of the KL is corrected; 10000 in PPO papers.",
    )
    ratio_weighted: bool = Field(
        default=True,
        description=(
            "Weight the KL of a token by its importance ratio when the policy has moved since the rollout, which keeps"
            " the gradient unbiased."
        ),
    )


class Grpo(Section):
    loss_type: Literal["grpo", "dapo", "dr_grpo", "gspo", "cispo"] = Field(
        default="dapo",
        description=(
            "dapo: mean over all tokens of the step, no bias to short answers. grpo: mean of sequence means. dr_grpo:"
            " constant length. gspo: sequence ratio. cispo: clipped weights."
        ),
    )
    eps_low: float = Field(default=0.2, gt=0, le=1, description="The ratio is clipped below at 1 - eps_low.")
    eps_high: float = Field(default=0.2, gt=0, description="The ratio is clipped above at 1 + eps_high.")
    dual_clip: float = Field(
        default=0.0,
        ge=0,
        description="Upper bound of the ratio where the advantage is negative, more than 1 + eps_high. 0: off.",
    )
    scale_rewards: Literal["group", "batch", "none"] = Field(
        default="group",
        description="Standard deviation that divides the advantage: of the group (paper), of the batch, or none.",
    )
    baseline: Literal["mean", "leave_one_out"] = Field(
        default="mean",
        description="What is subtracted from a reward: the group's mean, or the mean of the others (RLOO).",
    )
    advantage_eps: float = Field(
        default=1e-4,
        gt=0,
        description="Added to the standard deviation; keeps groups of nearly equal rewards from blowing up.",
    )
    updates_per_rollout: int = Field(
        default=1, ge=1, description="Optimizer steps on one rollout (the paper's mu). 1: strictly on-policy."
    )
    mask_truncated: bool = Field(
        default=False,
        description=(
            "Leave completions that hit max_new_tokens out of the loss. Off: being cut off is worth learning from."
        ),
    )
    kl: Annotated[Kl, Field(description="The KL term.")] = Field(default_factory=Kl)
