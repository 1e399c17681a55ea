"""Ranks and collectives. The only importer of torch.distributed; every collective of our own is written here, once."""

import io
import os
import pickle
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainer import heartbeat
from trainer.errors import KINDS, Lost, Refused, RunEnd, Stopped, refused_by_disk

SECONDS_TO_MEET = 600.0
"""For all ranks to begin and import, from a cold disk on another host, say."""


@dataclass(frozen=True)
class World:
    """Who this process is among the ranks of the job. ``size`` 1 is the same code with collectives of one."""

    rank: int
    size: int
    local_rank: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Rank 0: the one that writes and prints."""
        return self.rank == 0

    def all_reduce_sum(self, values: Sequence[float]) -> list[float]:
        """Element-wise sum over ranks, in float64 on the CPU: counts stay exact and every rank sees the same bits."""
        return self._all_reduce(values, dist.ReduceOp.SUM)

    def all_reduce_max(self, values: Sequence[float]) -> list[float]:
        """Element-wise maximum over ranks."""
        return self._all_reduce(values, dist.ReduceOp.MAX)

    def _all_reduce(self, values: Sequence[float], op: dist.ReduceOp.RedOpType) -> list[float]:
        # A new tensor: what is reduced is detached by construction and never re-enters a graph.
        tensor = torch.tensor([float(value) for value in values], dtype=torch.float64)
        if self.device.type == "cuda":
            tensor = tensor.to(self.device)
        heartbeat.met()
        dist.all_reduce(tensor, op=op)
        found = tensor.tolist()  # on a card the wait for the others is here
        heartbeat.beat()
        return found

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank: numbers, text, containers and records of ours.

        Lost where anything else arrives. torch's own ``all_gather_object`` would run what it is told to, and whoever
        reaches the ranks' ports can tell.
        """
        _Writer(written := io.BytesIO()).dump(value)
        told = torch.frombuffer(bytearray(written.getbuffer()), dtype=torch.uint8).to(self.device)
        sizes = [torch.empty(1, dtype=torch.int64, device=self.device) for _ in range(self.size)]
        heartbeat.met()
        dist.all_gather(sizes, torch.tensor([len(told)], device=self.device))
        longest = int(max(sizes))
        all_told = [torch.empty(longest, dtype=torch.uint8, device=self.device) for _ in range(self.size)]
        dist.all_gather(all_told, torch.nn.functional.pad(told, (0, longest - len(told))))
        pieces = [one[: int(size)].cpu().numpy().tobytes() for one, size in zip(all_told, sizes, strict=True)]
        heartbeat.beat()
        return [_read(piece) for piece in pieces]

    def all_reduce_seconds(self, size: int) -> float:
        """Of one all_reduce of ``size`` bytes: the fastest of three, after one that opens the connections."""
        tensor, taken = torch.zeros(size, dtype=torch.uint8, device=self.device), []
        for _ in range(4):
            self.barrier()
            start = time.perf_counter()
            dist.all_reduce(tensor)
            tensor[0].item()  # waits for the device
            taken.append(time.perf_counter() - start)
        return min(taken[1:])

    def barrier(self) -> None:
        dist.barrier()

    def write_on_main(self, folder: Path, write: Callable[[], None]) -> None:
        """``write()`` into ``folder`` on rank 0; where the disk refuses, all ranks are Stopped. A collective, with none
        in ``write``."""
        error = None
        try:
            if self.is_main:
                write()
        except OSError as failed:
            error = refused_by_disk(folder, failed)
        self.agree(error)

    def agree(self, error: RunEnd | None) -> None:
        """All ranks end alike: raises the lowest rank's error on every rank, or returns on every rank.

        A rank that raises alone leaves the others waiting in a collective until its time-out.
        """
        reports = self.gather_objects((error and (type(error).__name__, str(error)), socket.gethostname()))
        met = sorted({host for report, host in reports if report})
        for report, _ in reports:
            if report is not None:
                kind, message = report
                # A file that one host lacks, say; the others would look in vain for what is wrong.
                alone = "" if met == sorted({host for _, host in reports}) else f"\n(on {', '.join(met)} alone)"
                raise KINDS.get(kind, Stopped)(f"{message}{alone}") from error


class _Writer(pickle.Pickler):
    """Of what this rank tells: of a record its type and fields, no state that the reader would have to put back."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, type) or not is_dataclass(value):
            return NotImplemented
        return type(value), tuple(getattr(value, field.name) for field in fields(value))


class _Reader(pickle.Unpickler):
    """Of what another rank tells. A pickle can name anything, have it called, and change it; to this one every name is
    a function of its own that makes a record and that nobody else has, so that there is nothing to change."""

    CONTAINERS = (("collections", "Counter"), ("pathlib", "PosixPath"), ("pathlib._local", "PosixPath"))

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name) if (module, name) in self.CONTAINERS else None
        if found is not None:
            return lambda *values: found(*values)
        if module.startswith("trainer.") and name.isidentifier():  # a dot would lead into what the module imports
            found = super().find_class(module, name)
        if not (isinstance(found, type) and is_dataclass(found) and found.__module__ == module):
            raise Lost(f"a rank sent {module}.{name}, which no rank sends: {STRANGER}")
        return lambda *values: _record(found, values)


STRANGER = (
    "another program has joined, or the hosts run different versions of zero-grpo. Fix: keep the ranks' ports inside a "
    "private network."
)


def _record(kind: type, values: Sequence[Any]) -> Any:
    made: Any = object.__new__(kind)
    for field, value in zip(fields(kind), values, strict=True):
        object.__setattr__(made, field.name, value)
    return made


def _read(piece: bytes) -> Any:
    try:
        return _Reader(io.BytesIO(piece)).load()
    except Lost:
        raise
    except Exception as error:  # pickle raises whatever its steps run into
        raise Lost(f"a rank sent what cannot be read ({type(error).__name__}: {error}): {STRANGER}") from error


def connect(device: str, *, timeout_seconds: float, seconds_to_meet: float = SECONDS_TO_MEET) -> World:
    """Joins the job that a launcher described in the environment; without a launcher, a job of one rank.

    ``device``: "auto" takes a CUDA card when torch can use it; "cpu" does not look for one. ``timeout_seconds``: of a
    collective.
    """
    try:
        rank, size, local_rank = (
            int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
        )
    except ValueError as error:
        raise _cannot_meet(error) from None
    if "RANK" not in os.environ:
        # DeepSpeed reads these too. A free port, so that two runs on one machine do not meet.
        os.environ.update(
            RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_free_port())
        )
    chosen = _device(device, local_rank)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    backend = "nccl" if chosen.type == "cuda" else "gloo"
    try:
        store = _meet(rank, size, seconds_to_meet)
        timeout = timedelta(seconds=timeout_seconds)
        store.set_timeout(timeout)
        dist.init_process_group(backend, store=store, timeout=timeout, rank=rank, world_size=size)
    except (ValueError, RuntimeError) as error:
        raise _cannot_meet(error) from error
    return World(rank=rank, size=size, local_rank=local_rank, device=chosen)


def _meet(rank: int, size: int, seconds: float) -> dist.Store:
    """The store of all ranks, once each has come to it. Lost, with those that have not, where that takes too long.

    As torch's own rendezvous, but that one waits where no signal is seen, and does not know who is missing.
    """
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]:
        raise ValueError(f"{' and '.join(missing)}: not set.")
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    until = time.monotonic() + seconds
    leads = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    while not leads:
        try:
            socket.create_connection(address, timeout=1).close()
            break
        except OSError as error:
            if time.monotonic() > until:
                where = f"{address[0]}:{address[1]} ({error.strerror or error})"
                raise _not_met(seconds, f"nobody answers at {where}, where rank 0 should") from error
            time.sleep(0.1)
    store = dist.TCPStore(
        *address,
        size,
        is_master=leads,
        timeout=timedelta(seconds=max(seconds, 10)),
        wait_for_workers=False,
        multi_tenant=True,
    )
    met = dist.PrefixStore(f"meeting {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    try:
        met.set(f"{rank}", "")
        for one in range(size):
            while not met.check([f"{one}"]):
                if time.monotonic() > until:
                    missing = [f"{other}" for other in range(size) if not met.check([f"{other}"])]
                    time.sleep(leads)  # the others ask this one
                    raise _not_met(seconds, f"of {size} ranks, there was no sign of rank {', '.join(missing)}")
                time.sleep(0.1)
    except RuntimeError as error:
        raise _not_met(seconds, "rank 0 came, and left again") from error
    return met


def _not_met(seconds: float, why: str) -> Lost:
    return Lost(
        f"a meeting of the ranks that did not come about in {seconds:g} s: {why}. It hangs in its start, was not "
        "started, or the hosts do not reach each other. Fix: look at that rank's host and output."
    )


def _cannot_meet(error: Exception) -> Refused:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    described = ", ".join(f"{name}={os.environ.get(name, '')}" for name in names)
    return Refused(
        f"the ranks cannot meet: {str(error).splitlines()[0]} The launcher's variables: {described}. "
        "Fix: start with deepspeed or torchrun, which set all of them, or unset them for a run of one rank."
    )


def failed_collective(error: Exception) -> str:
    """What a collective said when another rank had gone, or did not come in time; "" of any other error."""
    text = " ".join(str(error).split())
    # gloo raises a bare RuntimeError, as its monitored barrier does when TORCH_DISTRIBUTED_DEBUG asks for one.
    of_gloo = isinstance(error, RuntimeError) and any(word in text for word in ("gloo", "monitoredBarrier"))
    return text[:300] if of_gloo or isinstance(error, dist.DistBackendError) else ""


def disconnect() -> None:
    """Leaves the job. Safe to call when it was never joined."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _device(device: str, local_rank: int) -> torch.device:
    if device == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        if local_rank >= torch.cuda.device_count():
            raise Refused(
                f"local rank {local_rank} has no GPU: torch sees {torch.cuda.device_count()}. "
                'Fix: start as many processes per host as it has GPUs, or set engine.device = "cpu".'
            )
        return torch.device("cuda", local_rank)
    if card := _nvidia_card():
        raise Refused(
            f"this machine has an NVIDIA card ({card}) that torch {torch.__version__} cannot use "
            f"(built for CUDA {torch.version.cuda or 'none: a CPU build'}). "
            'Fix: install the torch build for your CUDA driver, or set engine.device = "cpu" to train on the CPU.'
        )
    return torch.device("cpu")


def _nvidia_card() -> str:
    """What the kernel driver says, without torch; empty when there is no card."""
    folder = "/proc/driver/nvidia/gpus"
    return f"{len(os.listdir(folder))} in {folder}" if os.path.isdir(folder) and os.listdir(folder) else ""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
