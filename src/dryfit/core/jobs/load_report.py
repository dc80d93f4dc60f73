"""Where every tensor of a loaded model came from."""

from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict


class TensorOrigin(StrEnum):
    """Where one tensor came from."""

    FILE = "file"
    TIED = "tied"
    CONSTRUCTOR = "constructor"
    RANDOM = "random"


class LoadReport(BaseModel):
    """What loading did: every parameter, buffer and plain tensor of the module is named exactly once.

    Attributes:
        source: The folder or file of the weights; empty where there was none.
        files: The files that were read.
        from_file: Key in the file of each tensor that was read.
        tied: Names that are the same tensor as another name.
        constructed: Tensors with the value their constructor gave them.
        random: Tensors drawn at random, as the caller allowed; a function of the seed of the construction.
        unexpected: Keys of the file for parts this model does not have (heads of another task).
        ignored: Keys of the file that the architecture declares to be of no use.
        renamed: How keys became names, and how often: ``{"bert.": 199}``.
        casts: Conversions of number formats, and how often: ``{"bfloat16 to float32": 391}``.
        notes: What else a reader should know.
        seconds: Time it took.
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
        """The origin of every tensor, by name."""
        return (
            dict.fromkeys(self.from_file, TensorOrigin.FILE)
            | dict.fromkeys(self.tied, TensorOrigin.TIED)
            | dict.fromkeys(self.constructed, TensorOrigin.CONSTRUCTOR)
            | dict.fromkeys(self.random, TensorOrigin.RANDOM)
        )

    def summary(self) -> str:
        """One line: how many tensors came from where."""
        counts = (
            (len(self.from_file), "from file"),
            (len(self.tied), "tied"),
            (len(self.constructed), "built by the constructor"),
            (len(self.random), "random as allowed"),
            (len(self.unexpected), "keys not used"),
        )
        return ", ".join(f"{count} {what}" for count, what in counts if count) or "no tensor"
