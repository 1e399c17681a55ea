"""Peak memory of a step: CUDA keeps count itself; on a CPU, live tensor storages are counted here."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves


class PeakMemory:
    """Inside the ``with``, ``take_peak`` returns the most bytes that tensors held at once since the last call."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.storages = None if device.type == "cuda" else _LiveStorages()

    def __enter__(self) -> "PeakMemory":
        if self.storages is not None:
            self.storages.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.storages is not None:
            self.storages.__exit__(kind, error, trace)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Without a look at each operator of a CPU, for what holds no more than something counted has held."""
        if self.storages is None or _get_current_dispatch_mode() is not self.storages:
            yield
            return
        self.storages.__exit__(None, None, None)
        try:
            yield
        finally:
            self.storages.__enter__()

    def held(self) -> int:
        """Bytes that tensors hold now; between two steps it stays the same, unless something is not given back."""
        return self.storages.held if self.storages is not None else torch.cuda.memory_allocated(self.device)

    def take_peak(self) -> int:
        """Bytes; starts the next measurement."""
        if self.storages is not None:
            peak, self.storages.peak = self.storages.peak, self.storages.held
            return peak
        peak = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return peak


class _LiveStorages(TorchDispatchMode):
    """Sees every tensor that an operator returns, and each storage's end through a weak reference."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.held = self.peak = 0
        for one in gc.get_objects():
            if isinstance(one, torch.Tensor) and one.device.type == "cpu":
                self._count(one)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf)
        return result

    def _count(self, tensor: torch.Tensor) -> None:
        if (
            tensor.is_mkldnn
        ):  # a weight in blocks (models/blocked_weights.py): it has no storage that others could share
            self._hold(id(tensor), tensor.nbytes, tensor)
        else:
            storage = tensor.untyped_storage()
            self._hold(storage._cdata, storage.nbytes(), storage)

    def _hold(self, key: int, size: int, owner: object) -> None:
        if key in self.sizes:
            return
        self.sizes[key] = size
        self.held += size
        self.peak = max(self.peak, self.held)
        weakref.finalize(owner, self._freed, key)

    def _freed(self, key: int) -> None:
        self.held -= self.sizes.pop(key)
