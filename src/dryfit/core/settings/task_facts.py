"""The keys that each task reads from a study file, and its metrics."""

from collections.abc import Mapping
from typing import Annotated, Final, TypeAlias

from pydantic import Field

from dryfit.core.settings.choices import BuiltInTask, Metric
from dryfit.core.settings.functions import FunctionName
from dryfit.core.settings.tables import OWN_KEY

TaskName: TypeAlias = Annotated[
    BuiltInTask
    | Annotated[
        str, Field(pattern=r"^.+:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$", description="package.module:Class or file.py:Class")
    ],
    Field(union_mode="left_to_right"),
]
"""A built-in task, or a user's own class: ``package.module:Class`` or ``file.py:Class``."""

MetricName: TypeAlias = Annotated[
    Metric | Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$", description="a name that your own task gives")],
    Field(union_mode="left_to_right"),
]
"""A built-in metric, or one of a user's own task."""

_OF_CLASSES: Final = (
    Metric.F1_MACRO,
    Metric.F1,
    Metric.ACCURACY,
    Metric.BALANCED_ACCURACY,
    Metric.MCC,
    Metric.AUROC,
    Metric.ECE,
    Metric.LOSS,
)
SPAN_METRICS: Final = (
    Metric.TOKEN_F1,
    Metric.EXACT_MATCH,
    Metric.SPAN_IOU,
    Metric.NULL_PRECISION,
    Metric.NULL_RECALL,
    Metric.TOKEN_F1_HAS,
)
_OF_TEXT: Final = (Metric.LOSS, Metric.EXACT_MATCH)

OWN_TABLE: Final = "own"
"""Table of a study file whose keys a user's own class declares."""

_DECODER: Final = frozenset({"lora", "lm"})
_SPANS: Final = frozenset({"span"})
_BOTH: Final = frozenset({"multitask"})
_TWO_ENCODERS: Final = frozenset({"joint"})

UNREAD: Final[Mapping[BuiltInTask, frozenset[str]]] = {
    BuiltInTask.CRITERIA: _DECODER | _SPANS | _BOTH | _TWO_ENCODERS,
    BuiltInTask.EVIDENCE: _DECODER
    | _BOTH
    | _TWO_ENCODERS
    | {"head.pooling", "loss.alpha", "loss.class_balance", "loss.effective_beta"}
    | {"data.label", "data.num_labels", "data.multi_label"},
    BuiltInTask.SHARE: _DECODER | _TWO_ENCODERS,
    BuiltInTask.JOINT: _DECODER,
    BuiltInTask.CAUSAL_LM: _SPANS
    | _BOTH
    | _TWO_ENCODERS
    | {"head", "loss", "optim.layer_decay", "optim.head_lr_factor", "regularization.freeze_layers"},
}
"""The tables and keys that each task does not read. Setting one is an error."""

AVERAGED: Final = (BuiltInTask.CRITERIA, BuiltInTask.EVIDENCE, BuiltInTask.SHARE, BuiltInTask.JOINT)
"""Tasks whose models can be averaged: over classes, or over the characters of spans."""


def is_own(task: TaskName) -> bool:
    """Whether a task is a user's own class."""
    return not isinstance(task, BuiltInTask)


def metric_of(name: str) -> MetricName:
    """Return the metric of a name."""
    return Metric(name) if name in list(Metric) else name


def is_own_key(key: str) -> bool:
    """Whether a dotted name is that of a key that a user's own task declares."""
    table, _, name = key.partition(".")
    return table == OWN_TABLE and OWN_KEY.fullmatch(name) is not None


def task_word(task: TaskName) -> str:
    """Return a task's name for people: that of a user's own class without its folder."""
    return task.value if isinstance(task, BuiltInTask) else FunctionName.parse(task).short


def reads(task: TaskName, key: str) -> bool:
    """Whether a task reads a key of a trial's tables; a user's own class reads all keys here, and checks itself."""
    if key.partition(".")[0] == OWN_TABLE:
        return is_own(task)
    unread = UNREAD.get(task, frozenset[str]()) if isinstance(task, BuiltInTask) else frozenset[str]()
    return key not in unread and key.partition(".")[0] not in unread


def class_metrics(num_labels: int, *, multi_label: bool) -> tuple[Metric, ...]:
    """Return the metrics of a classification.

    ``f1`` is that of class 1 of two. With several labels per row, ``mcc`` and ``balanced_accuracy``, which compare one
    prediction with one label, do not exist.
    """
    without = {Metric.F1} if num_labels != 2 else set[Metric]()
    if multi_label:
        without = {Metric.F1, Metric.MCC, Metric.BALANCED_ACCURACY}
    return tuple(metric for metric in _OF_CLASSES if metric not in without)


def task_metrics(task: TaskName, num_labels: int, *, multi_label: bool) -> tuple[Metric, ...]:
    """Return a task's metrics, the default first; none for a user's own class or function."""
    if not isinstance(task, BuiltInTask):
        return ()
    match task:
        case BuiltInTask.CRITERIA:
            return class_metrics(num_labels, multi_label=multi_label)
        case BuiltInTask.EVIDENCE:
            return (*SPAN_METRICS, Metric.LOSS)
        case BuiltInTask.SHARE | BuiltInTask.JOINT:
            return (Metric.COMBINED, *class_metrics(num_labels, multi_label=multi_label), *SPAN_METRICS)
        case BuiltInTask.CAUSAL_LM:
            return _OF_TEXT
        case BuiltInTask.OBJECTIVE:
            return ()
