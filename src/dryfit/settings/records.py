"""Records: frozen data that crosses processes as JSON and is read strictly, of the standard library alone.

What runs in a user's own environment can be sure of nothing else there. A record has the methods of a pydantic model
that messages need, under their names, and may be a field of one.
"""

import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from enum import Enum
from functools import cache
from types import UnionType
from typing import Any, ClassVar, Final, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from dryfit.settings.older_python import dataclass_transform

RecordT = TypeVar("RecordT", bound="Record")

_EXACT: Final = (bool, int, float, str, type(None))


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
class Record:
    """Base of records: each subclass is a frozen data class whose fields are given by name."""

    # For pydantic, where a record is a field of a model: as strict as the model is.
    __pydantic_config__: ClassVar[Mapping[str, Any]] = {
        "strict": True,
        "extra": "forbid",
        "ser_json_inf_nan": "constants",
    }

    model_fields: ClassVar[Mapping[str, Any]] = {}
    """What is known of each field, in order."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        dataclass(frozen=True, kw_only=True)(cls)
        cls.model_fields = {one.name: one for one in fields(cast("Any", cls))}

    def model_copy(self: RecordT, *, update: Mapping[str, Any] | None = None) -> RecordT:
        """Return a copy with some fields changed."""
        return replace(cast("Any", self), **(update or {}))

    def model_dump(self, *, mode: str = "python", exclude: Collection[str] = ()) -> dict[str, Any]:
        """Return the fields by name, and those of records within.

        Args:
            mode: ``json`` makes lists of tuples, and texts of enumerations.
            exclude: Names of fields that are left out.
        """
        made = _plain(self, is_json=mode == "json")
        return {name: value for name, value in made.items() if name not in exclude}

    def model_dump_json(self) -> str:
        """Return the record as JSON."""
        return json.dumps(_plain(self, is_json=True), separators=(",", ":"), ensure_ascii=False)

    @classmethod
    def model_validate(cls: type[RecordT], value: Any, *, strict: bool | None = None) -> RecordT:
        """Return the record of what JSON says.

        Args:
            value: Dicts, lists, texts and numbers.
            strict: Nothing: a text of an enumeration is taken either way.

        Raises:
            ValueError: It is no such record; the message says where.
        """
        return _read(cls, value, cls.__name__)

    @classmethod
    def model_validate_json(cls: type[RecordT], text: str | bytes) -> RecordT:
        """Read the record.

        Raises:
            ValueError: It is no such record; the message says where.
        """
        try:
            return cls.model_validate(json.loads(text))
        except RecursionError as error:
            raise ValueError("it is nested too deep") from error


class Message(Record):
    """A record that a process sends: versioned."""

    v: Literal[1] = 1


@cache
def _kinds(cls: type[Record]) -> dict[str, Any]:
    """Return the types of a record's fields by their names."""
    hints = get_type_hints(cls)
    return {one.name: hints[one.name] for one in fields(cast("Any", cls))}


def _plain(value: Any, *, is_json: bool) -> Any:
    """Return a value as dicts and lists; tuples and enumerations stay as they are outside of JSON."""
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: _plain(getattr(value, one.name), is_json=is_json) for one in fields(value)}
    if isinstance(value, dict):
        items = cast("dict[Any, Any]", value).items()
        return {_plain(key, is_json=is_json): _plain(one, is_json=is_json) for key, one in items}
    if isinstance(value, list | tuple):
        made = [_plain(one, is_json=is_json) for one in cast("list[Any]", value)]
        return tuple(made) if isinstance(value, tuple) and not is_json else made
    return value.value if is_json and isinstance(value, Enum) else value


def _read(kind: Any, value: Any, where: str) -> Any:
    """Return a value of JSON as a type has it."""
    origin, parts = get_origin(kind), get_args(kind)
    if kind in _EXACT:
        return _exact(kind, value, where)
    if origin is Literal:
        if not any(value == one and type(value) is type(one) for one in parts):
            raise ValueError(f"{where} is {value!r:.80}, not one of {parts}")
        return value
    if origin in (Union, UnionType):
        return _any_of(parts, value, where)
    if origin is tuple:
        return _tuple(parts, value, where)
    if origin is dict and isinstance(value, dict):
        items = cast("dict[Any, Any]", value).items()
        return {_read(parts[0], key, where): _read(parts[1], one, f"{where}.{key}") for key, one in items}
    if isinstance(kind, type) and issubclass(kind, Record) and isinstance(value, dict):
        return _record(kind, cast("dict[str, Any]", value), where)
    if isinstance(kind, type) and (isinstance(value, kind) or (issubclass(kind, Enum) and isinstance(value, str))):
        return kind(value) if issubclass(kind, Enum) else value
    raise ValueError(f"{where} is {value!r:.80}, not {kind}")


def _exact(kind: Any, value: Any, where: str) -> Any:
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"{where} is {value!r:.80}, not {kind.__name__}")
    return value


def _any_of(kinds: Collection[Any], value: Any, where: str) -> Any:
    if type(value) in kinds:
        return value
    others = [kind for kind in kinds if kind is not type(None)]
    if len(others) == 1:
        return _read(others[0], value, where)  # its error says more
    for kind in others:
        with suppress(ValueError):
            return _read(kind, value, where)
    raise ValueError(f"{where} is {value!r:.80}, which is of none of its types")


def _tuple(parts: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{where} is {value!r:.80}, not a list")
    values = cast("list[Any]", value)
    kinds = parts[:1] * len(values) if parts[-1:] == (Ellipsis,) else parts
    if len(kinds) != len(values):
        raise ValueError(f"{where} has {len(values)} values, not {len(kinds)}")
    return tuple(_read(one, item, f"{where}.{at}") for at, (one, item) in enumerate(zip(kinds, values, strict=True)))


def _record(cls: type[RecordT], value: Mapping[str, Any], where: str) -> RecordT:
    kinds = _kinds(cls)
    if unknown := sorted(value.keys() - kinds.keys()):
        raise ValueError(f"{where} has an unknown key: {unknown[0]!r:.80}")
    for one in fields(cast("Any", cls)):
        if one.name not in value and one.default is MISSING and one.default_factory is MISSING:
            raise ValueError(f"{where}.{one.name} is missing")
    return cls(**{name: _read(kinds[name], one, f"{where}.{name}") for name, one in value.items()})
