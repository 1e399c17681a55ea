"""From the single times of tools/bench.py to medians, ratios and the Markdown of the README."""

from collections.abc import Sequence
from statistics import median
from typing import Any

from tools.bench_inputs import token_ratio
from tools.bench_measure import PHASES

ROWS = {
    "ours": "zero-grpo",
    "unshared": "zero-grpo, prompts not shared, transformers' `generate`",
    "trl": "TRL {trl}",
    "trl-compact": "TRL {trl}, head on completions only (forced)",
    "trl-checkpointing": "TRL {trl}, checkpointing on (its default)",
}
COLUMNS = ("rollout", "reference", "forward_backward", "optimizer", "step")

RATIOS = {
    "step: TRL as it comes": ("trl", "step"),
    "step: TRL with compaction forced": ("trl-compact", "step"),
    "step: TRL with checkpointing": ("trl-checkpointing", "step"),
    "rollout: TRL": ("trl", "rollout"),
    "rollout: our own, with transformers' `generate`": ("unshared", "rollout"),
    "reference: our own, prompts not shared": ("unshared", "reference"),
    "forward + backward: our own, prompts not shared": ("unshared", "forward_backward"),
    "forward + backward: TRL with compaction forced": ("trl-compact", "forward_backward"),
    "FLOPs: TRL as it comes": ("trl", "tflop"),
    "FLOPs: TRL with compaction forced": ("trl-compact", "tflop"),
}
"""The figure of that row over the one of ours."""


def medians(row: dict[str, Any], clock: str) -> dict[str, float]:
    """Of every phase and of the whole step, by ``clock``; the largest peak; FLOPs in 10^12."""
    seconds = [step["seconds"][clock] for step in row["steps"]]
    found = {phase: median(one[phase] for one in seconds) for phase in PHASES}
    found["step"] = median(sum(one.values()) for one in seconds)
    found["step_wall"] = median(sum(step["seconds"]["wall"].values()) for step in row["steps"])
    found["peak_gib"] = max(step["peak_gib"] for step in row["steps"])
    if "flops" in row:
        found["tflop"] = row["flops"] / 1e12
    return found


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """``medians`` by row and ``ratios`` of a result that holds ``rows``, ``gemm`` and ``clock``."""
    clock = result["clock"]
    rows = {name: medians(row, clock) for name, row in result["rows"].items() if row["steps"]}
    ratios: dict[str, float] = {}
    if "ours" in rows:
        ours = rows["ours"]
        ratios = {name: rows[row][figure] / ours[figure] for name, (row, figure) in RATIOS.items() if row in rows}
        rate = median(one[clock] for one in result["gemm"])
        ratios["our step over its FLOPs at the GEMM rate"] = ours["step"] / (ours["tflop"] * 1e3 / rate)
        if "trl" in rows:
            ratios["our peak memory over TRL's"] = ours["peak_gib"] / rows["trl"]["peak_gib"]
    return {"medians": rows, "ratios": ratios}


def curve_points(result: dict[str, Any]) -> list[dict[str, float]]:
    """What each point of ``curves`` took beside what its tokens predict.

    G completions without sharing are G times one completion with its prompt, so the measured counterpart of the token
    ratio is G t(1) / t(G), of the passes (reference, forward and backward) at the same prompt length.
    """
    clock, completion = result["clock"], result["settings"]["completion"]
    points = {(one["prompt"], one["group"]): medians(one, clock) for one in result["curves"]}
    passes = {at: found["reference"] + found["forward_backward"] for at, found in points.items()}
    return [
        {
            "prompt": prompt,
            "group": group,
            **{phase: found[phase] for phase in COLUMNS},
            "predicted": token_ratio(prompt, [[completion] * group]),
            "measured": group * passes[prompt, 1] / passes[prompt, group],
        }
        for (prompt, group), found in points.items()
    ]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def headline(result: dict[str, Any]) -> str:
    """What was measured on what."""
    settings, machine = result["settings"], result["machine"]
    length = f"{settings['completion']} tokens"
    if settings["ragged"]:
        length = f"lognormal lengths of mean {settings['completion']} before their cap"
    clock = "CPU" if result["clock"] == "cpu" else "wall"
    lora = f", LoRA r {settings['lora']}" if settings["lora"] else ""
    return (
        f"{settings['shape']}, random weights{lora}, {settings['dtype']}; {settings['prompts']} prompt(s) of "
        f"{settings['prompt']} tokens, {settings['group']} completions each, {length}; beta {settings['beta']}. "
        f"Medians of {result['repeats']} in {clock} seconds; {settings['threads']} thread(s), {machine['processor']}, "
        f"load {result['load_average'][0][0]:.1f} before and {result['load_average'][1][0]:.1f} after."
    )


def markdown(result: dict[str, Any]) -> str:
    """The tables of a whole result."""
    if "curves" in result:
        return curves_markdown(result)
    figures = []
    for name, row in result["rows"].items():
        words = ROWS[name].format(**result["versions"])
        if name not in result["medians"]:
            figures.append([words, *["-"] * (len(COLUMNS) + 2), row["failed"]])
            continue
        found = result["medians"][name]
        seconds = [f"{found[column]:.1f}" for column in (*COLUMNS, "step_wall")]
        figures.append([words, *seconds, f"{found['peak_gib']:.2f}", f"{found['tflop']:.2f}"])
    header = ["", "rollout", "reference", "forward + backward", "optimizer", "step", "step, wall", "peak GiB", "TFLOP"]
    parts = [headline(result), table(header, figures)]
    if result["ratios"]:
        ratios = [[name, f"{value:.2f}"] for name, value in result["ratios"].items()]
        parts.append(table(["over zero-grpo", ""], ratios))
    apart = [
        [name, *(f"{values[one]:.1e}" for one in ("logps", "gradient", "tensor"))]
        for name, values in result["equality"].items()
    ]
    parts.append(table(["ours from", "log-probs", "gradient", "worst tensor"], apart))
    if result["gemm"]:
        parts.append(f"GEMM rate: {median(one[result['clock']] for one in result['gemm']):.0f} GFLOP/s.")
    return "\n\n".join(parts)


def curves_markdown(result: dict[str, Any]) -> str:
    rows = [
        [
            f"{point['prompt']:.0f}",
            f"{point['group']:.0f}",
            *(f"{point[column]:.2f}" for column in COLUMNS),
            f"{point['predicted']:.2f}",
            f"{point['measured']:.2f}",
        ]
        for point in curve_points(result)
    ]
    header = ["P", "G", "rollout", "reference", "forward + backward", "optimizer", "step", "predicted", "measured"]
    return "\n\n".join([headline(result), table(header, rows)])
