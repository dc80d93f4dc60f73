"""Facts about tasks for the rest of dryfit: a row per built-in task, and one for all user-defined tasks.

A task is its name in :class:`~dryfit.settings.choices.BuiltInTask`, its row here, and its class in ``tasks/``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Final, TypeAlias

from pydantic import Field

from dryfit.settings.choices import TRAINER_METRIC, BuiltInTask, Metric
from dryfit.settings.tables import OWN_KEY, DataSettings, Knob
from dryfit.settings.user_code import NAME_PATTERN, FunctionName

TaskName: TypeAlias = Annotated[
    BuiltInTask | Annotated[str, Field(pattern=NAME_PATTERN, description="package.module:Class or file.py:Class")],
    Field(union_mode="left_to_right"),
]
"""A built-in task, or a user's own class: ``package.module:Class`` or ``file.py:Class``."""

MetricName: TypeAlias = Annotated[
    Metric | Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$", description="a name that your own task gives")],
    Field(union_mode="left_to_right"),
]
"""A built-in metric, or one of a user's own task."""

OWN_TABLE: Final = "own"
"""Table of a study file whose keys a user's own class declares."""

OWN_VERSION: Final = "study.task_version"
"""Key that counts the versions of a user's own class."""

TASK_TABLES: Final = frozenset({"head", "loss", "span", "multitask", "joint", "lora", "lm"})
"""Tables that only some tasks read."""

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
_OF_NUMBERS: Final = (Metric.MSE, Metric.MAE, Metric.PEARSON, Metric.SPEARMAN, Metric.LOSS)
_OF_SPANS: Final = (
    Metric.SPAN_BALANCED,
    Metric.TOKEN_F1,
    Metric.EXACT_MATCH,
    Metric.SPAN_IOU,
    Metric.NULL_PRECISION,
    Metric.NULL_RECALL,
    Metric.TOKEN_F1_HAS,
)


def metrics_of_classes(data: DataSettings) -> tuple[Metric, ...]:
    """Return the metrics of a classification; of one number to a row those of a regression.

    ``f1`` is that of class 1 of two. With several labels per row, ``mcc`` and ``balanced_accuracy``, which compare one
    prediction with one label, do not exist.
    """
    if data.is_regression:
        return _OF_NUMBERS
    without = {Metric.F1} if data.num_labels != 2 else set[Metric]()
    if data.multi_label:
        without = {Metric.F1, Metric.MCC, Metric.BALANCED_ACCURACY}
    return tuple(metric for metric in _OF_CLASSES if metric not in without)


def metrics_of_spans(data: DataSettings) -> tuple[Metric, ...]:
    """Return the metrics of spans, whatever the data."""
    del data
    return (*_OF_SPANS, Metric.LOSS)


def metrics_of_both(data: DataSettings) -> tuple[Metric, ...]:
    """Return the metrics of classes and of spans, after the one that combines both."""
    return (Metric.COMBINED, *metrics_of_classes(data), *_OF_SPANS)


def metrics_of_text(data: DataSettings) -> tuple[Metric, ...]:
    """Return the metrics of generated text.

    The second exists where answers are generated, the third where they quote evidence.
    """
    del data
    return (Metric.LOSS, Metric.EXACT_MATCH, Metric.TOKEN_F1)


def metrics_of_trainer(data: DataSettings) -> tuple[MetricName, ...]:
    """Return the metric that every Trainer has; its other metrics are known only to its code."""
    del data
    return (TRAINER_METRIC,)


def _unknown_metrics(data: DataSettings) -> tuple[Metric, ...]:
    del data
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFacts:
    """Facts about a task that the rest of dryfit needs; its class has the rest.

    Attributes:
        implementation: Its class, ``module:Class``; empty for a user's own class or function.
        own: It is a user's own class.
        calls_function: A user's own function is called: it trains what it likes, or makes what is trained.
        makes_trainer: That code makes a Trainer, or may: it names metrics, and leaves its best weights.
        decoder: Its model is a decoder, which answers prompts and may be trained by adapters. ``dryfit init`` writes a
            toy one, as none is packaged.
        spans: It answers with spans, or none.
        numbers: A row's label may be a number instead of a class: regression, with ``data.num_labels = 1``.
        tables: Those of :data:`TASK_TABLES` that it reads.
        unread: Further keys that it does not read, of the tables that it reads.
        only: The tables and keys that alone are read; None: any.
        not_searched: Keys that no search may draw, each with the reason.
        metrics: Returns its metrics for such data, the default first; nothing if only the user's code knows them.
        pipeline: The hub's word for what its models do; None: the hub has none.
        starter: Values of the study file that ``dryfit init`` writes, where they differ from the other tasks'.
        starter_space: Keys that this file searches, each as TOML.
    """

    implementation: str = ""
    own: bool = False
    calls_function: bool = False
    makes_trainer: bool = False
    decoder: bool = False
    spans: bool = False
    numbers: bool = False
    tables: frozenset[str] = frozenset()
    unread: frozenset[str] = frozenset()
    only: frozenset[str] | None = None
    not_searched: Mapping[str, str] = field(default_factory=dict[str, str])
    metrics: Callable[[DataSettings], tuple[MetricName, ...]] = _unknown_metrics
    pipeline: str | None = "text-classification"
    starter: Mapping[str, Knob] = field(default_factory=dict[str, Knob])
    starter_space: Mapping[str, str] = field(default_factory=dict[str, str])


_SPACE: Final[Mapping[str, str]] = {
    "optim.lr": "{low = 1e-4, high = 4e-4, log = true}",
    "optim.weight_decay": "[0.0, 0.01, 0.1]",
    "train.batch_size": "[16, 24]",
    "sched.name": '["linear", "cosine"]',
    "head.pooling": '["cls", "mean"]',
    "head.dropout": "{low = 0.0, high = 0.3, step = 0.1}",
    "head.layers": "[0, 1]",
    "head.hidden": '{choices = [128, 256], when = {"head.layers" = 1}}  # drawn only where there is such a layer',
}
_SPACE_OF_BOTH: Final = {**_SPACE, "multitask.criteria_weight": "{low = 0.3, high = 0.7, step = 0.1}"}

_READ_WITH_FUNCTION: Final = (
    frozenset({"space", "search"})
    | {f"study.{key}" for key in ("name", "task", "trials", "seed", "max_hours", "patience", "listeners", "track")}
    | {f"execution.{key}" for key in ("device", "threads")}
    | {"nodes"}
    | {f"runtime.{key}" for key in ("parallel", "isolation", "retries", "device_wait_s")}
    | {f"runtime.{key}" for key in ("start_timeout_s", "hang_timeout_s", "trial_timeout_s", "verdict_timeout_s")}
    | {f"runtime.{key}" for key in ("stop_grace_s", "max_failed_in_a_row", "max_same_failure")}
)
"""What a study reads that calls a user's own function, beside the function's own table."""

_READ_WITH_TRAINER: Final = frozenset(
    {"study.metric", "study.direction", "study.also", "study.also_directions"}
    | {"runtime.keep", "runtime.checkpoint_every_s", "runtime.max_refused_in_a_row"}
    | {"execution.allow", "execution.unknown"}
)
"""What it reads besides where a Trainer is trained, or may be."""

BUILT_IN: Final[Mapping[BuiltInTask, TaskFacts]] = {
    BuiltInTask.CRITERIA: TaskFacts(
        implementation="dryfit.tasks.classification:CriteriaTask",
        numbers=True,
        tables=frozenset({"head", "loss"}),
        metrics=metrics_of_classes,
        starter_space=_SPACE,
    ),
    BuiltInTask.EVIDENCE: TaskFacts(
        implementation="dryfit.tasks.evidence:EvidenceTask",
        spans=True,
        tables=frozenset({"head", "loss", "span"}),
        unread=frozenset({"head.pooling", "head.threshold", "loss.alpha", "loss.class_balance", "loss.effective_beta"})
        | {"data.label", "data.num_labels", "data.labels", "data.multi_label"},
        metrics=metrics_of_spans,
        pipeline="question-answering",
        starter_space={
            **{key: drawn for key, drawn in _SPACE.items() if key != "head.pooling"},
            "optim.lr": "{low = 1e-4, high = 1e-3, log = true}",
            "span.negatives": "[1.0, 3.0]  # windows without a span for each with one",
        },
    ),
    BuiltInTask.SHARE: TaskFacts(
        implementation="dryfit.tasks.joint:ShareTask",
        spans=True,
        tables=frozenset({"head", "loss", "span", "multitask"}),
        metrics=metrics_of_both,
        starter_space=_SPACE_OF_BOTH,
    ),
    BuiltInTask.JOINT: TaskFacts(
        implementation="dryfit.tasks.joint:JointTask",
        spans=True,
        tables=frozenset({"head", "loss", "span", "multitask", "joint"}),
        metrics=metrics_of_both,
        starter_space={**_SPACE_OF_BOTH, "joint.fusion": '["concat", "add", "gate", "attention"]'},
    ),
    BuiltInTask.CAUSAL_LM: TaskFacts(
        implementation="dryfit.tasks.causal_lm:CausalLmTask",
        decoder=True,
        tables=frozenset({"lora", "lm"}),
        unread=frozenset(
            {
                "optim.layer_decay",
                "optim.head_lr_factor",
                "regularization.freeze_layers",
                "regularization.frozen_dropout",
            }
        ),
        # It decides which columns rows must have, and what the loss is.
        not_searched={
            "lm.format": "losses of different formats do not compare",
            "lm.metric": "values of different metrics do not compare",
        },
        metrics=metrics_of_text,
        pipeline="text-generation",
        # The model is a toy, drawn at random: it learns fast, and from nothing.
        starter={"study.trials": 3, "train.epochs": 1, "train.max_length": 320, "optim.lr": 2e-3},
        starter_space={
            "optim.lr": "{low = 5e-4, high = 5e-3, log = true}",
            "lora.r": "[4, 8, 16]",
            "lora.dropout": "[0.0, 0.1]",
        },
    ),
    BuiltInTask.OBJECTIVE: TaskFacts(
        calls_function=True,
        only=_READ_WITH_FUNCTION | {"objective"},
        unread=frozenset({"search.defaults_first"}),
        pipeline=None,
    ),
    BuiltInTask.TRAINER: TaskFacts(
        calls_function=True,
        makes_trainer=True,
        only=_READ_WITH_FUNCTION | _READ_WITH_TRAINER | {"trainer"},
        unread=frozenset({"search.defaults_first"}),
        metrics=metrics_of_trainer,
        pipeline=None,
    ),
    BuiltInTask.SCRIPT: TaskFacts(
        calls_function=True,
        makes_trainer=True,
        only=_READ_WITH_FUNCTION | _READ_WITH_TRAINER | {"script"},
        unread=frozenset({"search.defaults_first"}),
        metrics=metrics_of_trainer,
        pipeline=None,
    ),
}
"""The row of each built-in task."""

TASK_MODULES: Final = tuple(
    facts.implementation.partition(":")[0] for facts in BUILT_IN.values() if facts.implementation
)
"""The modules of their classes, for a server of processes to import once."""

_OWN: Final = TaskFacts(
    own=True,
    numbers=True,
    tables=TASK_TABLES,  # its class says which of them it reads
    unread=frozenset({"head.threshold"}),  # its class decides itself
    pipeline=None,
)


def facts_of(task: TaskName) -> TaskFacts:
    """Return a task's row; all tasks of the user's own have the same."""
    return BUILT_IN[task] if isinstance(task, BuiltInTask) else _OWN


def default_metric(task: TaskName) -> MetricName:
    """Return the metric of a study file that names none: the task's first; of a user's own code the first of all."""
    return next(iter(facts_of(task).metrics(DataSettings())), Metric.F1_MACRO)


def metric_of(name: str) -> MetricName:
    """Return the metric of a name."""
    return Metric(name) if name in list(Metric) else name


def is_own_key(key: str) -> bool:
    """Whether a dotted name is that of a key that a user's own task declares."""
    table, _, name = key.partition(".")
    return table == OWN_TABLE and OWN_KEY.fullmatch(name) is not None


def task_word(task: TaskName) -> str:
    """Return a task's name for people: that of a user's own class without its folder."""
    return FunctionName.parse(task).short if facts_of(task).own else str(task)


def reads(task: TaskName, key: str) -> bool:
    """Whether a task reads a key of a study file, or a table; a user's own class checks itself which it reads."""
    facts, table = facts_of(task), key.partition(".")[0]
    if table == OWN_TABLE or key == OWN_VERSION:
        return facts.own
    if table in TASK_TABLES and table not in facts.tables:
        return False
    return not facts.unread & {table, key} and (facts.only is None or bool(facts.only & {table, key}))
