"""The words that each command takes."""

import argparse
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from trainer.errors import Refused
from trainer.outside import path_problem

Command = Callable[[argparse.Namespace, list[str]], int]
"""Called with its arguments and with the words that no parser knows: overrides of the run file. Its docstring is its
help."""

ANY_KEY = "Any key of the run file can be overridden: --section.key value"


class _Parser(argparse.ArgumentParser):
    """One whose complaints end the run as every other mistake does: once, whatever the number of ranks."""

    def error(self, message: str) -> NoReturn:
        raise Refused(f"{self.prog}: {message}. `{self.prog} --help` shows what it takes.")


def path(text: str) -> str:
    """A word that names a file or a folder."""
    if problem := path_problem(text):
        raise argparse.ArgumentTypeError(f"{text[:60]!r}: {problem}")
    return text


def parser_of(commands: Iterable[Command], others: Iterable[Callable[[Any], None]]) -> argparse.ArgumentParser:
    """Of ``commands``, by the names of the functions; ``others`` add the parsers of theirs."""
    parser = _Parser(
        prog="zero-grpo", description="GRPO training on DeepSpeed ZeRO that stays legible.", allow_abbrev=False
    )
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in commands:
        name = command.__name__
        sub = subparsers.add_parser(name, help=command.__doc__, description=command.__doc__, allow_abbrev=False)
        sub.set_defaults(command=command)
        WORDS[name](sub)
    for add in others:
        add(subparsers)
    return parser


def without_local_rank(argv: list[str]) -> list[str]:
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


def _run_file(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("run_file", type=path, metavar="RUN.toml")
    sub.add_argument("--gpus", type=int, metavar="N", help="ranks on this machine, through the deepspeed launcher")
    sub.add_argument(
        "--hostfile", type=path, metavar="H", help="ranks on the hosts of a file, NAME slots=N a line, through pdsh"
    )
    sub.epilog = ANY_KEY


def _choice_of_hosts(sub: argparse.ArgumentParser) -> None:
    for flag, what in (("--include", "those hosts and slots of the hostfile alone"), ("--exclude", "all but those")):
        sub.add_argument(flag, default="", metavar="NAME@NAME:0,2", help=what)


def _train(sub: argparse.ArgumentParser) -> None:
    _run_file(sub)
    _choice_of_hosts(sub)
    listens = "where rank 0 listens for the others; a free port by default"
    sub.add_argument("--master_port", type=int, default=0, metavar="P", help=listens)
    goes_on = "go on from the newest valid checkpoint, or from PATH"
    sub.add_argument("--resume", type=path, default="", metavar="auto|PATH", help=goes_on)
    changes = "a setting that the resumed run may change; once for each"
    sub.add_argument("--allow", action="append", default=[], metavar="KEY", help=changes)


def _preflight(sub: argparse.ArgumentParser) -> None:
    _run_file(sub)
    sub.add_argument("--json", action="store_true", help="one JSON object instead of tables")


def _plan(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("run_file", type=path, metavar="RUN.toml")
    sub.add_argument("--gpu", default="", metavar="NAME", help="a10, l4, rtx4090, a100-40, a100-80, h100 or h200")
    sub.add_argument("--memory-gib", type=float, default=0.0, metavar="X", help="instead: a card with so much memory")
    sub.add_argument("--gpus", type=int, default=1, metavar="N", help="how many of them")
    sub.add_argument("--json", action="store_true", help="as JSON")
    sub.epilog = f"{ANY_KEY}. Exit code 2: it does not fit."


def _doctor(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("target", type=path, metavar="RUN_DIR|RUN.toml")
    sub.add_argument("--json", action="store_true", help="the same with stable names")
    sub.epilog = f"Of a run file: {ANY_KEY[0].lower()}{ANY_KEY[1:]}. Exit code 1: a cause was found."


def _hosts(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("hostfile", type=path, metavar="HOSTFILE")
    _choice_of_hosts(sub)
    sub.add_argument("--probe", action="store_true", help="ask every host over ssh, and compare what they have")
    sub.add_argument("--model", default="", metavar="FOLDER", help="with --probe: compare its files, too")


def _export(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("source", type=path, metavar="CHECKPOINT", help="RUN_DIR/checkpoints/step-000010, or RUN_DIR")
    sub.add_argument("out", type=path, metavar="OUT", help="a folder that does not exist yet, or is empty")
    sub.add_argument("--merge", action="store_true", help="add the adapter into its base model: a whole model")
    sub.add_argument("--ollama", action="store_true", help="write a Modelfile and say how to convert and create")
    sub.add_argument(
        "--gguf-converter", type=path, default="", metavar="PATH", help="llama.cpp's convert_hf_to_gguf.py, to run"
    )
    sub.epilog = "Any key of the run file can be overridden: --model.name_or_path PATH, where the base model has moved"


def _init(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("recipe", metavar="RECIPE", nargs="?", default="first-run")


def _keys(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("section", metavar="SECTION", nargs="?", default="")


WORDS: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "train": _train,
    "preflight": _preflight,
    "plan": _plan,
    "doctor": _doctor,
    "hosts": _hosts,
    "export": _export,
    "init": _init,
    "keys": _keys,
}
