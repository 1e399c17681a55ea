"""Values that a run file may hold and that this version cannot do yet."""

from collections.abc import Iterator

from trainer.config.fields import literal
from trainer.config.problems import Problem
from trainer.config.rules.keys import problem
from trainer.config.schema import RunConfig

# key -> (values that do not work yet, what to use)
NOT_YET: dict[str, tuple[tuple[object, ...], str]] = {
    "rollout.engine": (("vllm",), '"shared" or "hf"'),
}


def not_yet(config: RunConfig) -> Iterator[Problem]:
    for key, (values, instead) in NOT_YET.items():
        section, name = key.split(".")
        value = getattr(getattr(config, section), name)
        if value in values:
            yield problem(key, f"{key} = {literal(value)} is not available in this version; use {instead}.")


RULES = (not_yet,)
