"""The tables of a study file that name a user's own code: ``objective``, ``trainer`` and ``script``."""

from typing import Annotated

from pydantic import Field

from dryfit.core.settings.choices import Direction
from dryfit.core.settings.tables import Settings

_NAME = r"^[^:]+:[\w.]+$"


class OwnCode(Settings):
    """What all these tables say of the code that they name."""

    version: int = Field(
        default=1, ge=0, description="another number: earlier values do not compare, and a new generation begins"
    )
    preload: tuple[str, ...] = Field(
        default=(), description="installed modules that are imported once, before any trial: what it needs and is slow"
    )
    secrets: tuple[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], ...] = Field(
        default=(), description="names of environment variables with secrets that it reads; no trial has any other"
    )


class OwnFunction(OwnCode):
    """What two of them say of a function, beside its name."""

    paths: tuple[str, ...] = Field(
        default=(".",),
        description="folders it is imported from, beside installed packages; unset: this file's, and the current one",
    )


class CalledCode(OwnFunction):
    """The user's own code of a study, whichever table names it.

    Attributes:
        function: ``place:name`` of a function, or the command of a script.
        paths: Of a script, the folder that it is run in.
    """

    function: str
    goals: tuple[str, ...] = Field(
        default=("value",), min_length=1, description="names of the numbers it returns, in their order"
    )
    directions: tuple[Direction, ...] | None = Field(
        default=None, description="a direction for each of the goals; unset: all are minimized"
    )


class ObjectiveSettings(CalledCode):
    """``[objective]``: a function of your own, for the task ``objective``."""

    function: str = Field(
        pattern=_NAME,
        description="what is called for each trial: `package.module:function`, or `file.py:function`",
    )


class TrainerSettings(OwnFunction):
    """``[trainer]``: a function that makes your own Trainer, for the task ``trainer``."""

    make: str = Field(
        pattern=_NAME,
        description="what makes the Trainer of a trial: `package.module:function`, or `file.py:function`",
    )


class ScriptSettings(OwnCode):
    """``[script]``: a training script of your own with its arguments, for the task ``script``."""

    command: str = Field(
        min_length=1,
        description="what is run for each trial: `train.py --lr {lr}`, with a placeholder for each key of `[space]`",
    )
    folder: str = Field(default=".", description="folder that it is run in; unset: this file's")
    results: str | None = Field(
        default=None,
        pattern=r"^[^/]",
        description="a file of JSON lines that it writes below `{folder}`: a report each, with `step` and the metric",
    )
