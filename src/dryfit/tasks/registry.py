"""Which class is which task."""

from collections.abc import Mapping
from typing import Any, Final

from dryfit.core.choices import Task as TaskName
from dryfit.core.errors import InternalError
from dryfit.tasks.causal_lm import CausalLmTask
from dryfit.tasks.classification import CriteriaTask
from dryfit.tasks.evidence import EvidenceTask
from dryfit.tasks.joint import JointTask
from dryfit.tasks.share import ShareTask

_CLASSES: Final[Mapping[TaskName, Any]] = {
    TaskName.CRITERIA: CriteriaTask,
    TaskName.EVIDENCE: EvidenceTask,
    TaskName.SHARE: ShareTask,
    TaskName.JOINT: JointTask,
    TaskName.CAUSAL_LM: CausalLmTask,
}


def task_class(name: TaskName) -> Any:
    """The class of a task: made from a :class:`~dryfit.tasks.base.Given`, it is a :class:`~dryfit.tasks.base.Task`."""
    if name not in _CLASSES:
        raise InternalError(f"looking for the task {name}", "it has no model")
    return _CLASSES[name]
