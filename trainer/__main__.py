"""The commands. One short function each; what they do lives in the modules that they call."""

import argparse
import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from trainer.errors import Lost, Refused, RunEnd
from trainer.interrupts import leave
from trainer.launcher.handover import accept
from trainer.launcher.speech import WRAPPED, report
from trainer.quiet import quiet_libraries

if TYPE_CHECKING:
    from trainer.config import RunConfig

RANK = int(os.environ.get("RANK") or 0)


def train(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Train on the run file; every problem is found before the first rollout."""
    from trainer.config import load
    from trainer.record.run_dir import RunDirectory

    config = load(arguments.run_file, overrides)
    if not config.run.dir:
        raise Refused('run.dir is not set. Expected the directory that this run writes. Fix: [run] dir = "runs/first".')
    if not arguments.resume:
        if arguments.allow:
            raise Refused("--allow names what a resumed run may change. Fix: add --resume auto, or leave --allow out.")
        RunDirectory(config.run.dir).check()
    if arguments.gpus is not None and arguments.gpus < 1:
        raise Refused(f"--gpus {arguments.gpus}: expected the number of ranks, 1 or more.")
    if (arguments.gpus or arguments.hostfile) and "RANK" not in os.environ:
        return _launch(arguments, config, overrides)
    _prepare_libraries()
    from trainer.run import Resume, train_run

    wanted = Resume(arguments.resume, arguments.allow)
    return train_run(config, Path(arguments.run_file).resolve().parent, wanted)


def _launch(arguments: argparse.Namespace, config: "RunConfig", overrides: list[str]) -> int:
    """The same command, without what starts ranks, on every rank."""
    from trainer.launcher.job import launch_here, launch_on_hosts

    if arguments.gpus and arguments.hostfile:
        raise Refused("--gpus and --hostfile: one of them. The hostfile says how many ranks (slots) each host gets.")
    if not 0 <= arguments.master_port <= 65535:
        raise Refused(f"--master_port {arguments.master_port}: expected a port, 1 to 65535.")
    words = ["train", arguments.run_file, *_resume_flags(arguments), *overrides]
    run_dir = Path(config.run.dir)
    if arguments.gpus:
        return launch_here(words, arguments.gpus, run_dir, arguments.master_port)
    key_names = [reward.key_env for reward in config.reward if reward.key_env]
    return launch_on_hosts(words, arguments.hostfile, arguments.run_file, run_dir, key_names, arguments.master_port)


def _resume_flags(arguments: argparse.Namespace) -> list[str]:
    flags = ["--resume", arguments.resume] if arguments.resume else []
    return flags + [word for key in arguments.allow for word in ("--allow", key)]


def preflight(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Check everything, load the model, train nothing."""
    from trainer.config import load
    from trainer.record.run_dir import RunDirectory

    config = load(arguments.run_file, overrides)
    if config.run.dir:
        RunDirectory(config.run.dir).check()
    _prepare_libraries()
    from trainer.run import preflight_run

    return preflight_run(config, Path(arguments.run_file).resolve().parent)


def doctor(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Name what is wrong with a run, by cause: from its records, or by loading and asking its parts."""
    with contextlib.redirect_stdout(sys.stderr):  # what is said on the way is not the diagnosis
        _prepare_libraries()
        from trainer.doctor.command import diagnose

        found = diagnose(arguments.target, overrides)
    sys.stdout.write((json.dumps(found.record(), indent=2) if arguments.json else found.text()) + "\n")
    return 1 if found.causes else 0


def hosts(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Check a hostfile and print its hosts, slots and ranks; with --probe, what each of them has."""
    from trainer.launcher.hosts import read_hostfile, table
    from trainer.launcher.survey import compared, problems, survey

    found = read_hostfile(arguments.hostfile)
    sys.stdout.write(table(found) + "\n")
    if arguments.probe:
        answers = survey(found)
        sys.stdout.write(f"\n{side_by_side}\n" if (side_by_side := compared(found, answers)) else "")
        if wrong := problems(found, answers):
            raise Refused("these hosts cannot train together:\n" + "\n".join(f"  {one}." for one in wrong))
    return 0


def export(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Write a checkpoint or a finished run as an adapter or a model for other tools, loaded again and compared."""
    _prepare_libraries()
    from trainer.checkpoint.command import Options, export_checkpoint

    options = Options(arguments.merge, arguments.ollama, arguments.gguf_converter)
    export_checkpoint(Path(arguments.source), Path(arguments.out), overrides, options)
    return 0


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


def run_command() -> NoReturn:
    """Entry of ``zero-grpo`` and of ``python -m trainer``."""
    leave(main())


def main(argv: Sequence[str] | None = None) -> int:
    """A command from its words to its exit code."""
    return ended(lambda: _command(list(sys.argv[1:] if argv is None else argv)))


def _command(argv: list[str]) -> int:
    arguments, rest = _parser().parse_known_args(accept(_without_local_rank(argv)))
    command: Callable[[argparse.Namespace, list[str]], int] = arguments.command
    if rest and command in (init, keys, hosts):
        raise Refused(f"zero-grpo {command.__name__}: it takes no {' '.join(rest)}.")
    return command(arguments, rest)


def ended(work: Callable[[], int]) -> int:
    """The exit code of ``work()``; what ends it early is said once, and last."""
    try:
        code = work()
    except Lost as end:
        report(end.exit_code, str(end))
        if WRAPPED in os.environ:  # the one who started the ranks knows more than any of them
            _linger()
        else:
            _say(f"lost: rank {RANK} of host {socket.gethostname()} ended with {end}")
        return end.exit_code
    except RunEnd as end:
        report(end.exit_code, str(end))
        _tell(f"{'refused' if end.exit_code in (2, 5) else 'stopped'}: {end}")
        return end.exit_code
    except KeyboardInterrupt:
        code = 130
    except Exception as error:
        report(4, f"{type(error).__name__}: {error}")
        raise
    report(code)
    return code


def _prepare_libraries() -> None:
    """Said before the imports, which take seconds from a disk that has not read them yet."""
    quiet_libraries()
    if RANK == 0:
        from trainer.launcher import say

        say("loading torch and transformers ...")


def _tell(message: str) -> None:
    """The last word, from rank 0 alone."""
    if RANK != 0:
        # Every rank meets the same mistake. The launcher ends all ranks as soon as one has left, and rank 0 has to
        # speak before that.
        with contextlib.suppress(KeyboardInterrupt):
            time.sleep(5)
    else:
        _say(message)


def _linger() -> None:
    """After the loss of another rank. launch.py looks at its ranks once a second and names one that has ended, not the
    first that did: this one must not be among them before the one that was lost is seen.
    """
    with contextlib.suppress(KeyboardInterrupt):  # seen: it ends all the others
        time.sleep(3)


def _say(message: str) -> None:
    if report := os.environ.get("TORCHELASTIC_ERROR_FILE"):
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
            sub.add_argument(
                "--hostfile", metavar="H", help="ranks on the hosts of a file, NAME slots=N a line, through pdsh"
            )
            sub.add_argument(
                "--master_port",
                type=int,
                default=0,
                metavar="P",
                help="where rank 0 listens for the others; a free port by default",
            )
            sub.add_argument(
                "--resume", default="", metavar="auto|PATH", help="go on from the newest valid checkpoint, or from PATH"
            )
            sub.add_argument(
                "--allow",
                action="append",
                default=[],
                metavar="KEY",
                help="a setting that the resumed run may change; once for each",
            )
    sub = commands.add_parser("doctor", help=doctor.__doc__, description=doctor.__doc__, allow_abbrev=False)
    sub.add_argument("target", metavar="RUN_DIR|RUN.toml")
    sub.add_argument("--json", action="store_true", help="the same with stable names")
    sub.set_defaults(command=doctor)
    sub = commands.add_parser("hosts", help=hosts.__doc__, description=hosts.__doc__, allow_abbrev=False)
    sub.add_argument("hostfile", metavar="HOSTFILE")
    sub.add_argument("--probe", action="store_true", help="ask every host over ssh, and compare what they have")
    sub.set_defaults(command=hosts)
    sub = commands.add_parser("export", help=export.__doc__, description=export.__doc__, allow_abbrev=False)
    sub.add_argument("source", metavar="CHECKPOINT", help="RUN_DIR/checkpoints/step-000010, or RUN_DIR")
    sub.add_argument("out", metavar="OUT", help="a folder that does not exist yet, or is empty")
    sub.add_argument("--merge", action="store_true", help="add the adapter into its base model: a whole model")
    sub.add_argument("--ollama", action="store_true", help="write a Modelfile and say how to convert and create")
    sub.add_argument("--gguf-converter", default="", metavar="PATH", help="llama.cpp's convert_hf_to_gguf.py, to run")
    sub.epilog = "Any key of the run file can be overridden: --model.name_or_path PATH, where the base model has moved"
    sub.set_defaults(command=export)
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
    run_command()
