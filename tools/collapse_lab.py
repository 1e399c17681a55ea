"""Break a small real run in every way that we know, and see what is noticed, when, and what is named as the cause.

    python tools/tiny_model.py .cache/demo-model      # as ./launch/demo.sh makes it
    python tools/collapse_lab.py                      # all runs; what is in .cache/lab already is not repeated
    python tools/collapse_lab.py faults healthy       # some: faults, variants, healthy, or runs by name
    python tools/collapse_lab.py --judge              # trains nothing: judges what is there by the rules as they are

Each run is the demo's model on the demo's sums, one rank on a CPU, forked from this process; each fault is a function
of the trainer replaced in it (tools/lab_faults.py). Prints the confusion matrix, keeps tests/results/collapse-lab.json.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.lab_judge import judge  # noqa: E402
from tools.lab_models import make_models  # noqa: E402
from tools.lab_run import MODEL, commit, run_once  # noqa: E402
from tools.lab_runs import FAULTS, HEALTHY, TUNED, VARIANTS, LabRun  # noqa: E402
from tools.lab_table import page  # noqa: E402

KEPT = ROOT / ".cache" / "lab" / "runs"
RESULTS = ROOT / "tests" / "results" / "collapse-lab.json"
SETS = {"faults": FAULTS, "healthy": HEALTHY, "variants": VARIANTS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="*", default=[*SETS], help=f"{', '.join(SETS)}, or names of runs")
    parser.add_argument("--judge", action="store_true", help="train nothing; leave out what is not there")
    parser.add_argument("--out", type=Path, default=KEPT)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if not (MODEL / "config.json").is_file():
        raise SystemExit(f"{MODEL} is not there. Fix: python tools/tiny_model.py {MODEL.relative_to(ROOT)}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: one thread is as quick at this size
    make_models()
    rows = lab(chosen(arguments.runs), arguments.out, train=not arguments.judge)
    keep(rows, arguments.results)
    print(page(rows))
    print("\n".join(f"- tuned: {what}; on {', '.join(runs)}." for what, runs in TUNED.items()))


def chosen(words: Sequence[str]) -> list[LabRun]:
    """Of sets and names, each run once."""
    known = {run.name: (run,) for runs in SETS.values() for run in runs} | SETS
    if strange := [word for word in words if word not in known]:
        raise SystemExit(f"{', '.join(strange)}: no such run or set. Expected: {', '.join(known)}")
    return list({run.name: run for word in words for run in known[word]}.values())


def lab(runs: Sequence[LabRun], out: Path, *, train: bool) -> list[dict[str, Any]]:
    rows = []
    for run in runs:
        folder = out / re.sub(r"\W+", "-", run.name)
        if train:
            record = run_once(run.name, run.settings, run.patches, run.steps, folder)
        elif (folder / "record.json").is_file():
            record = json.loads((folder / "record.json").read_text())
        else:
            continue
        rows.append(judge(run, record, folder))
        first = rows[-1].get("first_alarm") or {}
        print(
            f"{run.name}: {record['state']} in {record['seconds']} s, first alarm {first.get('step')} "
            f"{first.get('alarm', '')}, garbled at {rows[-1].get('garbled_at')}, named {rows[-1].get('named')}",
            file=sys.stderr,
            flush=True,
        )
    return rows


def keep(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """One run a line."""
    head = {
        "judged_by": commit(),
        "trained_by": sorted({row["commit"] for row in rows}),
        "seconds": round(sum(row["seconds"] for row in rows)),
        "tuned": TUNED,
    }
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows).replace(f"{ROOT}/", "")
    file.write_text(json.dumps(head)[:-1] + ', "runs": [\n' + lines + "\n]}\n")


if __name__ == "__main__":
    main()
