"""Values that a run file may hold and that this version cannot do yet."""

from collections.abc import Iterator

from trainer.config.fields import literal
from trainer.config.problems import Problem
from trainer.config.rules.keys import given, problem
from trainer.config.schema import RunConfig

# key -> (values that do not work yet, what to use)
NOT_YET: dict[str, tuple[tuple[object, ...], str]] = {
    "rollout.engine": (("vllm",), '"shared" or "hf"'),
}
# Keys that only take their default yet.
FIXED = ("watch.checksum_every",)


def not_yet(config: RunConfig) -> Iterator[Problem]:
    for key, (values, instead) in NOT_YET.items():
        section, name = key.split(".")
        value = getattr(getattr(config, section), name)
        if value in values:
            yield problem(key, f"{key} = {literal(value)} is not available in this version; use {instead}.")
    for key in FIXED:
        section_name, name = key.split(".")
        section = getattr(config, section_name)
        if given(section, name):
            default = literal(type(section).model_fields[name].default)
            yield problem(
                key, f"{key} = {literal(getattr(section, name))} is not available in this version; use {default}."
            )


RULES = (not_yet,)
