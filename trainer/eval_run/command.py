"""The words of ``zero-grpo eval``, and what they call."""

import argparse
import os
from pathlib import Path
from typing import Any

from trainer.arguments import ANY_KEY, path
from trainer.launcher import say
from trainer.quiet import quiet_libraries


def evaluate(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Measure a checkpoint, an exported folder or the base on the held-out prompts; nothing is written."""
    from trainer.config import load, load_foreign

    config = load(arguments.run_file, overrides)
    own_code = load_foreign(arguments.run_file, overrides).model.trust_remote_code
    quiet_libraries()
    if not arguments.json and os.environ.get("RANK", "0") == "0":
        say("loading torch and transformers ...")
    from trainer.eval_run.held_out import eval_run

    folder = Path(arguments.run_file).resolve().parent
    return eval_run(config, folder, arguments.checkpoint, arguments.against, own_code=own_code, as_json=arguments.json)


def add_commands(commands: Any) -> None:
    """``commands``: what ``add_subparsers`` of the main parser returned."""
    sub = commands.add_parser("eval", help=evaluate.__doc__, description=evaluate.__doc__, allow_abbrev=False)
    sub.set_defaults(command=evaluate)
    sub.add_argument("run_file", type=path, metavar="RUN.toml")
    sub.add_argument(
        "--checkpoint",
        type=path,
        default="base",
        metavar="PATH",
        help="a checkpoint, RUN_DIR, RUN_DIR/checkpoints/best, an exported adapter or model; without it, the base",
    )
    sub.add_argument(
        "--against", type=path, default="", metavar="PATH|base", help="another one: every number with its difference"
    )
    sub.add_argument("--json", action="store_true", help="one JSON object on stdout, everything else on stderr")
    sub.epilog = ANY_KEY
