"""The alarms of a run: a state machine over its rows of metrics. Pure, so that every rank decides alike."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from trainer.config import RunConfig
from trainer.config.watch import Watch
from trainer.watch.causes import CAUSES, suspected
from trainer.watch.rules import RULES, Numbers, Reading, Rule

REPEATED_EVERY = 50
"""Steps after which an alarm that still stands is told again."""
CLEARED_AFTER = 10
"""Steps in a row within the limit that end an alarm."""
UNMENDED = (
    *("garbled_from_start", "kl_at_start", "sampling_gap", "scored_tokens"),
    *("advantages", "decoded_text", "reward_failing", "memory"),
)
"""Alarms of what older weights have as well: a rollback is none of their answers."""
AT_ONCE = 3
"""Patience (steps) of rules whose first step past the limit speaks against a checkpoint already. Those that wait longer
are past it now and then in any run."""
UNFINISHED = ("garble_rate", "kl_at_step_1", "reward_mean", "reward_std")
"""What rules read of a beginning that is not over: its first step's, since medians of two steps would move under the
alarm."""
SUBSUMED = {"garble_rising": "garble", "kl": "collapse"}
"""An alarm that says nothing beside another, of the same cause and further on."""


@dataclass(frozen=True)
class Alarm:
    """What is told, at one step, of one alarm."""

    alarm: str
    event: Literal["raised", "stands", "cleared"]
    step: int
    since: int
    """First step of those in a row that raised it."""
    count: int
    """How often it has been told in this run."""
    signal: str
    value: float
    limit: float
    baseline: float | None
    cause: str
    """A key of ``CAUSES``."""

    def record(self) -> dict[str, Any]:
        """For alarms.jsonl, in words too. A baseline that does not exist is absent."""
        words = {"cause_in_words": CAUSES[self.cause].what, "fix": CAUSES[self.cause].fix}
        return {key: value for key, value in (asdict(self) | words).items() if value is not None}

    def line(self, as_for: str = "") -> str:
        """For the console. ``as_for``: an alarm of the same cause, which has explained it."""
        began = "" if self.baseline is None else f", {self.baseline:.3g} at the beginning"
        what = f"{self.signal} {self.value:.3g} (limit {self.limit:.3g}{began})"
        if self.event == "cleared":
            return f"step {self.step}: alarm {self.alarm} is over: {what}"
        again = "" if self.count == 1 else f", told {self.count} times"
        cause = CAUSES[self.cause]
        why = f"as for {as_for}" if as_for else f"{cause.what}. Fix: {cause.fix}"
        return f"step {self.step}: ALARM {self.alarm}: {what}, since step {self.since}{again}. Suspected: {why}."


@dataclass
class Standing:
    """Where one alarm stands."""

    active: bool = False
    since: int = 0
    streak: int = 0
    """Steps in a row: past the limit while the alarm is down, within it while it is up."""
    told: int = -REPEATED_EVERY
    """Step at which it was last said to be up."""
    count: int = 0


@dataclass
class Alarms:
    """The state is JSON-safe, and part of a checkpoint."""

    settings: Watch
    replays: bool = False
    """Rollouts are recorded ones: another policy has sampled them, so the gap to it is no sign."""
    first: list[dict[str, float]] = field(default_factory=list)
    """Signals of the first steps."""
    standings: dict[str, Standing] = field(default_factory=dict)
    good_step: int | None = None
    """Of the newest checkpoint from before any sign of trouble."""

    @classmethod
    def of(cls, config: RunConfig) -> "Alarms":
        """Those of a run."""
        return cls(config.watch, replays=bool(config.rollout.replay))

    def progress(self) -> dict[str, Any]:
        standings = {name: asdict(one) for name, one in self.standings.items()}
        return {"first": self.first, "standings": standings, "good_step": self.good_step}

    def restore(self, progress: Mapping[str, Any]) -> None:
        """What ``progress`` returned, also after a trip through JSON. An alarm that ends a run, or takes it back, has
        to be raised anew: one that stood on would never do so again."""
        self.first, good_step = list(progress["first"]), progress["good_step"]
        self.good_step = None if good_step is None else int(good_step)
        self.standings = {name: Standing(**one) for name, one in progress["standings"].items()}
        for name, one in self.standings.items():
            if action_of(name, self.settings) != "warn":
                one.active, one.streak = False, 0

    def beginning(self) -> dict[str, float]:
        """Medians of the first steps; of garble rate and KL what the model came with, before any update. Before the
        first steps are over, the first one."""
        first = {("kl_at_step_1" if key == "kl" else key): value for key, value in self.first[0].items()}
        if len(self.first) < self.settings.baseline_steps:
            return first
        keys = {key for row in self.first for key in row}
        medians = {key: statistics.median(row[key] for row in self.first if key in row) for key in sorted(keys)}
        return medians | {key: value for key, value in first.items() if key in ("garble_rate", "kl_at_step_1")}

    def look(self, step: int, row: Numbers) -> list[Alarm]:
        """What is to be told after a step; to be asked once a step, with its metrics."""
        row = {key: value for key, value in row.items() if not (self.replays and key == "sampling_logp_gap")}
        if len(self.first) < self.settings.baseline_steps:
            self.first.append(dict(row))
        begin, known = self.beginning(), len(self.first) >= self.settings.baseline_steps
        seen = begin if known else {key: value for key, value in begin.items() if key in UNFINISHED}
        limits = self.settings.limits()
        told = []
        for rule in RULES:
            wanted = (known or rule.at_once) and not (rule.relative and self.settings.level == "quiet")
            reading = rule.read(row, seen, limits) if wanted else None
            if reading is not None and (event := self._moved(rule, step, reading)):
                standing = self.standings[rule.alarm]
                told.append(
                    Alarm(
                        rule.alarm,
                        event,
                        step,
                        standing.since,
                        standing.count,
                        rule.signal,
                        reading.value,
                        reading.limit,
                        reading.baseline,
                        suspected(rule.alarm, row, begin),
                    )
                )
        return told

    def saved(self, step: int) -> None:
        """A checkpoint of this step can be gone back to when no alarm speaks against it. What older weights have too
        does not, nor what is compared with the run's own beginning and asks for no more than words."""
        for rule in RULES:
            one = self.standings.get(rule.alarm, Standing())
            counts = rule.alarm not in UNMENDED and not (
                rule.relative and action_of(rule.alarm, self.settings) == "warn"
            )
            if counts and (one.active or (one.streak and rule.patience <= AT_ONCE)):
                return
        self.good_step = step

    def _moved(self, rule: Rule, step: int, reading: Reading) -> Literal["raised", "stands", "cleared"] | None:
        """Counts the step; what of it is to be told."""
        one = self.standings.setdefault(rule.alarm, Standing())
        was_active = one.active
        if was_active:
            one.streak = one.streak + 1 if reading.clear else 0
            if one.streak >= CLEARED_AFTER:
                one.active, one.streak = False, 0
                return "cleared" if one.told >= one.since else None
        else:
            one.streak = one.streak + 1 if reading.beyond else 0
            if one.streak == 1:
                one.since = step
            if one.streak < rule.patience or self._is_active(SUBSUMED.get(rule.alarm)):
                return None
            one.active, one.streak = True, 0
        # One that comes and goes is told no more often than one that stays, unless more than words follows.
        rose = not was_active and action_of(rule.alarm, self.settings) != "warn"
        if not reading.beyond or not (rose or step - one.told >= REPEATED_EVERY):
            return None
        one.told, one.count = step, one.count + 1
        return "stands" if was_active and one.count > 1 else "raised"

    def _is_active(self, alarm: str | None) -> bool:
        return alarm is not None and alarm in self.standings and self.standings[alarm].active


Action = Literal["warn", "stop", "rollback"]


def action_of(alarm: str, settings: Watch) -> Action:
    """What that alarm does when it is raised."""
    action: Action = settings.on_garble if alarm == "garble" else settings.on_alarm
    return "warn" if action == "rollback" and alarm in UNMENDED else action


def stopped_by(alarms: Sequence[Alarm], settings: Watch) -> str:
    """What ends the run after this step, in words; empty when nothing does."""
    return "\n".join(alarm.line() for alarm in _asking(alarms, settings, "stop"))


def rolled_back_by(alarms: Sequence[Alarm], settings: Watch) -> list[Alarm]:
    """Those that take the run back after this step."""
    return _asking(alarms, settings, "rollback")


def _asking(alarms: Sequence[Alarm], settings: Watch, action: Action) -> list[Alarm]:
    return [one for one in alarms if one.event == "raised" and action_of(one.alarm, settings) == action]
