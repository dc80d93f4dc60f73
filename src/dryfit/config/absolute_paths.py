"""Absolute paths for the rows, models and functions that a study file names."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, cast

from dryfit.config.locate import KeyPath
from dryfit.config.schema import dotted
from dryfit.core.settings.choices import FUNCTION_TASK, SCRIPT_TASK, TRAINER_TASK
from dryfit.core.settings.functions import FunctionName
from dryfit.core.settings.tables import HUB_PREFIX

SET_ORIGIN: Final = "--set"
_PATHS: Final = (
    *(("data", name) for name in ("train", "validation", "test", "file")),
    ("search", "enqueue_from"),
    ("script", "folder"),
)
_NAMED: Final = (("study", "task"), ("lm", "metric"))
_MODELS: Final = ("model.name", "joint.criteria_model")
"""Keys whose values may be model folders."""

Document = dict[str, Any]


def table_of(document: Document, name: str) -> Document:
    """Return a table of the document; an empty one if it is missing or not a table."""
    value = document.get(name)
    return cast("Document", value) if isinstance(value, dict) else {}


def has_own_function(document: Document) -> bool:
    """Whether the study trains by a function of the user's, whose searched keys are the user's own."""
    return table_of(document, "study").get("task") in (FUNCTION_TASK, SCRIPT_TASK, TRAINER_TASK)


def resolve_paths(document: Document, folder: Path, places: Mapping[KeyPath, str]) -> None:
    """Make relative paths of rows, models and functions absolute, from the place where each was written."""

    def base(place: KeyPath) -> Path:
        return Path.cwd() if places.get(place) == SET_ORIGIN else folder

    study, search, space = (table_of(document, name) for name in ("study", "search", "space"))
    for table in ("objective", "trainer"):
        if isinstance(document.get(table), dict):
            paths = (own := table_of(document, table)).setdefault("paths", [str(folder), str(Path.cwd())])
            if isinstance(paths, list) and all(isinstance(path, str) for path in cast("list[object]", paths)):
                around = base((table, "paths"))
                own["paths"] = list(dict.fromkeys(absolute(path, around) for path in cast("list[str]", paths)))
    for table, key in _NAMED:
        if isinstance(name := table_of(document, table).get(key), str) and ":" in name:
            document[table][key] = _located(name, folder, base((table, key)))
    if isinstance(listeners := study.get("listeners"), list):
        around = base(("study", "listeners"))
        study["listeners"] = [
            _located(name, folder, around) if isinstance(name, str) and ":" in name else name
            for name in cast("list[object]", listeners)
        ]
    if isinstance(document.get("script"), dict):
        document["script"].setdefault("folder", ".")
    for table, key in _PATHS:
        source = table_of(document, table).get(key)
        if isinstance(source, str) and not source.startswith(HUB_PREFIX):
            document[table][key] = absolute(source, base((table, key)))
    for table, key in (name.split(".") for name in _MODELS):
        if isinstance(model := table_of(document, table).get(key), str):
            document[table][key] = _model(model, base((table, key)))
    if has_own_function(document):
        return  # its searched keys are the user's own: none is a model
    if isinstance(points := search.get("enqueue"), list):
        search["enqueue"] = [_enqueued_model(point, base(("search", "enqueue"))) for point in cast("list[Any]", points)]
    for key, value in space.items():
        space[key] = _searched_models(key, value, base(("space", key)))


def _searched_models(key: str, value: object, base: Path) -> object:
    """Return the cases of a searched key, with absolute model folders in choices and conditions."""
    if isinstance(value, list):
        return [_searched_models(key, item, base) for item in cast("list[object]", value)]
    if isinstance(value, str):
        return _model(value, base) if key in _MODELS else value
    if isinstance(value, dict):
        case = cast("Document", value)
        inner = {"choices": key, "when": key}
        named = [name for name in _MODELS if name in case]
        if named:  # the table of a condition
            return case | {name: _searched_models(name, case[name], base) for name in named}
        return {name: _searched_models(key, item, base) if name in inner else item for name, item in case.items()}
    return value


def _enqueued_model(point: object, base: Path) -> object:
    """Return an enqueued point with dotted names and absolute model folders."""
    table = dotted(point)
    if not isinstance(table, dict):
        return table
    names = cast("Document", table)
    models = {key: names.get(key) for key in _MODELS}
    return names | {key: _model(name, base) for key, name in models.items() if isinstance(name, str)}


def _model(name: str, base: Path) -> str:
    """Return a folder as an absolute path; any other name (a hub id, the packaged model) unchanged."""
    looks_like_path = name.startswith((".", "/", "~"))
    return absolute(name, base) if looks_like_path or (base / name).is_dir() else name


def _located(text: str, folder: Path, base: Path) -> str:
    """Return the name of a class or function with the folder of its file or module; unchanged if it is installed."""
    name = FunctionName.parse(text)
    if name.folder:
        return str(replace(name, place=absolute(name.place, base)))
    located = name.within(dict.fromkeys((base, folder, Path.cwd())))
    return str(located if located.folder or not name.in_script else replace(name, place=absolute(name.place, base)))


def absolute(path: str, base: Path) -> str:
    """Return a path, ``~`` included, as an absolute one; a relative one starts at ``base``."""
    return os.path.abspath(base / Path(path).expanduser())
