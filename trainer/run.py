"""One run from its run file to its exit code: join the ranks, check, train, record."""

import logging
import os
import warnings
from pathlib import Path

from trainer.config import RunConfig
from trainer.errors import RunEnd
from trainer.launcher import say
from trainer.output import Output, check_directory
from trainer.preflight.prepare import check, load_models, start_engine
from trainer.record.console import preflight_block
from trainer.train import together, train
from trainer.world import connect, disconnect


def train_run(config: RunConfig, folder: Path) -> int:
    """Trains, and returns the exit code, the same on every rank. ``folder``: where the run file lies."""
    _quiet_libraries()
    check_directory(config)
    world = connect(config.engine.device, timeout_seconds=config.watch.hang_timeout)
    output = None
    try:
        checked = together(world, lambda: check(config, folder, world))
        models = together(world, lambda: load_models(checked, world))
        state = together(world, lambda: start_engine(checked, models, world))
        output = Output(state)
        output.begin()
        train(state, output)
        output.end("done", 0, "")
        return 0
    except RunEnd as end:
        if output is not None:
            output.end("stopped", end.exit_code, str(end))
        raise
    except KeyboardInterrupt:
        if output is not None:
            output.end("interrupted", 130, "Ctrl-C")
        raise
    finally:
        disconnect()


def preflight_run(config: RunConfig, folder: Path) -> int:
    """Everything that ``train`` checks before the first rollout, and nothing written."""
    _quiet_libraries()
    world = connect(config.engine.device, timeout_seconds=config.watch.hang_timeout)
    try:
        checked = check(config, folder, world)
        load_models(checked, world)
        say(preflight_block(checked.notes))
        return 0
    finally:
        disconnect()


def _quiet_libraries() -> None:
    """What libraries say of their own internals hides what the run says."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
