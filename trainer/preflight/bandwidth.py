"""``zero-grpo hosts HOSTFILE --probe``: how fast the hosts all_reduce, one rank on each.

Fed through ssh to the Python of every host as well, as launcher/probe.py is, once it has told where rank 0 listens.
"""

import base64
import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

BYTES = 2**26
SECONDS_TO_MEET = 40.0


def between(hosts: Sequence[Any], answers: Sequence[Any]) -> str:
    """``hosts`` with their answers to the probe, all of which are there. A line for the eye; "" of one host alone."""
    if len(hosts) < 2:
        return ""
    from trainer.launcher.reach import PACKAGE_ROOT, ask

    first = answers[0]
    common = {"root": str(PACKAGE_ROOT), "MASTER_ADDR": first["address"], "MASTER_PORT": str(first["port"])}
    questions = [
        common | {"RANK": str(rank), "WORLD_SIZE": str(len(hosts)), "interface": answer["facts"]["interface"]}
        for rank, answer in enumerate(answers)
    ]
    with ThreadPoolExecutor(max_workers=len(hosts)) as pool:
        told = list(pool.map(lambda host, question: ask(host, question, __file__), hosts, questions))
    if wrong := [f"{host.name}: {one}" for host, one in zip(hosts, told, strict=True) if isinstance(one, str)]:
        return f"all_reduce between the hosts: not measured ({wrong[0]})"
    measured = [one for one in told if not isinstance(one, str)]
    seconds, backend = max(one["seconds"] for one in measured), measured[0]["backend"]
    rate = 2 * (len(hosts) - 1) / len(hosts) * BYTES / seconds
    return (
        f"all_reduce of {BYTES >> 20} MiB, a rank on each host ({backend}): {seconds * 1000:.0f} ms; each sends "
        f"{rate / 1e9:.2f} GB/s ({rate * 8 / 1e9:.1f} Gb/s)"
    )


def look(question: dict[str, str]) -> dict[str, Any]:
    """On a host: joins the others and measures. The answer's ``address`` is what a probe is expected to tell."""
    sys.path.insert(0, question["root"])
    from trainer.world import connect, disconnect

    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        os.environ[name] = question[name]
    os.environ["LOCAL_RANK"] = "0"
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if question["interface"]:
            os.environ.setdefault(name, question["interface"])
    world = connect("auto", timeout_seconds=SECONDS_TO_MEET, seconds_to_meet=SECONDS_TO_MEET)
    try:
        seconds = world.all_reduce_seconds(BYTES)
    finally:
        disconnect()
    backend = "NCCL" if world.device.type == "cuda" else "gloo"
    return {"seconds": seconds, "backend": backend, "address": question["MASTER_ADDR"]}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(look(json.loads(base64.urlsafe_b64decode(sys.argv[1])))) + "\n")
