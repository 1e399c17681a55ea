"""What of a step grows with the ranks: bytes and messages by formula, and a counter that the formulas are checked by.

Usage: python tools/comm.py [GPUS ...]: the table of launch/README.md, for 8, 64 and 512 by default.
"""

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

Part = tuple[str, str]
"""What of a step a collective belongs to, and its kind: ("gradients", "all_reduce")."""


@dataclass(frozen=True)
class Step:
    """One optimizer step: weights by count, sizes in bytes, passes by count; ``micro`` and ``forwards`` of one rank."""

    stage: int
    ranks: int
    weights: int
    """All of them, trained or frozen."""
    trained: int
    itemsize: int
    """Of a weight."""
    micro: int
    """Passes with a gradient."""
    forwards: int = 0
    """Passes without one: the reference's, scoring."""
    gradient_itemsize: int = 4
    head: int = 0
    """Weights of a head that is the embedding, too: stage 3 gathers it twice a pass, first and last."""
    persistent: int = 0
    """Those that stage 3 keeps whole on every rank, since they are small: norms, biases, adapters."""
    recomputed: int = 0
    """Those that gradient checkpointing has stage 3 gather once more a pass: of the layers, all but the last projection
    of each, which is still there; of adapters all, a bound."""
    modules: int = 0
    """That hold weights: stage 3 gathers by modules."""
    recomputed_modules: int = 0
    bucket: int = 50_000_000
    """Gradients of one reduction: as ds_configs/ have it, of stage 3 hidden_size squared."""


def payloads(step: Step) -> dict[Part, float]:
    """Bytes that go into each kind of collective, of one rank and step: what is reduced, or the whole that is gathered.

    Of adapters under stage 3 an upper bound: what is frozen and only read is not gathered for every backward pass.
    """
    gradients = step.trained * step.gradient_itemsize
    if step.stage == 0:
        return {("backward", "all_reduce"): gradients}
    if step.stage in (1, 2):
        # Its buckets hold the shards of several ranks, and are reduced whole: not the half that a reduce_scatter sends.
        return {
            ("backward", "all_reduce"): gradients * (step.micro if step.stage == 2 else 1),
            ("step", "all_gather"): step.trained * step.itemsize,
        }
    read = (step.weights + step.head) * step.itemsize
    return {
        ("rollout", "all_gather"): (step.weights - step.persistent) * step.itemsize,
        ("forward", "all_gather"): read * (step.micro + step.forwards),
        ("backward", "all_gather"): (read + step.recomputed * step.itemsize) * step.micro,
        ("backward", "reduce_scatter"): gradients * step.micro,
        ("step", "all_gather"): step.persistent * step.itemsize,
    }


GATHERED = 200_000_000
"""Weights of one gathering under stages 1 and 2, as ds_configs/ have it."""


def calls(step: Step) -> dict[Part, int]:
    """How many collectives of each kind. Under stage 3 a bound: one a module, where small ones may go together."""
    buckets = math.ceil(step.trained / step.bucket)
    if step.stage == 0:
        return {("backward", "all_reduce"): buckets}
    if step.stage in (1, 2):
        return {
            ("backward", "all_reduce"): buckets * (step.micro if step.stage == 2 else 1),
            ("step", "all_gather"): max(1, step.trained // GATHERED),
        }
    return {
        ("rollout", "all_gather"): step.modules,
        ("forward", "all_gather"): step.modules * (step.micro + step.forwards),
        ("backward", "all_gather"): (step.modules + step.recomputed_modules) * step.micro,
        ("backward", "reduce_scatter"): min(step.modules, buckets) * step.micro,
        ("step", "all_gather"): step.modules,
    }


def sent(kind: str, payload: float, ranks: int) -> float:
    """Bytes that a rank sends for it in a ring, which is the least."""
    share = (ranks - 1) / ranks
    return payload * share * (2 if kind == "all_reduce" else 1)


PAYLOAD: dict[str, Callable[[tuple[Any, ...], dict[str, Any]], Any]] = {
    "all_reduce": lambda a, k: a[0] if a else k["tensor"],
    "reduce": lambda a, k: a[0] if a else k["tensor"],
    "broadcast": lambda a, k: a[0] if a else k["tensor"],
    "all_gather": lambda a, k: a[0] if a else k["tensor_list"],
    "all_gather_into_tensor": lambda a, k: a[0] if a else k["output_tensor"],
    "reduce_scatter_tensor": lambda a, k: a[1] if len(a) > 1 else k["input"],
    "reduce_scatter": lambda a, k: a[1] if len(a) > 1 else k["input_list"],
    "all_to_all_single": lambda a, k: a[0] if a else k["output"],
}
"""The tensors that say how large a collective is."""
KIND = {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter"}

PLACES = (
    ("rollout/", "", "rollout"),
    ("engine.py", "gathered", "rollout"),
    ("engine.py", "whole", "whole"),
    ("engine.py", "backward_sum", "backward"),
    ("engine.py", "step", "step"),
    ("engine.py", "_grad_norm", "norm"),
    ("engine.py", "__call__", "forward"),
    ("world.py", "gather_objects", "objects"),
    ("world.py", "", "sums"),
)
"""File and function of the trainer's innermost frame -> part of a step."""


class Counter:
    """Calls and bytes of every collective of torch.distributed, by part of a step and kind."""

    def __init__(self) -> None:
        self.calls: dict[Part, int] = defaultdict(int)
        self.bytes: dict[Part, int] = defaultdict(int)

    def note(self, name: str, tensors: Any) -> None:
        each = tensors if isinstance(tensors, list | tuple) else [tensors]
        part = (place(), KIND.get(name, name))
        self.calls[part] += 1
        self.bytes[part] += sum(one.numel() * one.element_size() for one in each)

    def clear(self) -> None:
        self.calls.clear()
        self.bytes.clear()

    def told(self) -> dict[str, list[int]]:
        """ "part kind" -> [calls, bytes]."""
        return {" ".join(part): [self.calls[part], self.bytes[part]] for part in sorted(self.calls)}


def place() -> str:
    """Who asked for it, by the innermost frame of the trainer."""
    frame = sys._getframe(2)
    while frame:
        file = frame.f_code.co_filename
        if "/trainer/" in file:
            inside, function = file.rpartition("/trainer/")[2], frame.f_code.co_name
            for path, wanted, part in PLACES:
                if inside.startswith(path) and wanted in ("", function):
                    return part
        if not frame.f_back:
            return "other"
        frame = frame.f_back
    return "other"


@contextmanager
def counted() -> Iterator[Counter]:
    """Collectives are counted while it lasts. DeepSpeed keeps some of the functions: enter before it is imported."""
    import torch.distributed as dist

    counter = Counter()
    plain = {name: getattr(dist, name) for name in PAYLOAD}

    def wrapped(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            counter.note(name, PAYLOAD[name](arguments, keywords))
            return plain[name](*arguments, **keywords)

        return call

    for name in PAYLOAD:
        setattr(dist, name, wrapped(name))
    try:
        yield counter
    finally:
        for name, function in plain.items():
            setattr(dist, name, function)


LINKS = {"25 Gb/s": 25e9 / 8, "100 Gb/s": 100e9 / 8, "400 Gb/s": 400e9 / 8}
HOP_SECONDS = 10e-6
"""An assumption: what a hop of a ring takes beside its bytes."""
TOKENS, COMPLETIONS = 500, 16
"""Of a completion, and completions of a rank and step."""
BYTES_OF_A_TOKEN, BYTES_OF_A_COMPLETION = 12, 300
"""Of what the ranks tell each other to deal out the groups: an id, a log-prob, and a share of the record."""

LAYER, DOWN = 233_057_792, 3584 * 18944
"""Weights of a layer of 7B, and of its last projection; it has nine modules with weights, and 14 of adapters."""
CASES = {
    "1.5B, all weights, zero1": Step(1, 0, 1_543_714_304, 1_543_714_304, 2, micro=4),
    "1.5B, all weights, zero2": Step(2, 0, 1_543_714_304, 1_543_714_304, 2, micro=4),
    "7B, LoRA r = 16, zero2": Step(2, 0, 7_615_616_512, 40_370_176, 2, micro=4),
    "7B, all weights, zero3": Step(
        *(3, 0, 7_615_616_512, 7_615_616_512, 2),
        micro=4,
        forwards=4,
        recomputed=28 * (LAYER - DOWN),
        modules=28 * 9 + 3,
        recomputed_modules=28 * 8,
        bucket=3584**2,
    ),
    "7B, LoRA r = 16, zero3": Step(
        *(3, 0, 7_615_616_512 + 40_370_176, 40_370_176, 2),
        micro=4,
        forwards=4,
        recomputed=28 * LAYER + 40_370_176,
        modules=28 * (9 + 14) + 3,
        recomputed_modules=28 * (9 + 14),
        bucket=3584**2,
    ),
}
"""Qwen2.5 in bf16, 4 passes a rank and step, zero3 with gradient checkpointing; the reference of all weights under
zero3 is a copy in shards."""


def seconds(step: Step, link: float) -> tuple[float, float, int]:
    """(bytes that a rank sends, seconds of a ring through one such link a host, messages of a rank) of one step."""
    total, messages = 0.0, 0
    many = calls(step)
    for part, payload in payloads(step).items():
        total += sent(part[1], payload, step.ranks)
        messages += many[part] * (step.ranks - 1) * (2 if part[1] == "all_reduce" else 1)
    return total, total / link + messages * HOP_SECONDS, messages


def table(counts: list[int]) -> str:
    """Markdown."""
    lines = [f"| run, ranks | GB a rank sends | messages | {' | '.join(LINKS)} | told by all, MB |"]
    lines += ["|---" * (4 + len(LINKS)) + "|"]
    for name, case in CASES.items():
        for ranks in counts:
            step = replace(case, ranks=ranks)
            total, _, messages = seconds(step, 1.0)
            times = [f"{seconds(step, link)[1]:.1f} s" for link in LINKS.values()]
            told = ranks * COMPLETIONS * (TOKENS * BYTES_OF_A_TOKEN + BYTES_OF_A_COMPLETION) / 1e6
            lines.append(f"| {name}, {ranks} | {total / 1e9:.1f} | {messages:,} | {' | '.join(times)} | {told:.1f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table([int(word) for word in sys.argv[1:]] or [8, 64, 512]))
