"""What each task reads of a study file, and which metrics it has."""

from collections.abc import Mapping
from typing import Final

from dryfit.core.choices import Metric, Task

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

_DECODER: Final = frozenset({"lora", "lm"})
_SPANS: Final = frozenset({"span"})
_BOTH: Final = frozenset({"multitask"})
_TWO_ENCODERS: Final = frozenset({"joint"})

UNREAD: Final[Mapping[Task, frozenset[str]]] = {
    Task.CRITERIA: _DECODER | _SPANS | _BOTH | _TWO_ENCODERS,
    Task.EVIDENCE: _DECODER
    | _BOTH
    | _TWO_ENCODERS
    | {"head.pooling", "loss.alpha", "loss.class_balance", "loss.effective_beta"}
    | {"data.label", "data.num_labels", "data.multi_label"},
    Task.SHARE: _DECODER | _TWO_ENCODERS,
    Task.JOINT: _DECODER,
    Task.CAUSAL_LM: _SPANS
    | _BOTH
    | _TWO_ENCODERS
    | {"head", "loss", "optim.layer_decay", "optim.head_lr_factor", "regularization.freeze_layers"},
}
"""Of a trial's tables, their keys and those of ``[data]``, what a task does not read. Set there, it is an error."""


def reads(task: Task, key: str) -> bool:
    """Whether a task reads a key of a trial's tables; of a function of the user's own nobody knows."""
    unread = UNREAD.get(task, frozenset[str]())
    return key not in unread and key.partition(".")[0] not in unread


def class_metrics(num_labels: int, *, multi_label: bool) -> tuple[Metric, ...]:
    """The metrics that such classes have.

    ``f1`` is that of class 1 of two. Where each class is decided for itself there is no one guess for a row, which
    ``mcc`` and ``balanced_accuracy`` compare with the one truth.
    """
    without = {Metric.F1} if num_labels != 2 else set[Metric]()
    if multi_label:
        without = {Metric.F1, Metric.MCC, Metric.BALANCED_ACCURACY}
    return tuple(metric for metric in _OF_CLASSES if metric not in without)


def task_metrics(task: Task, num_labels: int, *, multi_label: bool) -> tuple[Metric, ...]:
    """The metrics that a task gives, the usual one first."""
    match task:
        case Task.CRITERIA:
            return class_metrics(num_labels, multi_label=multi_label)
        case Task.EVIDENCE:
            return (*SPAN_METRICS, Metric.LOSS)
        case Task.SHARE | Task.JOINT:
            return (Metric.COMBINED, *class_metrics(num_labels, multi_label=multi_label), *SPAN_METRICS)
        case Task.CAUSAL_LM:
            return _OF_TEXT
        case Task.OBJECTIVE:
            return ()
