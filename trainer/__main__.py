"""The commands. One short function each; what they do lives in the modules that they call."""

import argparse
import contextlib
import io
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from trainer.arguments import Command, parser_of, without_local_rank
from trainer.data_tools import command as data
from trainer.errors import Lost, OutOfMemory, Refused, RunEnd
from trainer.eval_run.command import add_commands as add_eval
from trainer.interrupts import leave
from trainer.launcher import say
from trainer.launcher.handover import accept
from trainer.launcher.speech import WRAPPED, report
from trainer.quiet import quiet_libraries
from trainer.report import command as readers

if TYPE_CHECKING:
    from trainer.config import RunConfig

RANK = int(word) if (word := os.environ.get("RANK", "")).isdecimal() else 0


def train(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Train on the run file; every problem is found before the first rollout."""
    from trainer.config import load
    from trainer.record.run_dir import RunDirectory

    config = load(arguments.run_file, overrides)
    if not config.run.dir:
        raise Refused('run.dir is not set. Expected the directory that this run writes. Fix: [run] dir = "runs/first".')
    if not arguments.resume and arguments.allow:
        raise Refused("--allow names what a resumed run may change. Fix: add --resume auto, or leave --allow out.")
    _check_ranks(arguments)
    _check_launch(arguments)
    if arguments.gpus or arguments.hostfile:
        if not arguments.resume:
            RunDirectory(config.run.dir).check()
        return _launch(arguments, config, overrides)
    _prepare_libraries()
    from trainer.run import Resume, train_run

    wanted = Resume(arguments.resume, arguments.allow)
    return train_run(config, Path(arguments.run_file).resolve().parent, wanted)


def _check_ranks(arguments: argparse.Namespace) -> None:
    if arguments.gpus is not None and arguments.gpus < 1:
        raise Refused(f"--gpus {arguments.gpus}: expected the number of ranks, 1 or more.")
    if arguments.gpus and arguments.hostfile:
        raise Refused("--gpus and --hostfile: one of them. The hostfile says how many ranks (slots) each host gets.")


def _check_launch(arguments: argparse.Namespace) -> None:
    if (rank := os.environ.get("RANK")) is not None and (arguments.gpus or arguments.hostfile):
        raise Refused(
            f"{'--gpus' if arguments.gpus else '--hostfile'}: RANK={rank} is set, so that this process is a rank which "
            "a launcher has started, and starts none itself. Fix: leave the flag out; or, where a pod's environment "
            "has RANK for another purpose, `env -u RANK zero-grpo train ...`."
        )
    if (arguments.include or arguments.exclude) and not arguments.hostfile:
        raise Refused("--include and --exclude: they choose hosts of a --hostfile, and there is none.")
    if not 0 <= arguments.master_port <= 65535:
        raise Refused(f"--master_port {arguments.master_port}: expected a port, 1 to 65535.")


def _launch(arguments: argparse.Namespace, config: "RunConfig", overrides: list[str]) -> int:
    """The same command, without what starts ranks, on every rank."""
    from trainer.launcher.hosts import read_hostfile, selected
    from trainer.launcher.start import Wanted, launch_here, launch_on_hosts

    words = ["train", arguments.run_file, *_resume_flags(arguments), *overrides]
    wanted = Wanted(words, Path(config.run.dir), config.run.grace_seconds, arguments.master_port)
    if arguments.gpus:
        return launch_here(wanted, arguments.gpus)
    found = selected(read_hostfile(arguments.hostfile), arguments.include, arguments.exclude)
    key_names = [reward.key_env for reward in config.reward if reward.key_env]
    return launch_on_hosts(wanted, found, arguments.run_file, key_names)


def _resume_flags(arguments: argparse.Namespace) -> list[str]:
    flags = ["--resume", arguments.resume] if arguments.resume else []
    return flags + [word for key in arguments.allow for word in ("--allow", key)]


def preflight(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Check everything that a run needs, and list all that is wrong; nothing is trained or written."""
    from trainer.config import load
    from trainer.preflight.report import refused_record

    try:
        _check_ranks(arguments)
        config = load(arguments.run_file, overrides)
        quiet_libraries() if arguments.json else _prepare_libraries()
        from trainer.run import preflight_run

        folder = Path(arguments.run_file).resolve().parent
        ranks, hostfile = arguments.gpus or 0, arguments.hostfile or ""
        return preflight_run(config, folder, ranks=ranks, hostfile=hostfile, as_json=arguments.json)
    except Refused as refusal:
        if not arguments.json:
            raise
        say(json.dumps(refused_record(refusal.problems)))
        return refusal.exit_code


def plan(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Say what a run will hold in memory, by formulas, and what would make it fit; no weight is read."""
    quiet_libraries()
    from trainer.preflight.plan_command import Asked, plan_run

    asked = Asked(arguments.run_file, overrides, arguments.gpu, arguments.memory_gib, arguments.gpus)
    return plan_run(asked, as_json=arguments.json)


def doctor(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Name what is wrong with a run, by cause: from its records, or by loading and asking its parts."""
    with contextlib.redirect_stdout(sys.stderr):  # what is said on the way is not the diagnosis
        _prepare_libraries()
        from trainer.doctor.command import diagnose

        found = diagnose(arguments.target, overrides)
    say(json.dumps(found.record(), indent=2) if arguments.json else found.text())
    return 1 if found.causes else 0


def hosts(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Check a hostfile and print its hosts, slots and ranks; with --probe, what each of them has."""
    from trainer.launcher.hosts import read_hostfile, selected, table
    from trainer.launcher.survey import compared, problems, survey

    if arguments.model and not arguments.probe:
        raise Refused("--model: a folder that --probe compares on the hosts. Fix: add --probe.")
    found = selected(read_hostfile(arguments.hostfile), arguments.include, arguments.exclude)
    say(table(found))
    if arguments.probe:
        answers = survey(found, arguments.model)
        if side_by_side := compared(found, answers):
            say(f"\n{side_by_side}")
        if wrong := problems(found, answers):
            raise Refused("these hosts cannot train together:\n" + "\n".join(f"  {one}." for one in wrong))
        from trainer.preflight.bandwidth import between

        if measured := between(found, answers):
            say(f"\n{measured}")
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


def parser() -> argparse.ArgumentParser:
    """Of all commands."""
    return parser_of(
        (train, preflight, plan, doctor, hosts, export, init, keys), (data.add_commands, add_eval, readers.add_to)
    )


def _command(argv: list[str]) -> int:
    arguments, rest = parser().parse_known_args(accept(without_local_rank(argv)))
    command: Command = arguments.command
    if rest and command in (init, keys, hosts, *data.COMMANDS, *readers.COMMANDS):
        raise Refused(f"zero-grpo {command.__name__}: it takes no {' '.join(rest)}.")
    return command(arguments, rest)


def ended(work: Callable[[], int]) -> int:
    """The exit code of ``work()``; what ends it early is said once, and last."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal that cannot show a character shows its escape
        sys.stdout.reconfigure(errors="backslashreplace")
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
        _tell(f"{'refused' if end.exit_code in (2, 5) else 'stopped'}: {end}", alone=isinstance(end, OutOfMemory))
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
        say("loading torch and transformers ...")


def _tell(message: str, *, alone: bool) -> None:
    """The last word, from rank 0. ``alone``: rank 0 may not know, and wait for this rank until it is ended."""
    if RANK != 0:
        # Every rank meets the same mistake. The launcher ends all ranks as soon as one has left, and rank 0 has to
        # speak before that.
        with contextlib.suppress(KeyboardInterrupt):
            time.sleep(5)
            if alone and WRAPPED not in os.environ:
                _say(message)
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
        say(f"\n{message}")


if __name__ == "__main__":
    run_command()
