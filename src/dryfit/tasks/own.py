"""Tasks by name: the built-in ones, and those of the user's own."""

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from dryfit.settings.errors import ConfigError, InternalError, LoadError
from dryfit.settings.tables import Knob, OwnSettings, TrialSettings
from dryfit.settings.task_facts import OWN_TABLE, TASK_TABLES, TaskName, facts_of
from dryfit.settings.text import did_you_mean
from dryfit.settings.trial import Scalar
from dryfit.settings.user_code import FunctionName, imported, source_file, source_hash
from dryfit.tasks.base import Loss, Task, TaskContext
from dryfit.tasks.encoder import EncoderTask

# Tasks of the user's own: a class is imported by name, checked, and made with the keys that it declares.


_WANTED: Final = "a class that is a Task, such as a subclass of dryfit.tasks.encoder.EncoderTask"
_GUIDE: Final = "docs/own-task.md has a whole one"

# Members that EncoderTask leaves to its subclasses, and the method of it that needs each.
_LEFT_OPEN: Final = {"num_outputs": "model", "labels": "tokenise"}


@cache
def own_class(name: str) -> Any:
    """Import a class of the user's own, a :class:`~dryfit.tasks.base.Task`.

    Args:
        name: ``package.module:Class`` or ``file.py:Class``, the folder that it is imported from before it, unless it
            is installed.

    Raises:
        ConfigError: There is no such module, file or class, or it is no task. Errors of the module itself pass through.
    """
    parsed = FunctionName.parse(name)
    doing = f"importing the task {parsed.short}"
    made = imported(parsed, doing)
    _check_class(made, doing)
    return made


def own_source(made: type) -> str:
    """Return a hash of the file of a user's class; empty for dryfit's own."""
    file = own_file_of(made)
    return "" if file is None else source_hash(file)


def own_file_of(made: type) -> Path | None:
    """Return the file of a user's class; None for dryfit's own."""
    return None if made.__module__.startswith("dryfit.") else source_file(made)


def saved_name(task: str, folder: Path, *, trust: bool) -> str:
    """Return the class name of a saved model's task with the folder to import it from.

    Args:
        task: The name in the model's folder.
        folder: The model's.
        trust: Whether code that is not dryfit's may be run.

    Raises:
        LoadError: It may not, or the class's file is not found.
    """
    doing = f"loading the model in {folder}"
    if not trust:
        problem = f"its task is {task}, which is no code of dryfit's"
        raise LoadError(doing, problem, "trust=True, or --trust, for code that you know")
    around = (Path.cwd(), *folder.resolve().parents)
    name = FunctionName.parse(task).within(around)
    if name.in_script and not name.folder:
        problem = f"its task is {task}, and that file is neither in the current folder nor in one above the model's"
        raise LoadError(doing, problem, f"the file {name.place} in one of these", "copy it there, or go to its folder")
    return str(name)


def made_with_own(made: Any, context: TaskContext) -> Task:
    """Make a task of the user's own; keys that the study file leaves out have the class's defaults.

    Raises:
        ConfigError: A key is not declared or has another type, or the class keeps no ``context``.
    """
    knobs = _declared(made, context.settings.own.knobs)
    own = OwnSettings.model_validate({**made.knobs, **knobs})
    task = made(replace(context, settings=context.settings.model_copy(update={OWN_TABLE: own})))
    if not hasattr(task, "context") and hasattr(task, "given"):
        task.context = task.given  # its former name
    if not isinstance(getattr(task, "context", None), TaskContext):
        doing, hint = f"making {made.__name__}", "call super().__init__(context)"
        raise ConfigError(doing, "it has no attribute context", "what __init__ got", hint)
    return task


def check_settings(made: Any, settings: TrialSettings, searched: Mapping[str, tuple[Scalar, ...]]) -> None:
    """Refuse settings and searched keys that a task of the user's own does not read.

    Raises:
        ConfigError: A key is not read, or a value has another type than its default.
    """
    _declared(made, settings.own.knobs)
    unread = sorted(TASK_TABLES - made.tables)
    default = TrialSettings()
    for key, values in searched.items():
        table, _, name = key.partition(".")
        if table == OWN_TABLE:
            for value in values:
                _declared(made, {name: value})
        elif table in unread:
            raise _not_read(made, f"{key} is searched")
    for table in unread:
        if getattr(settings, table) != getattr(default, table):
            raise _not_read(made, f"[{table}] is set")


def _not_read(made: Any, problem: str) -> ConfigError:
    read = ", ".join(sorted(TrialSettings.model_fields.keys() - (TASK_TABLES - made.tables)))
    hint = f"remove it; or where {made.__name__} reads the table, add it to {made.__name__}.tables"
    return ConfigError("checking the study's settings", f"{problem}, and {made.__name__} does not read it", read, hint)


def _declared(made: Any, values: Mapping[str, Scalar]) -> dict[str, Knob]:
    """Return the values of ``[own]`` in the types of their defaults; a key that is not declared is an error."""
    doing = f"checking [{OWN_TABLE}]"
    knobs: dict[str, Knob] = {}
    for name, value in values.items():
        if name not in made.knobs:
            allowed = f"what {made.__name__}.knobs declares: {', '.join(made.knobs) or 'nothing'}"
            hint = did_you_mean(name, made.knobs, f"add it to {made.__name__}.knobs, with its default")
            raise ConfigError(doing, f"there is no key {OWN_TABLE}.{name}", allowed, hint)
        default = made.knobs[name]
        taken = float(value) if isinstance(default, float) and type(value) is int else value
        if taken is None or type(taken) is not type(default):
            allowed = f"{_KINDS[type(default)]}, as its default, {default!r}, is one"
            raise ConfigError(doing, f"{OWN_TABLE}.{name} is {value!r}", allowed)
        knobs[name] = taken
    return knobs


_KINDS: Final = {bool: "true or false", int: "an integer", float: "a number", str: "text"}


def _check_class(made: object, doing: str) -> None:
    if not isinstance(made, type):
        raise ConfigError(doing, f"it is a {type(made).__name__}", _WANTED, _GUIDE)
    lacks = [name for name in _members() if _lacks(made, name)]
    if issubclass(made, EncoderTask):
        lacks += [
            name
            for name, asker in _LEFT_OPEN.items()
            if _static(made, name) is _static(EncoderTask, name) and _static(made, asker) is _static(EncoderTask, asker)
        ]
    if lacks:
        raise ConfigError(doing, f"{made.__name__} is no Task: it lacks {', '.join(lacks)}", _WANTED, _GUIDE)
    wrong = {name: default for name, default in getattr(made, "knobs").items() if type(default) not in _KINDS}  # noqa: B009
    for name, default in wrong.items():
        kinds = ", ".join(kind.__name__ for kind in _KINDS)
        raise ConfigError(doing, f"{made.__name__}.knobs has {name} = {default!r}", f"a default that is {kinds}")


def _members() -> Iterable[str]:
    """Return the names of the members that a task's class must have."""
    names = (name for one in (Loss, Task) for name in (*inspect.get_annotations(one), *vars(one)))
    return dict.fromkeys(name for name in names if not name.startswith("_") and name != "context")


def _lacks(made: type, name: str) -> bool:
    there = _static(made, name)
    stub = callable(there) or isinstance(there, property)  # of the protocol: does nothing
    return there is None or (stub and any(there is vars(one).get(name) for one in (Loss, Task)))


def _static(made: type, name: str) -> object:
    return inspect.getattr_static(made, name, None)


# The class of each task, imported on demand.


def task_class(name: TaskName) -> Any:
    """Return the class of a task, to be called with a :class:`~dryfit.tasks.base.TaskContext`.

    Raises:
        ConfigError: A class of the user's own cannot be imported, or is no task.
    """
    facts = facts_of(name)
    if facts.own:
        return own_class(name)
    if not facts.implementation:
        raise InternalError(f"looking for the task {name}", "it has no model")
    module, _, qualname = facts.implementation.partition(":")
    return getattr(import_module(module), qualname)


def make_task(name: TaskName, context: TaskContext) -> Task:
    """Make a task from the settings of one trial.

    Raises:
        ConfigError: As :func:`task_class`; or the task refuses a setting.
    """
    made = task_class(name)
    return made_with_own(made, context) if facts_of(name).own else made(context)
