"""Samples of a step as files: the form of the user's document for people, JSON with ids for everything else."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from trainer.errors import printable

Row = dict[str, Any]


def picked(rows: Sequence[Row]) -> list[tuple[str, Row]]:
    """The first completion of a step, its best and its worst; of equal rewards, the first and the last."""
    scored = sorted((row for row in rows if row["reward"] is not None), key=lambda row: row["reward"]) or list(rows)
    return [("first", rows[0]), ("best", scored[-1]), ("worst", scored[0])]


def sample_text(samples: Sequence[tuple[str, Row]]) -> str:
    """Begins as the document's file does: Query and Response of the first completion. Safe to print."""
    return "\n".join(
        f"Query: {printable(row['prompt'])}\nResponse: {printable(row['completion'])}\n"
        f"({label}: {facts(row)}, garble {garble(row)})\n"
        for label, row in samples
    )


def garble(row: Row) -> str:
    """The parts that are not 0, such as ``replacement 0.25, control 0.05``."""
    return ", ".join(f"{name} {share:.2g}" for name, share in row["garble"].items() if share) or "none"


def facts(row: Row) -> str:
    """One line: ``reward 0.500 (exact 0.500), group 3.1, row 17, 12 tok, finish stop``."""
    parts = printable(", ".join(f"{name} {worth(value)}" for name, value in row["rewards"].items()))
    return (
        f"reward {worth(row['reward'])}{f' ({parts})' if parts else ''}, group {row['group']}.{row['index']}, "
        f"row {row['row']}, {len(row['completion_ids'])} tok, finish {row['finish']}"
    )


def worth(reward: float | None) -> str:
    return "unscored" if reward is None else f"{reward:.3f}"


def sample_lines(samples: Sequence[tuple[str, Row]], decode: Callable[[list[int]], str]) -> str:
    """JSONL: the whole rows with the parts of their garble, and ``raw``: all tokens as text, special ones too, by
    ``decode``."""
    return "".join(
        json.dumps({"picked": label, **row, "raw": decode(row["completion_ids"])}, ensure_ascii=False) + "\n"
        for label, row in samples
    )
