"""Enumerations of a study file's choices, and the presets. Standard library only."""

from collections.abc import Mapping
from typing import Final, Literal, TypeAlias

from dryfit.settings.older_python import StrEnum

# Enumerations of a study file's choices. Standard library only: the command line's help imports them at once.


class BuiltInTask(StrEnum):
    """The tasks that dryfit has."""

    CRITERIA = "criteria"
    """Classify a text, with one class or several, for a criterion or without one."""
    EVIDENCE = "evidence"
    """Find the span of a text that shows that a criterion is met, or none."""
    SHARE = "share"
    """Both, by one encoder."""
    JOINT = "joint"
    """Both, by two encoders: one for the criterion, one for the text."""
    CAUSAL_LM = "causal-lm"
    """Causal language modelling."""
    OBJECTIVE = "objective"
    """A user's own function."""
    TRAINER = "trainer"
    """A Trainer of transformers, which a user's own function makes for each trial."""
    SCRIPT = "script"
    """A user's own training script, run as it is."""


DEFAULT_TASK: Final = BuiltInTask.CRITERIA
"""The task of a study file that names none."""

FUNCTION_TASK: Final = BuiltInTask.OBJECTIVE
"""The task of a study that calls a user's own function for its value."""

TRAINER_TASK: Final = BuiltInTask.TRAINER
"""The task of a study that trains what a user's own function makes."""

SCRIPT_TASK: Final = BuiltInTask.SCRIPT
"""The task of a study that runs a user's own script."""

TRAINER_METRIC: Final = "eval_loss"
"""What such a study optimises unless it says otherwise: the loss that every Trainer evaluates."""


class Metric(StrEnum):
    """Metrics that a study can optimise, computed on the validation split; defined in docs/settings.md."""

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
    SPAN_BALANCED = "span_balanced"
    COMBINED = "combined"
    MSE = "mse"
    MAE = "mae"
    PEARSON = "pearson"
    SPEARMAN = "spearman"


class Direction(StrEnum):
    """Whether larger or smaller values of the metric are better."""

    MAXIMIZE = "maximize"
    MINIMIZE = "minimize"


class Precision(StrEnum):
    """Number format of forward and backward passes; weights and optimizer state stay fp32."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    TF32 = "tf32"
    """fp32, but products of matrices read 10 bits of each fraction instead of 23."""
    AUTO = "auto"
    """Measured before a study's first trial: no trial has it."""

    @property
    def is_half(self) -> bool:
        """Whether passes run under autocast, in 16 bits."""
        return self in (Precision.FP16, Precision.BF16)

    @property
    def stored(self) -> "Precision":
        """The number format of its tensors."""
        return Precision.FP32 if self is Precision.TF32 else self


ComputeFormat: TypeAlias = Literal[Precision.FP32, Precision.FP16, Precision.BF16]
"""Number format that something is computed in."""

OptimizerName: TypeAlias = Literal[
    "adamw", "adafactor", "sgd", "lion", "adamw8bit", "radam", "nadam", "paged_adamw", "paged_adamw8bit"
]
"""Optimizers of a trial."""


class BaseFormat(StrEnum):
    """Number format of the frozen weights under adapters."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    INT8 = "int8"
    """Eight bits a weight, by LLM.int8()."""
    NF4 = "nf4"
    """Four bits a weight, by QLoRA's normal float."""


class Weighting(StrEnum):
    """How the losses of class and span are weighted when both are learned."""

    FIXED = "fixed"
    """By a weight in the study file."""
    UNCERTAINTY = "uncertainty"
    """By two variances that are learned with the model."""


class Fusion(StrEnum):
    """How the criterion's vector is combined with the text's token vectors."""

    CONCAT = "concat"
    ADD = "add"
    GATE = "gate"
    ATTENTION = "attention"


class Emitted(StrEnum):
    """What asks for a device by the names of which a request is made."""

    SKYPILOT = "skypilot"
    SBATCH = "sbatch"


class ExportFormat(StrEnum):
    """A format of ``dryfit export``."""

    OPTUNA = "optuna"
    """Of a study: an Optuna storage, a journal, or SQLite if the file's name says so."""
    CSV = "csv"
    """Of a study: one row for each trial."""
    TRANSFORMERS = "transformers"
    """Of a model: a folder that plain transformers loads, with the same scores."""
    ENCODER = "transformers-encoder"
    """Of a model: its encoder alone, as ``AutoModel`` loads it."""

    @property
    def of_model(self) -> bool:
        """Whether a model is exported, and not a study."""
        return self in (ExportFormat.TRANSFORMERS, ExportFormat.ENCODER)


# The study files that come with dryfit: a line about each. Standard library only, for the command line's help.


PRESETS: Final[Mapping[str, str]] = {
    "smoke": "2 short trials of the packaged encoder, a minute or two",
    "standard": "20 trials of one encoder, the usual keys",
    "evidence": "the same for spans",
    "share": "the same for classes and spans, by one encoder",
    "joint": "the same for classes and spans, by two encoders",
    "max": "any task: 800 trials of three models, nearly every key",
    "supermax": "any task: 5000 trials of seven models, every key",
    "lora-7b-24gb": "one run of Qwen2.5-7B with adapters, on 24 GiB",
    "qlora-7b-12gb": "one run of Qwen2.5-7B in four bits, on 12 GiB",
    "qlora-7b-24gb": "the same on 24 GiB, rows of 4096 tokens",
}
"""Every preset; those of one task are of the task in their files."""


class Wall(StrEnum):
    """What keeps a rehearsal from the user's files, the strongest first."""

    NAMESPACES = "namespaces"
    """The kernel shows a copy-on-write view of all files: every way of writing lands in the rehearsal's folder."""
    LANDLOCK = "landlock"
    """Python's functions are redirected; the kernel refuses every other way of writing elsewhere."""
    REDIRECT = "redirect"
    """Python's functions are redirected; what code in C and other programs write is written."""
