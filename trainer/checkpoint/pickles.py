"""The pickles of DeepSpeed's checkpoints, read without running anything that they name."""

from pathlib import Path
from typing import Any

import torch

from trainer import heartbeat
from trainer.errors import NoCheckpoint

OWN_GLOBALS = {
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
}
"""All that DeepSpeed 0.19 pickles beside tensors. It unpickles whatever a file names, and that can be any code."""


class _Inert:
    """Takes the place of DeepSpeed's own classes: it holds what was pickled, and nothing of theirs runs."""

    start: int
    numel: int

    def __init__(self, *_: Any) -> None: ...


def opened(path: Path) -> Any:
    """What was saved to ``path``, its tensors mapped and not read. NoCheckpoint where it names anything else than
    DeepSpeed's own three classes, or is no file that ``torch.save`` writes."""
    heartbeat.beat()
    try:
        foreign = sorted(set(torch.serialization.get_unsafe_globals_in_checkpoint(str(path))) - OWN_GLOBALS)
        if not foreign:
            with torch.serialization.safe_globals([(_Inert, name) for name in OWN_GLOBALS]):
                return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # readers of archives and of pickles each raise their own
        said = (str(error).splitlines() or [""])[0][:200]
        raise NoCheckpoint(
            f"{path}: cannot be read as torch.save writes it ({type(error).__name__}: {said})"
        ) from error
    raise NoCheckpoint(
        f"{path}: its pickle names {', '.join(foreign)}, which is no part of a checkpoint: loading it could run any "
        "code"
    )
