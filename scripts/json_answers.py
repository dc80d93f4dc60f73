"""What each command prints with ``--json``: every key with its type and meaning, read from the types of the answers."""

import inspect
import re
import types
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from datetime import datetime
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import Any, Final

from pydantic import BaseModel

from dryfit.documents.comparison import Comparison
from dryfit.documents.finals import TopTable, TrainedModel
from dryfit.documents.findings import BugReport
from dryfit.documents.story import TrialStory
from dryfit.documents.summary import NodeLogs, NodesView, SeveralStatuses, SeveralSummary, StudySummary
from dryfit.settings.check_messages import Health
from dryfit.settings.device_answers import DeviceAnswer
from dryfit.settings.execution import MemoryPlan
from dryfit.settings.largest_value import LargestValue
from dryfit.settings.memory_check import Kept, LineChange, MemoryCheck, RunCheck
from dryfit.settings.plan_messages import CalibrateResult, PlanAnswer
from dryfit.settings.reach_calibrations import ReachCalibration
from dryfit.settings.rehearsal_messages import Interval, RehearsalAnswer, RehearsalMemory, StepWork
from dryfit.settings.training_messages import PredictResult
from dryfit.study.importing import ImportSummary
from dryfit.study.machine_checks import Finding
from dryfit.study.models import Pushed
from dryfit.study.planning import PlannedCell, SpacePlan
from dryfit.study.step_calibrations import StepCalibrated

_WORDS: Final = {
    bool: "true or false",
    int: "integer",
    float: "number",
    str: "text",
    Path: "text",
    datetime: "text",
    NoneType: "null",
    object: "any value",
    Any: "any value",
}
_ATTRIBUTE: Final = re.compile(r"^    (\w+): (.*(?:\n        .*)*)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Key:
    """A key of an answer: the type of its value, and what it means."""

    kind: Any
    meaning: str = ""


Keys = dict[str, Key]


@dataclass(frozen=True, slots=True)
class Made:
    """An object that an answer puts together of several types."""

    name: str
    keys: Keys
    is_list: bool = True


def keys_of(kind: Any, without: Collection[str] = (), also: Collection[str] = ()) -> Keys:
    """Return the keys of a type.

    Args:
        kind: A pydantic model, a record or a data class.
        without: Names that an answer leaves out.
        also: Names of properties that an answer has too.
    """
    told, hints = dict(_told(kind)), typing.get_type_hints(kind)
    if issubclass(kind, BaseModel):
        found = {
            field.serialization_alias or field.alias or name: Key(hints[name], field.description or told.get(name, ""))
            for name, field in kind.model_fields.items()
            if not field.exclude
        }
    else:
        found = {field.name: Key(hints[field.name], told.get(field.name, "")) for field in fields(kind)}
    for name in also:
        getter = inspect.getattr_static(kind, name).fget
        found[name] = Key(typing.get_type_hints(getter)["return"], inspect.getdoc(getter) or "")
    return {name: key for name, key in found.items() if name not in without}


def _told(kind: type) -> Iterator[tuple[str, str]]:
    """Yield each attribute that the docstrings of a type and of those above it describe, with the description."""
    for one in reversed(kind.__mro__):
        attributes = inspect.cleandoc(one.__doc__ or "").partition("Attributes:\n")[2]
        for name, text in _ATTRIBUTE.findall(attributes):
            yield name, " ".join(text.split())


def _schema(version: int) -> Keys:
    return {"schema": Key(int, f"Version of this object: {version}.")}


def _or_null(keys: Keys) -> Keys:
    """Return the keys of a part that is unknown now and then."""
    return {name: Key(key.kind | None, key.meaning) for name, key in keys.items()}


def _filled(keys: Keys, others: Keys) -> Keys:
    """Return keys, each without a meaning with that of the key of the same name among others."""
    return {
        name: Key(key.kind, key.meaning or (others[name].meaning if name in others else ""))
        for name, key in keys.items()
    }


_CAPACITY: Final[Keys] = {"capacity_bytes": Key(int, "Memory of the device.")}
_PLAN: Final[Keys] = {
    **_schema(1),
    **keys_of(PlanAnswer, {"v", "memory"}),
    **_or_null(keys_of(MemoryPlan)),
    **_CAPACITY,
}
_NOT_TOLD: Final = ("v", "memory", "work", "sent", "rehearsal_s", "killed_by", "others", "apart")
_REHEARSAL: Final[Keys] = {
    **_schema(2),
    **keys_of(RehearsalAnswer, _NOT_TOLD, ("ran",)),
    **{
        name: Key(_PLAN[name].kind, "Of a plan: a rehearsal has none.")
        for name in ("host_bytes", "execution", "fallbacks", "eval_batches", "cut", "cannot_cut")
    },
    **_filled(_or_null(keys_of(RehearsalMemory)), _PLAN),
    **_or_null(keys_of(StepWork)),
    "fits": Key(bool | None, "Whether the script fits as it is; null: unknown."),
    "ended": Key(str, "The same as `end`."),
    "hours": Key(Interval | None, "Of the whole run; null: unknown."),
    "planner_s": Key(float, "Seconds that the rehearsal took."),
    "sent_bytes": Key(dict[str, int] | None, "Bytes that a rank sends in one optimizer step, by kind; null: one rank."),
    **_CAPACITY,
}
_DEVICE: Final[Keys] = {**_REHEARSAL, **keys_of(DeviceAnswer, {"answer"}, ("left_over_bytes",))}
_KEPT: Final = Made("Kept", keys_of(Kept, {"lines"}), is_list=False)
_CHECKED_RUN: Final[Keys] = {
    **keys_of(RunCheck),
    "before": Key(_KEPT, "The baseline; null: there is none."),
    "after": Key(_KEPT, "What was rehearsed now; null: nothing was seen."),
    "lines": Key(
        Made("LineChange", keys_of(LineChange, also=("difference_bytes",))), keys_of(RunCheck)["lines"].meaning
    ),
}
_CELL: Final[Keys] = {
    **keys_of(PlannedCell, {"answer"}),
    "plan": Key(Made("plan", {}, is_list=False), "The object of `dryfit plan`."),
}

ANSWERS: Final[Mapping[str, Keys]] = {
    "rehearse": _REHEARSAL,
    "rehearse --device A,B": {
        **_schema(2),
        "fits": Key(bool, "Whether the script fits on all devices."),
        "rehearsals": Key(int, "How many rehearsals answered for all devices."),
        "planner_s": Key(float, "Seconds of all rehearsals."),
        "devices": Key(Made("RehearsedDevice", _DEVICE), "For each device the object of `rehearse` and three keys."),
    },
    "rehearse --largest NAME": {
        **_schema(1),
        "name": Key(str, "The argument."),
        "devices": Key(Made("LargestValue", keys_of(LargestValue, also=("is_known",))), "One object for each device."),
    },
    "check": {
        **_schema(1),
        "exit_status": Key(int, "The status with which the command ends."),
        "runs": Key(Made("RunCheck", _CHECKED_RUN), "One object for each run on each device."),
        "updated": keys_of(MemoryCheck)["updated"],
    },
    "plan": _PLAN,
    "plan (of a search space)": {
        **_schema(1),
        **keys_of(SpacePlan, {"prices"}, ("hours", "cost")),
        "cells": Key(Made("PlannedCell", _CELL), keys_of(SpacePlan)["cells"].meaning),
    },
    "calibrate": {**_schema(1), **keys_of(CalibrateResult, {"v", "observation"})},
    "calibrate --time": {**_schema(2), **keys_of(ReachCalibration), **keys_of(StepCalibrated, {"kept"})},
    "tune, resume, status (of one study)": keys_of(StudySummary),
    "tune (of several studies)": keys_of(SeveralSummary),
    "status (of several studies)": keys_of(SeveralStatuses),
    "show STUDY TRIAL": keys_of(TrialStory),
    "nodes": keys_of(NodesView),
    "nodes --logs NODE": keys_of(NodeLogs),
    "doctor": {
        **_schema(1),
        "healthy": Key(bool, "Whether no check failed."),
        "counts": Key(dict[str, int], "The number of checks by status."),
        "checks": Key(tuple[Finding, ...], "All checks, in order."),
    },
    "bug-report": keys_of(BugReport),
    "import": keys_of(ImportSummary),
    "train": keys_of(TrainedModel),
    "train --top K": keys_of(TopTable),
    "compare": keys_of(Comparison),
    "predict": keys_of(PredictResult),
    "load --check": keys_of(Health),
    "push": keys_of(Pushed),
}
"""The keys of each answer, by the command that prints it."""


def json_page() -> str:
    """Return the page of all answers, and of the objects within them."""
    head = """# JSON

What each command prints with `--json`: one object on one line of stdout. Progress and warnings go to stderr. `schema`
is the version of an object ([what stays](../stability.md)). Numbers that are not finite are null. Times are in seconds,
sizes in bytes, as the ends of the keys say (`_s`, `_bytes`).
"""
    parts, objects = [head], dict[str, Keys]()
    for command, keys in ANSWERS.items():
        parts.append(_section(f"`dryfit {command}`", keys, level=2))
        _collect((key.kind for key in keys.values()), objects)
    parts.append("## Objects\n\nThe objects within the answers, by name.\n")
    parts += [_section(f"`{name}`", objects[name], level=3, anchor=name) for name in sorted(objects)]
    return "\n".join(parts)


def _section(title: str, keys: Keys, *, level: int, anchor: str = "") -> str:
    lines = ["#" * level + f" {title}" + (f" {{ #{anchor} }}" if anchor else ""), ""]
    lines += ["| key | type | meaning |", "|---|---|---|"]
    lines += [f"| `{name}` | {_cell(type_text(key.kind))} | {_cell(_meaning(key))} |" for name, key in keys.items()]
    return "\n".join(lines) + "\n"


def _meaning(key: Key) -> str:
    """Return what a key means, in the words of JSON; where nobody has said so, what its type is."""
    text = key.meaning or next((_purpose(kind) for kind in _kinds(key.kind) if _purpose(kind)), "")
    return re.sub(r"\bNone\b", "null", re.sub(r":(?:class|func|data|meth):`~?([\w.]+)`", r"`\1`", text))


def _kinds(kind: Any) -> Iterator[Any]:
    """Yield a type, and those that it is made of."""
    yield kind
    for part in typing.get_args(kind):
        yield from _kinds(part)


def _purpose(kind: Any) -> str:
    """Return the first paragraph of the docstring of an object or an enumeration; empty: it is neither."""
    is_told = _is_object(kind) or (isinstance(kind, type) and issubclass(kind, Enum))
    return (kind.__doc__ or "").partition("\n\n")[0] if is_told else ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("``", "`")


def _collect(kinds: Iterable[Any], found: dict[str, Keys]) -> None:
    """Add all objects that types name, and those within them, by their names."""
    for kind in kinds:
        keys = kind.keys if isinstance(kind, Made) else keys_of(kind) if _is_object(kind) else None
        if keys is None:
            _collect(typing.get_args(kind), found)
        elif keys and _name(kind) not in found:
            found[_name(kind)] = keys
            _collect((key.kind for key in keys.values()), found)


def _is_object(kind: Any) -> bool:
    return isinstance(kind, type) and (issubclass(kind, BaseModel) or is_dataclass(kind))


def _name(kind: Any) -> str:
    return kind.name if isinstance(kind, Made) else kind.__name__


def type_text(kind: Any) -> str:
    """Return a type in the words of JSON, with links to the sections of objects."""
    parts = typing.get_args(kind)
    if isinstance(kind, Made):
        text = f"[{kind.name}](#{kind.name})" if kind.keys else kind.name
        return f"list of {text}" if kind.is_list else text
    if kind in _WORDS:
        return _WORDS[kind]
    if _is_object(kind):
        return f"[{kind.__name__}](#{kind.__name__})"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "one of " + ", ".join(f"`{one.value}`" for one in kind)
    match typing.get_origin(kind):
        case typing.Union | types.UnionType:
            return " or ".join(dict.fromkeys(map(type_text, parts)))
        case typing.Literal:
            return " or ".join(f"`{one}`" for one in parts)
        case typing.Annotated:
            return type_text(parts[0])
        case origin if isinstance(origin, type) and issubclass(origin, Mapping):
            return f"object: {type_text(parts[1])} by {type_text(parts[0])}"
        case origin if isinstance(origin, type) and issubclass(origin, Collection):
            each = [part for part in parts if part is not Ellipsis]
            return (
                f"list of {type_text(each[0])}" if len(set(each)) == 1 else f"list: {', '.join(map(type_text, each))}"
            )
    raise TypeError(f"no words for the type {kind!r} of an answer")
