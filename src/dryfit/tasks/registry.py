"""The class of each task, imported on demand."""

from importlib import import_module
from typing import Any

from dryfit.core.errors import InternalError
from dryfit.core.settings.task_facts import TaskName, facts_of
from dryfit.tasks.base import Task, TaskContext
from dryfit.tasks.own import made_with_own, own_class


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
