"""What commands print with ``--json``: the manners that all of it shares."""

from pydantic import BaseModel, ConfigDict, Field


class View(BaseModel):
    """A part of such an answer; numbers that are not finite are null."""

    model_config = ConfigDict(frozen=True, populate_by_name=True, serialize_by_alias=True, ser_json_inf_nan="null")


class Answer(View):
    """One whole answer, which says its version first."""

    schema_version: int = Field(default=1, serialization_alias="schema")
