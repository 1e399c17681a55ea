"""The commands. One short function each; what they do lives in the modules that they call."""

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from trainer.errors import Refused, RunEnd
from trainer.quiet import quiet_libraries

RANK = int(os.environ.get("RANK") or 0)


def train(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Train on the run file; every problem is found before the first rollout."""
    from trainer.config import load
    from trainer.record.run_dir import RunDirectory

    config = load(arguments.run_file, overrides)
    if not config.run.dir:
        raise Refused('run.dir is not set. Expected the directory that this run writes. Fix: [run] dir = "runs/first".')
    RunDirectory(config.run.dir).check()
    if arguments.gpus is not None and arguments.gpus < 1:
        raise Refused(f"--gpus {arguments.gpus}: expected the number of ranks, 1 or more.")
    if arguments.gpus and "RANK" not in os.environ:
        from trainer.launcher import launch

        return launch(["train", arguments.run_file, *overrides], arguments.gpus, Path(config.run.dir))
    quiet_libraries()
    from trainer.run import train_run

    return train_run(config, Path(arguments.run_file).resolve().parent)


def preflight(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Check everything, load the model, train nothing."""
    from trainer.config import load
    from trainer.record.run_dir import RunDirectory

    config = load(arguments.run_file, overrides)
    if config.run.dir:
        RunDirectory(config.run.dir).check()
    quiet_libraries()
    from trainer.run import preflight_run

    return preflight_run(config, Path(arguments.run_file).resolve().parent)


def init(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Print a run file to start from."""
    from trainer.config.recipes import read

    sys.stdout.write(read(arguments.recipe))
    return 0


def keys(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Print every key with type, default and meaning."""
    from trainer.config import describe

    sys.stdout.write(describe(arguments.section).rstrip("\n") + "\n")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of ``zero-grpo`` and of ``python -m trainer``; returns the exit code."""
    try:
        arguments, rest = _parser().parse_known_args(_without_local_rank(list(sys.argv[1:] if argv is None else argv)))
        command: Callable[[argparse.Namespace, list[str]], int] = arguments.command
        if rest and command in (init, keys):
            raise Refused(f"zero-grpo {command.__name__}: it takes no {' '.join(rest)}.")
        return command(arguments, rest)
    except RunEnd as end:
        _tell(f"{'refused' if end.exit_code == 2 else 'stopped'}: {end}")
        return end.exit_code
    except KeyboardInterrupt:
        return 130


def _tell(message: str) -> None:
    """The last word, from rank 0 alone."""
    if RANK != 0:
        # Every rank meets the same mistake. The launcher ends all ranks as soon as one has left, and rank 0 has to
        # speak
        # before that.
        with contextlib.suppress(KeyboardInterrupt):
            time.sleep(5)
    elif report := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # torchrun ends with a report of its own, which has room for the message: there it is said last, and once.
        Path(report).write_text(json.dumps({"message": message, "timestamp": int(time.time())}), encoding="utf-8")
    else:
        from trainer.launcher import say

        say(f"\n{message}")


class _Parser(argparse.ArgumentParser):
    """One whose complaints end the run as every other mistake does: once, whatever the number of ranks."""

    def error(self, message: str) -> NoReturn:
        raise Refused(f"{self.prog}: {message}. `{self.prog} --help` shows what it takes.")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="zero-grpo", description="GRPO training on DeepSpeed ZeRO that stays legible.", allow_abbrev=False
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (train, preflight):
        sub = commands.add_parser(
            command.__name__, help=command.__doc__, description=command.__doc__, allow_abbrev=False
        )
        sub.add_argument("run_file", metavar="RUN.toml")
        sub.set_defaults(command=command)
        sub.epilog = "Any key of the run file can be overridden: --section.key value"
        if command is train:
            sub.add_argument(
                "--gpus", type=int, metavar="N", help="ranks on this machine, through the deepspeed launcher"
            )
    sub = commands.add_parser("init", help=init.__doc__, description=init.__doc__, allow_abbrev=False)
    sub.add_argument("recipe", metavar="RECIPE", nargs="?", default="first-run")
    sub.set_defaults(command=init)
    sub = commands.add_parser("keys", help=keys.__doc__, description=keys.__doc__, allow_abbrev=False)
    sub.add_argument("section", metavar="SECTION", nargs="?", default="")
    sub.set_defaults(command=keys)
    return parser


def _without_local_rank(argv: list[str]) -> list[str]:
    """The deepspeed launcher puts --local_rank=N before everything; the LOCAL_RANK variable says the same."""
    kept: list[str] = []
    skip = False
    for argument in argv:
        if skip:
            skip = False
        elif argument in ("--local_rank", "--local-rank"):
            skip = True
        elif not argument.startswith(("--local_rank=", "--local-rank=")):
            kept.append(argument)
    return kept


if __name__ == "__main__":
    sys.exit(main())
