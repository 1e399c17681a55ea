"""What a survey found: as one JSON object, and as a page for people. Imports nothing heavy, for what fails early."""

from collections.abc import Iterable, Sequence
from io import StringIO
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trainer.errors import printable
from trainer.record.console import shortened

if TYPE_CHECKING:
    from trainer.preflight.survey import Survey

WIDTH = 100
SECTIONS = ("batch", "prompts", "rewards", "model", "disk", "hosts", "plan", "versions")
"""Objects of the record; {} where a section could not be filled."""


def refused_record(problems: Sequence[str]) -> dict[str, Any]:
    """The record of a run file that cannot be read: nothing else was looked at."""
    return {"ok": False, "errors": list(problems), "warnings": [], "not_checked": ["everything else"]} | {
        name: {} for name in SECTIONS
    }


def record(found: "Survey") -> dict[str, Any]:
    """JSON-safe. The names are stable."""
    return {
        "ok": not found.errors,
        "errors": found.errors,
        "warnings": found.warnings,
        "not_checked": found.unasked,
        "batch": found.batch.record() if found.batch else {},
        "prompts": _prompts(found),
        "rewards": found.probes.record() if found.probes else {},
        "model": _model(found),
        "disk": found.disk.record() if found.disk else {},
        "hosts": found.hosts,
        "plan": found.memory.record() if found.memory else {},
        "versions": found.versions,
    }


def _prompts(found: "Survey") -> dict[str, Any]:
    sets = found.prompts
    if sets is None:
        return {}
    lengths = [len(prompt.ids) for prompt in sets.train]
    return {
        "train": len(sets.train),
        "eval": len(sets.eval),
        "shortest": min(lengths),
        "longest": max(lengths),
        "left_out": sets.left_out,
        "cut": sets.cut,
        "first": sets.train[0].text,
    }


def _model(found: "Survey") -> dict[str, Any]:
    told: dict[str, Any] = {}
    if found.causal is not None:
        told["class"] = type(found.causal).__name__
    if found.parameters is not None:
        told |= {"parameters": found.parameters.total, "trained": found.parameters.trained}
    if found.dtype is not None:
        told["dtype"] = str(found.dtype).removeprefix("torch.")
    if found.window is not None:
        told |= {"window": found.window.limit, "window_rule": found.window.rule}
    if (lengths := found.lengths) is not None:
        told["longest_row"] = lengths.need
    if found.tokenizer is not None:
        told["tokenizer"] = len(found.tokenizer)
    if found.stops is not None:
        told["stop_ids"] = list(found.stops.ids)
    return told


def page(found: "Survey") -> str:
    """Errors first, then warnings, then what was found, within 100 columns; safe to print."""
    parts: list[RenderableType] = [
        *_listed("error", found.errors),
        *_listed("warning", found.warnings),
    ]
    if found.unasked:
        parts.append(Text(f"not checked, for want of what is missing: {', '.join(found.unasked)}\n"))
    if found.batch is not None:
        parts.append(_batch_table(found.batch.record()))
    if found.probes is not None and found.probes.scores:
        parts.append(_reward_table(found))
    parts.append(_facts(found))
    verdict = f"{_counted('error', found.errors)}, {_counted('warning', found.warnings)}"
    parts.append(Text(f"{'refused' if found.errors else 'ready'}: {verdict}; nothing was trained or written"))
    out = StringIO()
    console = Console(file=out, width=WIDTH, force_terminal=False, markup=False, emoji=False, highlight=False)
    for part in parts:
        console.print(part)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _counted(kind: str, told: Sequence[str]) -> str:
    return f"{len(told) or 'no'} {kind}{'' if len(told) == 1 else 's'}"


def _listed(kind: str, told: Sequence[str]) -> Iterable[RenderableType]:
    if not told:
        return
    yield Text(_counted(kind, told))
    table = Table.grid(padding=(0, 1), pad_edge=True)
    table.add_column(justify="right", width=3)
    table.add_column()
    for number, one in enumerate(told, 1):
        table.add_row(f"{number}.", printable(one))
    yield Padding(table, (0, 0, 1, 0))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="none", box=box.SIMPLE_HEAD, pad_edge=True)
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left", overflow="fold")
    return table


def _scaled(count: float, unit: str, size: float) -> str:
    """Three digits, also of the small."""
    return f"{count / size:,.1f} {unit}" if count >= 10 * size else f"{count / size:.3g} {unit}"


def _span(low: int, high: int) -> str:
    return f"{high:,}" if low == high else f"{low:,} to {high:,}"


def _batch_table(batch: dict[str, Any]) -> Table:
    ranks, completions, tokens = batch["ranks"], batch["completions_per_step"], batch["completion_tokens_per_step"]
    a_rank = "a rank" if ranks == 1 else f"each of {ranks} ranks"
    table = _table("Batch", "", "a step", a_rank, "a micro-batch")
    fewest, most = batch["completions_per_rank"]
    table.add_row("prompts", f"{batch['prompts_per_step']:,}", _span(*batch["prompts_per_rank"]), "")
    table.add_row(
        f"completions, {batch['num_generations']} a prompt",
        f"{completions:,}",
        _span(fewest, most),
        f"up to {batch['completions_per_micro_batch']:,}",
    )
    new = tokens // completions
    table.add_row("tokens sampled, at most", f"{tokens:,}", _span(fewest * new, most * new), "")
    table.add_row(
        "tokens in training passes, at most",
        "",
        f"{batch['tokens_per_rank']:,}",
        f"{batch['tokens_per_micro_batch']:,}",
    )
    table.add_row("micro-batches, at most", "", f"{batch['micro_batches_per_rank']:,}", "")
    table.add_row("updates of the weights", f"{batch['updates_per_step']:,}", "", "")
    table.caption = (
        f" {batch['steps']:,} steps, {batch['updates']:,} updates, {batch['epochs']:g} passes over the prompts\n"
    )
    table.caption_justify, table.caption_style = "left", "none"
    return table


def _reward_table(found: "Survey") -> Table:
    assert found.probes is not None
    names = list(dict.fromkeys(name for scores in found.probes.scores.values() for name in scores))
    table = _table(
        f"Rewards, tried on row {found.probes.row}", "", "weight", *(TRIED[name] for name in names), "seconds"
    )
    weights = {section.name: section.weight for section in found.config.reward}
    for name, scores in found.probes.scores.items():
        shown = ["none" if scores[one] is None else f"{scores[one]:.4g}" for one in names]
        table.add_row(name, f"{weights[name]:g}", *shown, f"{found.probes.seconds[name]:.2f}")
    return table


TRIED = {"reference": "its answer", "shuffled": "another row's", "empty": "nothing said", "prompt": "its prompt"}


def _facts(found: "Survey") -> Table:
    table = Table.grid(padding=(0, 2), pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, fact in _told(found):
        table.add_row(f" {name}", printable(fact))
    table.add_row("", "")
    return table


def _told(found: "Survey") -> Iterable[tuple[str, str]]:
    model, prompts = _model(found), _prompts(found)
    if "parameters" in model:
        whole, trained = (_scaled(model[name], "M", 1e6) for name in ("parameters", "trained"))
        yield "model", f"{model['class']}, {whole} parameters, of which {trained} train"
    if found.window is not None:
        needed = f"{found.lengths}, " if found.lengths else ""
        yield "context", f"{needed}of {found.window.limit} tokens: {found.window.rule}"
    if found.tokenizer is not None and found.stops is not None:
        ends = ", ".join(f"{one} ({found.tokenizer.convert_ids_to_tokens(one)})" for one in found.stops.ids)
        yield "tokenizer", f"{len(found.tokenizer)} tokens; a completion ends with {ends or 'none of them'}"
    if prompts:
        lost = f", {prompts['cut']} cut at their beginning" if prompts["cut"] else ""
        kept = f"{prompts['train']:,} to train on, {prompts['eval']:,} held out"
        yield "prompts", f"{kept}; {prompts['left_out']} rows left out{lost}"
    for note in found.notes:
        name, _, rest = note.partition(" ")
        if name == "device":
            yield name, rest
        elif not note.startswith(("first prompt", f"{found.steps} steps of")):  # which are shown otherwise
            yield "", note
    if prompts:
        yield "the first", shortened(prompts["first"]).rstrip()
    if found.unread:
        yield "weights", found.unread
    if found.memory is not None:
        yield "memory", found.memory.line()
    if (disk := found.disk) is not None:
        one, all_kept, free = (_scaled(size, "GB", 1e9) for size in (disk.checkpoint, disk.needed, disk.free))
        kept = f"checkpoint.keep = {disk.keep} and the one being written {all_kept}"
        yield "disk", f"a checkpoint takes {one}; {kept}, of {free} that are free in {disk.path}"
    if found.hosts:
        listed = ", ".join(f"{host} ({slots} ranks)" for host, slots in found.hosts.items())
        yield "hosts", f"{listed}; `zero-grpo hosts HOSTFILE --probe` asks them"
    yield "versions", ", ".join(f"{name} {version}" for name, version in found.versions.items() if version)
