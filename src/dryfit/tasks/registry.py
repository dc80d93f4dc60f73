"""The class of each task."""

from collections.abc import Mapping
from typing import Any, Final

from dryfit.core.errors import InternalError
from dryfit.core.settings.choices import BuiltInTask
from dryfit.core.settings.task_facts import TaskName
from dryfit.tasks.base import Task, TaskContext
from dryfit.tasks.classification import CriteriaTask
from dryfit.tasks.joint.joint import JointTask
from dryfit.tasks.joint.share import ShareTask
from dryfit.tasks.lm.causal_lm import CausalLmTask
from dryfit.tasks.own import made_with_own, own_class
from dryfit.tasks.spans.evidence import EvidenceTask

_CLASSES: Final[Mapping[BuiltInTask, Any]] = {
    BuiltInTask.CRITERIA: CriteriaTask,
    BuiltInTask.EVIDENCE: EvidenceTask,
    BuiltInTask.SHARE: ShareTask,
    BuiltInTask.JOINT: JointTask,
    BuiltInTask.CAUSAL_LM: CausalLmTask,
}


def task_class(name: TaskName) -> Any:
    """Return the class of a task, to be called with a :class:`~dryfit.tasks.base.TaskContext`.

    Raises:
        ConfigError: A class of the user's own cannot be imported, or is no task.
    """
    if not isinstance(name, BuiltInTask):
        return own_class(name)
    if name not in _CLASSES:
        raise InternalError(f"looking for the task {name}", "it has no model")
    return _CLASSES[name]


def make_task(name: TaskName, context: TaskContext) -> Task:
    """Make a task from the settings of one trial.

    Raises:
        ConfigError: As :func:`task_class`; or the task refuses a setting.
    """
    made = task_class(name)
    return made(context) if isinstance(name, BuiltInTask) else made_with_own(made, context)
