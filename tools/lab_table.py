"""The results of the collapse lab as text: the confusion matrix, the alarms' times, the peers' words, the totals."""

from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]


def page(rows: Sequence[Row]) -> str:
    """Everything, as Markdown."""
    broken = [row for row in rows if row["causes"]]
    parts = []
    for title, kind in (("Faults", False), ("Variants of them, held out", True)):
        if chosen := [row for row in broken if row["held_out"] == kind]:
            parts += [f"## {title}", matrix(chosen), times(chosen), peers(chosen)]
    if healthy := [row for row in rows if not row["causes"]]:
        parts += ["## Healthy runs", false_alarms(healthy), peers(healthy)]
    return "\n\n".join([*parts, "## Totals", totals(rows)])


def matrix(rows: Sequence[Row]) -> str:
    """Injected cause x named cause: 1 and 2 by the doctor's two halves together, ``a``: the first alarm's suspicion."""
    columns: list[str] = []
    for row in rows:
        columns += [cause for cause in row["causes"][:1] if cause not in columns]
    for row in rows:
        columns += [cause for cause in (*_named(row)[:2], _suspected(row)) if cause and cause not in columns]
    letters = {cause: chr(ord("A") + place) for place, cause in enumerate(columns)}
    lines = [_line("injected", *letters.values(), "right"), _line("---", *["---"] * len(columns), "---")]
    for row in rows:
        cells = []
        for cause in columns:
            marks = [str(place) for place, named in enumerate(_named(row)[:2], start=1) if named == cause]
            marks += ["a"] if _suspected(row) == cause else []
            cells.append(" ".join(marks))
        lines.append(_line(f"{row['name']} ({letters[row['causes'][0]]})", *cells, _right(row)))
    named = ", ".join(f"{letter} {cause}" for cause, letter in letters.items())
    return "\n".join(lines) + f"\n\n1, 2: the doctor's first and second cause; a: suspected by the first alarm. {named}"


def times(rows: Sequence[Row]) -> str:
    """When the first alarm came, and when it would have been too late."""
    head = ("first alarm at step", "alarm", "garbled past 40 % at", "most garbled", "RUN_DIR", "RUN.toml")
    lines = [_line("fault", *head)]
    lines.append(_line(*["---"] * 7))
    for row in rows:
        first = row.get("first_alarm") or {
            "step": row.get("state", "none") if row.get("steps") == 0 else "none",
            "alarm": "",
        }
        garbled = [row.get("garbled_at") or "never", f"{row.get('garble_most', 0):.0%}"]
        named = [(row.get(key) or [["-"]])[0][0] for key in ("by_records", "by_parts")]
        lines.append(_line(row["name"], first["step"], first["alarm"], *garbled, *named))
    return "\n".join(lines)


def peers(rows: Sequence[Row]) -> str:
    if not any(row.get("peers") for row in rows):
        return "rlprobe and rldoctor are not installed (tools/lab_peers.sh), or had no run to read."
    lines = [_line("run", "zero-grpo", "rlprobe 0.1.0", "rldoctor 0.2.0"), _line(*["---"] * 4)]
    for row in rows:
        said = row.get("peers", {})
        words = ["; ".join(said.get(name, ())) or "-" for name in ("rlprobe", "rldoctor")]
        lines.append(_line(row["name"], "; ".join(_named(row)[:2]) or "-", *words))
    return "\n".join(lines)


def false_alarms(rows: Sequence[Row]) -> str:
    lines = [_line("run", "alarms", "causes named", "reward", "KL", "garbled"), _line(*["---"] * 6)]
    for row in rows:
        alarms = ", ".join(f"{name} at {step}" for name, step in row.get("alarms", {}).items()) or "-"
        end = row.get("end", {})
        numbers = [f"{end[key]:.3g}" if key in end else "-" for key in ("reward_mean", "kl", "garble_rate")]
        lines.append(_line(row["name"], alarms, ", ".join(_named(row)) or "-", *numbers))
    return "\n".join(lines)


def totals(rows: Sequence[Row]) -> str:
    lines = []
    for title, held_out in (("faults", False), ("held-out variants", True)):
        broken = [row for row in rows if row["causes"] and row["held_out"] == held_out]
        if not broken:
            continue
        first = sum(_named(row)[:1] != [] and _named(row)[0] in row["causes"] for row in broken)
        two = sum(bool({*_named(row)[:2]} & {*row["causes"]}) for row in broken)
        alone = {
            key: sum(bool(row.get(key)) and row[key][0][0] in row["causes"] for row in broken)
            for key in ("by_records", "by_parts")
        }
        late = [row for row in broken if row.get("garbled_at")]
        early = [row for row in late if row["first_alarm"] and row["first_alarm"]["step"] < row["garbled_at"]]
        lines.append(
            f"- {title}: right cause first in {first} of {len(broken)}, among the first two in {two}; by RUN_DIR alone "
            f"{alone['by_records']}, by RUN.toml alone {alone['by_parts']}. An alarm in "
            f"{sum(bool(row.get('first_alarm')) for row in broken)}; before 40 % of the text was garbled in "
            f"{len(early)} of {len(late)} where that came."
        )
    for title, chosen in (
        ("healthy runs", [row for row in rows if not row["causes"]]),
        ("of them held out", [row for row in rows if not row["causes"] and row["held_out"]]),
    ):
        alarmed = sum(bool(row.get("alarms")) for row in chosen)
        named = sum(bool(_named(row)) for row in chosen)
        loud = {peer: sum(bool(row.get("peers", {}).get(peer)) for row in chosen) for peer in ("rlprobe", "rldoctor")}
        lines.append(
            f"- {title}: {len(chosen)}; alarmed {alarmed}; called ill by the doctor {named}; findings by rlprobe in "
            f"{loud['rlprobe']}, by rldoctor in {loud['rldoctor']}."
        )
    lines += [f"- {row['name']}: {row['note']}." for row in rows if row.get("note")]
    return "\n".join(lines)


def _named(row: Row) -> list[str]:
    return [cause for cause, _ in row.get("named", ())]


def _suspected(row: Row) -> str:
    return (row.get("first_alarm") or {"cause": ""})["cause"]


def _right(row: Row) -> str:
    named = _named(row)
    if named and named[0] in row["causes"]:
        return "first"
    return "second" if {*named[:2]} & {*row["causes"]} else "no"


def _line(*cells: Any) -> str:
    return f"| {' | '.join(map(str, cells))} |"
