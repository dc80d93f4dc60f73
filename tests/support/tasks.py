"""Tasks for tests that need no study: criteria with any loss and counts, models of folders."""

from collections.abc import Mapping
from typing import Any

from dryfit.settings.choices import BuiltInTask
from dryfit.settings.tables import DataSettings, HeadSettings, LossSettings, ModelSettings, TrainSettings, TrialSettings
from dryfit.tasks.base import TaskContext
from dryfit.tasks.classification import CriteriaTask
from dryfit.tasks.saved_models import model_input
from dryfit.tasks.tokens import TokenFacts

NO_LOSS = LossSettings()


def criteria(
    loss: LossSettings = NO_LOSS,
    *,
    num_labels: int = 2,
    train_counts: Mapping[int, int] | None = None,
    pad_id: int = 0,
    train_rows: int = 0,
    multi_label: bool = False,
    max_length: int = 64,
) -> CriteriaTask:
    """The task with this loss, as after its rows were tokenised."""
    facts = TokenFacts(pad_id=pad_id, train_rows=train_rows, label_counts=dict(train_counts or {}))
    data = DataSettings(num_labels=num_labels, multi_label=multi_label)
    return CriteriaTask(TaskContext(TrialSettings(loss=loss, train=TrainSettings(max_length=max_length)), data, facts))


def reading(data: DataSettings, model: ModelSettings, max_length: int) -> CriteriaTask:
    """The task before its rows were tokenised: it knows its data, its model and its length."""
    return CriteriaTask(TaskContext(TrialSettings(model=model, train=TrainSettings(max_length=max_length)), data))


def saved_input(head: HeadSettings, num_labels: int) -> dict[str, Any]:
    """What ``dryfit.json`` says of the rows and the head of a model for ``criteria``."""
    context = TaskContext(TrialSettings(head=head), DataSettings(num_labels=num_labels))
    return model_input(BuiltInTask.CRITERIA, context).model_dump(mode="json")
