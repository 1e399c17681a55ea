"""What a run writes and says: files and terminal, both from rank 0. Every rank calls, since rows come from all of
them."""

import os
import socket
import statistics
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.batch import Completion
from trainer.checkpoint.card import load_line
from trainer.config import dump
from trainer.evaluate import Evaluation, Score, rise
from trainer.launcher import say
from trainer.models.vocabulary import vocabulary_of
from trainer.record.console import (
    BeforeAfter,
    before_after_table,
    preflight_block,
    printable,
    progress_line,
    sample_block,
)
from trainer.record.environment import collect
from trainer.record.first_steps import FirstSteps
from trainer.record.rollout_rows import row
from trainer.record.run_dir import RunDirectory, RunState
from trainer.record.trackers import Trackers
from trainer.state import State
from trainer.watch.alarms import Alarm, Alarms
from trainer.watch.signals import evidence, in_words


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
        self.alarms = Alarms(state.config.watch)
        self.trackers = Trackers((), self.path, "", {}, 0)
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
        config = self.config.model_dump(mode="json")
        self.trackers = Trackers(self.config.log.report_to, self.path, self.run_id, config, self.state.step)
        say(preflight_block(self._untold()))

    def step(self, metrics: dict[str, float], completions: Sequence[Completion]) -> list[Alarm]:
        """Metrics, rollouts, samples and alarms of the step that was just done."""
        self._records(metrics, completions)
        # Another policy has sampled what is replayed.
        other = {"sampling_logp_gap"} if self.config.rollout.replay else set()
        alarms = self.alarms.look(self.state.step, {key: metrics[key] for key in metrics if key not in other})
        if alarms:  # on all ranks alike: they have the same metrics
            shown = evidence(completions, self.state.policy.tokenizer, self.world)
            for alarm in alarms if self.world.is_main else ():
                self.directory.append_alarm(alarm.record() | {"evidence": shown})
                self.state.notes += self.trackers.log({f"alarm/{alarm.alarm}": float(alarm.count)}, alarm.step)
                say(printable(alarm.line() if alarm.event == "cleared" else f"{alarm.line()} {in_words(shown)}"))
        return alarms

    def _records(self, metrics: dict[str, float], completions: Sequence[Completion]) -> None:
        step, log = self.state.step, self.config.log
        self.seconds.append(sum(value for name, value in metrics.items() if name.startswith("seconds_")))
        wanted = (log.rollouts_every and step % log.rollouts_every == 0) or (
            log.samples_every and step % log.samples_every == 0
        )
        rows: list[dict[str, Any]] = []
        if wanted:
            for part in self.world.gather_objects([row(completion, step) for completion in completions]):
                rows += part
        if not self.world.is_main:
            return
        self.directory.append_metrics({"step": step, **metrics})
        self.state.notes += self.trackers.log(metrics, step)
        if log.rollouts_every and step % log.rollouts_every == 0:
            self.directory.write_rollouts(step, rows)
        limit = self.config.rollout.max_new_tokens
        self.state.notes += self.first_steps.notes(metrics, max_new_tokens=limit, ends=self._ends())
        for note in self._untold():
            say(note)
        if step % log.every == 0 or step == self.state.steps:
            left = statistics.median(self.seconds[-20:]) * (self.state.steps - step)
            say(progress_line(metrics, step, self.state.steps, left))
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
        if self.world.is_main:
            self.directory.write_evaluation(result.step, result.record())
            means = {"eval/reward_sampled": result.sampled.mean, "eval/reward_greedy": result.greedy.mean}
            self.state.notes += self.trackers.log(means, result.step)
            say(
                f"held-out, step {result.step}: reward {result.sampled.mean:.3f} ± {result.sampled.stderr:.3f} "
                "sampled, "
                f"{result.greedy.mean:.3f} ± {result.greedy.stderr:.3f} greedy"
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
        say(f"\n{target.name}: {target}\nload it: {load_line(str(target), self.config.model, target.name)}")

    def end(self, state: RunState, exit_code: int, reason: str) -> None:
        """The last word in run_status.json."""
        if self.world.is_main:
            self._status(state, exit_code, reason)

    def _samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        scored = [one for one in rows if one["reward"] is not None] or rows
        by_reward = sorted(scored, key=lambda one: one["reward"] or 0.0)
        text = sample_block(by_reward[-1], by_reward[0])
        self.directory.write_samples(step, text + "\n")
        say(text)

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
