"""What the user's document says of KL coefficients, rates and lengths, measured on the demo's model with real runs.

    python tools/seed_claims.py

Runs that are there already (.cache/seed-claims) are not repeated. Prints the tables and writes
tests/results/seed-claims.json. About 20 minutes of one core.

The model is a thousand times smaller than the document's: its rate 2e-5 stands for the demo's 1e-3 (and 5e-5 for
2.5e-3), its 128 new tokens for 8, since an answer here has 5 tokens. Coefficients are the document's own.
"""

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from torch import Tensor  # noqa: E402

import trainer.update  # noqa: E402
from tools.lab_faults import coefficient_by_ranks, kl_sign  # noqa: E402
from tools.lab_run import MODEL, Patch, Replace, run_once  # noqa: E402
from trainer.algorithm.loss import Objective  # noqa: E402
from trainer.record.run_dir import read_metrics  # noqa: E402

CACHE, RESULTS = ROOT / ".cache" / "seed-claims", ROOT / "tests" / "results" / "seed-claims.json"
COEFFICIENTS = (0.01, 0.1, 0.2, 0.5, 0.8, 1.0)
CARDS = 4
"""Of the document, by which it divides."""
LAST = 10
"""Steps at the end of a run that its numbers are means of."""
GARBLED = 0.4
BASE = {"rollout.max_new_tokens": 16, "watch.on_garble": "stop"}
"""A run whose text is gone ends: two steps in a row with 40 % garbled."""


def reference_in_bf16(put: Replace) -> None:
    """The reference's log-probs are rounded, as those of another engine are; else KL and its gradient would stay 0."""
    real = trainer.update.sampled_kl

    def rounded(logps: Tensor, reference_logps: Tensor, estimator: Any) -> Tensor:
        return real(logps, reference_logps.bfloat16().float(), estimator)

    put(trainer.update, "sampled_kl", rounded)


def reward_without_gradient(put: Replace) -> None:
    """The document's loss is ``(rewards - c * kl).mean()``; a reward of sampled text has no gradient."""
    real = trainer.update.policy_objective

    def constant(*arguments: Any, **options: Any) -> Objective:
        objective = real(*arguments, **options)
        return objective._replace(loss=0 * objective.loss)

    put(trainer.update, "policy_objective", constant)


@dataclass(frozen=True)
class Run:
    table: str
    what: str
    settings: dict[str, Any]
    patches: tuple[Patch, ...] = ()
    ranks: int = 1
    seeds: int = 1
    steps: int = 120
    shown: dict[str, Any] = field(default_factory=dict)
    """Columns of its own."""


RIGHT, ON_TWO = "as it should be", "as it should be, 2 ranks"
VARIANTS: dict[str, tuple[Patch, ...]] = {
    RIGHT: (),
    "KL sign of the document": (kl_sign,),
    "loss of the document": (kl_sign, reward_without_gradient, reference_in_bf16),
}


def runs() -> Iterator[Run]:
    for what, patches in VARIANTS.items():
        for coef in COEFFICIENTS:
            steps = 150 if kl_sign in patches else 120
            yield Run("coefficient", what, {"grpo.kl.coef": coef}, patches, steps=steps, shown={"coefficient": coef})
    for coef in (0.1, 1.0):
        settings = {"grpo.kl.coef": coef}
        yield Run("coefficient", ON_TWO, settings, ranks=2, steps=60, shown={"coefficient": coef})
    decay = {"grpo.kl.coef": 0.5, "grpo.kl.schedule": "warmup_decay", "grpo.kl.start": 0.01, "grpo.kl.min": 0.1}
    yield Run("schedule", "fixed 0.5", {"grpo.kl.coef": 0.5}, seeds=2)
    # 200 of the 1,200 steps that it speaks of.
    yield Run("schedule", "0.01 to 0.5, then down to 0.1", decay | {"grpo.kl.warmup_steps": 20}, seeds=2)
    yield Run("schedule", "fixed 0.1", {"grpo.kl.coef": 0.1}, seeds=2)
    for named, rate in (("2e-5", 1e-3), ("5e-5", 2.5e-3)):
        for coef in (0.5, 0.3):
            settings = {"grpo.kl.coef": coef, "optim.lr": rate}
            yield Run("rate", named, settings, seeds=2, steps=80, shown={"rate here": rate, "coefficient": coef})
    for named, tokens in (("64", 4), ("128", 8), ("256", 16)):
        settings = {"grpo.kl.coef": 0.5, "rollout.max_new_tokens": tokens}
        yield Run("new tokens", named, settings, steps=80, shown={"tokens here": tokens})
    for coef in COEFFICIENTS:
        divided, shown = (coefficient_by_ranks(CARDS),), {"coefficient": coef}
        yield Run("coefficient", f"coefficient / {CARDS}", {"grpo.kl.coef": coef}, divided, shown=shown)


def folder_of(run: Run, seed: int = 0) -> Path:
    """One for runs that differ in nothing but the table they stand in."""
    asked = json.dumps([run.settings, [patch.__name__ for patch in run.patches], run.ranks, seed], sort_keys=True)
    return CACHE / f"{hashlib.sha256(asked.encode()).hexdigest()[:10]}-{run.steps}"


def measured(run: Run, seed: int) -> dict[str, Any]:
    """One row; the run is made unless it is there."""
    folder = folder_of(run, seed)
    settings = BASE | run.settings | {"run.seed": seed, "data.seed": seed}
    record = run_once(folder.name, settings, run.patches, run.steps, folder, ranks=run.ranks, doctor=False)
    metrics = read_metrics(folder / "run")
    past = [one["step"] for one in metrics if one["garble_rate"] >= GARBLED]
    row = {"table": run.table, "run": run.what, **run.shown, "ranks": run.ranks, "seed": seed, "steps": len(metrics)}
    row |= {"state": record["state"], "garbled_at": past[0] if past else None, "seconds": record["seconds"]}
    if record["state"] == "crashed":
        row["reason"] = record["reason"]
    for key in ("garble_rate", "reward_mean", "kl", "entropy", "truncated_fraction"):
        values = [one[key] for one in metrics[-LAST:] if key in one]
        row[key] = statistics.fmean(values) if values else None
    return row


def apart() -> dict[str, Any]:
    """Largest difference of a step on 2 ranks and on 1, of the runs that were made on both."""
    most: dict[str, float] = {}
    both = [run for run in runs() if run.what == ON_TWO]
    for run in both:
        alone = next(one for one in runs() if one.what == RIGHT and one.shown == run.shown)
        pair = [read_metrics(folder_of(one) / "run") for one in (run, alone)]
        for two, single in zip(*pair, strict=False):
            for key in ("reward_mean", "kl", "garble_rate"):
                most[key] = max(most.get(key, 0.0), abs(two[key] - single[key]))
    steps = {run.shown["coefficient"]: run.steps for run in both}
    return {"steps_by_coefficient": steps, "largest_difference": most}


def table(rows: Sequence[dict[str, Any]], own: Sequence[str]) -> Iterator[str]:
    """Markdown; seeds of one run are one line, ± one standard error of their mean."""
    columns = ("garbled", "reward", "KL", "40 % garbled at step", "steps")
    yield "| run | " + " | ".join((*own, *columns)) + " |"
    yield "|---" * (1 + len(own) + len(columns)) + "|"
    kinds: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        kinds.setdefault((row["run"], *(row[key] for key in own)), []).append(row)
    for kind, same in kinds.items():
        ends = ", ".join("never" if row["garbled_at"] is None else str(row["garbled_at"]) for row in same)
        steps = ", ".join(str(row["steps"]) for row in same)
        numbers = [mean([row[key] for row in same], form) for key, form in NUMBERS]
        yield (
            "| "
            + " | ".join((*(f"{one:g}" if isinstance(one, float) else str(one) for one in kind), *numbers, ends, steps))
            + " |"
        )


NUMBERS = (("garble_rate", ".1%"), ("reward_mean", ".3f"), ("kl", ".3g"))


def mean(values: Sequence[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    error = statistics.stdev(known) / len(known) ** 0.5 if len(known) > 1 else 0.0
    return f"{statistics.fmean(known):{form}}" + (f" ± {error:{form}}" if error else "")


def main() -> None:
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
    if not (MODEL / "config.json").is_file():
        raise SystemExit(f"{MODEL} is not there. Fix: python tools/tiny_model.py {MODEL.relative_to(ROOT)}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows = []
    for run in runs():
        for seed in range(run.seeds):
            rows.append(row := measured(run, seed))
            print(json.dumps(row), file=sys.stderr, flush=True)
    same, seconds = apart(), sum(row["seconds"] for row in rows)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    found = {"commit": commit.stdout.strip(), "seconds": round(seconds), "ranks_apart": same, "runs": rows}
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    for name in dict.fromkeys(run.table for run in runs()):
        own = next(list(run.shown) for run in runs() if run.table == name)
        print("", *table([row for row in rows if row["table"] == name], own), sep="\n")
    print(f"\n1 rank against 2: {json.dumps(same)}")


if __name__ == "__main__":
    main()
