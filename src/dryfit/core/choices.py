"""Words that a study file chooses from. No library but the standard one: the command line's help needs them at once."""

from enum import StrEnum


class Task(StrEnum):
    """What a model learns to do."""

    CRITERIA = "criteria"
    CAUSAL_LM = "causal-lm"
    """Planned, not trained yet."""
    OBJECTIVE = "objective"
    """Whatever a function of the user's own does."""


class Metric(StrEnum):
    """Metrics a study can optimise, computed on the validation split; docs/settings.md defines each."""

    F1_MACRO = "f1_macro"
    F1 = "f1"
    ACCURACY = "accuracy"
    BALANCED_ACCURACY = "balanced_accuracy"
    MCC = "mcc"
    AUROC = "auroc"
    ECE = "ece"
    LOSS = "loss"


def metrics_of(num_labels: int, *, multi_label: bool) -> tuple[Metric, ...]:
    """The metrics that such classes have.

    ``f1`` is that of class 1 of two. Where each class is decided for itself there is no one guess for a row, which
    ``mcc`` and ``balanced_accuracy`` compare with the one truth.
    """
    without = {Metric.F1} if num_labels != 2 else set[Metric]()
    if multi_label:
        without = {Metric.F1, Metric.MCC, Metric.BALANCED_ACCURACY}
    return tuple(metric for metric in Metric if metric not in without)


class Direction(StrEnum):
    """Whether larger or smaller values of the metric are better."""

    MAXIMIZE = "maximize"
    MINIMIZE = "minimize"


class Precision(StrEnum):
    """Number format of forward and backward passes; weights and optimizer state stay fp32."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"


class BaseFormat(StrEnum):
    """Number format of frozen weights that adapters stand beside."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    INT8 = "int8"
