"""Reading of a study file: TOML and ``--set`` become a checked configuration."""

import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime, time
from pathlib import Path
from typing import Any, Final, cast

from pydantic import ValidationError

from dryfit.settings.choices import DEFAULT_TASK, FUNCTION_TASK, SCRIPT_TASK, TRAINER_TASK, Metric
from dryfit.settings.errors import ConfigError
from dryfit.settings.files import read_bounded
from dryfit.settings.secrets import has_password
from dryfit.settings.study_file import StudyConfig, dotted
from dryfit.settings.study_file_checks import Use, cross_problems, password_problem
from dryfit.settings.study_file_problems import (
    MOST_PROBLEMS,
    KeyPath,
    Problem,
    config_error,
    explain,
    locate_keys,
    parse_key,
    unknown_searched_keys,
)
from dryfit.settings.study_file_text import CASE_KEYS, TABLES
from dryfit.settings.tables import HUB_PREFIX
from dryfit.settings.task_facts import OWN_TABLE
from dryfit.settings.text import sendable
from dryfit.settings.user_code import FunctionName
from dryfit.settings.wire import MOST_DEPTH, is_too_deep

# Absolute paths for the rows, models and functions that a study file names.


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


# Loading of a study file: TOML and ``--set`` become a checked :class:`StudyConfig` with the origin of every value.
#
# ``[space]`` takes dotted names quoted (``"optim.lr" = [...]``) or bare (``optim.lr = [...]``). On the command line
# ``--set space.optim.lr=[1e-5,1e-4]`` and ``--set 'space."optim.lr"=[1e-5,1e-4]'`` both name that key, and
# ``--set space.optim.lr.low=1e-5`` changes one key of its only case. A value is parsed as TOML; anything else is text,
# so that ``--set data.train=posts.jsonl`` needs no quotes.


STUDY_FILE: Final = "study.toml"
FROZEN_FILE: Final = "frozen.toml"
DEFAULT_ORIGIN: Final = "default"
_MOST_SEARCHED: Final = 1000
_TOO_DEEP: Final = f"its tables and lists are nested deeper than {MOST_DEPTH} levels"


@dataclass(frozen=True, slots=True)
class LoadedStudy:
    """A study file that was read and checked.

    Attributes:
        config: The configuration, with absolute paths.
        origins: The origin of every dotted key: ``study.toml:12``, ``--set`` or ``default``.
        folder: The file's folder.
        path: The file.
    """

    config: StudyConfig
    origins: dict[str, str]
    folder: Path
    path: Path


def load_study_file(path: Path, overrides: Sequence[str] = (), use: Use = Use.TRAIN) -> LoadedStudy:
    """Read and check a study file.

    Args:
        path: A study file, or a folder with a ``study.toml``.
        overrides: ``a.b=c`` texts, applied in order on top of the file. Relative paths in them are relative to the
            current directory, those in the file to the file's folder.
        use: The purpose, which decides what is required.

    Raises:
        ConfigError: The file cannot be read, or something in it or in the overrides is wrong; all problems at once.
    """
    path = path / STUDY_FILE if path.is_dir() else path
    return load_study_text(_read(path), path, overrides, use)


def load_study_text(text: str, path: Path, overrides: Sequence[str] = (), use: Use = Use.TRAIN) -> LoadedStudy:
    """Read and check the text of a study file.

    Args:
        text: The file's content.
        path: The path of the file, existing or not: relative paths start at its folder, and messages name it.
        overrides: As in :func:`load_study_file`.
        use: The purpose.

    Raises:
        ConfigError: Something in it or in the overrides is wrong; all problems at once.
    """
    document = _parse(path, text)
    if path.name == FROZEN_FILE:
        _rename_old_keys(document)
    places = {place: f"line {line}" for place, line in locate_keys(text).items()}
    return load_document(document, path, overrides, use, places=places)


def load_document(
    document: Document,
    path: Path,
    overrides: Sequence[str] = (),
    use: Use = Use.TRAIN,
    *,
    places: dict[KeyPath, str] | None = None,
) -> LoadedStudy:
    """Check the document of a study file, parsed or made in memory.

    Args:
        document: Its tables; changed in place.
        path: As in :func:`load_study_text`.
        overrides: As in :func:`load_study_file`.
        use: The purpose.
        places: Where each key was written, ``line 12``.

    Raises:
        ConfigError: Something in it or in the overrides is wrong; all problems at once.
    """
    places = {} if places is None else places
    _join_searched_names(document, places)
    _join_enqueued_names(places)
    _check_bounds(path, document, places)
    for override in overrides:
        _apply(document, override, places)
    _check_bounds(path, document, places)
    _refuse_passwords(path, document, places)
    folder = Path(absolute("", path.parent))
    resolve_paths(document, folder, places)
    config = _checked(path, document, places, use)
    return LoadedStudy(config, _origins(config, places, path.name), folder, path)


_MOST_BYTES: Final = 2**20
"""Of a study file."""


def read_toml(path: Path, allowed: str, hint: str) -> Document:
    """Read a TOML file.

    Args:
        allowed: What the file is.
        hint: What to do where there is none.

    Raises:
        ConfigError: It cannot be read, or is not TOML.
    """
    return _parse(path, _read(path, allowed, hint))


def _read(path: Path, allowed: str = "a study file", hint: str = "write one with `dryfit init DIR`") -> str:
    try:
        return read_bounded(path, _MOST_BYTES, links=True).decode("utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"reading {path}", "there is no such file", allowed, hint) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"reading {path}", f"byte {error.start} is not UTF-8", "UTF-8 text") from error
    except OSError as error:
        raise ConfigError(f"reading {path}", error.strerror or str(error)) from error


def _parse(path: Path, text: str) -> Document:
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise ConfigError(f"reading {path}", _TOO_DEEP) from error
    except tomllib.TOMLDecodeError as error:
        # The parser's message ends with "(at line 3, column 5)" or "(at end of document)".
        match = re.fullmatch(r"(.*) \(at (?:line (\d+), column \d+|end of document)\)", str(error), re.DOTALL)
        message, line = (match[1], match[2]) if match else (str(error), None)
        line = line or str(text.count("\n") + 1)
        raise ConfigError(f"reading {path}, line {line}", f"this is not TOML: {message}", hint="see toml.io") from error
    except ValueError as error:
        raise ConfigError(f"reading {path}", "a number has thousands of digits", "integers of 64 bits") from error


def _rename_old_keys(document: Document) -> None:
    """Rename or drop keys of a file that an earlier dryfit wrote, as its user cannot be asked to do so."""
    runtime = table_of(document, "runtime")
    if "keep_best" in runtime:
        runtime["keep"] = f"best:{runtime.pop('keep_best')}"
    table_of(document, "execution").pop("frozen_cache", None)  # what frozen layers give is computed in each step


def _join_searched_names(document: Document, places: dict[KeyPath, str]) -> None:
    """Replace nested tables in ``[space]``, as TOML reads ``optim.lr = ...``, by the one key that is meant."""
    space = table_of(document, "space")
    joined: Document = {}
    for name, value in space.items():
        if isinstance(value, dict) and "." not in name and not set(CASE_KEYS) & set(cast("Document", value)):
            joined |= {f"{name}.{key}": cases for key, cases in cast("Document", value).items()}
        else:
            joined[name] = value
    if space:
        document["space"] = joined
    for place, line in list(places.items()):
        if len(place) > 2 and place[0] == "space" and "." not in str(place[1]):
            places.setdefault(("space", f"{place[1]}.{place[2]}", *place[3:]), line)


def _join_enqueued_names(places: dict[KeyPath, str]) -> None:
    """Add places for ``optim.lr = ...`` in ``[[search.enqueue]]`` under the one key that the schema makes of it."""
    for place, line in list(places.items()):
        if place[:2] == ("search", "enqueue") and len(place) > 4:
            places.setdefault((*place[:3], ".".join(map(str, place[3:]))), line)


def _check_bounds(path: Path, document: Document, places: Mapping[KeyPath, str]) -> None:
    """Refuse what would cost more than the checks of the schema are made for, and values that no key can have."""
    if is_too_deep(document):
        raise ConfigError(f"reading {path}", _TOO_DEEP)
    problems = [problem for place, value in _leaves(document) if (problem := _illegal(place, value)) is not None]
    if (searched := len(table_of(document, "space"))) > _MOST_SEARCHED:
        problems.insert(0, Problem(("space",), f"has {searched} keys", f"at most {_MOST_SEARCHED}"))
    if problems:
        raise config_error(str(path), problems[:MOST_PROBLEMS], places)


def _illegal(place: KeyPath, value: object) -> Problem | None:
    """Return the problem of a value that no key can have."""
    if isinstance(value, datetime | date | time):
        hint = f'write it in quotes: "{value}"'
        return Problem(place, f"is the date or time {value}", "numbers, text, true or false", hint)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return Problem(place, f"is an integer of {value.bit_length()} bits", "integers of 64 bits, as TOML has them")
    if any(isinstance(text, str) and ("\0" in text or sendable(text) != text) for text in (*place, value)):
        return Problem(place, "has a NUL character, or is not UTF-8", "text in UTF-8 without one")
    return None


def _refuse_passwords(path: Path, document: Document, places: Mapping[KeyPath, str]) -> None:
    """Refuse URLs with a password, but in the frozen file of an earlier version: its study goes on as it was."""

    def is_set(place: KeyPath) -> bool:
        return any(places.get(place[:length]) == SET_ORIGIN for length in range(len(place) + 1))

    found = [place for place, value in _leaves(document) if isinstance(value, str) and has_password(value)]
    problems = [password_problem(place) for place in found if path.name != FROZEN_FILE or is_set(place)]
    if problems:
        raise config_error(str(path), problems[:MOST_PROBLEMS], places)


def _leaves(value: object, place: KeyPath = ()) -> Iterator[tuple[KeyPath, object]]:
    if isinstance(value, dict):
        for key, item in cast("Document", value).items():
            yield from _leaves(item, (*place, key))
    elif isinstance(value, list):
        for index, item in enumerate(cast("list[object]", value)):
            yield from _leaves(item, (*place, index))
    else:
        yield place, value


def _apply(document: Document, override: str, places: dict[KeyPath, str]) -> None:
    """Apply one ``a.b=c`` to the document."""
    doing = f"reading --set {override}"
    try:
        parts, end = parse_key(override)
    except ValueError:
        parts, end = (), 0
    if len(parts) < 2 or override[end : end + 1] != "=":
        raise ConfigError(doing, "this is not KEY=VALUE", "TABLE.KEY=VALUE, such as optim.lr=1e-4")
    value = _override_value(override[end + 1 :])
    if parts[0] == "space" and "." not in parts[1] and len(parts) > 2:
        parts = ("space", f"{parts[1]}.{parts[2]}", *parts[3:])
    table = document
    for part in parts[:-1]:
        inner = table.setdefault(part, {})
        if not isinstance(inner, dict):
            raise ConfigError(
                doing, f"{part} is {json.dumps(inner, default=str)}, which has no keys", "a key of a table"
            )
        table = cast("Document", inner)
    table[parts[-1]] = value
    for place in [place for place in places if place[: len(parts)] == parts]:
        places[place] = SET_ORIGIN
    places[parts] = SET_ORIGIN


def _override_value(text: str) -> Any:
    """Parse a TOML value; anything else is text."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    value = parsed["value"]
    has_date = any(isinstance(leaf, datetime | date | time) for _, leaf in _leaves(value))
    return text if len(parsed) != 1 or has_date else value


def _checked(path: Path, document: Document, places: Mapping[KeyPath, str], use: Use) -> StudyConfig:
    problems = [] if has_own_function(document) else unknown_searched_keys(table_of(document, "space"))
    try:
        # Strict models take the text of an enum, and a list for a tuple, from JSON only.
        config = StudyConfig.model_validate_json(json.dumps(_with_metric(document)))
    except ValidationError as error:
        named = {problem.path for problem in problems}
        problems += [problem for problem in explain(error, document) if problem.path[:2] not in named]
    else:
        problems += cross_problems(config, use)
        if not problems:
            return config
    raise config_error(str(path), problems, {problem.path: _place(problem.path, places) for problem in problems})


def _place(path: KeyPath, places: Mapping[KeyPath, str]) -> str:
    """Return where a path, or else its nearest parent, was written. A single case has no list in the file."""
    short = tuple(part for part in path if part != 0)
    around = [way[:size] for size in range(len(path), 0, -1) for way in (path, short) if size <= len(way)]
    return next((places[candidate] for candidate in around if candidate in places), "")


def _origins(config: StudyConfig, places: Mapping[KeyPath, str], file: str) -> dict[str, str]:
    keys: list[KeyPath] = [(table, key) for table, names in TABLES.items() for key in names]
    keys += [(OWN_TABLE, key) for key in config.own.knobs]
    keys += [("space", key) for key in config.space]
    keys += [("search", "enqueue", index, name) for index, point in enumerate(config.search.enqueue) for name in point]
    return {".".join(map(str, key)): places.get(key, DEFAULT_ORIGIN).replace("line ", f"{file}:") for key in keys}


def _with_metric(document: dict[str, Any]) -> dict[str, Any]:
    """Return the tables of a study file with the metric of a regression, where it is one and names none."""
    study, data = document.get("study", {}), document.get("data", {})
    if not isinstance(study, dict) or not isinstance(data, dict) or "metric" in study:
        return document
    study, data = cast("dict[str, Any]", study), cast("dict[str, Any]", data)
    if data.get("num_labels") != 1 or data.get("multi_label") or study.get("task", DEFAULT_TASK) != DEFAULT_TASK:
        return document
    return {**document, "study": {**study, "metric": str(Metric.MSE)}}
