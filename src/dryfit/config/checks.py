"""Checks between keys of a study file that need no data and no machine."""

import re
from enum import Enum, auto
from typing import Final

from dryfit.config.locate import KeyPath
from dryfit.config.problems import Problem, shown
from dryfit.config.schema import PrunerName, StudyConfig
from dryfit.config.task_checks import (
    decoder_problems,
    direction_problems,
    function_problems,
    metric_problems,
    regression_problems,
    sampler_problems,
    unread_problems,
)
from dryfit.config.trackers import tracker_problems
from dryfit.core.errors import ConfigError
from dryfit.core.settings.choices import Precision
from dryfit.core.settings.execution import DeviceKind
from dryfit.core.settings.switches import TRIAL_NEEDS, Needs
from dryfit.core.settings.task_facts import facts_of
from dryfit.core.text.units import parse_bytes


class Use(Enum):
    """The purpose of reading a study file."""

    TRAIN = auto()
    PLAN = auto()
    """To plan memory: no rows and no metric are needed."""


_NEEDS: Final = (
    *TRIAL_NEEDS,
    Needs("search.startup_trials", "search.sampler", ("tpe", "gp", "cmaes")),
    Needs("search.qmc_sequence", "search.sampler", ("qmc",)),
    Needs("search.population_size", "search.sampler", ("nsga2",)),
    Needs("search.warmup_reports", "search.pruner", ("median", "percentile", "asha", "hyperband", "patient")),
    Needs("search.patient_of", "search.pruner", ("patient",)),
    Needs("search.patience_reports", "search.pruner", ("patient",)),
    Needs("search.min_delta", "search.pruner", ("patient",)),
    Needs("runtime.keep", "data.folds", (1,)),  # a trial of several folds leaves no weights
)
# Keys of some pruners, alone or behind a patient one.
_READ_BY_PRUNERS: Final = {
    "search.pruner_startup_trials": (PrunerName.MEDIAN, PrunerName.PERCENTILE),
    "search.percentile": (PrunerName.PERCENTILE,),
    "search.reduction": (PrunerName.ASHA, PrunerName.HYPERBAND),
}
_SPLIT_KEYS: Final = ("validation_fraction", "test_fraction", "split_seed")


def cross_problems(config: StudyConfig, use: Use = Use.TRAIN) -> list[Problem]:
    """Return all problems between keys of a configuration whose single values are valid."""
    unread = [*unread_problems(config), *_unread(config), *_unread_by_pruner(config), *_mirror(config), *_nodes(config)]
    unread += tracker_problems(config.study.track)
    if facts_of(config.study.task).calls_function:
        return [*function_problems(config, planned=use is Use.PLAN), *direction_problems(config), *unread]
    problems = [*_data(config, use), *_classes(config), *decoder_problems(config), *direction_problems(config)]
    problems += [*_precision(config), *_limits(config), *_goals(config), *unread]
    return [*problems, *(_plannable(config) if use is Use.PLAN else metric_problems(config))]


def _nodes(config: StudyConfig) -> list[Problem]:
    """Refuse what is said of GPUs where trials are not planned for any."""
    if config.nodes is None or (config.objective is None and config.execution.device != DeviceKind.CPU):
        return []
    said = [
        key for key, says in (("expect", config.nodes.expect), ("change_device", config.nodes.change_device)) if says
    ]
    why = "trials run on CPUs" if config.objective is None else "what a function trains is not planned"
    return [Problem(("nodes", key), f"is set, and {why}", "unset") for key in said]


def _plannable(config: StudyConfig) -> list[Problem]:
    """Refuse a micro-batch above the batch; a study that is trained may search smaller batches."""
    rows, batch = config.execution.micro_batch, config.train.batch_size
    if rows is None or rows <= batch or "train.batch_size" in config.space:
        return []
    found = f"is {rows}, and train.batch_size is {batch}"
    return [Problem(("execution", "micro_batch"), found, f"from 1 to {batch}: a part of the batch")]


def _data(config: StudyConfig, use: Use) -> list[Problem]:
    data = config.data
    if data.file is None:
        unread = [key for key in _SPLIT_KEYS if config.is_changed(f"data.{key}")]
        if data.folds > 1:
            unread = [key for key in unread if key != "split_seed"]
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
    place, total = ("data", "validation_fraction"), data.validation_fraction + data.test_fraction
    if data.validation_fraction == 0:
        problems.append(Problem(place, "is 0", "above 0: every trial is scored on these rows"))
    if total >= 1:
        found = f"and data.test_fraction add up to {total:g}"
        problems.append(Problem(place, found, "a sum below 1: the rest is train"))
    return problems


def _classes(config: StudyConfig) -> list[Problem]:
    """Return settings that need another number of classes."""
    data = config.data
    problems: list[Problem] = []
    if data.labels and len(data.labels) != data.num_labels:
        found = f"is {data.num_labels}, and data.labels has {len(data.labels)} names"
        problems.append(Problem(("data", "num_labels"), found, "a name for each class", "leave out data.num_labels"))
    if data.multi_label:
        return problems
    if data.is_regression:
        return [*problems, *regression_problems(config)]
    if data.num_labels > 2 and (config.loss.alpha is not None or "loss.alpha" in config.space):
        path = ("space", "loss.alpha") if "loss.alpha" in config.space else ("loss", "alpha")
        found = f"weighs class 1 against class 0, and data.num_labels is {data.num_labels}"
        hint = 'balance more classes with loss.class_balance = "weighted" or "effective"'
        problems.append(Problem(path, found, "alpha with two classes, or with data.multi_label = true", hint))
    cases = config.space.get("head.threshold", ())
    searched = any("calibrated" in (case.choices or ()) for case in cases)
    if data.num_labels > 2 and (searched or (config.head.threshold == "calibrated" and not cases)):
        path = ("space", "head.threshold") if searched else ("head", "threshold")
        found = f"is calibrated, which decides between two classes, and data.num_labels is {data.num_labels}"
        hint = "leave it fixed: the likeliest class"
        problems.append(Problem(path, found, "calibrated with two classes, or with data.multi_label = true", hint))
    return problems


def _goals(config: StudyConfig) -> list[Problem]:
    """Return contradictions between several goals, and between goals and pruner."""
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
    problems += sampler_problems(config.search, len(metrics)) if study.also else []
    if study.also and config.search.pruner is not PrunerName.NONE:
        found = (
            f"is {config.search.pruner}, but with study.also no trial is worse than another by its validations alone: "
            "one that is poor by one goal may be the best by another"
        )
        hint = "remove study.also to prune by study.metric"
        problems.append(Problem(("search", "pruner"), found, str(PrunerName.NONE), hint))
    return problems


def _precision(config: StudyConfig) -> list[Problem]:
    format_ = config.train.precision
    if format_ in (Precision.FP16, Precision.TF32) and config.execution.device == DeviceKind.CPU:
        found = f"is {format_}, and execution.device is cpu"
        return [Problem(("train", "precision"), found, f"{format_} on CUDA only", "use bf16 or fp32")]
    drawn = any(Precision.AUTO in (case.choices or ()) for case in config.space.get("train.precision", ()))
    if config.train.precision is Precision.AUTO and facts_of(config.study.task).decoder:
        found = "is auto, and steps of a language model are not measured"
        return [Problem(("train", "precision"), found, "fp32, tf32, fp16 or bf16", "use bf16 where the device has it")]
    if drawn or (config.train.precision is Precision.AUTO and "train.precision" in config.space):
        found, hint = "is auto and searched", "leave one of them out"
        return [Problem(("train", "precision"), found, "auto, or formats in [space]", hint)]
    return []


def _limits(config: StudyConfig) -> list[Problem]:
    try:
        parse_bytes(config.execution.memory_limit or "1B")
    except ConfigError as error:
        return [Problem(("execution", "memory_limit"), f"is {error.found}", f"above 0: {error.allowed}")]
    return []


def password_problem(place: KeyPath) -> Problem:
    """Return the problem of a value that is a URL with a password in it."""
    found = "is a URL with a password in it"
    if place == ("search", "mirror"):
        hint = 'put the URL into a variable, such as DRYFIT_STORAGE, and write mirror = "env:DRYFIT_STORAGE"'
        return Problem(place, found, "env:NAME, a URL without", hint)
    if place[:2] == ("study", "track"):
        hint = 'put the URL into a variable, such as MLFLOW_TRACKING_URI, and write "mlflow:env:MLFLOW_TRACKING_URI"'
        return Problem(place, found, "mlflow:env:NAME, a URL without", hint)
    hint = "the file is copied into the study's folder: let what reads the URL take the password from a variable"
    return Problem(place, found, "a URL without", hint)


def _mirror(config: StudyConfig) -> list[Problem]:
    mirror = config.search.mirror
    if mirror.startswith("env:") and not re.fullmatch(r"env:[A-Za-z_][A-Za-z0-9_]*", mirror):
        return [Problem(("search", "mirror"), f"is {shown(mirror)}", "env:NAME, NAME a variable of the environment")]
    return []


def _unread(config: StudyConfig) -> list[Problem]:
    problems: list[Problem] = []
    for needs in _NEEDS:
        value = config.value(needs.switch)
        if needs.switch in config.space or value in needs.values:
            continue
        reason = f"but {needs.switch} = {value} does not read it"
        if needs.key in config.space:
            problems.append(Problem(("space", needs.key), f"is searched, {reason}", f"with {needs.condition}"))
        elif config.is_changed(needs.key) and not needs.may_idle:
            found = f"is {shown(config.value(needs.key))}, {reason}"
            problems.append(Problem(tuple(needs.key.split(".")), found, f"with {needs.condition}"))
    return problems


def _unread_by_pruner(config: StudyConfig) -> list[Problem]:
    switch = "search.patient_of" if config.search.pruner is PrunerName.PATIENT else "search.pruner"
    problems: list[Problem] = []
    for key, readers in _READ_BY_PRUNERS.items():
        if config.search.deciding_pruner not in readers and config.is_changed(key):
            found = f"is {shown(config.value(key))}, but {switch} = {config.value(switch)} does not read it"
            problems.append(Problem(tuple(key.split(".")), found, f"with {switch} = {' or '.join(readers)}"))
    return problems
