"""The ZeRO engine. The only importer of deepspeed, and the only place that knows its arithmetic."""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer import heartbeat
from trainer.config.sections import Optim
from trainer.errors import Refused, Stopped
from trainer.untouched import exact_buffers, outlived, without_frozen
from trainer.world import World

Read = Callable[[str, str, int, int], Tensor]
"""Name of a trained parameter; "" for its fp32 weight, or a moment; from which element on, flat; how many."""


@dataclass(frozen=True)
class StepOutcome:
    """What became of one optimizer step, the same on every rank."""

    grad_norm: float
    """L2 norm of the averaged gradient over all parameters, before clipping."""
    applied: bool
    """False: the gradient was not finite on some rank, so no rank updated."""


class ZeroEngine:
    """DeepSpeed's engine reduced to what a policy gradient needs: forward, summed backward, step, gather."""

    away: Callable[[Sequence[Tensor], Sequence[Tensor]], AbstractContextManager[None]] | None = None
    """Takes from the device what only an update reads, and what is zero until then, while parameters are gathered."""

    def __init__(self, module: nn.Module, optim: Optim, deepspeed_config: dict[str, Any], world: World) -> None:
        self._deepspeed = deepspeed = join(world)
        self.world = world
        self.stage: int = deepspeed_config.get("zero_optimization", {}).get("stage", 0)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        trained[0].register_hook(self._note_gradient)
        offload = deepspeed_config.get("zero_optimization", {}).get("offload_optimizer", {})
        self._offloads = offloads = offload.get("device", "none") != "none"
        module.register_state_dict_post_hook(without_frozen(module))
        with exact_buffers(module, world.device):
            self._engine, *_ = deepspeed.initialize(
                model=module, optimizer=_optimizer(deepspeed, trained, optim, offload=offloads), config=deepspeed_config
            )
        self.module: nn.Module = self._engine.module
        wrapper = self._engine.optimizer
        # What DeepSpeed makes of stage 1 in bf16, with names of its own.
        self._is_bf16_optimizer = isinstance(wrapper, deepspeed.runtime.bf16_optimizer.BF16_Optimizer)
        self._inner: torch.optim.Optimizer = wrapper.optimizer if hasattr(wrapper, "optimizer") else wrapper
        if self.stage == 0 and self._inner is not wrapper:
            # In bf16 DeepSpeed has taken a step on zeros to allocate the state. Adam's bias correction counts it: the
            # first update would be 0.74 of what it should be.
            self._inner.state.clear()

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Forward through the engine, so that its hooks run."""
        return self._engine(*args, **kwargs)

    def close(self) -> None:
        """Lets go of hooks and buffers. Left to the garbage collector, ranks would do it at different moments."""
        self._engine.destroy()

    def _note_gradient(self, gradient: Tensor) -> None:
        self._gradient = torch.linalg.vector_norm(gradient.detach(), ord=torch.inf)

    def backward_sum(self, loss_sum: Tensor, global_count: float, *, last: bool) -> Tensor:
        """Accumulates the gradient of ``loss_sum / global_count``, where ``loss_sum`` is this rank's part of the sum.

        DeepSpeed averages gradients over the ranks, so the sum is multiplied by their number here and nowhere else;
        gradient_accumulation_steps is 1 in the config, so that nothing divides by it. A coefficient inside the loss is
        never divided by the world size: the averaging has done that already.
        ``last``: this is the last backward of the optimizer step, after which gradients are complete.
        Returns the largest element of this pass's gradient of the first weight, to which the pass comes last: NaN or
        infinite where one was further up. Of this rank, before any other has added its own.
        """
        self._gradient = torch.zeros(())
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss_sum * (self.world.size / global_count))
        return self._gradient

    def step(self, learning_rate: float) -> StepOutcome:
        """One update, or none on every rank when the gradient holds a NaN or an infinity on any."""
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate
        grad_norm = self._grad_norm()
        finite = torch.isfinite(torch.tensor(grad_norm)).item()
        if not finite and self.stage == 0:
            # Stage 0 in fp32 applies a NaN without a word; so its step must not run.
            self._engine.optimizer.zero_grad()
            self._engine.zero_grad()
            return StepOutcome(grad_norm, applied=False)
        # Stages 1-3 drop a non-finite gradient inside their step and reset the buffers that hold it.
        self._engine.step()
        if self._engine.was_step_applied() != finite:
            raise Stopped(
                f"ZeRO stage {self.stage} {'skipped' if finite else 'applied'} a step of gradient norm {grad_norm}"
            )
        return StepOutcome(grad_norm, applied=bool(finite))

    def _grad_norm(self) -> float:
        """fp32 norm of the averaged gradient. Each stage keeps it elsewhere: whole on every rank, or sharded."""
        # Not shard.square().sum(), which makes a second gradient of a shard that holds all of them.
        square = sum(
            (torch.linalg.vector_norm(shard, dtype=torch.float32).square() for shard in self._gradient_shards()),
            torch.zeros((), device=self.world.device),
        )
        if self.stage == 0:
            return float(square.sqrt())
        return float(self.world.all_reduce_sum([float(square)])[0] ** 0.5)

    def _gradient_shards(self) -> Sequence[Tensor]:
        optimizer = self._engine.optimizer
        if self._is_bf16_optimizer:
            return optimizer.fp32_groups_gradient_flat_partition
        if self.stage == 0:
            gradients = [self._deepspeed.utils.safe_get_full_grad(p) for p in self.trained().values()]
            return [gradient for gradient in gradients if gradient is not None]
        if self.stage == 3:
            if optimizer.offload_optimizer:
                return [group.grad for group in optimizer.fp32_partitioned_groups_flat]
            return [shard for shards in optimizer.averaged_gradients.values() for shard in shards]
        if optimizer.cpu_offload:
            return [group.grad for group in optimizer.single_partition_of_fp32_groups]
        return [shard for shards in optimizer.averaged_gradients.values() for shard in shards]

    def save(self, folder: Path) -> None:
        """This rank's optimizer shard, and the trained weights, into ``folder``. A collective. Frozen weights stay
        out. OSError where the disk refuses on this rank, when the others no longer wait for it."""
        refused: list[OSError] = []
        engine = self._engine
        with outlived(engine.checkpoint_engine, "save", refused), outlived(engine, "_copy_recovery_script", refused):
            engine.save_checkpoint(
                str(folder.parent), tag=folder.name, save_latest=False, exclude_frozen_parameters=True
            )
        if refused:
            raise refused[0]

    def load(self, folder: Path) -> bool:
        """What ``save`` wrote, into an engine between two steps, of as many ranks and the same stage.

        DeepSpeed unpickles the files: verify them first. Its module is loaded without strictness for the frozen
        weights alone; that all trained ones are there, the manifest says. False: there was nothing.
        """
        optimizer = self._engine.optimizer
        asked = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        clip = getattr(optimizer, "clip_grad", None)
        path, _ = self._engine.load_checkpoint(
            str(folder.parent), tag=folder.name, load_module_strict=False, load_lr_scheduler_states=False
        )
        # The optimizer's state is the checkpoint's, its settings are this run's: DeepSpeed brings back both.
        for group, settings in zip(self._engine.optimizer.param_groups, asked, strict=True):
            group.update(settings)
        if clip is not None:
            optimizer.clip_grad = clip
        return path is not None

    def trained(self) -> dict[str, Any]:
        """Parameters by name, in the optimizer's order."""
        return {name: one for name, one in self.module.named_parameters() if one.requires_grad}

    @torch.no_grad()
    def put(self, moments: Sequence[str], steps: float, read: Read) -> None:
        """A saved state, however it was cut up, into an engine between two steps. A collective."""
        trained, masters = self.trained(), self._masters()
        self._inner.state.clear()
        for master in masters if moments else ():
            self._inner.state[master] = {key: torch.zeros_like(master) for key in moments} | {
                # torch's Adam counts in a tensor, the CPU Adam of an offload in a number.
                "step": int(steps) if self._offloads else torch.tensor(steps, device=master.device)
            }
        if self.stage in (1, 2):
            self._engine.optimizer._hp_optimizer_states_linked = False  # parameters know the moments of before, or none
            self._engine.optimizer._lazy_init_hp_params_optimizer_state()
        for index, (name, parameter) in enumerate(trained.items()):
            heartbeat.beat()
            for key in ("", *moments):
                self._put_part(read, name, parameter, key, masters[index] if self.stage == 0 else None)
            with self.whole([parameter], changed=True):
                if self.stage != 3 or self.world.is_main:  # whose weights the others get
                    parameter.copy_(read(name, "", 0, parameter.numel()).view_as(parameter))

    def _put_part(self, read: Read, name: str, parameter: Any, key: str, master: Tensor | None) -> None:
        """This rank's part of a moment, or of the fp32 weight (""). ``master``: of stage 0, where that is all of it."""
        if master is not None:
            kept = self._inner.state[master][key] if key else master
            kept.copy_(read(name, key, 0, kept.numel()).view_as(kept))
        elif self.stage == 3:
            # Not set_full_hp_param: where the ranks do not divide a parameter it reads beyond the end.
            size = parameter.ds_tensor.numel()
            part = read(name, key, self.world.rank * size, size)
            part = nn.functional.pad(part, (0, size - part.numel()))
            self._engine.optimizer.set_local_hp_param(part, parameter, key or None)
        elif (mapping := parameter._hp_mapping) is not None:  # None where another rank has all of it
            address = mapping.lp_fragment_address
            mapping.get_hp_fragment(key or None).copy_(read(name, key, address.start, address.numel))

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Whole parameters on every rank and no ZeRO-3 module hooks: for decoding, where each rank runs on its own.
        What only an update reads is ``away`` meanwhile, where that is set."""
        with self.away(*self._for_updates()) if self.away else nullcontext(), self._gathered():
            yield

    def _for_updates(self) -> tuple[list[Tensor], list[Tensor]]:
        """Of stages 1 to 3: this rank's master weights and moments, and the sums of gradients that are kept, all zeros,
        between two updates."""
        optimizer, sums = self._engine.optimizer, []
        if self._is_bf16_optimizer:
            sums = optimizer.fp32_groups_gradients_flat
        elif self.stage == 3:
            sums = [optimizer.grad_partitions_flat_buffer]
        states = [one for state in self._inner.state.values() for one in state.values()]
        moments = [one for one in states if isinstance(one, Tensor) and one.dim()]  # a count of steps is a number
        return [*self._masters(), *moments], sums

    def _masters(self) -> list[Tensor]:
        """This rank's fp32 weights. Each class of DeepSpeed's has them elsewhere."""
        optimizer = self._engine.optimizer
        if self.stage == 0:
            return optimizer.param_groups[0]["params"]
        if self.stage == 3:
            return optimizer.fp32_partitioned_groups_flat
        if self._is_bf16_optimizer:
            return optimizer.fp32_groups_flat_partition
        return optimizer.single_partition_of_fp32_groups

    @contextmanager
    def _gathered(self) -> Iterator[None]:
        """Gathering alone is not enough: the hooks would gather and release again at every module of every token."""
        if self.stage != 3:
            yield
            return
        offload = self._engine.optimizer.parameter_offload
        with self._deepspeed.zero.GatheredParameters(list(self.module.parameters())):
            partitioned: list[Any] = list(self.module.parameters())
            for parameter in partitioned:
                parameter.ds_active_sub_modules.clear()
            for hook in (*offload.forward_hooks, *offload.backward_hooks):
                hook.remove()
            offload.forward_hooks, offload.backward_hooks = [], []
            try:
                yield
            finally:
                offload.setup_zero_stage3_hooks()

    @contextmanager
    def whole(self, parameters: Sequence[nn.Parameter], *, changed: bool = False) -> Iterator[None]:
        """Whole ``parameters`` on every rank, to read them, or to change them alike. A collective under ZeRO-3."""
        if self.stage != 3:
            yield
            return
        with self._deepspeed.zero.GatheredParameters(list(parameters), modifier_rank=0 if changed else None):
            yield


def join(world: World) -> Any:
    """The library, and this rank in its process group."""
    if world.device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read at import; a card may be present and not wanted
    import deepspeed  # here, so that a command that trains nothing does not pay for the import

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    if world.device.type == "cpu":
        # CPU ranks speak gloo. DeepSpeed would compile a shared-memory operator for 100 s at the first start, and
        # leave 66 MiB per rank and port in /dev/shm after every run. It asks this table for nothing else, and filling
        # it at the first access takes the compiler.
        deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
    deepspeed.init_distributed(verbose=False, auto_mpi_discovery=False)
    return deepspeed


def _optimizer(deepspeed: Any, trained: list[nn.Parameter], optim: Optim, *, offload: bool) -> torch.optim.Optimizer:
    adam: dict[str, Any] = {"lr": optim.lr, "betas": optim.betas, "eps": optim.eps, "weight_decay": optim.weight_decay}
    if offload:
        try:
            return deepspeed.ops.adam.DeepSpeedCPUAdam(trained, **adam, adamw_mode=True)
        except Exception as error:  # ninja, the compiler and the loader each raise their own
            reason = " ".join(str(error).split())[-300:]
            raise Refused(
                "engine.deepspeed asks for optimizer offload, whose CPU Adam is compiled at the first use, and that "
                f"failed: {reason} "
                "Fix: install a C++ compiler (g++) and ninja, or use a configuration without offload, such as zero2."
            ) from error
    if optim.name == "sgd":
        return torch.optim.SGD(trained, lr=optim.lr, weight_decay=optim.weight_decay)
    if optim.name == "adamw8bit":
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(trained, **adam)
    return torch.optim.AdamW(trained, **adam, fused=True)
