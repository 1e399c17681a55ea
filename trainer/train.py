"""The loop and ``grpo_step``: the algorithm on one screen (DeepSeekMath, arXiv 2402.03300, Algorithm 1)."""

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar, cast

from trainer import heartbeat, interrupts
from trainer.batch import Completion, Prompt
from trainer.checkpoint import resume
from trainer.checkpoint.export import export
from trainer.checkpoint.save import Checkpoints
from trainer.checkpoint.store import step_of
from trainer.collect import of_all_ranks, sample, score, set_advantages, share, trained
from trainer.config import RunConfig
from trainer.data.order import prompts_for_step
from trainer.errors import RunEnd, Stopped
from trainer.evaluate import Evaluation, answer_and_score, gathered
from trainer.measure import Stopwatch, measure_rollout, step_metrics
from trainer.output import Output
from trainer.ranks import compare_seconds, compare_weights
from trainer.record.metrics import Sums
from trainer.rewards.runtime import RewardRuntime
from trainer.rollout.decoder import Decoder, Group
from trainer.rollout.hooks import run_hooks
from trainer.state import State
from trainer.update import (
    ask_reference,
    charge_kl_to_rewards,
    control_kl,
    global_count,
    kl_in_loss,
    kl_in_reward,
    measure_masks,
    micro_batch_loss,
    note_unmoved_adapters,
    passes,
    set_kl_coefficient,
    take_step,
    with_gradient,
)
from trainer.watch.alarms import Alarm, rolled_back_by, stopped_by
from trainer.watch.signals import measure_text, top_tokens
from trainer.world import World

T = TypeVar("T")

MOST_ROLLBACKS = 3
"""Of one run. The next alarm stops it."""
FIRST_LOOK = 3
"""Steps after which adapters that still are zero are worth a note."""


def grpo_step(state: State, groups: list[Group]) -> tuple[dict[str, float], list[Completion]]:
    """One rollout and its policy updates. ``groups`` are this rank's prompts.

    Returns the metrics, equal on all ranks, and this rank's completions.
    """
    config, world = state.config, state.world
    sums, clock = Sums(), Stopwatch()
    heartbeat.enter("rollout", step=state.step + 1)
    set_kl_coefficient(state)

    # 1. G completions of each prompt, with the log-probs of their sampler.
    context = state.hook_context(groups)
    state.notes += together(world, lambda: run_hooks(state.hooks, context))
    with state.engine.gathered():
        completions = together(world, clock.timed("rollout", lambda: sample(state, groups)))
    clock.lap("rollout")

    # 2. What they are worth. A row that could not be scored is unscored, not zero.
    heartbeat.enter("reward")
    said = together(world, clock.timed("reward", lambda: score(state, completions, sums)))
    state.notes += of_all_ranks(said, world)
    clock.lap("reward")

    # 3. Advantages within each group; then what the reference says of the tokens to train. N counts skipped ones, too.
    heartbeat.enter("reference")
    trainable = trained(completions, config.grpo.mask_truncated)
    if kl_in_reward(state):
        charge_kl_to_rewards(state, trained(completions, mask_truncated=False), sums)
    set_advantages(state, completions)
    count = global_count(state, trainable)
    batches = passes(state, read := with_gradient(state, trainable))
    measure_masks(batches, read, sums)
    if kl_in_loss(state):
        ask_reference(state, batches)
    clock.lap("reference")

    # 4. The updates: a sum over this rank's tokens, divided once by a count over all ranks.
    if count == 0:
        state.notes.append(f"step {state.step + 1}: no completion to train on, on any rank; no update")
    for update in range(config.grpo.updates_per_rollout if count else 0):
        heartbeat.enter("backward")
        for number, batch in enumerate(batches):
            heartbeat.met()
            if update == 0:  # until here no weight has moved
                together(world, interrupts.check)
            with clock.working("forward"):
                loss_sum = micro_batch_loss(state, batch, sums, first=update == 0)
            batch.gradient = state.engine.backward_sum(loss_sum, count, last=number == len(batches) - 1)
        take_step(state, batches, sums)
        if update == 0:
            sums.add("loss", 0.0, count if world.is_main else 0)
    clock.lap("update")

    metrics = measure_step(state, completions, sums, clock)
    control_kl(state, metrics.get("kl"))
    return metrics, completions


def measure_step(state: State, completions: list[Completion], sums: Sums, clock: Stopwatch) -> dict[str, float]:
    """What the completions and the machine say, beside what the updates have summed; over all ranks. A collective."""
    measure_rollout(completions, sums)
    measure_text(completions, sums, state.policy.tokenizer)
    for _, share_of_top in top_tokens(completions, state.world)[:1]:
        sums.maximum("top_token_share", share_of_top)
    sums.maximum("kl_coef", state.kl_coefficient)
    sums.maximum("held_memory_gib", state.memory.held() / 2**30)
    compare_seconds(state, clock, sums)
    metrics = step_metrics(state.world, sums, clock.seconds, state.memory.take_peak())
    if (slope := state.memory_slope.add(metrics["held_memory_gib"])) is not None:
        metrics["memory_slope_mib"] = slope * 1024
    return metrics


def train(state: State, output: Output, checkpoints: Checkpoints) -> None:
    """All steps that are left of a run. Between two steps, where both are due: evaluation, then checkpoint."""
    config = state.config
    with state.memory:
        while True:
            state.at_boundary()
            if evaluation_is_due(state, output):
                evaluate_now(state, output)
                note_best(state, output)
                state.at_boundary()  # rewards of the evaluation may have drawn random numbers
                keep_best(state, output, checkpoints)
            every = config.checkpoint.every
            if every and state.step and (state.step % every == 0 or state.step == state.steps):
                save(state, output, checkpoints)
            if state.step >= state.steps:
                break
            rows = prompts_for_step(len(state.prompts), config.rollout.prompts_per_step, state.step, config.data.seed)
            groups = share([state.prompts[row] for row in rows], state.world)
            state.memory.take_peak()  # what an evaluation or a checkpoint held is not the step's
            metrics, completions = grpo_step(state, groups)
            state.step += 1
            if config.watch.checksum_every and state.step % config.watch.checksum_every == 0:
                compare_weights(state)
            if state.step == FIRST_LOOK:
                note_unmoved_adapters(state)
            alarms = output.step(metrics, completions)
            if reason := stopped_by(alarms, config.watch):
                state.at_boundary()
                raise Stopped(f"{reason}\n{where_to_go_on(checkpoints)}")
            if asking := rolled_back_by(alarms, config.watch):
                roll_back(state, output, checkpoints, asking)
    heartbeat.enter("export")
    output.exported(export(state.policy, state.engine, state.world, output.path, config))


def save(state: State, output: Output, checkpoints: Checkpoints) -> Path | None:
    """A checkpoint of the last moment between two steps; None when an update has left it. A collective."""
    if state.boundary is None:
        return None
    step = state.boundary.progress["step"]
    if checkpoints.saved_step == step:
        return checkpoints.store.folder(step)
    if state.config.watch.checksum_every:
        compare_weights(state)
    heartbeat.enter("save")
    output.alarms.saved(step)
    checkpoints.keep_good(output.alarms.good_step)
    progress = state.boundary.progress | {"output": output.progress()}
    began, first = time.monotonic(), not checkpoints.bytes
    folder = checkpoints.save(step, progress, state.boundary.random_states)
    if first and checkpoints.bytes:  # of rank 0, which tells it
        size, seconds = checkpoints.bytes / 1e9, time.monotonic() - began
        state.notes.append(f"the first checkpoint: {size:.3g} GB in {seconds:.1f} s, which a scheduler must leave it")
    state.notes += state.rewards.forget_paid_before(checkpoints.oldest)
    return folder


def roll_back(state: State, output: Output, checkpoints: Checkpoints, alarms: Sequence[Alarm]) -> None:
    """The run as it was at the last checkpoint that no signal spoke against, to go on from there with other samples. A
    collective. Stopped where there is none, or after ``MOST_ROLLBACKS``: what comes again is no chance of the samples.
    """
    world, rollbacks = state.world, state.rollbacks + 1
    state.at_boundary()
    if checkpoints.good is None or rollbacks > MOST_ROLLBACKS:
        why = "There is no checkpoint to go back to" if checkpoints.good is None else "It came again with other samples"
        said = "\n".join(alarm.line() for alarm in alarms)
        raise Stopped(f"{said}\n{why} (rollbacks: {state.rollbacks}). {where_to_go_on(checkpoints)}")
    good = checkpoints.go_back()
    state.boundary = None  # until everything is put back there is nothing whole to save
    checkpoints.agreed(
        lambda: output.go_back(step_of(good), alarms[0], rollbacks) if world.is_main else None,
        "the run cannot go back: its records cannot be set aside",
    )
    progress = together(world, lambda: resume.restore(good, state.engine, world, state.facts))
    state.restore(progress)
    state.rollbacks = rollbacks
    state.best = checkpoints.still_best(state.best)
    output.restore(progress["output"], goes_on=True)


def where_to_go_on(checkpoints: Checkpoints) -> str:
    """After an alarm: from the last checkpoint that no signal spoke against, with other settings."""
    if checkpoints.good is None:
        return "No checkpoint is from before. Fix: begin again, with the change above."
    return f"Last checkpoint from before: --resume {checkpoints.good} with a new run.dir, and --allow the change above."


def evaluation_is_due(state: State, output: Output) -> bool:
    """Before the first step, every ``eval.every``, and after the last; not where a resumed run has it already."""
    every = state.config.eval.every
    due = state.step in (0, state.steps) or (every and state.step % every == 0)
    return bool(state.eval_prompts and due and output.evaluated_step() != state.step)


def note_best(state: State, output: Output) -> None:
    """Whether the last evaluation is the best one so far, by ``eval.best_metric``."""
    metric = state.config.eval.best_metric
    if not metric:
        return
    value = getattr(output.evaluations[-1], metric).mean
    if state.best is not None and state.best["metric"] != metric:
        state.best = None
    if math.isfinite(value) and (state.best is None or value > state.best["value"]):
        state.best = {"metric": metric, "step": state.step, "value": value}


def keep_best(state: State, output: Output, checkpoints: Checkpoints) -> None:
    """A checkpoint of the best evaluation so far, which pruning leaves alone."""
    if state.best is not None and state.best["step"] == state.step:
        checkpoints.keep_best(save(state, output, checkpoints))


def evaluate_now(state: State, output: Output) -> None:
    """Mean reward on the held-out prompts."""
    heartbeat.enter("evaluate")
    output.evaluating()
    with state.engine.gathered():
        output.evaluation(
            held_out(
                state.config, state.world, state.decoder, state.rewards, state.eval_prompts, state.step, state.notes
            )
        )


def held_out(
    config: RunConfig,
    world: World,
    decoder: Decoder,
    rewards: RewardRuntime,
    prompts: Sequence[Prompt],
    step: int,
    notes: list[str],
) -> Evaluation:
    """The evaluation of the weights that ``decoder`` reads. ``step``: what reward functions are told. A collective."""
    generations = config.eval.num_generations
    said: list[str] = []

    def score(completions: list[Completion]) -> None:
        said.extend(rewards.score(completions, step).messages)

    completions = together(
        world, lambda: answer_and_score(decoder, score, prompts, generations=generations, world=world)
    )
    notes += of_all_ranks(said, world)
    correct_at = config.eval.correct_at
    return gathered(
        step, completions, prompts=len(prompts), generations=generations, correct_at=correct_at, world=world
    )


def together(world: World, work: Callable[[], T]) -> T:
    """``work()`` on every rank; where it ends the run on one rank, it ends it on all, with that rank's message.

    A safe point, too: a rank that was asked to end does so here, and takes the others with it.
    """
    result: T | None = None
    error: RunEnd | None = None
    try:
        interrupts.check()
        result = work()
        interrupts.check()
    except RunEnd as end:
        error = end
    world.agree(error)
    return cast(T, result)
