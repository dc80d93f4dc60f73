"""What later versions keep: keys and types of every answer, of the ledger and the study file, and names of Python.

A type is filled with one value for each field, written as the command would write it, and flattened:
``{"trials.total": "integer", "rows[].name": "string"}``.
"""

import dataclasses
import enum
import inspect
import json
import types
from collections.abc import Iterator, Mapping, Sequence, Set
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel

from dryfit.documents.comparison import Comparison
from dryfit.documents.device_answers import device_answers_json, largest_values_json, step_calibrated_json
from dryfit.documents.document import json_text
from dryfit.documents.finals import TopTable, TrainedModel
from dryfit.documents.findings import BugReport, Diagnosis
from dryfit.documents.memory_checks import MemoryCheck
from dryfit.documents.plans import CalibrateResult, PlanAnswer, SpacePlan
from dryfit.documents.rehearsals import rehearsal_json
from dryfit.documents.story import TrialStory
from dryfit.documents.summary import NodeLogs, NodesView, SeveralStatuses, SeveralSummary, StudySummary
from dryfit.ledger import events
from dryfit.settings.check_messages import Health
from dryfit.settings.errors import DryfitError, ExitStatus
from dryfit.settings.largest_value import LargestValue
from dryfit.settings.memory_check import Baseline
from dryfit.settings.rehearsal_messages import RehearsalAnswer
from dryfit.settings.study_file_text import study_json_schema
from dryfit.settings.training_messages import PredictResult
from dryfit.study.importing import ImportSummary
from dryfit.study.models import Pushed
from dryfit.study.rehearsals import DeviceAnswers
from dryfit.study.step_calibrations import StepCalibrated

FORMAT_NAMES: Final = ("schema", "v", "format")
"""Keys that hold the number of a format, where they hold a number."""
_PLAIN: Final[dict[Any, Any]] = {
    bool: True,
    int: 1,
    float: 1.5,
    str: "*",
    date: date.min,
    Any: "*",
    object: "*",
    type(None): None,
}
_ANY_OF: Final = "* any of "
"""Begins the text that stands for a value of one of several types."""
_JSON: Final = {bool: "boolean", int: "integer", float: "number", str: "string", date: "string", type(None): "null"}

Promise = dict[str, Any]
"""``format``: the number of a format; ``keys``: each key with the name of its type."""


def answers() -> dict[str, object]:
    """Return an answer of each kind that a command prints with ``--json``, by the command that prints it."""
    kinds = {
        "bug-report": BugReport,
        "calibrate": CalibrateResult,
        "check": MemoryCheck,
        "compare": Comparison,
        "doctor": Diagnosis,
        "import": ImportSummary,
        "load": Health,
        "nodes": NodesView,
        "nodes --logs": NodeLogs,
        "plan": PlanAnswer,
        "plan of a search space": SpacePlan,
        "predict": PredictResult,
        "push": Pushed,
        "show": TrialStory,
        "status": StudySummary,
        "status of several": SeveralStatuses,
        "train": TrainedModel,
        "train --top": TopTable,
        "tune of several": SeveralSummary,
    }
    of_rehearsals = {
        "calibrate --time": step_calibrated_json(filled(StepCalibrated)),
        "rehearse": rehearsal_json(filled(RehearsalAnswer), with_timeline=True),
        "rehearse --largest": largest_values_json([filled(LargestValue)]),
        "rehearse of several devices": device_answers_json(filled(DeviceAnswers), with_timeline=True),
    }
    return {name: filled(kind) for name, kind in kinds.items()} | of_rehearsals


def promises() -> dict[str, Promise]:
    """Return what this version promises, but for names of Python."""
    found = {f"--json of {name}": promise(json.loads(json_text(one))) for name, one in answers().items()}
    for kind in get_args(get_args(events.Event)[0]):
        found[f"event {kind.model_fields['type'].default}"] = promise(json.loads(json_text(filled(kind))))
    statuses = {str(status.value): status.name for status in ExitStatus}
    codes = {kind.code: f"status {int(kind.exit_status)}" for kind in _below(DryfitError)}
    return found | {
        "baseline of check": promise(json.loads(json_text(filled(Baseline)))),
        "study file": {"format": None, "keys": dict(_study_keys(study_json_schema()))},
        "code of an error": {"format": None, "keys": codes},
        "exit status": {"format": None, "keys": statuses},
    }


def python_names(modules: Sequence[types.ModuleType]) -> Promise:
    """Return the public names of modules, each with the names of its parameters.

    Of a module without ``__all__`` they are what it defines, and the methods of its classes, which users override.
    """
    keys: dict[str, object] = {}
    for module in modules:
        if hasattr(module, "__all__"):
            keys |= {f"{module.__name__}.{name}": _call(getattr(module, name)) for name in module.__all__}
            continue
        for name, thing in _defined(module, module.__name__):
            keys[f"{module.__name__}.{name}"] = _call(thing)
            if inspect.isclass(thing):
                keys |= {f"{module.__name__}.{name}.{method}": _call(one) for method, one in _methods(thing)}
    return {"format": None, "keys": keys}


def _defined(module: types.ModuleType, home: str) -> Iterator[tuple[str, Any]]:
    """Yield the public functions and classes that a module defines itself."""
    for name, thing in vars(module).items():
        if not name.startswith("_") and callable(thing) and getattr(thing, "__module__", "") == home:
            yield name, thing


def _methods(kind: type) -> Iterator[tuple[str, Any]]:
    for name, thing in vars(kind).items():
        if not name.startswith("_") and inspect.isfunction(thing):
            yield name, thing


def _below(kind: type[DryfitError]) -> Iterator[type[DryfitError]]:
    """Yield a class of errors and all of its subclasses that dryfit defines."""
    yield kind
    for one in kind.__subclasses__():
        if one.__module__ == kind.__module__:
            yield from _below(one)


def promise(value: Mapping[str, Any]) -> Promise:
    """Return the format's number and the flattened keys of a JSON object."""
    number = next((value[name] for name in FORMAT_NAMES if isinstance(value.get(name), int)), None)
    return {"format": number, "keys": dict(sorted(_flat(value).items()))}


def broken(before: Mapping[str, Promise], now: Mapping[str, Promise]) -> list[str]:
    """List what was promised and is not kept; a format whose number has grown may differ."""
    found: list[str] = []
    for name, kept in before.items():
        have = now.get(name)
        if have is None:
            found.append(f"{name} is gone")
        elif kept["format"] is None or have["format"] == kept["format"]:
            keys = have["keys"]
            found += [
                f"{name}: {key} was {kind}, {f'is {keys[key]}' if key in keys else 'is gone'}"
                for key, kind in kept["keys"].items()
                if key not in keys or not _holds(kind, keys[key])
            ]
        elif not have["format"] or have["format"] < kept["format"]:
            found.append(f"{name}: format {kept['format']} became {have['format']}")
    return found


def _holds(before: object, now: object) -> bool:
    """Whether a key may still be used as before: same type, or the same parameters with others after or beside them."""
    if isinstance(before, list) and isinstance(now, list):
        return set(before) <= set(now)
    if isinstance(before, str) and isinstance(now, str) and "," in before + now:
        return set(before.split(", ")) <= set(now.split(", "))  # a key of a study file may take further types
    return before == now


def filled(kind: Any, around: tuple[Any, ...] = ()) -> Any:
    """Return a value of a type with every field of it filled; nothing is validated.

    Args:
        kind: A model of pydantic, a dataclass, or any type that a field has.
        around: The types of which it is a part: a type within itself is left out.
    """
    origin, parts = get_origin(kind), get_args(kind)
    if kind in _PLAIN:
        return _PLAIN[kind]
    if origin is Annotated:
        return filled(parts[0], around)
    if origin in (Union, types.UnionType):
        values = [filled(part, around) for part in parts if part is not type(None)]
        if len(values) == 1:
            return values[0]
        plain = {_JSON[type(value.value if isinstance(value, enum.Enum) else value)] for value in values}
        return _ANY_OF + ", ".join(sorted(plain))
    if origin is Literal:
        return parts[0]
    if origin is tuple and parts[1:] != (...,):
        return tuple(filled(part, around) for part in parts)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        keys = list(parts[0]) if isinstance(parts[0], enum.EnumType) else [filled(parts[0], around)]
        return {key: filled(parts[1], around) for key in keys}
    if isinstance(origin, type) and issubclass(origin, Sequence | Set):
        return (filled(parts[0], around),)
    if issubclass(kind, enum.Enum):
        return next(iter(kind))
    if issubclass(kind, Path):
        return Path("*")
    return None if kind in around else _made(kind, (*around, kind))


def _made(kind: Any, around: tuple[Any, ...]) -> Any:
    if issubclass(kind, BaseModel):
        kept = {"schema_version", *FORMAT_NAMES}
        values = {
            name: field.default if name in kept and isinstance(field.default, int) else filled(field.annotation, around)
            for name, field in kind.model_fields.items()
        }
        return kind.model_construct(**values)
    assert dataclasses.is_dataclass(kind), kind
    hints, made = get_type_hints(kind), object.__new__(kind)
    for field in dataclasses.fields(kind):
        value = field.default if field.name in FORMAT_NAMES else filled(hints[field.name], around)
        object.__setattr__(made, field.name, value)
    return made


def _flat(value: Any, at: str = "") -> dict[str, str]:
    if isinstance(value, dict):
        found = {at: "object"} if at else {}
        for key, one in value.items():
            found |= _flat(one, f"{at}.{key}" if at else key)
        return found
    if isinstance(value, list):
        found = {at: "array"}
        for one in value:
            found |= _flat(one, f"{at}[]")
        return found
    text = value if isinstance(value, str) else ""
    return {at: text.removeprefix(_ANY_OF) if text.startswith(_ANY_OF) else _JSON[type(value)]}


def _study_keys(schema: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each key of a study file with the JSON types that it may have."""
    for table, node in sorted(schema["properties"].items()):
        inside = schema["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node
        for key, one in sorted(inside.get("properties", {}).items()):
            yield f"{table}.{key}", ", ".join(sorted(set(_json_types(schema, one))))


def _json_types(schema: dict[str, Any], node: dict[str, Any]) -> Iterator[str]:
    if "$ref" in node:
        yield from _json_types(schema, schema["$defs"][node["$ref"].rpartition("/")[2]])
    for option in node.get("anyOf", ()):
        yield from _json_types(schema, option)
    if "type" in node:
        yield node["type"]


def _call(thing: Any) -> object:
    """Return the parameters of a function or a class that is called; of anything else what it is."""
    if isinstance(thing, types.ModuleType | str):
        return type(thing).__name__
    if isinstance(thing, type) and (issubclass(thing, BaseException) or dataclasses.is_dataclass(thing)):
        return "class"  # which dryfit makes, not its users
    try:
        return list(inspect.signature(thing).parameters)
    except (TypeError, ValueError):
        return type(thing).__name__
