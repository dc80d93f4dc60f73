"""Report of loading a model: the origin of every tensor."""

from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict


class TensorOrigin(StrEnum):
    """The origin of one tensor."""

    FILE = "file"
    TIED = "tied"
    CONSTRUCTOR = "constructor"
    RANDOM = "random"


class LoadReport(BaseModel):
    """Report of loading a model; every parameter, buffer and plain tensor of the module is named exactly once.

    Attributes:
        source: The folder or file of the weights; empty if there was none.
        files: The files that were read.
        from_file: The file's key of each tensor that was read.
        tied: Names of a tensor that has another name too, with that name.
        constructed: Tensors with the value their constructor gave them.
        random: Tensors drawn at random, as the caller allowed; they depend on the seed of the construction.
        unexpected: Keys of the file for parts that this model does not have (heads of another task).
        ignored: Keys of the file that the architecture declares to be unused.
        renamed: Rules by which keys were renamed, with counts: ``{"bert.": 199}``.
        casts: Conversions of number formats, with counts: ``{"bfloat16 to float32": 391}``.
        notes: Further remarks.
        seconds: Duration.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    source: str = ""
    files: tuple[str, ...] = ()
    from_file: dict[str, str] = {}
    tied: dict[str, str] = {}
    constructed: tuple[str, ...] = ()
    random: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    renamed: dict[str, int] = {}
    casts: dict[str, int] = {}
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    def origins(self) -> dict[str, TensorOrigin]:
        """Return the origin of every tensor, by name."""
        return (
            dict.fromkeys(self.from_file, TensorOrigin.FILE)
            | dict.fromkeys(self.tied, TensorOrigin.TIED)
            | dict.fromkeys(self.constructed, TensorOrigin.CONSTRUCTOR)
            | dict.fromkeys(self.random, TensorOrigin.RANDOM)
        )

    def summary(self) -> str:
        """Return one line with the number of tensors of each origin."""
        counts = (
            (len(self.from_file), "from file"),
            (len(self.tied), "tied"),
            (len(self.constructed), "built by the constructor"),
            (len(self.random), "random as allowed"),
            (len(self.unexpected), "keys not used"),
        )
        return ", ".join(f"{count} {what}" for count, what in counts if count) or "no tensor"
