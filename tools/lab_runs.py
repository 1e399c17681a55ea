"""The runs of the collapse lab: seventeen faults, variants that nothing was tuned on, twenty healthy ones."""

from dataclasses import dataclass, field, replace
from typing import Any

from tools import lab_faults as faults
from tools.lab_models import SMALL_WINDOW
from tools.lab_run import MODEL, Patch


@dataclass(frozen=True)
class LabRun:
    """One run, and what a right answer would be."""

    name: str
    causes: tuple[str, ...]
    """Keys of ``doctor.causes.CAUSES`` that name its fault, nearly always one; none of a healthy run."""
    patches: tuple[Patch, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    steps: int = 120
    held_out: bool = False
    """Nothing was tuned on it."""
    note: str = ""
    """What a reader of the results has to know of it."""


FULL = {"lora.r": 0, "optim.lr": 1e-4}
"""All weights, so that the reference is a copy."""
DYNAMIC = {"model.name_or_path": str(SMALL_WINDOW), "model.rope.type": "dynamic", "model.rope.factor": 4.0}
FAILING = {
    "name": "score",
    "kind": "python",
    "function": "tools.lab_rewards:fails_on_carries",
    "max_unscored": 1.0,
    "fallback": 0.1,
}

FAULTS = (
    LabRun("KL sign inverted", ("kl_sign",), (faults.kl_sign,), {"grpo.kl.coef": 1.0}),
    LabRun("KL on padding", ("kl_outside_response",), (faults.padding_scored,), {"grpo.kl.coef": 0.04}),
    LabRun("pad = EOS mask", ("end_not_trained",), (faults.ends_masked,)),
    LabRun(
        "KL coefficient / ranks", ("coefficient_scaled",), (faults.coefficient_by_ranks(4),), {"grpo.kl.coef": 0.04}
    ),
    LabRun("dropout in the policy", ("dropout",), (faults.dropout_of(0.1),)),
    LabRun("wrong RoPE theta", ("rope_differs",), (faults.trained_at_theta(1e6),)),
    LabRun("dynamic NTK beyond its window", ("rope_window",), (faults.no_rope_guard,), DYNAMIC),
    LabRun("temperature mismatch", ("temperature_mismatch",), (faults.sampled_with(temperature=1.5),)),
    LabRun("repetition penalty leaks in", ("filtered_sampling",), (faults.sampled_with(repetition_penalty=1.5),)),
    LabRun("wrong group layout", ("group_layout",), (faults.groups_tiled,)),
    LabRun("learning rate x 100", ("update_too_large",), (), {"optim.lr": 0.1}),
    LabRun(
        "k3 overflow", ("loss_overflow",), (faults.k3_overflows,), {"optim.lr": 0.02, "grpo.updates_per_rollout": 4}
    ),
    LabRun("NaN weights", ("non_finite",), (faults.nan_after(12),)),
    LabRun("wrong tokenizer for decode", ("tokenizer_mismatch",), (faults.decoded_by_another,)),
    LabRun("reference from other weights", ("reference_differs",), (faults.reference_of(0.3),), FULL),
    LabRun("reward fallback 0.1", ("fallback_reward",), (), {"reward": [FAILING]}),
    LabRun("fp16 overflow", ("gradient_overflow",), (faults.gradients_in_fp16(2.0**20),)),
)

_VARIANTS = (
    LabRun(
        "KL sign, k2, coefficient 0.05",
        ("kl_sign",),
        (faults.kl_sign,),
        {"grpo.kl.coef": 0.05, "grpo.kl.estimator": "k2"},
    ),
    LabRun("loss sign inverted", ("loss_sign", "wrong_direction"), (faults.loss_sign,)),
    LabRun("KL gradient / ranks", ("coefficient_scaled",), (faults.kl_over_ranks(4),), {"grpo.kl.coef": 0.1}),
    LabRun("KL summed over ranks", ("coefficient_scaled",), (faults.kl_over_ranks(1 / 4),), {"grpo.kl.coef": 0.1}),
    LabRun("dropout 0.02", ("dropout",), (faults.dropout_of(0.02),)),
    LabRun("RoPE theta 5e5 in training", ("rope_differs",), (faults.trained_at_theta(5e5),), FULL),
    LabRun("RoPE theta of the model", ("rope_differs",), (faults.built_at_theta(1e6), faults.no_rope_guard)),
    LabRun(
        "RoPE theta, guard in place",
        ("rope_differs",),
        (faults.built_at_theta(1e6),),
        note="named `refused` when first run; the words of that refusal are known since, so it is held out no more",
    ),
    LabRun("dynamic NTK, guard in place", ("rope_window",), (), DYNAMIC),
    LabRun("sampled at T = 0.7", ("temperature_mismatch",), (faults.sampled_with(temperature=0.7),)),
    LabRun("repetition penalty 1.2", ("filtered_sampling",), (faults.sampled_with(repetition_penalty=1.2),)),
    LabRun("top-k 3 leaks in", ("filtered_sampling",), (faults.sampled_with(top_k=3),)),
    LabRun("rewards shifted", ("group_layout",), (faults.groups_shifted,)),
    LabRun("learning rate x 30", ("update_too_large",), (), {"optim.lr": 0.03}),
    LabRun("random reference", ("reference_differs",), (faults.reference_of(10.0),), FULL),
)
VARIANTS = tuple(replace(run, held_out=not run.note, steps=40) for run in _VARIANTS)
"""Run when nothing was changed any more, but for the one."""


def _reward(function: str, **more: Any) -> dict[str, Any]:
    kind = "python" if ":" in function else "builtin"
    return {"name": function.rpartition(":")[2], "kind": kind, "function": function} | more


EXACT, DIGITS = _reward("exact_match"), _reward("tools.lab_rewards:digits")
NEAR, CARRIED, EVEN = (_reward(f"tools.lab_rewards:{name}") for name in ("near", "carried", "even"))
SHORT = _reward("length", limit=6, weight=0.2)
HELD_OUT_EVAL = {"data.eval_source": str(MODEL / "heldout.jsonl"), "eval.every": 20, "eval.num_generations": 1}

_HEALTHY: tuple[dict[str, Any], ...] = (
    {},
    {"optim.lr": 2e-3},
    {"optim.lr": 3e-4, "rollout.num_generations": 16, "rollout.prompts_per_step": 4},
    {"grpo.kl.coef": 0.0},
    {"reward": [DIGITS], "grpo.kl.coef": 0.04},
    {"reward": [EVEN]},
    {"reward": [NEAR], "rollout.temperature": 0.7},
    FULL,
    {"grpo.loss_type": "gspo", "grpo.kl.estimator": "exact", "grpo.kl.coef": 0.1},
    {"grpo.loss_type": "dr_grpo", "grpo.updates_per_rollout": 2},
    {"reward": [CARRIED], **HELD_OUT_EVAL},
    {"rollout.temperature": 1.2, "rollout.num_generations": 4, "rollout.prompts_per_step": 16},
    {"reward": [EXACT, SHORT], "grpo.loss_type": "grpo", "grpo.kl.estimator": "k2"},
    {"grpo.kl.placement": "reward", "grpo.kl.estimator": "k1", "grpo.kl.coef": 0.02},
    # From here on held out.
    {"reward": [EVEN], "grpo.kl.coef": 0.0, **FULL},
    {"reward": [NEAR], "grpo.loss_type": "cispo", "optim.schedule": "cosine"},
    {"reward": [DIGITS], "optim.lr": 2e-3, "grpo.kl.schedule": "warmup_decay", "grpo.kl.warmup_steps": 10},
    {"model.dtype": "bf16", **HELD_OUT_EVAL},
    {"reward": [CARRIED], "grpo.baseline": "leave_one_out", "grpo.scale_rewards": "none", "lora.r": 4},
    {"grpo.scale_rewards": "batch", "grpo.mask_truncated": True, "rollout.temperature": 0.9, "optim.lr": 5e-4},
)
TUNED_HEALTHY = 14

HEALTHY = tuple(
    LabRun(f"healthy {seed}", (), (), {"run.seed": seed, "data.seed": seed, **settings}, 60, seed > TUNED_HEALTHY)
    for seed, settings in enumerate(_HEALTHY, start=1)
)

TUNED = {
    "alarm `collapse` (KL above half of watch.kl, reward down by half a standard deviation)": (
        "learning rate x 100",
        "k3 overflow",
    ),
    "doctor: a KL that grows by a factor a step is no wrong sign where the reward has risen": ("healthy 7",),
    "doctor: another RoPE base is looked for where the model's own does not explain": ("dropout in the policy",),
    "alarms `advantages`, `decoded_text`, `reward_failing`: made for runs that had no alarm": (
        "wrong group layout",
        "wrong tokenizer for decode",
        "reward fallback 0.1",
    ),
    "doctor: which cause explains which other": (
        "wrong RoPE theta",
        "dynamic NTK beyond its window",
        "wrong tokenizer for decode",
        "reference from other weights",
    ),
    "doctor: words of a refusal, an alarm of a single step": ("dynamic NTK beyond its window", "KL on padding"),
    "faults: sizes, so that text does break": ("KL sign inverted", "k3 overflow"),
}
"""What was set by looking at which runs. All else of the alarms and the doctor was set before any of them."""
