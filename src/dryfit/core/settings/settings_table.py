"""The base class of all tables of settings, and the table ``[own]`` of a user's own task."""

import re
from collections.abc import Mapping
from typing import Annotated, Final, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class Settings(BaseModel):
    """Base of every settings table: frozen, strictly typed, and an unknown key is an error.

    Validate from JSON (``model_validate_json``): only there does strict mode take the text of an enum.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


Knob: TypeAlias = bool | int | float | str
"""A value of a key that a user's own task declares."""

OWN_KEY: Final = re.compile(r"[a-z][a-z0-9_]{0,99}")
"""Pattern of the names of such keys."""


class OwnSettings(Settings):
    """``[own]``: keys that a task of your own declares."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Knob] = Field(init=False)  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def knobs(self) -> Mapping[str, Knob]:
        """Its keys with their values; attributes of this class may have the same names."""
        return self.__pydantic_extra__

    @model_validator(mode="after")
    def _named(self) -> "OwnSettings":
        for name in self.knobs:
            if not OWN_KEY.fullmatch(name):
                raise ValueError(f"{name!r} is no name of a key: a small letter, then small letters, digits and _")
        return self
