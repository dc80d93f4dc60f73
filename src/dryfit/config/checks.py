"""Checks between keys of a study file that need no data and no machine."""

from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from dryfit.config.problems import Problem, shown
from dryfit.config.schema import PatientOf, PrunerName, StudyConfig
from dryfit.config.schema_json import TABLES
from dryfit.core.errors import ConfigError
from dryfit.core.plan import DeviceKind
from dryfit.core.settings import Metric, Precision, Settings, Task
from dryfit.core.units import parse_bytes


class Use(Enum):
    """What a study file is read for."""

    TRAIN = auto()
    PLAN = auto()
    """Its memory is asked about: no rows are needed, and tasks may be named that cannot be trained yet."""


@dataclass(frozen=True, slots=True)
class _Needs:
    """``key`` is read only where ``other`` has one of ``values``."""

    key: str
    other: str
    values: tuple[str, ...]


# A setting that nothing reads is an error: whoever wrote it expects an effect.
_NEEDS: Final = (
    _Needs("optim.beta2", "optim.name", ("adamw", "adamw8bit", "lion")),
    _Needs("optim.eps", "optim.name", ("adamw", "adamw8bit")),
    _Needs("optim.beta1", "optim.name", ("adamw", "adamw8bit", "lion", "sgd")),
    _Needs("loss.gamma", "loss.name", ("focal",)),
    _Needs("loss.label_smoothing", "loss.name", ("cross_entropy",)),
    _Needs("search.startup_trials", "search.sampler", ("tpe",)),
    _Needs("search.qmc_sequence", "search.sampler", ("qmc",)),
    _Needs("search.population_size", "search.sampler", ("nsga2",)),
    _Needs("search.warmup_reports", "search.pruner", ("median", "asha", "hyperband", "patient")),
    _Needs("search.pruner_startup_trials", "search.pruner", ("median", "patient")),
    _Needs("search.reduction", "search.pruner", ("asha", "hyperband", "patient")),
    _Needs("search.patient_of", "search.pruner", ("patient",)),
    _Needs("search.patience_reports", "search.pruner", ("patient",)),
    _Needs("search.min_delta", "search.pruner", ("patient",)),
)
_HIDDEN_LAYER_KEYS: Final = ("hidden", "activation")
# What a patient pruner does not read: the numbers of the pruner it does not ask.
_UNREAD_BY_PATIENT: Final = {PatientOf.MEDIAN: "reduction", PatientOf.ASHA: "pruner_startup_trials"}
_SPLIT_KEYS: Final = ("validation_fraction", "test_fraction", "split_seed")
_ENCODER_TABLES: Final = ("head", "loss")


def cross_problems(config: StudyConfig, use: Use = Use.TRAIN) -> list[Problem]:
    """Everything that is wrong between the keys of a config whose single values are legal."""
    problems = [*_task(config), *_data(config, use), *_metric(config), *_precision(config), *_limit(config)]
    return [
        *problems,
        *_goals(config),
        *_unread(config),
        *_unread_by_patient(config),
        *(_plannable(config) if use is Use.PLAN else _trainable(config)),
    ]


def _task(config: StudyConfig) -> list[Problem]:
    """Tables that the task does not read."""
    task = config.study.task
    if task is not Task.CAUSAL_LM:
        found = f"is read only with study.task = {Task.CAUSAL_LM}, and it is {task}"
        return [Problem(("lora",), found, hint="remove the table")] if config.lora is not None else []
    keys = [(table, key) for table in _ENCODER_TABLES for key in TABLES[table]]
    found = f"is not read by study.task = {task}"
    problems = [Problem((table, key), found) for table, key in keys if _changed(config, f"{table}.{key}")]
    searched = [name for name in config.space if name.partition(".")[0] in _ENCODER_TABLES]
    return problems + [Problem(("space", name), found) for name in searched]


def _trainable(config: StudyConfig) -> list[Problem]:
    if config.study.task is not Task.CAUSAL_LM:
        return []
    found = f"is {Task.CAUSAL_LM}, which can be planned, not trained yet"
    return [Problem(("study", "task"), found, str(Task.CRITERIA), "ask for its memory with `dryfit plan`")]


def _plannable(config: StudyConfig) -> list[Problem]:
    """Sizes that contradict each other. A study that is trained may search the batch below its micro-batch."""
    rows, batch = config.execution.micro_batch, config.train.batch_size
    if rows is None or rows <= batch or "train.batch_size" in config.space:
        return []
    found = f"is {rows}, and train.batch_size is {batch}"
    return [Problem(("execution", "micro_batch"), found, f"from 1 to {batch}: a part of the batch")]


def _data(config: StudyConfig, use: Use) -> list[Problem]:
    data = config.data
    if data.file is None:
        unread = [key for key in _SPLIT_KEYS if _changed(config, f"data.{key}")]
        problems = [Problem(("data", key), "is read only with data.file") for key in unread]
        missing = [name for name in ("train", "validation") if getattr(data, name) is None]
        if missing and use is Use.TRAIN:
            found = f"has no {' and no '.join(missing)}"
            hint = f'add {missing[0]} = "PATH", or --set data.{missing[0]}=PATH'
            problems.append(Problem(("data",), found, "train and validation (and test), or file alone", hint))
        return problems
    named = [name for name in ("train", "validation", "test") if getattr(data, name) is not None]
    problems = [
        Problem(("data", name), "stands beside data.file", "train and validation, or file", "remove one of the two")
        for name in named
    ]
    if data.validation_fraction == 0:
        problems.append(
            Problem(("data", "validation_fraction"), "is 0", "above 0: every trial is scored on these rows")
        )
    total = data.validation_fraction + data.test_fraction
    if total >= 1:
        found = f"and data.test_fraction add up to {total:g}"
        problems.append(Problem(("data", "validation_fraction"), found, "a sum below 1: the rest is train"))
    return problems


def _metric(config: StudyConfig) -> list[Problem]:
    if config.data.num_labels == 2:
        return []
    study = config.study
    named = [key for key, metrics in (("metric", (study.metric,)), ("also", study.also)) if Metric.F1 in metrics]
    found = f"asks for f1, and data.num_labels is {config.data.num_labels}"
    return [Problem(("study", key), found, "f1 with two labels", "use f1_macro") for key in named]


def _goals(config: StudyConfig) -> list[Problem]:
    """What several goals ask of each other and of the search."""
    study, problems = config.study, list[Problem]()
    metrics = (study.metric, *study.also)
    repeated = [metric for index, metric in enumerate(metrics) if metric in metrics[:index]]
    if repeated:
        found = f"repeats {', '.join(dict.fromkeys(repeated))}"
        problems.append(Problem(("study", "also"), found, f"metrics beside study.metric = {study.metric}, each once"))
    if study.also_directions is not None and len(study.also_directions) != len(study.also):
        found = f"has {len(study.also_directions)} direction(s) for {len(study.also)} metric(s) in study.also"
        hint = "leave it out: each metric then has its own direction"
        problems.append(Problem(("study", "also_directions"), found, "one direction for each, in their order", hint))
    if study.also and config.search.pruner is not PrunerName.NONE:
        found = (
            f"is {config.search.pruner}, but with study.also no trial is worse than another by its validations alone: "
            "one that is poor by one goal may be the best by another"
        )
        hint = "remove study.also to prune by study.metric"
        problems.append(Problem(("search", "pruner"), found, str(PrunerName.NONE), hint))
    return problems


def _precision(config: StudyConfig) -> list[Problem]:
    if config.train.precision is Precision.FP16 and config.execution.device == DeviceKind.CPU:
        found = "is fp16, and execution.device is cpu"
        return [Problem(("train", "precision"), found, "fp16 on CUDA only", "use bf16 or fp32")]
    return []


def _limit(config: StudyConfig) -> list[Problem]:
    try:
        parse_bytes(config.execution.memory_limit or "1B")
    except ConfigError as error:
        return [Problem(("execution", "memory_limit"), f"is {error.found}", f"above 0: {error.allowed}")]
    return []


def _unread(config: StudyConfig) -> list[Problem]:
    problems: list[Problem] = []
    for need in _NEEDS:
        value = _value(config, need.other)
        if _changed(config, need.key) and need.other not in config.space and value not in need.values:
            found = f"is {shown(_value(config, need.key))}, but {need.other} = {value} does not read it"
            problems.append(
                Problem(tuple(need.key.split(".")), found, f"with {need.other} " + " or ".join(need.values))
            )
    if config.head.layers == 0 and "head.layers" not in config.space:
        for key in _HIDDEN_LAYER_KEYS:
            if _changed(config, f"head.{key}"):
                found = f"is {shown(_value(config, f'head.{key}'))}, but head.layers is 0"
                problems.append(Problem(("head", key), found, "with head.layers of 1 or more"))
    return problems


def _unread_by_patient(config: StudyConfig) -> list[Problem]:
    search = config.search
    key = _UNREAD_BY_PATIENT[search.patient_of]
    if search.pruner is not PrunerName.PATIENT or not _changed(config, f"search.{key}"):
        return []
    found = f"is {shown(_value(config, f'search.{key}'))}, but search.patient_of = {search.patient_of} does not read it"
    other = next(one for one, unread in _UNREAD_BY_PATIENT.items() if unread != key)
    return [Problem(("search", key), found, f"with search.patient_of = {other}")]


def _value(config: StudyConfig, key: str) -> object:
    table, _, name = key.partition(".")
    return getattr(getattr(config, table), name)


def _changed(config: StudyConfig, key: str) -> bool:
    """Whether a key differs from its default (a frozen study file spells out the defaults too)."""
    table, _, name = key.partition(".")
    settings: Settings = getattr(config, table)
    return getattr(settings, name) != type(settings).model_fields[name].default
