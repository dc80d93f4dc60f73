"""Findings about a checkpoint that was examined without reading its weights."""

from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class _Facts(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, populate_by_name=True)


class Subject(StrEnum):
    """The kind of checkpoint in a folder."""

    MODEL = "model"
    """A pretrained model."""
    TRAINED = "trained"
    """An encoder with its head, saved by a trial."""
    ADAPTER = "adapter"
    """A PEFT adapter without its base model."""
    ENSEMBLE = "ensemble"
    """Several models saved by trials, whose predictions are averaged."""


class StoredFile(_Facts):
    """One file with weights."""

    name: str
    size_bytes: int
    tensors: int


class Stored(_Facts):
    """The contents of a checkpoint, by its files' headers.

    Attributes:
        format: ``safetensors`` or ``pickle``.
        files: The files with the weights, in reading order.
        tensors: Number of tensors.
        total_bytes: Bytes of all tensors.
        bytes_by_dtype: The same by number format.
    """

    format: str
    files: tuple[StoredFile, ...]
    tensors: int
    total_bytes: int
    bytes_by_dtype: dict[str, int]


class Built(_Facts):
    """The model that a folder's config describes, and how the checkpoint fits it.

    Attributes:
        architecture: Its class name.
        parameters: Number of trainable parameters; tied ones count once.
        places: Tensors that a complete checkpoint has; tied ones count once.
        filled: How many of them this checkpoint has.
        tied: Groups of names of one tensor.
        renamed: Rules by which keys were renamed, with counts: ``{"module.": 39}``.
        conversions: Tensors made of several keys: ``name: of key, key``.
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
        kind: PEFT's type: ``LORA``.
        base: Name of its base model; empty if it has none.
        layers: Number of layers it adapts.
        rank: The rank in its config; None for kinds without one.
    """

    kind: str
    base: str
    layers: int
    rank: int | None


class Health(_Facts):
    """The contents of a checkpoint, whether it can be loaded, and if not, why.

    Attributes:
        folder: Its folder.
        subject: Its kind.
        task: The task it was examined for, as in ``dryfit.load(..., task=...)``; empty for a trial's own folder or an
            adapter.
        why: Why that task was taken.
        healthy: Whether ``dryfit.load`` can load it, as far as the headers show.
        stored: Contents of the files; None if they cannot be opened.
        model: The model of the config; None if it cannot be built, and for an adapter.
        adapter: The adapter, if it is one.
        missing: Names of tensors that the files lack.
        shapes: Sentences about tensors of a wrong shape.
        kinds: Sentences about tensors of a wrong kind of number.
        strays: Keys that no tensor has, of parts that the model does have.
        unwritten: Tensors that neither a file nor the constructor fills.
        errors: Errors that ended the examination; four-part messages.
        unexpected: Keys for parts that this model does not have (heads of another task). No fault.
        ignored: Keys that are not used. No fault.
        notes: Further remarks. No fault.
        members: The findings about each model of an ensemble.
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
        """Return each kind of fault in words, with its tensors; errors are left out."""
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
