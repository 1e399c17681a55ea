"""``run_status.json``, how a run stands: written by its ranks, and by those that end it from outside."""

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

NAME = "run_status.json"


def read(run_dir: Path) -> dict[str, Any]:
    """Empty where there is none, or none that can be read."""
    try:
        found = json.loads((run_dir / NAME).read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def amend(run_dir: Path, **changed: Any) -> None:
    """What is not given stays. The whole file or nothing: written beside and moved over.

    OSError where the disk refuses.
    """
    status = read(run_dir) | changed | {"updated": datetime.now(UTC).isoformat(timespec="seconds")}
    path = run_dir / NAME
    beside = path.with_name(f".{NAME}.tmp")
    # A lone surrogate is no UTF-8; backslashreplace writes it as \udXXX, which is JSON's own escape.
    beside.unlink(missing_ok=True)  # a link, say, through which "w" would write
    with beside.open("x", encoding="utf-8", errors="backslashreplace") as file:
        file.write(json.dumps(status, indent=2, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
