"""The random generators of this process, as JSON. Sampling does not need them (its noise is keyed); reward functions
may."""

import base64
import random
from typing import Any

import numpy as np
import torch


def seed(number: int) -> None:
    """All of them, so that a run whose rewards draw random numbers can be repeated."""
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)


def capture() -> dict[str, Any]:
    """States of Python's, NumPy's and torch's global generators, the current GPU's included."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": [name, np.asarray(keys).tolist(), position, has_gauss, cached],
        "torch": _text(torch.get_rng_state()),
    }
    if torch.cuda.is_available():
        states["cuda"] = _text(torch.cuda.get_rng_state())
    return states


def restore(states: dict[str, Any]) -> None:
    """What ``capture`` returned, also after a trip through JSON."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_tensor(states["torch"]))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(_tensor(states["cuda"]))


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
