"""What the rules say their problems with."""

from collections.abc import Iterator, Sequence

from trainer.config.fields import field_at, literal
from trainer.config.problems import Problem
from trainer.config.section import Section


def problem(keys: str, text: str) -> Problem:
    """A problem with keys named as "grpo.kl.min grpo.kl.coef"; the first is the one to be found in the file."""
    return Problem(tuple(tuple(key.split(".")) for key in keys.split()), text)


def given(section: Section, name: str) -> bool:
    """Whether a key says something: a resolved run file writes the defaults too, so those say nothing."""
    return getattr(section, name) != type(section).model_fields[name].get_default(call_default_factory=True)


def unused(prefix: str, section: Section, names: Sequence[str], reason: str, because: str) -> Iterator[Problem]:
    """A problem for each of the keys that is given although `because` leaves it without effect."""
    for name in names:
        if given(section, name):
            key = f"{prefix}.{name}"
            field = field_at(key.split("."))
            assert field is not None
            default = literal(field.get_default(call_default_factory=True))
            yield problem(
                f"{key} {because}",
                f"{key} = {literal(getattr(section, name))} has no effect: {reason}. Remove it (default {default}), or"
                f" change {because}.",
            )
