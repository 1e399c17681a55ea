"""Rules about length, data, evaluation, optimizer and engine."""

import difflib
import re
from collections.abc import Iterator

from trainer.config.fields import literal
from trainer.config.problems import Problem
from trainer.config.rules.keys import problem, unused
from trainer.config.schema import RunConfig
from trainer.config.shipped import DEEPSPEED
from trainer.outside import path_problem

HOOK = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def one_length(config: RunConfig) -> Iterator[Problem]:
    steps, epochs = config.run.steps, config.run.epochs
    if steps and epochs:
        yield problem(
            "run.epochs run.steps", f"run.steps = {steps} and run.epochs = {epochs:g} are both given. Keep one."
        )
    if not steps and not epochs:
        yield problem(
            "run.steps run.epochs",
            "neither run.steps nor run.epochs is given: how long to train? Write one, for example run.steps = 200.",
        )


def paths_can_be(config: RunConfig) -> Iterator[Problem]:
    paths = {
        "run.dir": config.run.dir,
        "model.name_or_path": config.model.name_or_path,
        "model.gguf_file": config.model.gguf_file,
        "lora.start_adapter": config.lora.start_adapter,
        "rollout.replay": config.rollout.replay,
        "engine.deepspeed": config.engine.deepspeed,
    }
    for key, path in paths.items():
        if wrong := path_problem(path):
            yield problem(key, f"{key} = {literal(path)}: {wrong}. Fix: correct the path.")
    for index, entry in enumerate(config.reward):
        for name, path in (("function", entry.function), ("path", entry.path)):
            if wrong := path_problem(path):
                text = f"reward.{entry.name}.{name} = {literal(path)}: {wrong}. Fix: correct the path."
                yield Problem((("reward", index, name),), text)


def warmup_fits(config: RunConfig) -> Iterator[Problem]:
    updates = config.run.steps * config.grpo.updates_per_rollout
    if updates and config.optim.schedule != "constant" and config.optim.warmup_steps >= updates:
        yield problem(
            "optim.warmup_steps run.steps",
            f"optim.warmup_steps = {config.optim.warmup_steps} leaves nothing of the {updates} updates (run.steps x"
            " grpo.updates_per_rollout) "
            f'for optim.schedule = "{config.optim.schedule}". Lower optim.warmup_steps below {updates}, or raise'
            " run.steps.",
        )


def data_source(config: RunConfig) -> Iterator[Problem]:
    if not config.data.source and not config.rollout.replay:
        yield problem(
            "data.source rollout.replay",
            'data.source is missing: where are the prompts? A .jsonl file, for example data.source = "prompts.jsonl";'
            " only with rollout.replay none is needed.",
        )


def one_evaluation_set(config: RunConfig) -> Iterator[Problem]:
    data = config.data
    for name in ("eval_source", "eval_split"):
        if data.eval_fraction and getattr(data, name):
            yield problem(
                f"data.eval_fraction data.{name}",
                f"data.eval_fraction = {data.eval_fraction:g} takes the evaluation from the training prompts,"
                f" data.{name} names another set. Keep one.",
            )


def evaluation_is_not_training(config: RunConfig) -> Iterator[Problem]:
    data = config.data
    same_source = data.eval_source in ("", data.source)
    if data.source and same_source and (data.eval_source or data.eval_split) and data.eval_split in ("", data.split):
        yield problem(
            "data.eval_split data.eval_source data.split",
            "data.eval_source and data.eval_split name the training prompts (data.source, data.split ="
            f' "{data.split}"). Name another split, or hold some prompts out: data.eval_fraction = 0.05.',
        )


def evaluation_has_data(config: RunConfig) -> Iterator[Problem]:
    data = config.data
    if config.eval.every and not (data.eval_source or data.eval_split or data.eval_fraction):
        yield problem(
            "eval.every data.eval_fraction",
            f"eval.every = {config.eval.every}, but there is nothing to evaluate on. Give data.eval_source,"
            " data.eval_split or data.eval_fraction, or remove eval.every.",
        )
    if not config.eval.every:
        yield from unused("eval", config.eval, ["best_metric"], "nothing is evaluated (eval.every = 0)", "eval.every")


def columns_differ(config: RunConfig) -> Iterator[Problem]:
    data = config.data
    prompt, answer = data.prompt_column or "prompt", data.answer_column or "answer"
    if prompt == answer:
        yield problem(
            "data.answer_column data.prompt_column",
            f'data.prompt_column and data.answer_column are both "{prompt}": the answer would be part of the prompt.'
            " Name two columns.",
        )


def template_keys(config: RunConfig) -> Iterator[Problem]:
    if config.data.chat_template == "off":
        reason = 'prompts are not rendered (data.chat_template = "off")'
        yield from unused("data", config.data, ["system", "chat_template_kwargs"], reason, "data.chat_template")


def optimizer_keys(config: RunConfig) -> Iterator[Problem]:
    if config.optim.name == "sgd":
        yield from unused("optim", config.optim, ["betas", "eps"], 'optim.name = "sgd" has no moments', "optim.name")


def offload_needs_adam(config: RunConfig) -> Iterator[Problem]:
    if config.optim.name != "adamw" and config.engine.deepspeed.endswith("-offload"):
        yield problem(
            "optim.name engine.deepspeed",
            f'optim.name = "{config.optim.name}" cannot be offloaded: engine.deepspeed = "{config.engine.deepspeed}"'
            ' updates with DeepSpeed\'s CPU Adam. Use optim.name = "adamw", or engine.deepspeed without -offload.',
        )


def deepspeed_name(config: RunConfig) -> Iterator[Problem]:
    name = config.engine.deepspeed
    if name not in DEEPSPEED and not name.endswith(".json"):
        close = difflib.get_close_matches(name, DEEPSPEED, n=1)
        help_text = f'Did you mean "{close[0]}"?' if close else "Or give the path of a DeepSpeed .json."
        yield problem(
            "engine.deepspeed", f'engine.deepspeed = "{name}": expected one of {", ".join(DEEPSPEED)}. {help_text}'
        )


def one_batch_limit(config: RunConfig) -> Iterator[Problem]:
    if config.engine.micro_batch:
        reason = f"engine.micro_batch = {config.engine.micro_batch} already says what one pass holds"
        yield from unused("engine", config.engine, ["token_budget"], reason, "engine.micro_batch")


def rollback_changes_something(config: RunConfig) -> Iterator[Problem]:
    for key in ("on_alarm", "on_garble"):
        if getattr(config.watch, key) != "rollback":
            continue
        if not config.checkpoint.every:
            yield problem(
                f"watch.{key} checkpoint.every",
                f'watch.{key} = "rollback" goes back to a checkpoint, and checkpoint.every = 0 saves none. Give'
                f' checkpoint.every, for example 20, or use watch.{key} = "stop".',
            )
        if config.rollout.replay:
            yield problem(
                f"watch.{key} rollout.replay",
                f'watch.{key} = "rollback" goes on with other samples, and with rollout.replay ='
                f' "{config.rollout.replay}" none are drawn: it would come to the same. Use watch.{key} = "stop".',
            )


def hook_names(config: RunConfig) -> Iterator[Problem]:
    for name in config.hooks.before_rollout:
        if not HOOK.fullmatch(name):
            yield problem(
                "hooks.before_rollout", f'hooks.before_rollout has "{name}": expected "package.module:function".'
            )


RULES = (
    paths_can_be,
    one_length,
    warmup_fits,
    data_source,
    one_evaluation_set,
    evaluation_is_not_training,
    evaluation_has_data,
    columns_differ,
    template_keys,
    optimizer_keys,
    offload_needs_adam,
    deepspeed_name,
    one_batch_limit,
    rollback_changes_something,
    hook_names,
)
