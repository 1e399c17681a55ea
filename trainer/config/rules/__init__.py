"""The rules between keys: one small function each, which names the keys and the fix. All are asked, always."""

from trainer.config.problems import Problem
from trainer.config.rules import algorithm, available, model, reward, run, service
from trainer.config.schema import RunConfig

RULES = (*available.RULES, *run.RULES, *model.RULES, *reward.RULES, *service.RULES, *algorithm.RULES)


def broken(config: RunConfig) -> list[Problem]:
    """Every rule that the config breaks, one problem each."""
    return [problem for rule in RULES for problem in rule(config)]
