"""Checks between keys of a study file that need no data and no machine."""

import re
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from dryfit.config.problems import Problem, shown
from dryfit.config.schema import StudyConfig
from dryfit.config.schema_json import TABLES
from dryfit.core.errors import ConfigError
from dryfit.core.plan import DeviceKind
from dryfit.core.secrets import redacted
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
    _Needs("search.warmup_reports", "search.pruner", ("median", "asha")),
    _Needs("search.pruner_startup_trials", "search.pruner", ("median",)),
    _Needs("search.reduction", "search.pruner", ("asha",)),
)
_HIDDEN_LAYER_KEYS: Final = ("hidden", "activation")
_SPLIT_KEYS: Final = ("validation_fraction", "test_fraction", "split_seed")
_ENCODER_TABLES: Final = ("head", "loss")


def cross_problems(config: StudyConfig, use: Use = Use.TRAIN) -> list[Problem]:
    """Everything that is wrong between the keys of a config whose single values are legal."""
    problems = [*_task(config), *_data(config, use), *_metric(config), *_precision(config), *_limit(config)]
    problems += _mirror(config)
    return [*problems, *_unread(config), *(_plannable(config) if use is Use.PLAN else _trainable(config))]


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
    if config.study.metric is Metric.F1 and config.data.num_labels != 2:
        found = f"is f1, and data.num_labels is {config.data.num_labels}"
        return [Problem(("study", "metric"), found, "f1 with two labels", "use f1_macro")]
    return []


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


def _mirror(config: StudyConfig) -> list[Problem]:
    """A password in a study file would be copied into frozen.toml, and from there into reports."""
    mirror = config.search.mirror
    if redacted(mirror, {}) != mirror:
        hint = 'put the URL into a variable, such as DRYFIT_STORAGE, and write mirror = "env:DRYFIT_STORAGE"'
        return [Problem(("search", "mirror"), "is a URL with a password in it", "env:NAME, a URL without", hint)]
    if mirror.startswith("env:") and not re.fullmatch(r"env:[A-Za-z_][A-Za-z0-9_]*", mirror):
        return [Problem(("search", "mirror"), f"is {shown(mirror)}", "env:NAME, NAME a variable of the environment")]
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


def _value(config: StudyConfig, key: str) -> object:
    table, _, name = key.partition(".")
    return getattr(getattr(config, table), name)


def _changed(config: StudyConfig, key: str) -> bool:
    """Whether a key differs from its default (a frozen study file spells out the defaults too)."""
    table, _, name = key.partition(".")
    settings: Settings = getattr(config, table)
    return getattr(settings, name) != type(settings).model_fields[name].default
