"""``zero-grpo report`` and ``zero-grpo samples``: the commands that look at a run. They import no torch."""

import argparse
from pathlib import Path
from typing import Any

from trainer.arguments import path
from trainer.launcher import say


def report(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Write one HTML page of a run, or of several laid over each other: curves, alarms, rollouts, settings."""
    from trainer.report.page import write_report

    say(str(write_report([Path(one) for one in arguments.run_dirs], arguments.out and Path(arguments.out))))
    return 0


def samples(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Print completions of a run, with nothing in them that could steer the terminal."""
    from trainer.report.terminal import show

    say(show(Path(arguments.run_dir), arguments.step, arguments.count, worst=arguments.worst))
    return 0


COMMANDS = (report, samples)


def add_to(commands: Any) -> None:
    """Their parsers, among those of the other commands."""
    sub = commands.add_parser("report", help=report.__doc__, description=report.__doc__, allow_abbrev=False)
    sub.add_argument("run_dirs", type=path, metavar="RUN_DIR", nargs="+")
    sub.add_argument("--out", type=path, metavar="PATH", help="report.html in the first RUN_DIR by default")
    sub.set_defaults(command=report)
    sub = commands.add_parser("samples", help=samples.__doc__, description=samples.__doc__, allow_abbrev=False)
    sub.add_argument("run_dir", type=path, metavar="RUN_DIR")
    sub.add_argument("--worst", action="store_true", help="those of the lowest reward, instead of the first ones")
    sub.add_argument("--step", type=int, metavar="N", help="of this step; the last recorded one by default")
    sub.add_argument("--count", type=int, default=5, metavar="N", help="how many; 5 by default")
    sub.set_defaults(command=samples)
