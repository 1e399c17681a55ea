"""Weights that are only read, shared out over the ranks' CPU memory."""

from typing import Any

import torch
from torch import Tensor, nn

from trainer.engine import join
from trainer.untouched import exact_buffers
from trainer.world import World


class FrozenShards:
    """A module that is not trained, in ZeRO-3 shards in CPU memory: a rank holds its part, and gathers each layer on
    the device as the forward comes to it."""

    def __init__(self, module: nn.Module, world: World) -> None:
        self._deepspeed = deepspeed = join(world)
        config = {
            "train_batch_size": world.size,
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": next(module.parameters()).dtype == torch.bfloat16},
            "zero_optimization": {
                "stage": 3,
                "overlap_comm": False,
                "stage3_max_reuse_distance": 0,  # a layer is let go of when it has been computed
                "stage3_param_persistence_threshold": max(
                    (one.numel() for one in module.parameters() if one.dim() == 1), default=0
                ),  # norms and biases stay whole
                "offload_param": {"device": "cpu", "pin_memory": world.device.type == "cuda"},
            },
            "steps_per_print": 10**9,
        }
        with exact_buffers(module, world.device):
            self._engine, *_ = deepspeed.initialize(model=module, config=config)
        self._engine.eval()

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """A collective: as many calls on every rank."""
        return self._engine(*args, **kwargs)

    def whole(self, parameter: Tensor) -> Tensor:
        """A whole copy of one parameter, on the device. A collective."""
        with self._deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()
