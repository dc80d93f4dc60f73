"""A study file as text: its resolved configuration as TOML, and its JSON schema."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, cast

from dryfit.settings.study_file import StudyConfig
from dryfit.settings.tables import TrialSettings
from dryfit.settings.task_facts import OWN_TABLE, reads

_HEADER: Final = "# What this study was created from. Written by dryfit; edit study.toml instead.\n"
_SOURCES: Final = ("train", "validation", "test", "file")


def dump_toml(config: StudyConfig, folder: Path | None = None) -> str:
    """Return a configuration as a complete TOML document, which loads as the same configuration.

    Args:
        config: The configuration, written with defaults. Unset keys are left out, as TOML has no null.
        folder: The folder of the document: paths below it are written relative to it, so that it can be moved.
    """
    document = _document(config)
    if folder is not None:
        _make_relative(document, folder)
    lines = [_HEADER]
    for table, keys in document.items():
        lines.append(f"[{table}]")
        lines += [f"{_key(key)} = {toml_value(value)}" for key, value in keys.items() if value is not None]
        lines.append("")
    return "\n".join(lines)


def _make_relative(document: dict[str, Any], folder: Path) -> None:
    models = (("model", ("name",)), ("joint", ("criteria_model",)))
    for table, names in (("data", _SOURCES), ("search", ("enqueue_from",)), *models):
        for name in names if table in document else ():
            document[table][name] = _relative(document[table][name], folder)
    study = document["study"]
    study["task"] = _relative(study["task"], folder)
    study["listeners"] = [_relative(name, folder) for name in study["listeners"]]
    if "lm" in document:
        document["lm"]["metric"] = _relative(document["lm"]["metric"], folder)
    if "script" in document:
        document["script"]["folder"] = _relative(document["script"]["folder"], folder)
    for table in ("objective", "trainer"):
        if table in document:
            document[table]["paths"] = [_relative(path, folder) for path in document[table]["paths"]]


def _relative(value: object, folder: Path) -> object:
    if isinstance(value, str) and Path(value).is_absolute() and Path(value).is_relative_to(folder):
        return "./" + os.path.relpath(value, folder)
    return value


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else _toml_text(key)


def _toml_text(text: str) -> str:
    """Return a basic string. JSON's escapes are valid TOML, which needs DEL escaped as well."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def toml_value(value: object) -> str:
    """Format a value as TOML."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return _toml_text(value)
        case list() | tuple():
            return "[" + ", ".join(toml_value(item) for item in cast("Sequence[object]", value)) + "]"
        case dict():
            items = cast("dict[str, object]", value).items()
            return "{" + ", ".join(f"{_key(key)} = {toml_value(item)}" for key, item in items if item is not None) + "}"
        case _:
            return repr(value)


def _document(config: StudyConfig) -> dict[str, dict[str, Any]]:
    """Return the tables that are set and that the study's task reads."""
    tables = {table: keys for table, keys in config.model_dump(mode="json").items() if keys is not None}
    read = {
        table: {key: value for key, value in keys.items() if reads(config.study.task, f"{table}.{key}")}
        for table, keys in tables.items()
    }
    return {table: keys for table, keys in read.items() if keys}


# The study file's JSON schema, and descriptions of single keys from it.


Node = dict[str, Any]

_DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
_VALUE: Final[Node] = {"type": ["boolean", "integer", "number", "string"]}


def study_json_schema() -> Node:
    """Return the JSON schema of a study file, for editors and for ``dryfit schema``.

    It describes what a user may write: a searched key takes a list, one case or a list of cases.
    """
    schema = StudyConfig.model_json_schema()
    _repair(schema)
    case = {"$ref": "#/$defs/Case"}
    schema["properties"]["space"]["additionalProperties"] = {
        "anyOf": [
            {"type": "array", "items": _VALUE, "minItems": 1, "description": "categorical"},
            case,
            {"type": "array", "items": case, "minItems": 1, "description": "cases, each with its condition"},
        ]
    }
    for name, node in schema["properties"].items():
        node.pop("default", None)  # every key inside carries its own
        for option in node.pop("anyOf", ()):  # a table that may be absent; TOML cannot write null
            node.update({"$ref": option["$ref"]} if "$ref" in option else {})
        if "$ref" in node:
            summary = _resolve(schema, node).get("description", "").split("\n")[0]
            node.setdefault("description", summary.removeprefix(f"``[{name}]``: "))
    return {
        "$schema": _DIALECT,
        "title": "dryfit study",
        "description": "A study file (study.toml) of dryfit: what to train, what to search, how to run it.",
        **{key: value for key, value in schema.items() if key not in ("title", "description")},
    }


def _repair(node: Any) -> None:
    """Correct two errors of pydantic's generator: constraints on arrays and unions with Python's names."""
    if isinstance(node, dict):
        table = cast("Node", node)
        if table.get("type") == "array" and "minLength" in table:
            table["minItems"] = table.pop("minLength")
        if "anyOf" in table and "gt" in table:
            table["exclusiveMinimum"] = table.pop("gt")
        for value in table.values():
            _repair(value)
    elif isinstance(node, list):
        for value in cast("list[Any]", node):
            _repair(value)


def _resolve(schema: Node, node: Node) -> Node:
    reference = node.get("$ref")
    return schema["$defs"][reference.rpartition("/")[2]] if reference else node


_SCHEMA: Final = study_json_schema()

TABLES: Final[dict[str, tuple[str, ...]]] = {
    name: tuple(_resolve(_SCHEMA, node)["properties"])
    for name, node in _SCHEMA["properties"].items()
    if name != "space"
}
"""Every table of a study file except ``[space]``, with its keys."""

SEARCHABLE: Final[tuple[str, ...]] = tuple(
    f"{table}.{key}" for table in TrialSettings.model_fields for key in TABLES[table]
)
"""Every dotted name that is allowed in ``[space]``."""

CASE_KEYS: Final[tuple[str, ...]] = tuple(_SCHEMA["$defs"]["Case"]["properties"])
"""Keys of one case of a searched key."""


def key_description(path: Sequence[str]) -> str:
    """Return the description of a key such as ``("train", "epochs")``, or of a table."""
    node = _SCHEMA["properties"][path[0]]
    if len(path) == 1:
        return node["description"]
    return _resolve(_SCHEMA, node)["properties"][path[1]].get("description", "")


def legal_values(path: Sequence[str]) -> str:
    """Return a key's allowed values in words: its type, range or choices.

    Args:
        path: Table and key, ``("space", "KEY", "low")`` for a key of a case, or a table alone.
    """
    if path[0] == "space":
        if len(path) > 2 and path[2] in CASE_KEYS:
            return _CASE_WORDS[path[2]]
        return "a list of choices, a table with low and high, or a list of such tables with when"
    if len(path) > 1 and path[0] == OWN_TABLE:
        return "a number, text in quotes, true or false"
    if len(path) == 1 or path[1] not in TABLES.get(path[0], ()):
        return "a table of keys"
    if tuple(path[:2]) == ("search", "enqueue"):
        return _POINT_WORDS if len(path) == 2 else "a number, text in quotes, true or false"
    return _words(_resolve(_SCHEMA, _SCHEMA["properties"][path[0]])["properties"][path[1]])


_POINT_WORDS: Final = "tables [[search.enqueue]] of searched keys, each with a value"
_CASE_WORDS: Final = {
    "choices": "a list of at least one number, text, true or false",
    "low": "a number",
    "high": "a number",
    "log": "true or false",
    "step": "a number above 0",
    "when": "a table of searched keys, each with a value or a list of values",
}


def number_type(path: Sequence[str]) -> type[int] | type[float] | None:
    """Return which numbers a key such as ``("train", "epochs")`` holds; None: none."""
    node = _resolve(_SCHEMA, _resolve(_SCHEMA, _SCHEMA["properties"][path[0]])["properties"][path[1]])
    kinds = {_resolve(_SCHEMA, option).get("type") for option in node.get("anyOf", [node])}
    return float if "number" in kinds else int if "integer" in kinds else None


def _words(node: Node) -> str:
    node = {**_resolve(_SCHEMA, node), **{key: value for key, value in node.items() if key != "$ref"}}
    if "anyOf" in node:
        options = [option for option in node["anyOf"] if option.get("type") != "null"]
        return " or ".join(option.get("description") or _words(option) for option in options)
    if "const" in node:
        return f'"{node["const"]}"'
    if "enum" in node:
        return "one of " + ", ".join(str(choice) for choice in node["enum"])
    match node.get("type"):
        case "boolean":
            return "true or false"
        case "integer":
            return ("an integer " + _range(node)).strip()
        case "number":
            return ("a number " + _range(node)).strip()
        case "array":
            return "a list, each " + _words(node["items"])
        case _:
            return _node_text(node)


def _range(node: Node) -> str:
    low, above = node.get("minimum"), node.get("exclusiveMinimum")
    high, below = node.get("maximum"), node.get("exclusiveMaximum")
    if low is not None and high is not None:
        return f"from {low} to {high}"
    first = f"from {low}" if low is not None else f"above {above}" if above is not None else ""
    last = f"at most {high}" if high is not None else f"below {below}" if below is not None else ""
    return ", ".join(part for part in (first, last) if part)


def _node_text(node: Node) -> str:
    pattern = node.get("pattern")
    if pattern is None:
        return "text in quotes"
    choices = pattern.removeprefix("^(").removesuffix(")$")
    if choices.replace("|", "").isalpha():
        return "one of " + choices.replace("|", ", ")
    return f"text that matches {pattern}"
