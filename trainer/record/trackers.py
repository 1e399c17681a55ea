"""TensorBoard, Weights & Biases, trackio and SwanLab, from rank 0. metrics.jsonl has all they get; they may fail."""

import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PROJECT = "zero-grpo"
Log = Callable[[dict[str, float], int], None]
"""Gets a step's metrics and its number."""


def unusable(names: Sequence[str]) -> list[str]:
    """What the user should read of trackers that are missing, or would ask for an account: the run goes on without."""
    return [f"log.report_to: {problem}" for name in names for problem in _problems(name)]


class Trackers:
    """The open trackers of one run. What fails is left out from then on, and said once."""

    def __init__(self, names: Sequence[str], run_dir: Path, run_id: str, config: Mapping[str, Any], step: int) -> None:
        """``step``: that after which a resumed run goes on, so that its later points are written again."""
        self.notes: list[str] = []
        self.logs: dict[str, Log] = {}
        for name in names:
            if any(_problems(name)):  # preflight has said so
                continue
            with _Forgiven(name, self):
                self.logs[name] = OPEN[name](run_dir, run_id, dict(config), step)

    def log(self, metrics: dict[str, float], step: int) -> list[str]:
        """Sends a step's metrics; returns what the user should read."""
        for name in list(self.logs):
            with _Forgiven(name, self):
                self.logs[name](metrics, step)
        notes, self.notes = self.notes, []
        return notes


class _Forgiven:
    """A tracker's exception becomes a note: no training ends for a dashboard."""

    def __init__(self, name: str, trackers: Trackers) -> None:
        self.name, self.trackers = name, trackers

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self.trackers.logs.pop(self.name, None)
        text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        self.trackers.notes.append(
            f"log.report_to: {self.name} failed and gets no more ({text}); metrics.jsonl goes on"
        )
        return True


def _problems(name: str) -> Iterator[str]:
    goes_on = "The run goes on without it; metrics.jsonl has everything."
    if find_spec(name) is None:
        yield f'"{name}" needs a package that is not installed. {goes_on} Fix: pip install "zero-grpo[track]".'
    elif name == "wandb" and not _wandb_can_log_in():
        yield (
            f'"wandb" would ask for a key: WANDB_API_KEY is not set and nobody is logged in. {goes_on} Fix: `wandb '
            "login`, or WANDB_API_KEY, or WANDB_MODE=offline, which keeps the run in run.dir."
        )
    elif name == "swanlab" and not _swanlab_can_log_in():
        yield (
            f'"swanlab" would ask for a key: SWANLAB_API_KEY is not set and nobody is logged in. {goes_on} Fix: '
            "`swanlab login`, or SWANLAB_API_KEY, or SWANLAB_MODE=offline, which keeps the run in run.dir."
        )


def _wandb_can_log_in() -> bool:
    if os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun") or os.environ.get("WANDB_API_KEY"):
        return True
    from requests.utils import get_netrc_auth  # where `wandb login` keeps the key

    return get_netrc_auth(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")) is not None


def _swanlab_can_log_in() -> bool:
    # Of the environment, of its files, and of where `swanlab login` keeps the key.
    settings = importlib.import_module("swanlab").Settings()
    return settings.mode != "online" or settings.api_key is not None


def _tensorboard(run_dir: Path, run_id: str, config: dict[str, Any], step: int) -> Log:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=step + 1)

    def log(metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return log


def _wandb(run_dir: Path, run_id: str, config: dict[str, Any], step: int) -> Log:
    wandb = importlib.import_module("wandb")
    wandb.init(project=PROJECT, name=run_dir.name, id=run_id, resume="allow", dir=str(run_dir), config=config)
    return lambda metrics, step: wandb.log(metrics, step=step)


def _trackio(run_dir: Path, run_id: str, config: dict[str, Any], step: int) -> Log:
    trackio = importlib.import_module("trackio")
    trackio.init(project=PROJECT, name=f"{run_dir.name}-{run_id}", config=config, resume="allow")
    return lambda metrics, step: trackio.log(metrics, step=step)


def _swanlab(run_dir: Path, run_id: str, config: dict[str, Any], step: int) -> Log:
    swanlab = importlib.import_module("swanlab")
    folder = run_dir / "swanlab"
    folder.mkdir(exist_ok=True)
    swanlab.init(project=PROJECT, name=run_dir.name, id=run_id, resume="allow", log_dir=str(folder), config=config)
    return lambda metrics, step: swanlab.log(metrics, step=step)


OPEN: dict[str, Callable[[Path, str, dict[str, Any], int], Log]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "trackio": _trackio,
    "swanlab": _swanlab,
}
