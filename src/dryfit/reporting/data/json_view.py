"""Base classes of what commands print with ``--json``."""

from pydantic import BaseModel, ConfigDict, Field


class View(BaseModel):
    """A part of an answer; numbers that are not finite are null."""

    model_config = ConfigDict(frozen=True, populate_by_name=True, serialize_by_alias=True, ser_json_inf_nan="null")


class Answer(View):
    """One whole answer, beginning with the version of its schema."""

    schema_version: int = Field(default=1, serialization_alias="schema")
