"""A resolved config as TOML, and which of its keys may change while a study goes on."""

import json
import os
from pathlib import Path
from typing import Any, Final, cast

from dryfit.config.objective import is_read
from dryfit.config.schema import StudyConfig
from dryfit.core.errors import StudyMismatchError
from dryfit.core.settings import Task

_HEADER: Final = "# What this study was created from. Written by dryfit; edit study.toml instead.\n"
_SOURCES: Final = ("train", "validation", "test", "file")

FREE_KEYS: Final = frozenset(
    {"study.trials", "study.max_hours", "study.patience", "objective.paths", "objective.preload"}
)
"""Keys that may change on an existing study."""

FREE_TABLES: Final = frozenset({"space", "search", "execution", "runtime"})
"""Tables that may change on an existing study: none of their keys changes what a given trial learns."""


def dump_toml(config: StudyConfig, folder: Path | None = None) -> str:
    """Write a config as a full TOML document; loading it again gives the same config.

    Args:
        config: What to write, defaults included. Unset keys are left out, as TOML has no null.
        folder: Where the text will be kept: files and models below it are written relative to it, so that the
            folder can be moved.
    """
    document = _document(config)
    if folder is not None:
        _make_relative(document, folder)
    lines = [_HEADER]
    for table, keys in document.items():
        lines.append(f"[{table}]")
        lines += [f"{_key(key)} = {_value(value)}" for key, value in keys.items() if value is not None]
        lines.append("")
    return "\n".join(lines)


def _make_relative(document: dict[str, Any], folder: Path) -> None:
    for table, names in (("data", _SOURCES), ("model", ("name",))):
        for name in names if table in document else ():
            document[table][name] = _relative(document[table][name], folder)
    if "objective" in document:
        document["objective"]["paths"] = [_relative(path, folder) for path in document["objective"]["paths"]]


def _relative(value: object, folder: Path) -> object:
    if isinstance(value, str) and Path(value).is_absolute() and Path(value).is_relative_to(folder):
        return "./" + os.path.relpath(value, folder)
    return value


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else _text(key)


def _text(text: str) -> str:
    """A basic string. JSON's escapes are TOML's too, but TOML wants DEL escaped as well."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return _text(value)
        case list():
            return "[" + ", ".join(_value(item) for item in cast("list[object]", value)) + "]"
        case dict():
            items = cast("dict[str, object]", value).items()
            return "{" + ", ".join(f"{_key(key)} = {_value(item)}" for key, item in items if item is not None) + "}"
        case _:
            return repr(value)


def changed_keys(old: StudyConfig, new: StudyConfig) -> tuple[str, ...]:
    """Dotted keys whose values differ; a searched key is ``space.NAME``."""
    before, after = _flat(old), _flat(new)
    names = dict.fromkeys((*before, *after))
    return tuple(name for name in names if _text_of(before, name) != _text_of(after, name))


def may_change(key: str) -> bool:
    """Whether a key may differ from what a study was created with."""
    return key in FREE_KEYS or key.partition(".")[0] in FREE_TABLES


def check_resumable(old: StudyConfig, new: StudyConfig) -> None:
    """Refuse a config under which an existing study's results would no longer be comparable.

    Args:
        old: What the study was created from.
        new: What the study file and the overrides say now.

    Raises:
        StudyMismatchError: A key differs that changes what is learned or how it is judged; names each of them.
    """
    before, after = _flat(old), _flat(new)
    refused = [key for key in changed_keys(old, new) if not may_change(key)]
    if not refused:
        return
    changes = [f"{key} was {_text_of(before, key)}, is now {_text_of(after, key)}" for key in refused]
    backs = [_set_back(key, before.get(key)) for key in refused]
    raise StudyMismatchError(
        f"going on with study {old.study.name}",
        "; ".join(changes),
        f"changes of {', '.join(sorted(FREE_KEYS))}, [space], [search], [execution] and [runtime]",
        f"start a new study in a new folder, or go back: {' '.join(backs)}",
    )


def _set_back(key: str, value: object) -> str:
    return f"remove {key}" if value is None else f"--set {key}={value if isinstance(value, str) else _value(value)}"


def _flat(config: StudyConfig) -> dict[str, Any]:
    return {f"{table}.{key}": value for table, keys in _document(config).items() for key, value in keys.items()}


def _document(config: StudyConfig) -> dict[str, dict[str, Any]]:
    """Every table that is there, and that the study's task reads."""
    tables = {table: keys for table, keys in config.model_dump(mode="json").items() if keys is not None}
    if config.study.task is not Task.OBJECTIVE:
        return tables
    read = {table: {key: keys[key] for key in keys if is_read(table, key)} for table, keys in tables.items()}
    return {table: keys for table, keys in read.items() if keys}


def _text_of(flat: dict[str, Any], key: str) -> str:
    """A value as JSON, which keeps 1, 1.0 and true apart; ``unset`` where there is none."""
    value = flat.get(key)
    return "unset" if value is None else json.dumps(value, sort_keys=True)
