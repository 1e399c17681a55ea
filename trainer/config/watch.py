"""The guards of a running job, and the limits that `watch.level` sets."""

from math import inf
from typing import Any, Literal

from pydantic import Field

from trainer.config.section import Section

LEVELS: dict[str, tuple[float, float, float]] = {
    # quiet, normal, seed. An infinity, or 0 of a floor: no alarm.
    "garble_entry": (0.4, 0.4, 0.4),
    "garble_clear": (0.05, 0.05, 0.05),
    "garble_rise": (inf, 0.1, 0.1),
    "kl": (5.0, 2.0, 2.0),
    "kl_cv": (inf, inf, 5.0),
    "entropy_floor": (0.0, 0.0, 0.5),
    "top_token": (inf, 0.6, 0.6),
    "sampling_gap": (0.5, 0.1, 0.1),
    "reward_kl_ratio": (0.0, 0.0, 2.0),
}
"""Every limit that a run file may override. "seed" adds what the document asks for that this project began with."""


def _limit(key: str, meaning: str) -> Any:
    """A key whose default is that of the level."""
    quiet, normal, seed = ("off" if value in (0, inf) else f"{value:g}" for value in LEVELS[key])
    values = normal if quiet == normal == seed else f"quiet {quiet}, normal {normal}, seed {seed}"
    return Field(default=None, gt=0, description=f"{meaning} As watch.level says: {values}.")


def _phase(what: str) -> Any:
    """A key whose default is watch.hang_timeout."""
    return Field(default=None, gt=0, description=f"Seconds {what}. As watch.hang_timeout says.")


class PhaseTimeout(Section):
    start: float | None = _phase("of loading model, data and engine; the ranks meet in 600 at most, before it")
    evaluate: float | None = _phase("of an evaluation, between two tokens or calls")
    rollout: float | None = _phase("of a rollout, between two tokens")
    reward: float | None = _phase("of scoring, of which the rewards get 0.4")
    reference: float | None = _phase("between two micro-batches of the reference")
    backward: float | None = _phase("of a micro-batch, forward and backward")
    update: float | None = _phase("of an optimizer step")
    save: float | None = _phase("of each half of a checkpoint: shards, then weights and hashes")
    export: float | None = _phase("of writing the adapter or model at the end")


class Watch(Section):
    level: Literal["quiet", "normal", "seed"] = Field(
        default="normal",
        description=(
            "Sets all limits. quiet: only what is broken beyond doubt. normal: what goes wrong against the run's own"
            " beginning. seed: also fixed limits on entropy, KL spread and reward / KL, which healthy runs can cross."
        ),
    )
    on_alarm: Literal["warn", "stop", "rollback"] = Field(
        default="warn",
        description=(
            "What an alarm does, other than that of garbled text. stop: saves, exit code 3. rollback: goes back to the"
            " last checkpoint that no signal spoke against, and on from there with other samples (run.seed + 1, + 2,"
            " ...); after three times it stops."
        ),
    )
    on_garble: Literal["warn", "stop", "rollback"] = Field(
        default="stop",
        description=(
            "What the alarm of garbled text does. stop: nothing that is trained after it is worth its price. rollback:"
            " as in on_alarm."
        ),
    )
    baseline_steps: int = Field(
        default=10,
        ge=1,
        description="First steps, whose medians later ones are compared with. 10: the warm-up of the learning rate.",
    )
    garble_entry: float | None = _limit(
        "garble_entry", "Share of garbled completions that raises the alarm, two steps in a row."
    )
    garble_clear: float | None = _limit("garble_clear", "Share that ends it, held for 10 steps in a row.")
    garble_rise: float | None = _limit("garble_rise", "Rise of that share over the first step that warns beforehand.")
    kl: float | None = _limit(
        "kl", "KL (nats per token) that warns; a tenth of it where the reward has fallen since the beginning."
    )
    kl_cv: float | None = _limit("kl_cv", "Standard deviation of the tokens' KL, over its mean.")
    entropy_floor: float | None = _limit("entropy_floor", "Entropy (nats per token) below which it warns in any case.")
    top_token: float | None = _limit("top_token", "Share of one token among all sampled ones.")
    sampling_gap: float | None = _limit(
        "sampling_gap", "Mean difference of a token's log-prob as sampled and as scored (nats)."
    )
    reward_kl_ratio: float | None = _limit("reward_kl_ratio", "Least reward / (KL coefficient x KL).")
    max_nonfinite_steps: int = Field(
        default=3,
        ge=1,
        description="Refused (non-finite) steps in a row that end the run. 3: one is bad luck, three are not.",
    )
    hang_timeout: float = Field(
        default=1800.0,
        gt=0,
        description=(
            "Seconds without a sign of life of a rank (a token, a micro-batch, a phase) after which the watchdog of its"
            " host names it, keeps the stacks of all ranks and ends the job. 1800: torch's limit of a collective."
        ),
    )
    phase_timeout: PhaseTimeout = Field(
        default_factory=PhaseTimeout, description="Other limits than hang_timeout, of the phase that a rank is in."
    )
    checksum_every: int = Field(
        default=0,
        ge=0,
        description=(
            "Steps between comparisons of the weights of all ranks, bit for bit; before each checkpoint there is one,"
            " too. Ranks that differ end the run, and nothing is saved. ZeRO 0 to 2. 0: never."
        ),
    )

    def seconds_of(self, phase: str) -> tuple[float, str]:
        """Without a sign of life in a phase, and the key that says so."""
        given: float | None = getattr(self.phase_timeout, phase)
        return (self.hang_timeout, "watch.hang_timeout") if given is None else (given, f"watch.phase_timeout.{phase}")

    def for_rewards(self) -> tuple[float, str]:
        """The same of rewards, which an evaluation asks too."""
        return min(self.seconds_of("reward"), self.seconds_of("evaluate"))

    def limits(self) -> dict[str, float]:
        """Of every key of ``LEVELS``: what was given, else what the level says."""
        place = ("quiet", "normal", "seed").index(self.level)
        given = self.model_dump()
        return {key: values[place] if given[key] is None else given[key] for key, values in LEVELS.items()}
