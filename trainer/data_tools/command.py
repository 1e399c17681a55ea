"""The words of ``zero-grpo data``, and what they call."""

import argparse
from pathlib import Path
from typing import Any

from trainer.arguments import path
from trainer.errors import Refused
from trainer.quiet import quiet_libraries

TARGETS = {
    "prompt": "prompt, answer: what training reads, and TRL",
    "seed": "query, chosen, rejected, id",
    "slime": "input, label",
    "openai": "messages, the answer last",
    "sharegpt": "conversations, the answer last",
}


def check(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Show what a source holds and how training reads it; exit 2 where rows cannot be used."""
    quiet_libraries()
    from trainer.config.sections import Data
    from trainer.data.sources import Source
    from trainer.data_tools.check import check_data

    if arguments.max_prompt_tokens < 1:
        raise Refused(f"--max-prompt-tokens {arguments.max_prompt_tokens}: expected 1 or more.")
    source = Source(arguments.source, arguments.split, arguments.config, "IN", "--split")
    data = Data(
        prompt_column=arguments.prompt_column,
        answer_column=arguments.answer_column,
        max_prompt_tokens=arguments.max_prompt_tokens,
    )
    check_data(source, data, arguments.tokenizer)
    return 0


def convert(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Write a source as JSONL that training reads, or in another tool's form; bad rows go beside it."""
    quiet_libraries()
    from trainer.data.sources import Source
    from trainer.data_tools.convert import Wanted, convert_data

    if not 0 <= arguments.eval_fraction < 1:
        raise Refused(f"--eval-fraction {arguments.eval_fraction}: expected a share from 0 to below 1.")
    wanted = Wanted(
        arguments.to,
        arguments.prompt_column,
        arguments.answer_column,
        arguments.eval_fraction,
        arguments.seed,
        arguments.force,
    )
    source = Source(arguments.source, arguments.split, arguments.config, "IN", "--split")
    convert_data(source, Path(arguments.out), wanted)
    return 0


COMMANDS = (check, convert)


def add_commands(commands: Any) -> None:
    """``commands``: what ``add_subparsers`` of the main parser returned."""
    about = "Check data, and convert them to the form that training reads."
    parts = commands.add_parser("data", help=about, description=about, allow_abbrev=False).add_subparsers(
        required=True, metavar="check|convert"
    )
    for function in (check, convert):
        sub = parts.add_parser(
            function.__name__, help=function.__doc__, description=function.__doc__, allow_abbrev=False
        )
        sub.set_defaults(command=function)
        sub.add_argument("source", metavar="IN", help="a file, a folder, a hub data set or reasoning_gym:TASK")
        if function is convert:
            sub.add_argument("out", type=path, metavar="OUT", help="a file that ends in .jsonl")
        sub.add_argument("--split", default="train", help="of a folder or a hub data set")
        sub.add_argument("--config", default="", help="configuration of a hub data set")
        sub.add_argument("--prompt-column", default="", metavar="NAME", help="where its name is none of the usual")
        sub.add_argument("--answer-column", default="", metavar="NAME", help="the same of the answer")
        if function is check:
            sub.add_argument(
                "--tokenizer", type=path, default="", metavar="PATH", help="a model folder or hub name: count tokens"
            )
            sub.add_argument("--max-prompt-tokens", type=int, default=512, metavar="N", help="data.max_prompt_tokens")
        else:
            forms = "; ".join(f"{name}: {what}" for name, what in TARGETS.items())
            sub.add_argument("--to", choices=list(TARGETS), default="prompt", help=forms)
            sub.add_argument("--eval-fraction", type=float, default=0.0, metavar="F", help="share held out, beside OUT")
            sub.add_argument("--seed", type=int, default=0, metavar="N", help="of the share held out, as data.seed")
            sub.add_argument("--force", action="store_true", help="replace what lies at OUT")
