"""Input format of a trained model (columns, length, labels, settings), kept in its ``dryfit.json``."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError

from dryfit.core.errors import LoadError
from dryfit.core.jobs.model_folders import DRYFIT_FILE, MODEL_FOLDER
from dryfit.core.settings.choices import DEFAULT_TASK
from dryfit.core.settings.functions import FunctionName
from dryfit.core.settings.tables import DataSettings, Settings, TrialSettings
from dryfit.core.settings.task_facts import TaskName, facts_of, task_word
from dryfit.tasks.base import TaskContext
from dryfit.tasks.own import saved_name
from dryfit.tasks.tokens.token_set import TokenFacts

MEMBERS = "members"
"""Folder with the models of an ensemble, which earlier versions wrote."""
BASE = "base"
"""Key of :data:`DRYFIT_FILE`: the path from the folder to the base of the adapters in it, if that is a folder."""
FORMAT = 2
"""Format of :data:`DRYFIT_FILE`. Format 1 had only the task ``criteria``, and the shape of its head."""
ENSEMBLE_FORMAT = 3
"""Format of a folder with several models, which earlier versions averaged."""


class ModelInput(Settings):
    """How a row becomes a model's input, and the model's output a prediction.

    Attributes:
        task: Its task; a class of the user's own without the folder it lies in.
        id: Column with the row's id.
        text: Column with the text.
        criterion: Column with the criterion; None: the model reads text alone.
        max_length: Tokens a row, or a window of it, is cut to.
        pad_id: The token that rows are padded with.
        num_labels: Classes of the data it was trained on.
        labels: Names of the classes; empty: they are numbers.
        multi_label: Each class has a probability of its own.
        cls_last: The classification token is each row's last one.
        settings: Settings of the training; of a model's folder only the last part of its path.
        fitted: Numbers chosen on the validation rows.
    """

    task: TaskName = DEFAULT_TASK
    id: str
    text: str
    criterion: str | None
    max_length: int
    pad_id: int
    num_labels: int = 2
    labels: tuple[str, ...] = ()
    multi_label: bool
    cls_last: bool = False
    settings: TrialSettings = TrialSettings()
    fitted: dict[str, float] = Field(default_factory=dict[str, float])

    def with_task_folder(self, folder: Path, *, trust: bool) -> Self:
        """Return a copy whose task has the folder that a class of the user's own is imported from.

        Args:
            folder: The model's.
            trust: Whether code that is not dryfit's may be run.

        Raises:
            LoadError: It may not, or the class's file is not found.
        """
        if not facts_of(self.task).own:
            return self
        return self.model_copy(update={"task": saved_name(self.task, folder, trust=trust)})

    @property
    def context(self) -> TaskContext:
        """Return the context to make the task with."""
        train = self.settings.train.model_copy(update={"max_length": self.max_length})
        data = DataSettings(
            id=self.id,
            text=self.text,
            num_labels=self.num_labels,
            labels=self.labels,
            multi_label=self.multi_label,
        )
        return TaskContext(
            settings=self.settings.model_copy(update={"train": train}),
            data=data if self.criterion is None else data.model_copy(update={"criterion": self.criterion}),
            facts=TokenFacts(pad_id=self.pad_id, cls_last=self.cls_last, pairs=self.criterion is not None),
            fitted=self.fitted,
        )


def model_input(task: TaskName, context: TaskContext) -> ModelInput:
    """Return the input format of a model that was trained in this context."""
    data, facts, model = context.data, context.facts, context.settings.model
    joint = context.settings.joint
    criteria = None if joint.criteria_model is None else _without_path(joint.criteria_model)
    lm = context.settings.lm
    metric = None if lm.metric is None else FunctionName.parse(lm.metric).short
    shortened = {
        "lm": lm.model_copy(update={"metric": metric}),
        "model": model.model_copy(update={"name": _without_path(model.name)}),
        "joint": joint.model_copy(update={"criteria_model": criteria}),
    }
    return ModelInput(
        task=task_word(task) if facts_of(task).own else task,
        id=data.id,
        text=data.criterion if _instructs(task, context) else data.text,
        criterion=data.criterion if facts.pairs else None,
        max_length=context.settings.train.max_length,
        pad_id=facts.pad_id,
        num_labels=data.num_labels,
        labels=data.labels,
        multi_label=data.multi_label,
        cls_last=facts.cls_last,
        settings=context.settings.model_copy(update=shortened),
        fitted=dict(context.fitted),
    )


def _without_path(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2] if name.startswith(("/", "~", ".")) else name


def _instructs(task: TaskName, context: TaskContext) -> bool:
    """Return whether the text is an answer: rows to predict have only the instruction."""
    return facts_of(task).decoder and context.settings.lm.format == "instruction"


def read_model_input(folder: Path, *, doing: str = "", to_load: bool = False) -> ModelInput:
    """Read the input format from a model's folder.

    Args:
        folder: The model's.
        doing: For messages.
        to_load: The format of rows may be missing, as for loading weights alone.

    Raises:
        LoadError: The folder holds no model of dryfit's, or its format of rows is missing.
    """
    doing = doing or f"reading {folder / DRYFIT_FILE}"
    allowed = MODEL_FOLDER
    meta = read_dryfit_file(folder, doing, allowed)
    if meta.get("format") == ENSEMBLE_FORMAT:
        hint = f"predict with each, the first is {folder / MEMBERS / '1'}, and average the probabilities"
        raise LoadError(doing, "it holds several models, which earlier versions averaged", "one model", hint)
    if meta.get("format") not in (1, FORMAT):
        raise LoadError(doing, f"format {meta.get('format')!r}", allowed=f"1 or {FORMAT}", hint="upgrade dryfit")
    if "input" not in meta and not to_load:
        hint = "an earlier dryfit saved it: train it once more with `dryfit train`"
        raise LoadError(doing, "it does not say what rows the model reads", allowed, hint)
    try:
        return ModelInput.model_validate_json(json.dumps(_of_format_2(meta)))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise LoadError(doing, f"input.{'.'.join(map(str, first['loc']))}: {first['msg']}", allowed) from error


def read_base(folder: Path) -> str | None:
    """Return the value of :data:`BASE` in a model's folder; None where it is missing.

    Raises:
        LoadError: The file cannot be read.
    """
    base = read_dryfit_file(folder, f"reading {folder / DRYFIT_FILE}", "a folder that dryfit saved").get(BASE)
    return base if isinstance(base, str) else None


def read_dryfit_file(folder: Path, doing: str, allowed: str) -> dict[str, Any]:
    """Return the content of ``dryfit.json``.

    Raises:
        LoadError: The file is missing or damaged.
    """
    try:
        meta = json.loads((folder / DRYFIT_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LoadError(doing, str(error).strip().splitlines()[0], allowed, "the folder is damaged") from error
    if not isinstance(meta, dict):
        raise LoadError(doing, f"{DRYFIT_FILE} holds no object", allowed, "the folder is damaged")
    return meta


def _of_format_2(meta: Mapping[str, Any]) -> Any:
    if meta["format"] == FORMAT:
        return meta.get("input")
    unknown = {"id": "id", "text": "text", "criterion": "criterion", "max_length": 8, "pad_id": 0, "multi_label": False}
    return {
        **unknown,
        **meta.get("input", {}),
        "num_labels": meta.get("num_outputs"),
        "cls_last": meta.get("cls_last"),
        "multi_label": meta.get("multi_label", False),
        "settings": {"head": meta.get("head")},
    }
