"""Words that a study file chooses from. No library but the standard one: the command line's help needs them at once."""

from enum import StrEnum


class BuiltInTask(StrEnum):
    """What a model learns to do."""

    CRITERIA = "criteria"
    """Which class a text has, or which classes; asked with a criterion, or without."""
    EVIDENCE = "evidence"
    """Which span of a text shows that a criterion is met; or none."""
    SHARE = "share"
    """Both at once, by one encoder."""
    JOINT = "joint"
    """Both at once, by two encoders: one reads the criterion, the other the text."""
    CAUSAL_LM = "causal-lm"
    """Each token from those before it."""
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
    TOKEN_F1 = "token_f1"
    EXACT_MATCH = "exact_match"
    SPAN_IOU = "span_iou"
    NULL_PRECISION = "null_precision"
    NULL_RECALL = "null_recall"
    TOKEN_F1_HAS = "token_f1_has"
    COMBINED = "combined"


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


class Weighting(StrEnum):
    """How the losses of a class and of a span, learned at once, are weighed."""

    FIXED = "fixed"
    """By a weight of the study file."""
    UNCERTAINTY = "uncertainty"
    """By two variances that are learned with the model."""


class Fusion(StrEnum):
    """How the criterion's encoder meets that of the text."""

    CONCAT = "concat"
    ADD = "add"
    GATE = "gate"
    ATTENTION = "attention"
