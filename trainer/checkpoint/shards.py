"""What DeepSpeed's files of a checkpoint hold, by parameter and whole, whatever ranks and ZeRO stage have cut it up.

DeepSpeed's universal checkpoints are for this, but need a conversion and as much disk again, and know no stage 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.pickles import opened
from trainer.errors import NoCheckpoint


@dataclass
class _Parts:
    """Of one parameter: pieces in the order of its elements, of the weight ("") and of each moment."""

    pieces: dict[str, list[Tensor]] = field(default_factory=dict)
    steps: float = 0.0

    def add(self, weight: Tensor, state: dict[str, Any], start: int, numel: int) -> None:
        """``numel`` elements from ``start`` of flat tensors."""
        moments = {key: value for key, value in state.items() if key != "step"}
        self.steps = float(state.get("step", 0))
        for key, value in {"": weight, **moments}.items():
            self.pieces.setdefault(key, []).append(value.detach().reshape(-1).narrow(0, start, numel))


class Shards:
    """A checkpoint's master weights and optimizer state. The files are mapped, so that one parameter at a time is in
    memory."""

    def __init__(self, folder: Path, *, stage: int, ranks: int, names: Sequence[str]) -> None:
        """``names``: of the trained parameters, in the optimizer's order. NoCheckpoint where the files are not what
        DeepSpeed 0.19 writes."""
        self._parts = {name: _Parts() for name in names}
        try:
            if stage == 0:
                self._read_plain(opened(folder / "mp_rank_00_model_states.pt"))
            for rank in range(ranks if stage else 0):
                # In bf16 the name may begin with bf16_.
                (file,) = folder.glob(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
                saved = opened(file)["optimizer_state_dict"]
                if stage == 3:
                    states = opened(folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
                    self._read_stage_3(saved, states["param_shapes"], rank, ranks)
                else:
                    self._read_partition(saved)
        except NoCheckpoint:
            raise
        except Exception as error:  # what is not there, or is something else, fails anywhere
            raise NoCheckpoint(
                f"{folder}: not the files of ZeRO stage {stage} on {ranks} ranks that this version reads "
                f"({type(error).__name__}: {error})"
            ) from error
        if missing := [name for name, parts in self._parts.items() if not parts.pieces]:
            raise NoCheckpoint(f"{folder}: {len(missing)} trained weights are not in it (first: {missing[0]})")

    @property
    def moments(self) -> list[str]:
        return [key for key in next(iter(self._parts.values())).pieces if key]

    @property
    def steps(self) -> float:
        """The optimizer's."""
        return next(iter(self._parts.values())).steps

    def read(self, name: str, key: str, start: int, numel: int) -> Tensor:
        """Elements of a moment, or of the fp32 weight (""), flat. No more than them is read."""
        found, offset = [], 0
        for piece in self._parts[name].pieces[key]:
            first, last = max(start - offset, 0), min(start + numel - offset, piece.numel())
            if first < last:
                found.append(piece[first:last])
            offset += piece.numel()
        return torch.cat(found) if found else torch.empty(0)

    def _read_plain(self, states: dict[str, Any]) -> None:
        """Every rank holds all of it, and rank 0 has written it; in bf16 with copies in fp32."""
        optimizer = states["optimizer"]
        if copies := optimizer.get("fp32_groups"):
            weights, state = dict(zip(self._parts, copies[0], strict=True)), optimizer["optimizer_state_dict"]["state"]
        else:
            weights, state = states["module"], optimizer["state"]
        for index, (name, parts) in enumerate(self._parts.items()):
            parts.add(weights[name], state.get(index, {}), 0, weights[name].numel())

    def _read_partition(self, saved: dict[str, Any]) -> None:
        """Stages 1 and 2: the parameters of a group one after another, cut into as many parts as there are ranks."""
        state = saved["base_optimizer_state"]["state"]
        groups = zip(saved["single_partition_of_fp32_groups"], saved["param_slice_mappings"], strict=True)
        for index, (flat, mapping) in enumerate(groups):
            for name, piece in mapping.items():
                self._parts[name].add(flat, state.get(index, {}), piece.start, piece.numel)

    def _read_stage_3(self, saved: dict[str, Any], shapes: list[dict[str, Any]], rank: int, ranks: int) -> None:
        """Every parameter cut into as many parts as there are ranks, the last one filled up with zeros."""
        state = saved["optimizer_state_dict"]["state"]
        for index, (flat, group) in enumerate(zip(saved["fp32_flat_groups"], shapes, strict=True)):
            offset = 0
            for name, shape in group.items():
                part = -(-shape.numel() // ranks)
                numel = min(part, max(0, shape.numel() - rank * part))
                self._parts[name].add(flat, state.get(index, {}), offset, numel)
                offset += part


def check_own(folder: Path, *, stage: int, rank: int) -> None:
    """NoCheckpoint unless the files that this rank alone reads, to go on where it was saved, can be opened."""
    own = f"zero_pp_rank_{rank}_" if stage == 3 else ""
    wanted = [(f"{own}mp_rank_00_model_states.pt", "module")]
    if stage:
        wanted.append((f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", "optimizer_state_dict"))
    for pattern, key in wanted:
        files = list(folder.glob(pattern))
        if len(files) != 1 or not isinstance(found := opened(files[0]), dict) or key not in found:
            raise NoCheckpoint(f"{folder / pattern}: not there with {key!r} in it, as ZeRO stage {stage} is saved")
