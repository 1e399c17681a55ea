"""What a run writes and says: files and terminal, both from rank 0. Every rank calls, since rows come from all."""

import os
import socket
import statistics
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer import run_status
from trainer.batch import Completion
from trainer.checkpoint.card import load_line
from trainer.config import dump
from trainer.evaluate import Evaluation, Score, rise
from trainer.launcher import say
from trainer.models.vocabulary import vocabulary_of
from trainer.record import kl_histogram
from trainer.record.console import (
    BeforeAfter,
    before_after_table,
    kl_line,
    preflight_block,
    progress_line,
    sample_block,
    with_error,
)
from trainer.record.environment import collect
from trainer.record.first_steps import FirstSteps
from trainer.record.rollout_rows import row
from trainer.record.run_dir import RunDirectory, RunState
from trainer.record.samples import picked, sample_lines, sample_text
from trainer.record.trackers import Trackers
from trainer.state import State
from trainer.watch.alarms import REPEATED_EVERY, Alarm, Alarms
from trainer.watch.signals import evidence, garble_of_row, in_words

KL_LINE_EVERY = 100
"""Steps between lines with the spread of the KL, as the user's document prints them."""

Rows = list[dict[str, Any]]


class Output:
    """The records of one run."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.config = state.config
        self.world = state.world
        self.path = Path(state.config.run.dir)
        self.directory = RunDirectory(self.path)
        self.hosts: list[str] = self.world.gather_objects(socket.gethostname())
        """One name a rank."""
        self.run_id = uuid.uuid4().hex[:12]
        self.seconds: list[float] = []
        self.first_steps = FirstSteps(state.steps)
        self.evaluations: list[Evaluation] = []
        self.alarms = Alarms.of(state.config)
        self.explained: dict[str, tuple[str, int]] = {}
        """Cause -> the alarm that has said it, and when."""
        self.trackers = Trackers((), self.path, "", {}, 0)
        self.draws = True
        """Histograms become pictures, too, until that has failed."""
        self.told = 0
        """How many of the state's notes the user has seen."""

    def progress(self) -> dict[str, Any]:
        """What a resumed run says on from, JSON-safe."""
        return {
            "run_id": self.run_id,
            "cut": self.first_steps.cut,
            "flat": self.first_steps.flat,
            "evaluations": [evaluation.record() for evaluation in self.evaluations],
            "alarms": self.alarms.progress(),
        }

    def restore(self, progress: dict[str, Any], *, goes_on: bool) -> None:
        """What ``progress`` returned, also after a trip through JSON. A branch is a run of its own, by another id."""
        if goes_on:
            self.run_id = progress["run_id"]
        self.first_steps = FirstSteps(self.state.steps, progress["cut"], progress["flat"])
        self.evaluations = [Evaluation.of(one) for one in progress["evaluations"]]
        self.alarms.restore(progress["alarms"])
        if not goes_on:  # its checkpoints are another run's
            self.alarms.good_step = None

    def evaluated_step(self) -> int | None:
        """Step of the last evaluation."""
        return self.evaluations[-1].step if self.evaluations else None

    def begin(self, *, goes_on: bool) -> None:
        """Makes the run directory, and shows what was decided. No collective: it may be refused on rank 0 alone.

        ``goes_on``: it holds the records of this run already, those after the state's step included.
        """
        if not self.world.is_main:
            return
        if goes_on:
            self.directory.lock()
            self.directory.cut_after(self.state.step)
        else:
            self.directory.create()
            self.directory.lock()
        self.directory.write_config(dump(self.config))
        self.directory.write_environment(collect() | {"hosts": self.hosts})
        vocabulary_of(self.state.policy.tokenizer).save(self.path / "rollouts" / "vocabulary.json")
        self.state.rewards.copy_into(self.path)
        self._status("running", None, "")
        self._open_trackers(self.state.step)
        say(preflight_block(self._untold()))

    def go_back(self, step: int, alarm: Alarm, rollbacks: int) -> None:
        """Before the run goes on again after ``step``: sets later records aside, says why and what changes. Rank 0."""
        aside, seed = self.directory.set_aside(step), self.config.run.seed + rollbacks
        message = (
            f"after step {alarm.step} the run has gone back to step {step}, rollback {rollbacks}: weights, optimizer, "
            "random generators, learning rate and KL coefficient are as they were then. What changes: samples are "
            f"drawn with seed {seed} (run.seed + {rollbacks}). What came after step {step} is in {aside.name}"
        )
        words = {"event": "rolled_back", "step": step, "count": rollbacks, "from_step": alarm.step, "message": message}
        self.directory.append_alarm(alarm.record() | words)
        self.explained.clear()
        self._open_trackers(step)
        say(f"alarm {alarm.alarm}: {message}.")

    def _open_trackers(self, step: int) -> None:
        config = self.config.model_dump(mode="json")
        self.trackers = Trackers(self.config.log.report_to, self.path, self.run_id, config, step)

    def step(self, metrics: dict[str, float], completions: Sequence[Completion]) -> list[Alarm]:
        """Metrics, rollouts, samples and alarms of the step that was just done."""
        rows, histogram = self._gathered(metrics, completions)
        alarms = self.alarms.look(self.state.step, metrics)  # alike on all ranks, which have the same metrics
        shown = evidence(completions, self.state.policy.tokenizer, self.world) if alarms else {}

        def write() -> None:
            self._records(metrics, rows, histogram)
            for alarm in alarms:
                self.directory.append_alarm(alarm.record() | {"evidence": shown})
                self.state.notes += self.trackers.log({f"alarm/{alarm.alarm}": float(alarm.count)}, alarm.step)
                say(self._said_of(alarm, shown))

        self.world.write_on_main(self.path, write)
        return alarms

    def _said_of(self, alarm: Alarm, shown: dict[str, Any]) -> str:
        """A cause is explained by one of its alarms, and by that of garbled text, which may end the run."""
        if alarm.event == "cleared":
            return alarm.line()
        name, step = self.explained.get(alarm.cause, ("", 0))
        if name not in ("", alarm.alarm) and alarm.step - step < REPEATED_EVERY and alarm.alarm != "garble":
            return alarm.line(as_for=name)
        self.explained[alarm.cause] = (alarm.alarm, alarm.step)
        return f"{alarm.line()} {in_words(shown)}"

    def _gathered(self, metrics: dict[str, float], completions: Sequence[Completion]) -> tuple[Rows, list[int]]:
        """Rows and KL histogram of all ranks, where this step's are wanted."""
        step, log = self.state.step, self.config.log
        rows: Rows = []
        if any(every and step % every == 0 for every in (log.rollouts_every, log.samples_every)):
            for part in self.world.gather_objects([row(completion, step) for completion in completions]):
                rows += part
        counts = self.state.kl_histogram.take()
        if not (log.histogram_every and step % log.histogram_every == 0 and "kl" in metrics):
            return rows, []
        return rows, [int(count) for count in self.world.all_reduce_sum(counts)]

    def _records(self, metrics: dict[str, float], rows: Rows, histogram: list[int]) -> None:
        step, log = self.state.step, self.config.log
        self.seconds.append(sum(value for name, value in metrics.items() if name.startswith("seconds_")))
        self.directory.append_metrics({"step": step, **metrics})
        self.state.notes += self.trackers.log(metrics, step)
        if log.rollouts_every and step % log.rollouts_every == 0:
            self.directory.write_rollouts(step, rows)
        if histogram:
            self._histogram(kl_histogram.record(step, histogram, metrics))
        limit = self.config.rollout.max_new_tokens
        self.state.notes += self.first_steps.notes(metrics, max_new_tokens=limit, ends=self._ends())
        for note in self._untold():
            say(note)
        if step % log.every == 0 or step == self.state.steps:
            left = statistics.median(self.seconds[-20:]) * (self.state.steps - step)
            say(progress_line(metrics, step, self.state.steps, left))
        if step % KL_LINE_EVERY == 0 and "kl" in metrics:
            say(kl_line(metrics, step))
        if log.samples_every and step % log.samples_every == 0:
            self._samples(step, rows)
        self._status("running", None, "")

    def evaluating(self) -> None:
        """Before the first step nothing else has been shown yet, and an evaluation can take minutes."""
        if self.world.is_main and not self.evaluations:
            say(f"held-out evaluation of {len(self.state.eval_prompts)} prompts before the first step ...")

    def evaluation(self, result: Evaluation) -> None:
        """Keeps a held-out evaluation, with the mean reward of every prompt."""
        self.evaluations.append(result)
        self.world.write_on_main(self.path, lambda: self._evaluation(result))

    def _evaluation(self, result: Evaluation) -> None:
        self.directory.write_evaluation(result.step, result.record())
        means = {"eval/reward_sampled": result.sampled.mean, "eval/reward_greedy": result.greedy.mean}
        means |= {f"eval/pass_at_{k}": score.mean for k, score in result.total.pass_at.items()}
        self.state.notes += self.trackers.log(means, result.step)
        k, passed = max(result.total.pass_at.items())
        say(
            f"held-out, step {result.step}: reward "
            f"{with_error(result.sampled.mean, result.sampled.stderr)} sampled, "
            f"{with_error(result.greedy.mean, result.greedy.stderr)} greedy"
            + (f"; pass@{k} {with_error(passed.mean, passed.stderr)}" if k > 1 else "")
        )

    def exported(self, target: Path) -> None:
        """The closing words: what was gained, where it lies, how to load it."""
        if not self.world.is_main:
            return
        # Allowed changes to the data of a resumed run may have changed the held-out prompts.
        comparable = [one for one in self.evaluations if len(one.greedy.per_prompt) == len(self.state.eval_prompts)]
        if len(comparable) > 1:
            before, after = comparable[0], comparable[-1]
            sampled = f"sampled at T={self.config.rollout.temperature:g}, {self.config.eval.num_generations} a prompt"
            table = [_line(sampled, before.sampled, after.sampled), _line("greedy", before.greedy, after.greedy)]
            say("\n" + before_after_table(table, len(self.state.eval_prompts)))
        line = load_line(str(target), self.config, target.name, self.state.policy.dtype)
        say(f"\n{target.name}: {target}\nload it: {line}")
        if (best := self.state.best) and best["step"] != self.state.step:
            kept = self.path / "checkpoints" / f"step-{best['step']:06d}"
            say(
                f"that is the last step; the best held-out reward, {best['metric']} {best['value']:.3f}, was after "
                f"step {best['step']}: zero-grpo export {kept} {self.path / 'best'}"
            )

    def end(self, state: RunState, exit_code: int, reason: str) -> None:
        """The last word in run_status.json."""
        try:
            if self.world.is_main:
                self._status(state, exit_code, reason)
        except OSError as error:  # a full disk, which may be why the run ends
            say(f"run_status.json cannot be written: {error}")

    def end_alone(self, exit_code: int, reason: str) -> None:
        """The same from a rank that stops alone, before it lets the others know by leaving."""
        who = {"host": socket.gethostname(), "rank": self.world.rank, "pid": os.getpid()}
        run_status.amend(self.path, state="stopped", exit_code=exit_code, reason=reason, **who)

    def _samples(self, step: int, rows: Rows) -> None:
        tokenizer = self.state.policy.tokenizer
        samples = [(label, one | {"garble": garble_of_row(one, tokenizer)}) for label, one in picked(rows)]
        lines = sample_lines(samples, lambda ids: str(tokenizer.decode(ids)))
        self.directory.write_samples(step, sample_text(samples), lines)
        _, (_, best), (_, worst) = samples
        say(sample_block(best, worst))

    def _histogram(self, record: dict[str, Any]) -> None:
        picture = self.directory.write_histogram(record["step"], record)
        if not self.draws:
            return
        try:
            kl_histogram.draw(record, picture)
        except Exception as error:  # no training ends for a picture
            self.draws = False
            missing = isinstance(error, ImportError)
            why = "needs matplotlib: pip install 'zero-grpo[plots]'" if missing else f"failed ({error})"
            self.state.notes.append(f"log.histogram_every: the picture {why}; the JSON beside it is written")

    def _ends(self) -> str:
        """What ends a completion, in words."""
        tokenizer, stop_ids = self.state.policy.tokenizer, self.state.decoder.stop_ids
        ends = [f"{token_id} ({tokenizer.convert_ids_to_tokens(token_id)})" for token_id in stop_ids]
        ends += [repr(text) for text in self.config.rollout.stop]
        return ", ".join(ends) or "nothing"

    def _status(self, state: RunState, exit_code: int | None, reason: str) -> None:
        self.directory.status(
            state,
            exit_code,
            self.state.step,
            reason,
            host=socket.gethostname(),
            rank=self.world.rank,
            pid=os.getpid(),
            run_id=self.run_id,
        )

    def _untold(self) -> list[str]:
        fresh = self.state.notes[self.told :]
        self.told = len(self.state.notes)
        return fresh


def _line(name: str, before: Score, after: Score) -> BeforeAfter:
    _, error = rise(before, after)
    return BeforeAfter(name, before.mean, before.stderr, after.mean, after.stderr, error)
