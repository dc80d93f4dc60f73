"""Base classes of what commands print with ``--json``."""

from typing import Self

from pydantic import BaseModel, ConfigDict, Field


class View(BaseModel):
    """A part of an answer; numbers that are not finite are null."""

    model_config = ConfigDict(frozen=True, populate_by_name=True, serialize_by_alias=True, ser_json_inf_nan="null")

    @classmethod
    def of(cls, source: object, **others: object) -> Self:
        """Return a view of an object.

        Args:
            source: What is viewed: its attributes are the fields of the same names.
            others: All further fields, and those that differ from the attribute of that name.

        Raises:
            ValidationError: A field is missing, or has another type.
        """
        same = {name: getattr(source, name) for name in cls.model_fields if hasattr(source, name)}
        return cls.model_validate({**same, **others})


class Answer(View):
    """One whole answer, beginning with the version of its schema."""

    schema_version: int = Field(default=1, serialization_alias="schema")
