"""The random generators of this process, as JSON. Sampling does not need them (its noise is keyed); reward functions
may."""

import base64
import hashlib
import random
from typing import Any

import numpy as np
import torch


def seed(number: int) -> None:
    """All of them, so that a run whose rewards draw random numbers can be repeated."""
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)


def seed_anew(number: int, *, step: int, rank: int) -> None:
    """Of a rank that a checkpoint holds nothing of; the same whenever the run goes on from there."""
    digest = hashlib.sha256(f"{number} {step} {rank}".encode()).digest()
    seed(int.from_bytes(digest[:7]))


def capture(device: torch.device) -> dict[str, Any]:
    """States of Python's, NumPy's and torch's global generators, and the device's when it is a GPU."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": [name, np.asarray(keys).tolist(), position, has_gauss, cached],
        "torch": _text(torch.get_rng_state()),
    }
    if device.type == "cuda":
        states["cuda"] = _text(torch.cuda.get_rng_state(device))
    return states


def restore(states: dict[str, Any], device: torch.device) -> None:
    """What ``capture`` returned, also after a trip through JSON."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_tensor(states["torch"]))
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(_tensor(states["cuda"]), device)


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
