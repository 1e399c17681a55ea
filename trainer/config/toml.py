"""A RunConfig as the run file that says all of it."""

from trainer.config.schema import RunConfig


def dump(config: RunConfig) -> str:
    """Every key with its value, in TOML; `load` reads it back to an equal config."""
    import tomli_w  # here, so that reading and checking a config needs pydantic alone

    # TOML has no null: an absent fallback stays absent.
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))
