"""Print the before/after table of finished runs as Markdown, and keep the numbers as JSON.

python tools/result_table.py RUN_DIR [RUN_DIR ...] [--json tests/results/NAME.json]
"""

import argparse
import json
import sys
import tomllib
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from trainer.evaluate import Evaluation, Score, rise


def scores(run: Path, kind: str) -> tuple[Score, Score]:
    """The first and the last held-out evaluation of a run."""
    files = sorted((run / "eval").glob("step-*.json"))
    first, last = (Evaluation.of(json.loads(files[place].read_text())) for place in (0, -1))
    return getattr(first, kind), getattr(last, kind)


def summary(run: Path) -> dict[str, Any]:
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    seconds = sum(value for step in metrics for name, value in step.items() if name.startswith("seconds_"))
    found: dict[str, Any] = {
        "seed": tomllib.loads((run / "config.toml").read_text())["run"]["seed"],
        "steps": len(metrics),
        "minutes": round(seconds / 60, 1),
        "kl_first": metrics[0].get("kl"),
        "kl_last": metrics[-1].get("kl"),
        "commit": (json.loads((run / "environment.json").read_text()).get("git") or {}).get("commit"),
    }
    for kind in ("sampled", "greedy"):
        before, after = scores(run, kind)
        difference, error = rise(before, after)
        found[kind] = {
            "prompts": len(after.per_prompt),
            "before": [before.mean, before.stderr],
            "after": [after.mean, after.stderr],
            "rise": [difference, error],
            "standard_errors": difference / error,
        }
    return found


def markdown(rows: list[dict[str, Any]]) -> str:
    def cell(pair: list[float]) -> str:
        return f"{pair[0]:.3f} ± {pair[1]:.3f}"

    lines = [
        "| seed | steps | minutes | held-out accuracy | before | after | rise | KL, first and last step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        for kind in ("sampled", "greedy"):
            one = row[kind]
            rise_cell = f"{one['rise'][0]:+.3f} ± {one['rise'][1]:.3f} ({one['standard_errors']:.1f} s.e.)"
            lines.append(
                f"| {row['seed']} | {row['steps']} | {row['minutes']} | {kind} | {cell(one['before'])} | "
                f"{cell(one['after'])} "
                f"| {rise_cell} | {row['kl_first']:.3f}, {row['kl_last']:.3f} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = [summary(run) for run in arguments.runs]
    print(markdown(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
