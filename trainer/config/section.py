"""What every section of a run file has in common."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, Strict, field_validator


class Section(BaseModel):
    """A table of the run file: frozen, no unknown keys, no conversion of types, no NaN and no infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _of_64_bits(cls, value: Any) -> Any:
        """As TOML has it; Python knows larger ones, which no float and no tensor holds."""
        if type(value) is int and abs(value) >= 2**63:
            raise ValueError
        return value


# TOML and JSON only know lists, so a tuple takes one; its items stay strict.
Texts = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Strict(False)]

# numpy, which the libraries below seed as well, refuses more.
SEED_MAX = 2**32 - 1
