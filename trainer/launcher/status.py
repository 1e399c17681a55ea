"""``run_status.json``, for those that end a run from outside; the run itself writes it by ``record.run_dir``."""

import json
import os
from pathlib import Path


def read(run_dir: Path) -> dict[str, object]:
    """Empty where there is none."""
    try:
        found: dict[str, object] = json.loads((run_dir / "run_status.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found


def write(run_dir: Path, status: dict[str, object]) -> None:
    """For ranks that could not record their end; one that did knows less, that its neighbour was gone."""
    path = run_dir / "run_status.json"
    beside = path.with_name(f".{path.name}.tmp")
    beside.write_text(json.dumps(status, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(beside, path)
