"""One run from its run file to its exit code: join the ranks, check, train, record."""

import signal
import time
from pathlib import Path
from types import FrameType

from trainer.config import RunConfig
from trainer.errors import RunEnd
from trainer.launcher import say
from trainer.output import Output
from trainer.preflight.prepare import check, load_models, start_engine
from trainer.record.console import preflight_block
from trainer.record.run_dir import RunState
from trainer.train import together, train
from trainer.world import World, connect, disconnect

ASKED_TO_END: dict[int, tuple[RunState, int, str]] = {
    signal.SIGINT: ("interrupted", 130, "Ctrl-C"),
    signal.SIGTERM: ("preempted", 75, "SIGTERM, by a scheduler or a launcher"),
}
SECONDS_TO_NOTICE = 2.0
"""The deepspeed launcher sends SIGTERM right after the SIGINT that all have got: it must not break into the answer."""


def train_run(config: RunConfig, folder: Path) -> int:
    """Trains, and returns the exit code, the same on every rank. ``folder``: where the run file lies."""
    received = _signals_as_interrupts()
    output: list[Output] = []
    try:
        world = connect(config.engine.device, timeout_seconds=config.watch.hang_timeout)
        try:
            _train(config, folder, world, output)
        except Exception as error:
            _await_signal(error, world)
            raise
        return 0
    except RunEnd as end:
        _record(output, "stopped", end.exit_code, str(end))
        raise
    except KeyboardInterrupt:
        for number in ASKED_TO_END:
            signal.signal(number, signal.SIG_IGN)
        state, code, who = ASKED_TO_END[received[0] if received else signal.SIGINT]
        _record(output, state, code, who)
        if output and output[0].world.is_main:
            say(f"\n{state}: {who}, after step {output[0].state.step}. What is recorded lies in {output[0].path}.")
        return code
    except Exception as error:
        _record(output, "lost", 4, f"{type(error).__name__}: {error}")
        raise
    finally:
        disconnect()


def _train(config: RunConfig, folder: Path, world: World, outputs: list[Output]) -> None:
    checked = together(world, lambda: check(config, folder, world))
    models = together(world, lambda: load_models(checked, world))
    state = together(world, lambda: start_engine(checked, models, world))
    output = Output(state)
    together(world, output.begin)
    outputs.append(output)
    train(state, output)
    output.end("done", 0, "")


def _record(outputs: list[Output], state: RunState, exit_code: int, reason: str) -> None:
    for output in outputs:
        output.end(state, exit_code, reason)


def _signals_as_interrupts() -> list[int]:
    """SIGTERM, like SIGINT, raises KeyboardInterrupt, which no ``except Exception`` swallows. Returns what has come."""
    received: list[int] = []
    first = 0.0

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal first
        received.append(number)
        if len(received) == 1:
            first = time.monotonic()
        elif time.monotonic() - first < SECONDS_TO_NOTICE:
            return
        raise KeyboardInterrupt

    for number in ASKED_TO_END:
        signal.signal(number, note)
    return received


def _await_signal(error: Exception, world: World) -> None:
    """Where all ranks are signalled, a collective with one that has left already fails before this rank's signal is
    seen.

    Python delivers a signal no earlier than at the next call, and a launcher reaches its ranks one by one. Rank 0 waits
    less: what keeps the launcher from ending it is its own record of a rank that was lost.
    """
    time.sleep(0)
    if world.size > 1 and not isinstance(error, RunEnd):
        time.sleep(0.2 if world.is_main else 3)


def preflight_run(config: RunConfig, folder: Path) -> int:
    """Everything that ``train`` checks before the first rollout, and nothing written."""
    world = connect(config.engine.device, timeout_seconds=config.watch.hang_timeout)
    try:
        checked = check(config, folder, world)
        load_models(checked, world)
        say(preflight_block(checked.notes))
        return 0
    finally:
        disconnect()
