"""Writing of a resolved study configuration as TOML."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, cast

from dryfit.config.schema import StudyConfig
from dryfit.core.settings.task_facts import reads

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
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else _text(key)


def _text(text: str) -> str:
    """Return a basic string. JSON's escapes are valid TOML, which needs DEL escaped as well."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def toml_value(value: object) -> str:
    """Format a value as TOML."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return _text(value)
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
