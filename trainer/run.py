"""One run from its run file to its exit code: join the ranks, check, train, record."""

import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from trainer import faults, heartbeat, interrupts
from trainer.checkpoint import manifest, resume
from trainer.checkpoint.save import PROGRESS, Checkpoints
from trainer.checkpoint.store import Found
from trainer.config import RunConfig
from trainer.errors import KINDS, Interrupted, Lost, NoCheckpoint, OutOfMemory, Preempted, Refused, RunEnd, Stopped
from trainer.launcher import say, watchdog
from trainer.launcher.hosts import read_hostfile
from trainer.models.skeleton import is_here
from trainer.out_of_memory import heard_of, ran_out
from trainer.output import Output
from trainer.preflight.prepare import check, checked_of, load_models, start_engine
from trainer.preflight.report import page, record
from trainer.preflight.shared_dir import check_shared
from trainer.preflight.survey import Survey, survey
from trainer.record.memory import asked_of_memory
from trainer.record.run_dir import RunState
from trainer.rewards.ledger import Ledger
from trainer.state import State
from trainer.train import save, together, train
from trainer.world import SECONDS_TO_MEET, World, connect, disconnect, failed_collective

LEAST_SECONDS_OF_A_COLLECTIVE = 1800.0
"""torch's own for gloo, which DeepSpeed's groups have anyway."""
STATES: dict[type[RunEnd], RunState] = {Interrupted: "interrupted", Preempted: "preempted"}


@dataclass(frozen=True)
class Resume:
    """``--resume`` and ``--allow`` of the command line."""

    asked: str = ""
    """"auto", a path, or nothing."""
    allowed: Sequence[str] = ()


@dataclass
class Run:
    """A run that has begun to leave records."""

    state: State
    output: Output
    checkpoints: Checkpoints


def train_run(config: RunConfig, folder: Path, wanted: Resume) -> int:
    """Trains, and returns the exit code, the same on every rank. ``folder``: where the run file lies."""
    interrupts.install()
    faults.read_environment()
    begun: list[Run] = []
    guard = None
    limits = [config.watch.seconds_of(phase) for phase in heartbeat.PHASES]
    try:
        # A collective outlasts what the watchdog allows, since that knows who hangs, and who is only slow.
        longest = max(LEAST_SECONDS_OF_A_COLLECTIVE, 2 * max(seconds for seconds, _ in limits))
        to_meet = min(SECONDS_TO_MEET, config.watch.seconds_of("start")[0])
        world = connect(config.engine.device, timeout_seconds=longest, seconds_to_meet=to_meet)
        try:
            ranks = world.gather_objects(own := watchdog.Rank.here(world.rank, heartbeat.share()))
            guard = watchdog.start(own, ranks, limits, Path(config.run.dir))
            heartbeat.enter("start", step=0)
            check_shared(Path(config.run.dir), world)
            _train(config, folder, world, wanted, begun)
        except Exception as error:
            _await_signal(error, world)
            if asked := asked_of_memory(error):
                raise ran_out(error, asked, config, world, begun[0].state if begun else None) from None
            if said := failed_collective(error):
                raise (heard_of(Path(config.run.dir), world) if begun else None) or Lost(_lost(said, begun)) from error
            raise
        return 0
    except Lost as end:
        for run in begun:
            run.output.end("lost", end.exit_code, str(end))
        raise
    except OutOfMemory as end:
        for run in begun:
            _leave(run, end)
        interrupts.ignore()
        raise
    except RunEnd as end:
        for run in begun:
            _close(run, end)
        interrupts.ignore()
        if begun and type(end) in STATES:
            return end.exit_code
        raise
    except KeyboardInterrupt:
        interrupts.ignore()
        kind, who = interrupts.asked()
        for run in begun:
            run.output.end(STATES[kind], kind.exit_code, f"{who}, at once: nothing was saved")
        if os.environ.get("RANK", "0") == "0":
            say(f"\n{STATES[kind]}: {who}, {'at once: nothing was saved' if begun else 'before the first step'}.")
        return kind.exit_code
    except Exception as error:
        for run in begun:
            run.output.end("lost", 4, f"{type(error).__name__}: {error}")
        raise
    finally:
        if guard:
            guard.stop()
        disconnect()


def _train(config: RunConfig, folder: Path, world: World, wanted: Resume, begun: list[Run]) -> None:
    found, goes_on = together(world, lambda: _found(config, world, wanted))
    checked = together(world, lambda: check(config, folder, world, begins=not wanted.asked))
    if wanted.asked and not found:
        checked.notes.append(
            f"--resume {wanted.asked}: {config.run.dir} has no checkpoint yet; this run starts at step 0"
        )
    models = together(world, lambda: load_models(checked, world))
    if found:
        checked.notes.extend(together(world, lambda: resume.check_run(found, models.facts, wanted.allowed)))
    state = together(world, lambda: start_engine(checked, models, world))
    output = Output(state)
    if found:
        progress = together(world, lambda: resume.restore(found.path, state.engine, world, state.facts))
        with resume.as_written(found.path / PROGRESS):
            state.restore(progress)
            output.restore(progress["output"], goes_on=goes_on)
        if not goes_on:  # a branch has no checkpoint of its own yet
            state.best = None
        else:  # a kill may have come between a rollback and the next checkpoint
            state.rollbacks = max(state.rollbacks, world.gather_objects(output.directory.rollbacks())[0])
    if found and state.step >= state.steps:
        state.notes.append(f"step {state.step} of {state.steps} is done already: there is nothing left to train")
    checkpoints = Checkpoints(config, state.policy, state.engine, world, state.facts, output.run_id)
    checkpoints.notes = state.notes
    if found:
        with resume.as_written(found.path / PROGRESS):
            checkpoints.resumed(found, state.best, output.alarms.good_step, in_place=goes_on)
    together(world, lambda: output.begin(goes_on=goes_on))
    if goes_on:
        state.best = checkpoints.tidy(state.step, found.path if found else None, state.best)
    state.rewards.ledger = together(world, lambda: Ledger(output.path, world.rank, ranks=world.size))
    begun.append(Run(state, output, checkpoints))
    interrupts.defer()
    train(state, output, checkpoints)
    output.end("done", 0, "")


def _found(config: RunConfig, world: World, wanted: Resume) -> tuple[Found | None, bool]:
    """What to resume from, and whether run.dir holds this run's records already. A collective: rank 0 verifies."""
    found, goes_on, error = None, False, None
    if world.is_main and wanted.asked:
        try:
            found, goes_on = resume.locate(wanted.asked, Path(config.run.dir), config.checkpoint.verify)
        except RunEnd as end:
            error = (type(end).__name__, str(end))
    found, goes_on, error = world.gather_objects((found, goes_on, error))[0]
    if error:
        kind, message = error
        raise KINDS.get(kind, Stopped)(message)
    if found and not (found.path / manifest.NAME).is_file():
        raise NoCheckpoint(f"{found.path} is not there. Fix: a path that every host sees.")
    return found, goes_on


def _leave(run: Run, end: OutOfMemory) -> None:
    """Without a collective, since others may wait in one; they learn from run_status.json why it fails."""
    if end.whole and run.output.world.size == 1:
        _close(run, end)
        return
    if end.rank == run.output.world.rank:
        run.output.end_alone(end.exit_code, str(end))
    if run.output.world.is_main:
        say(f"\n{_newest(run)}")


def _newest(run: Run) -> str:
    step = run.checkpoints.saved_step
    return "there is no checkpoint" if step is None else f"the newest checkpoint is that of step {step}"


def _close(run: Run, end: RunEnd) -> None:
    """Saves what is whole, and says and records how the run ended. Every rank raised the same ``end``: a collective."""
    state, where = STATES.get(type(end), "stopped"), _newest(run)
    try:
        if folder := save(run.state, run.output, run.checkpoints):
            where = f"saved {folder}; go on with --resume auto"
    except RunEnd as failed:
        where = f"not saved{'' if str(failed) == str(end) else f': {failed}'}; {where}"
    except (RuntimeError, MemoryError) as failed:
        if not asked_of_memory(failed):
            raise
        where = f"not saved, for want of memory; {where}"
    finally:
        run.output.end(state, end.exit_code, str(end))
    if run.output.world.is_main and type(end) in STATES:
        say(f"\n{state}: {end}, after step {run.state.step}; {where}.")
    elif run.output.world.is_main:
        say(f"\n{where}")


def _lost(said: str, begun: Sequence[Run]) -> str:
    if not begun:
        return f"a collective that failed before the first step ({said}): another rank was lost or hangs."
    run = begun[0]
    saved = run.checkpoints.saved_step
    fix = "There is no checkpoint." if saved is None else f"Fix: --resume auto goes on after step {saved}."
    return f"a collective that failed in step {run.state.step + 1} ({said}): another rank was lost or hangs. {fix}"


def _await_signal(error: Exception, world: World) -> None:
    """Where all ranks are signalled while they start, a collective with one that has left already fails before this
    rank's signal is seen.

    Python delivers a signal no earlier than at the next call, and a launcher reaches its ranks one by one. Rank 0 waits
    less: what keeps the launcher from ending it is its own record of a rank that was lost.
    """
    time.sleep(0)
    if world.size > 1 and not isinstance(error, RunEnd):
        time.sleep(0.2 if world.is_main else 3)


def preflight_run(config: RunConfig, folder: Path, *, ranks: int, hostfile: str, as_json: bool) -> int:
    """What ``train`` checks before the first rollout, and nothing written: the exit code.

    Weights are read only where their files' headers do not say enough, or a hook of the user's looks at them.
    ``ranks``: those that the run will have; 0: those of ``hostfile``, or of this launch.
    """
    with redirect_stdout(sys.stderr if as_json else sys.stdout):  # rewards may print
        world = connect(config.engine.device, timeout_seconds=config.watch.hang_timeout)
        try:
            if world.is_main and not as_json:
                say("checking configuration, rewards and data ...")
            found = _surveyed(config, folder, world, ranks, hostfile)
        finally:
            disconnect()
    if world.is_main:
        say(json.dumps(record(found)) if as_json else page(found))
    return Refused.exit_code if found.errors else 0


def _surveyed(config: RunConfig, folder: Path, world: World, ranks: int, hostfile: str) -> Survey:
    problems: Sequence[str] = ()
    hosts: dict[str, int] = {}
    try:
        hosts = {host.name: host.slots for host in read_hostfile(hostfile)} if hostfile else {}
    except Refused as refusal:
        problems = refusal.problems
    found = survey(config, folder, world.device, ranks=ranks or sum(hosts.values()) or world.size, begins=True)
    found.errors[:0] = problems
    found.hosts = hosts
    if found.errors or not is_here(config.model):
        return found
    if found.unread or config.hooks.before_rollout:
        checked = checked_of(found)
        told = len(checked.notes)
        found.ask(lambda: load_models(checked, world))
        found.notes += checked.notes[told:]
    return found
