"""What only an update reads, the master weights and moments and sums of gradients, on the host while a rollout runs.

By storages, which are emptied and filled again in place: whoever holds a view of one, as DeepSpeed does, need not know.
DeepSpeed 0.19's own ``offload_states`` moves tensors: in stage 3 it takes its compiled FusedAdam alone, and what it
makes of stage 1 in bf16 has none.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, UntypedStorage

from trainer.models.streaming import Placement
from trainer.record.memory import asked_of_memory

ROLE = "optimizer"


class Resting:
    """Its copies on the host stay from one rollout to the next: page-locking takes longer than copying."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self._copies: dict[int, Tensor] = {}

    @contextmanager
    def __call__(self, kept: Sequence[Tensor], zeros: Sequence[Tensor]) -> Iterator[None]:
        """Inside, the storages of these tensors are empty. ``zeros`` come back as zeros, which they were; nobody may
        look at either before."""
        storages, blank = _storages(kept), _storages(zeros)
        sizes = {key: one.nbytes() for key, one in (storages | blank).items()}
        self._copies = {key: self._copied(key, one) for key, one in storages.items()}
        for one in (storages | blank).values():
            one.resize_(0)
        self._count(storages | blank)
        try:
            yield
        except Exception as error:
            if asked_of_memory(error):
                raise  # there is no room to come back to, and the run ends
            self._back(storages, blank, sizes)
            raise
        self._back(storages, blank, sizes)

    def _copied(self, key: int, storage: UntypedStorage) -> Tensor:
        content, copied = _bytes(storage), self._copies.get(key)
        if copied is None or copied.numel() != content.numel():
            return self.placement.copy(content, ROLE, "host")
        return copied.copy_(content)

    def _back(
        self, storages: dict[int, UntypedStorage], blank: dict[int, UntypedStorage], sizes: dict[int, int]
    ) -> None:
        cuda = self.placement.device.type == "cuda"
        if cuda:
            torch.cuda.empty_cache()  # one large piece each, of which the rollout has left small ones
        for key, one in (storages | blank).items():
            one.resize_(sizes[key])
            _bytes(one).copy_(self._copies[key], non_blocking=True) if key in storages else _bytes(one).zero_()
        if cuda:
            torch.cuda.current_stream(self.placement.device).synchronize()  # DeepSpeed has streams of its own
        self._count(storages | blank)

    def _count(self, storages: dict[int, UntypedStorage]) -> None:
        self.placement.count(list(storages.values()), ROLE, "device")


def _storages(tensors: Sequence[Tensor]) -> dict[int, UntypedStorage]:
    """Each once."""
    return {storage._cdata: storage for one in tensors if (storage := one.untyped_storage()).nbytes()}


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
