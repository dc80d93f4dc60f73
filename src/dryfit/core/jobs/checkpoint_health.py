"""What a look at a checkpoint finds, without its weights being read."""

from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class _Facts(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, populate_by_name=True)


class Subject(StrEnum):
    """What a folder holds."""

    MODEL = "model"
    """A pretrained model."""
    TRAINED = "trained"
    """An encoder with its head, saved by a trial."""
    ADAPTER = "adapter"
    """A PEFT adapter, without the model it belongs on."""
    ENSEMBLE = "ensemble"
    """Several models saved by trials, whose predictions are averaged."""


class StoredFile(_Facts):
    """One file with weights."""

    name: str
    size_bytes: int
    tensors: int


class Stored(_Facts):
    """What the headers of a checkpoint's files say.

    Attributes:
        format: ``safetensors`` or ``pickle``.
        files: The files that hold the weights, in reading order.
        tensors: How many tensors they hold.
        total_bytes: Bytes of all tensors.
        bytes_by_dtype: The same, for each number format.
    """

    format: str
    files: tuple[StoredFile, ...]
    tensors: int
    total_bytes: int
    bytes_by_dtype: dict[str, int]


class Built(_Facts):
    """The model that a folder's config describes, and how the file fits into it.

    Attributes:
        architecture: Its class.
        parameters: How many numbers are trained; tied ones count once.
        places: Tensors that a file of it holds, tied ones once.
        filled: How many of them this file fills.
        tied: Names that are one tensor.
        renamed: How keys became names, and how often: ``{"module.": 39}``.
        conversions: Tensors that are made of several keys: ``name: of key, key``.
    """

    architecture: str
    parameters: int
    places: int
    filled: int
    tied: tuple[tuple[str, ...], ...] = ()
    renamed: dict[str, int] = {}
    conversions: tuple[str, ...] = ()


class Adapter(_Facts):
    """A PEFT adapter.

    Attributes:
        kind: PEFT's name of it: ``LORA``.
        base: The model it says it belongs on; empty where it says none.
        layers: How many layers it adapts.
        rank: Its rank, as its config says; None for kinds without one.
    """

    kind: str
    base: str
    layers: int
    rank: int | None


class Health(_Facts):
    """What a checkpoint holds, whether it can be loaded, and if not, why.

    Attributes:
        folder: Where it lies.
        subject: What it is.
        task: What the model was built for, in the words of ``dryfit.load(..., task=...)``; empty where that is not
            asked (a trial's own folder, an adapter).
        why: Why it was that task.
        healthy: Whether ``dryfit.load`` can load it, as far as headers tell.
        stored: What the files hold; None where they cannot be opened.
        model: The model of the config; None where it cannot be built, or for an adapter.
        adapter: The adapter, where it is one.
        missing: Names the files have nothing for.
        shapes: Sentences about tensors of another shape.
        kinds: Sentences about tensors of another kind of number.
        strays: Keys without a place inside a part of the model that is there.
        unwritten: Tensors that no file holds and no constructor fills.
        errors: What kept the look from going further; four-part messages.
        unexpected: Keys for parts this model does not have (heads of another task). No fault.
        ignored: Keys that nothing has a use for. No fault.
        notes: What else a reader should know. No fault.
        members: Of an ensemble, what each of its models holds.
    """

    schema_version: Literal[1] = Field(default=1, alias="schema")
    folder: str
    subject: Subject
    task: str = ""
    why: str = ""
    healthy: bool
    stored: Stored | None = None
    model: Built | None = None
    adapter: Adapter | None = None
    missing: tuple[str, ...] = ()
    shapes: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    strays: tuple[str, ...] = ()
    unwritten: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    members: tuple["Health", ...] = ()

    def faults(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """What is wrong, in words, and with which tensors; errors left out."""
        table = (
            ("missing", self.missing),
            ("of another shape", self.shapes),
            ("of another kind of number", self.kinds),
            ("without a place", self.strays),
            ("never written", self.unwritten),
        )
        own = [(what, names) for what, names in table if names]
        of_members = (
            (what, tuple(f"{place}: {name}" for name in names))
            for place, member in enumerate(self.members, start=1)
            for what, names in member.faults()
        )
        return (*own, *of_members)
