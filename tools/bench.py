"""This trainer and TRL's GRPOTrainer at the same work: same weights, prompts, group, forced lengths, dtype and beta.

    python tools/bench.py --shape smollm2-135m --prompt 512 --completion 128 --group 8 --out bench.json

Log-probs and gradients on fixed completions are compared first; unequal ones end the benchmark. Then the rows take one
step each in turn, --repeats times, after one step each that warms up and counts FLOPs. Each side is a process of its
own, so that its peak memory is. Weights are random; shapes are those of the real models. TRL: ./tools/peer.sh.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PEER = ROOT / ".cache" / "peer"
sys.path.insert(0, str(ROOT))
sys.path.append(str(PEER))

from tools.bench_inputs import CAP, SHAPES, Settings, write_inputs  # noqa: E402
from tools.bench_side import OutOfMemory, Side  # noqa: E402
from tools.bench_table import ROWS, curve_points, markdown, summary  # noqa: E402

EQUAL = {"cpu": 1e-5, "cuda": 1e-4}
"""Largest relative difference of log-probs, of the whole gradient and of any tensor's, in fp32, by device."""
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRL_EXPERIMENTAL_SILENCE": "1"}

GROUPS = (1, 2, 4, 8, 16)
PROMPTS = (64, 128, 256, 512, 1024, 2048)


def order_of(row: str, settings: Settings) -> tuple[str, dict[str, Any]]:
    """The side that a row belongs to, and what it is told."""
    match row:
        case "ours":
            return "ours", {"shared": True, "engine": settings.engine}
        case "unshared":
            return "ours", {"shared": False, "engine": "hf"}
        case _:
            return "trl", {"compact": row == "trl-compact", "checkpointing": row == "trl-checkpointing"}


def target(side: str, what: str) -> Callable[..., None]:
    """``serve`` or ``score_fixed`` of a side; imported where it is wanted, since TRL may be missing."""
    return getattr(import_module(f"tools.bench_{side}"), what)


def equality(settings: Settings, folder: Path) -> dict[str, Any]:
    """How far our unshared pass and TRL are from our shared pass, on the same completions."""
    found: dict[str, Any] = {}
    for name in ("ours", "trl"):
        side = Side(name, target(name, "score_fixed"), settings, folder)
        answer = side.answer()
        found |= {"unshared": answer} if name == "ours" else answer
        side.close()
        tell(f"equality: {found}")
    limit = EQUAL[settings.device]
    if any(max(values.values()) > limit for values in found.values()):
        raise SystemExit(f"log-probs or gradients differ by more than {limit}, so there is nothing to compare: {found}")
    return found


def measure_rows(settings: Settings, folder: Path, names: list[str], repeats: int) -> dict[str, Any]:
    """All rows in turn: one step each that counts FLOPs, then ``repeats`` timed ones."""
    rows: dict[str, Any] = {name: {"steps": []} for name in names}
    sides: dict[str, Side] = {}
    rates = []
    for repeat in range(repeats + 1):
        for name in names:
            if "failed" in rows[name]:
                continue
            side, order = order_of(name, settings)
            try:
                measured = opened(sides, side, settings, folder).ask(order | {"flops": repeat == 0})
            except OutOfMemory as error:
                rows[name] |= {"steps": [], "failed": f"out of memory: {error}"}
                tell(f"{name}: out of memory")
                del sides[side]
                continue
            if repeat == 0:
                rows[name]["flops"] = measured["flops"]
            else:
                rows[name]["steps"].append(measured)
            tell(f"{name}, step {repeat} of {repeats}: {shown(measured)}")
        if repeat and "ours" in names and "failed" not in rows["ours"]:
            rates.append(opened(sides, "ours", settings, folder).ask({"gemm": True}))
    for one in sides.values():
        one.close()
    return {"rows": rows, "gemm": rates}


def opened(sides: dict[str, Side], name: str, settings: Settings, folder: Path) -> Side:
    if name not in sides:
        sides[name] = Side(name, target(name, "serve"), settings, folder)
        sides[name].answer()
    return sides[name]


def measure_curves(settings: Settings, folder: Path, repeats: int) -> dict[str, Any]:
    """Our step over G at the settings' prompt, and over P at the settings' group and at one completion."""
    points = {(settings.prompt, group) for group in GROUPS}
    points |= {(prompt, group) for prompt in PROMPTS for group in (1, settings.group)}
    widest = replace(settings, prompt=max(*PROMPTS, settings.prompt), group=max(*GROUPS, settings.group))
    write_inputs(widest, folder)
    side = Side("ours", target("ours", "serve"), widest, folder)
    side.answer()
    _, order = order_of("ours", settings)
    rows: dict[tuple[int, int], Any] = {at: {"prompt": at[0], "group": at[1], "steps": []} for at in sorted(points)}
    for repeat in range(repeats + 1):  # the first one of all warms up
        for (prompt, group), row in rows.items() if repeat else list(rows.items())[:1]:
            measured = side.ask(order | {"prompt": prompt, "group": group, "flops": False})
            row["steps"] += [measured] if repeat else []
            tell(f"P {prompt} G {group}, step {repeat} of {repeats}: {shown(measured)}")
    side.close()
    return {"curves": list(rows.values())}


def shown(measured: dict[str, Any]) -> str:
    parts = ", ".join(f"{phase} {value:.1f}" for phase, value in measured["seconds"]["cpu"].items())
    return f"{sum(measured['seconds']['wall'].values()):.1f} s; CPU {parts}; peak {measured['peak_gib']:.2f} GiB"


def tell(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def machine(settings: Settings) -> dict[str, Any]:
    if settings.device == "cuda":
        import torch

        card = torch.cuda.get_device_properties(0)
        return {"processor": card.name, "memory_gib": settings.memory_gib or round(card.total_memory / 2**30, 1)}
    cpus = Path("/proc/cpuinfo").read_text().splitlines()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": next((line.split(": ")[1] for line in cpus if line.startswith("model name")), platform.machine()),
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "system": platform.platform(),
    }


def commit() -> str:
    found = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    return found.stdout.strip()


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--completion", type=int, default=128, help="tokens of each completion")
    parser.add_argument("--group", type=int, default=8, help="completions of each prompt")
    parser.add_argument("--prompts", type=int, default=1, help="prompts of a step")
    parser.add_argument("--ragged", action="store_true", help="lognormal lengths, sigma 0.7, of that mean, cap 256")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--engine", choices=("shared", "hf"), default="shared", help="rollout.engine of our row")
    parser.add_argument("--lora", type=int, default=0, help="rank on both sides; 0: all weights")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--memory-gib", type=float, default=0.0, help="of the GPU, for each side; 0: all")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--curves", action="store_true", help="our step over G and over P, without TRL")
    parser.add_argument("--out", type=Path, help="JSON: every single time, and what it was measured on")
    arguments = parser.parse_args()
    if arguments.ragged and arguments.completion > CAP:
        parser.error(f"--ragged --completion {arguments.completion}: a mean above the cap of {CAP}")
    return arguments


def main() -> None:
    arguments = parsed()
    settings = Settings(
        **{field: getattr(arguments, field) for field in Settings.__annotations__ if field in arguments}
    )
    peer = () if arguments.curves else ("trl",)
    if peer and find_spec("trl") is None:
        raise SystemExit("TRL is not there. Fix: ./tools/peer.sh, which installs it into .cache/peer.")
    os.environ |= ENVIRONMENT | {"OMP_NUM_THREADS": str(settings.threads)}
    result: dict[str, Any] = {
        "settings": asdict(settings),
        "repeats": arguments.repeats,
        "clock": "cpu" if settings.device == "cpu" and settings.threads == 1 else "wall",
        "commit": commit(),
        "machine": machine(settings),
        "versions": {name: version(name) for name in ("torch", "transformers", "deepspeed", "peft", *peer)},
        "began": time.strftime("%Y-%m-%d %H:%M:%S"),
        "load_average": [os.getloadavg()],
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if arguments.curves:
            result |= measure_curves(settings, folder, arguments.repeats)
            result["points"] = curve_points(result)
        else:
            # Wherever Triton is, TRL compacts by itself.
            rows = [row for row in arguments.rows if row != "trl-compact" or settings.device == "cpu"]
            write_inputs(settings, folder)
            result["equality"] = equality(settings, folder)
            result |= measure_rows(settings, folder, rows, arguments.repeats)
            result |= summary(result)
    result["load_average"].append(os.getloadavg())
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(markdown(result))


if __name__ == "__main__":
    main()
