"""Checks between keys of a study file that need no data and no machine."""

import difflib
import hashlib
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from typing import Final

from dryfit.settings.choices import FUNCTION_TASK, SCRIPT_TASK, TRAINER_TASK, Direction, Metric, Precision
from dryfit.settings.errors import ConfigError
from dryfit.settings.execution import PRECISIONS_WITH, base_format
from dryfit.settings.memory_terms import DeviceKind
from dryfit.settings.study_file import PrunerName, SamplerName, SearchSettings, StudyConfig
from dryfit.settings.study_file_problems import KeyPath, Problem, shown
from dryfit.settings.study_file_text import TABLES
from dryfit.settings.tables import TRIAL_NEEDS, DataSettings, LossSettings, Needs, ObjectiveSettings
from dryfit.settings.task_facts import BUILT_IN, OWN_TABLE, OWN_VERSION, facts_of, reads, task_word
from dryfit.settings.text import did_you_mean, parse_bytes
from dryfit.settings.user_code import OF_THE_TRIAL, CommandTemplate, FunctionName

# Parse and check the entries of ``study.track``.


_VARIABLE = re.compile(r"env:[A-Za-z_][A-Za-z0-9_]*")
_PROJECT = re.compile(r"([A-Za-z0-9._-]{1,128}/)?[A-Za-z0-9._-]{1,128}")
_LIKE_A_KEY = re.compile(r"[0-9a-f]{32,}|hf_[A-Za-z0-9]{20,}|wandb_v[0-9]_\S{20,}|dapi[0-9a-f]{20,}")
"""Keys of Weights & Biases and Databricks, tokens of the hub."""

ENVIRONMENT_PREFIX = "env:"


def variable_of(where: str) -> str | None:
    """Return the environment variable that has a target's URL; None: the target is named as it is."""
    return where.removeprefix(ENVIRONMENT_PREFIX) if where.startswith(ENVIRONMENT_PREFIX) else None


class TrackerName(StrEnum):
    """What a study can be shown in."""

    TENSORBOARD = "tensorboard"
    MLFLOW = "mlflow"
    WANDB = "wandb"
    TRACKIO = "trackio"


_AFTER_COLON = {
    TrackerName.TENSORBOARD: "tensorboard, or tensorboard:FOLDER",
    TrackerName.MLFLOW: "mlflow:env:NAME, mlflow:URL, or mlflow (MLFLOW_TRACKING_URI)",
    TrackerName.WANDB: "wandb, wandb:PROJECT or wandb:ENTITY/PROJECT",
    TrackerName.TRACKIO: "trackio, or trackio:PROJECT",
}


@dataclass(frozen=True, slots=True)
class Tracker:
    """One entry of ``study.track``.

    Attributes:
        entry: As it is written.
        name: Which tracker.
        where: What follows the first colon, or what its absence means; of wandb and trackio empty: a project of the
            study's name.
    """

    entry: str
    name: TrackerName
    where: str

    @property
    def variable(self) -> str | None:
        """The environment variable that has the URL; None: it is in the file."""
        return variable_of(self.where)

    @property
    def slug(self) -> str:
        """What its files are called: its name, and where it is not the only meaning of that, a hash of the entry."""
        if self.entry == self.name:
            return self.entry
        return f"{self.name}-{hashlib.sha256(self.entry.encode()).hexdigest()[:6]}"


_MEANT = {TrackerName.TENSORBOARD: "tensorboard", TrackerName.MLFLOW: "env:MLFLOW_TRACKING_URI"}


def tracker_of(entry: str) -> Tracker:
    """Parse a valid entry."""
    name, _, where = entry.partition(":")
    known = TrackerName(name)
    return Tracker(entry, known, where or _MEANT.get(known, ""))


def tracker_problems(entries: tuple[str, ...]) -> list[Problem]:
    """Return the problems of the entries of ``study.track``."""
    problems: list[Problem] = []
    meant: dict[tuple[str, str], str] = {}
    for index, entry in enumerate(entries):
        place = ("study", "track", index)
        problem = _entry_problem(entry)
        if problem is not None:
            problems.append(Problem(place, *problem))
            continue
        tracker = tracker_of(entry)
        earlier = meant.setdefault((tracker.name, tracker.where), entry)
        if earlier is not entry or entries.index(entry) != index:
            problems.append(Problem(place, f"is {shown(entry)}, which {shown(earlier)} means too", "each target once"))
    return problems


def _entry_problem(entry: str) -> tuple[str, str, str] | None:
    name, colon, where = entry.partition(":")
    if name not in list(TrackerName):
        return f"is {shown(entry)}", ", ".join(TrackerName), did_you_mean(name.lower(), TrackerName)
    if _LIKE_A_KEY.search(where):
        hint = "keep it in the variable that the tracker reads, such as WANDB_API_KEY"
        return "has what looks like a key in it", _AFTER_COLON[TrackerName(name)], hint
    wrong = bool(colon and not where) or where != where.strip()
    if where.startswith(ENVIRONMENT_PREFIX):
        wrong = wrong or name != TrackerName.MLFLOW or not _VARIABLE.fullmatch(where)
    elif name == TrackerName.WANDB and where:
        wrong = wrong or not _PROJECT.fullmatch(where)
    elif name == TrackerName.TRACKIO and where:
        wrong = wrong or "/" in where or not _PROJECT.fullmatch(where)
    elif name == TrackerName.MLFLOW and where:
        wrong = wrong or ":" not in where
    return (f"is {shown(entry)}", _AFTER_COLON[TrackerName(name)], "") if wrong else None


# Checks of a study file's task against its other keys: tables, metrics and required settings.


_TABLES: Final = {"objective": FUNCTION_TASK, "trainer": TRAINER_TASK, "script": SCRIPT_TASK}
"""Tables that name a user's own code, each with the only task that reads it."""

_EXAMPLES: Final = {
    "objective": 'function = "package.module:function"',
    "trainer": 'make = "package.module:function"',
    "script": 'command = "train.py --learning_rate {lr}"',
}
"""What such a table says, for who has none."""

_ELSEWHERE: Final = {
    "study.metric": "name what the function returns in objective.goals",
    "study.also": "name all that the function returns in objective.goals",
    "study.direction": 'write directions = ["maximize"] into [objective]',
    "study.also_directions": "write objective.directions, one for each goal",
    "search.defaults_first": "your function's parameters have no defaults that dryfit knows",
}
"""Keys that a study with a user's own function does not read, with what to write instead."""

_OF_CLASSES: Final = (*(f"loss.{key}" for key in LossSettings.model_fields), "head.threshold")
"""Keys that no regression reads."""

_DIRECTIONS: Final = " or ".join(Direction)
_ASKS_LABELS: Final = ("criteria", "both")
_ASKS_EVIDENCE: Final = ("evidence", "both")


def unread_problems(config: StudyConfig) -> list[Problem]:
    """Return the keys that are set or searched, and that the task does not read, or lets no search draw.

    A frozen study file has the defaults too, so only a value that differs from its default was set by the user.
    """
    task = config.study.task
    facts, word = facts_of(task), task_word(task)
    misplaced = [table for table, reader in _TABLES.items() if getattr(config, table) is not None and reader != task]
    if misplaced:
        table = misplaced[0]
        found = f"is read only with study.task = {_TABLES[table]}, and it is {word}"
        hint = f'remove the table, or write study.task = "{_TABLES[table]}"'
        return [Problem((table,), found, hint=hint)]

    given = [f"{table}.{key}" for table, keys in TABLES.items() if getattr(config, table) is not None for key in keys]
    given = [key for key in given if not reads(task, key) and config.is_changed(key)]
    given += [f"{OWN_TABLE}.{name}" for name in config.own.knobs if not facts.own]
    problems = [
        Problem(tuple(key.split(".", 1)), _not_read(key, word), hint=_ELSEWHERE.get(key, "remove it")) for key in given
    ]
    if facts.calls_function:
        return problems  # its searched keys are the user's own
    for name in config.space:
        if not reads(task, name):
            problems.append(Problem(("space", name), _not_read(name, word), hint="remove it"))
        elif name in facts.not_searched:
            found = f"is searched, and {facts.not_searched[name]}"
            problems.append(Problem(("space", name), found, "one value", "run a study of each"))
    return problems


def _not_read(key: str, task: str) -> str:
    if key == OWN_VERSION or key.startswith(f"{OWN_TABLE}."):
        return f"is read only with a task of your own, and study.task = {task}"
    return f"is not read by study.task = {task}"


def metric_problems(config: StudyConfig) -> list[Problem]:
    """Return metrics that a built-in task does not have; those of a user's own task are checked by its class."""
    study, data, facts = config.study, config.data, facts_of(config.study.task)
    known = facts.metrics(data)
    if not known:
        return []
    own = config.lm.metric is not None  # the names of its numbers are known to it alone
    classes = "data.multi_label is true" if data.multi_label else f"data.num_labels is {data.num_labels}"
    problems: list[Problem] = []
    for key, metrics in (("metric", (study.metric,)), ("also", study.also)):
        for metric in metrics:
            if metric not in known and not (own and not isinstance(metric, Metric)):
                given = classes if metric in facts.metrics(DataSettings()) else f"study.task is {study.task}"
                found = f"is {metric}, and {given}"
                problems.append(Problem(("study", key), found, ", ".join(known), _nearest(metric, known)))
    return problems


def regression_problems(config: StudyConfig) -> list[Problem]:
    """Return settings that contradict regression: class names, and keys that only classes have."""
    task, data = config.study.task, config.data
    if not facts_of(task).numbers:
        found = f"is 1, and data.multi_label is false: a number to each row, which study.task = {task} does not learn"
        return [Problem(("data", "num_labels"), found, "2 or more, or 1 or more with data.multi_label = true")]
    problems: list[Problem] = []
    if data.labels:
        found = f"has one name, {data.labels[0]!r}, and data.num_labels = 1 is regression, which has no classes"
        problems.append(Problem(("data", "labels"), found, "two names or more, or none", "remove it"))
    if facts_of(task).own:
        return problems  # its class says itself what it reads
    for key in _OF_CLASSES:
        if key in config.space or config.is_changed(key):
            path = ("space", key) if key in config.space else tuple(key.split(".", 1))
            found = "is not read: data.num_labels = 1 is regression, whose loss is the mean squared error"
            problems.append(Problem(path, found, hint="remove it, or classes: data.num_labels = 2"))
    return problems


def _nearest(metric: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(metric, known, n=1)
    return f"did you mean {near[0]}?" if near and metric not in list(Metric) else f"use {known[0]}"


def direction_problems(config: StudyConfig) -> list[Problem]:
    """Return user-defined metrics whose required direction the study file lacks."""
    study, problems, facts = config.study, list[Problem](), facts_of(config.study.task)
    if not facts.own and config.lm.metric is None and not facts.makes_trainer:
        return []
    whose = task_word(study.task) if config.lm.metric is None else FunctionName.parse(config.lm.metric).short
    known = facts.metrics(config.data)
    if not isinstance(study.metric, Metric) and study.metric not in known and study.direction is None:
        found = f"is unset, and {study.metric} is a metric of {whose}: nobody else knows what is better"
        hint = 'write direction = "minimize" or "maximize"'
        problems.append(Problem(("study", "direction"), found, _DIRECTIONS, hint))
    unknown = [metric for metric in study.also if not isinstance(metric, Metric) and metric not in known]
    if unknown and study.also_directions is None:
        found = f"is unset, and {', '.join(unknown)} of study.also has no direction that dryfit knows"
        problems.append(Problem(("study", "also_directions"), found, f"{_DIRECTIONS} for each metric of study.also"))
    return problems


def function_problems(config: StudyConfig, *, planned: bool) -> list[Problem]:
    """Return the problems of a study with a user's own function, beside the keys that it does not read.

    Args:
        config: The study file.
        planned: It is read to plan memory, which is not possible for a function.
    """
    task = config.study.task
    if planned:
        found = f"is {task}: what your own function takes of a device cannot be planned"
        trained = [task for task, facts in BUILT_IN.items() if not facts.calls_function]
        return [Problem(("study", "task"), found, ", ".join(trained))]
    own, pruner, problems = config.function, config.search.pruner, list[Problem]()
    table = next(table for table, reader in _TABLES.items() if reader == task)
    if own is None or config.function_table != table:
        hint = f"add [{table}] with {_EXAMPLES[table]}"
        return [Problem(("study", "task"), f"is {task}, and there is no [{table}]", hint=hint)]
    if not config.space:
        problems.append(Problem(("space",), "is empty", "at least one parameter of your function"))
    if config.script is not None:
        problems += _command_problems(config.script.command, config.space)
    if config.objective is not None:
        problems += _goals_of(config.objective)
    elif len(set(own.goals)) != len(own.goals):
        problems.append(Problem(("study", "also"), "repeats a metric", "each once, and not study.metric"))
    if len(own.goals) > 1 and pruner is not PrunerName.NONE:
        found = f"is {pruner}, and there are {len(own.goals)} goals: reports know only the first"
        problems.append(Problem(("search", "pruner"), found, str(PrunerName.NONE)))
    elif config.search.deciding_pruner is PrunerName.HYPERBAND:
        found = "is hyperband, which must know how many reports a trial makes: of your own function nobody does"
        problems.append(
            Problem(("search", "pruner"), found, "none, median, percentile, asha, or patient of one of them")
        )
    if len(own.goals) > 1:
        problems += sampler_problems(config.search, len(own.goals))
    return problems


def _command_problems(text: str, space: Collection[str]) -> list[Problem]:
    """Return what is wrong with a script's command, and its placeholders that no trial has a value for."""
    where = ("script", "command")
    try:
        command = CommandTemplate.parse(text)
    except ValueError as error:
        return [Problem(where, str(error), "train.py ARGS..., or -m package.module ARGS...")]
    free = command.placeholders - OF_THE_TRIAL
    problems = [
        Problem(
            where,
            f"has {{{name}}}, and [space] has no {name}",
            f"a key of [space], or {', '.join(f'{{{one}}}' for one in sorted(OF_THE_TRIAL))}",
            f"did you mean {{{near[0]}}}?" if (near := difflib.get_close_matches(name, space, n=1)) else "",
        )
        for name in sorted(free - set(space))
    ]
    for name in space:
        if name in OF_THE_TRIAL:
            found = f"has a name that commands have a meaning of their own for: {{{name}}}"
            problems.append(Problem(("space", name), found, "another name"))
        elif name not in free:
            found = f"is searched, and script.command has no {{{name}}}: the script would never get it"
            problems.append(Problem(("space", name), found, hint=f"add --{name} {{{name}}} to the command"))
    return problems


def _goals_of(own: ObjectiveSettings) -> list[Problem]:
    problems: list[Problem] = []
    if len(set(own.goals)) != len(own.goals) or not all(own.goals):
        problems.append(Problem(("objective", "goals"), "repeats a name, or has an empty one", "each name once"))
    if own.directions is not None and len(own.directions) != len(own.goals):
        found = f"has {len(own.directions)} directions for {len(own.goals)} goals"
        problems.append(Problem(("objective", "directions"), found, "one for each, or none at all"))
    return problems


def sampler_problems(search: SearchSettings, goals: int) -> list[Problem]:
    """Return the problem of a sampler of one goal where there are several."""
    if search.sampler is not SamplerName.CMAES:
        return []
    found = f"is cmaes, which optimises one goal, and there are {goals}"
    return [Problem(("search", "sampler"), found, "tpe, random, qmc, nsga2 or gp")]


def decoder_problems(config: StudyConfig) -> list[Problem]:
    """Return contradictions between the keys of a decoder's task; searched values are checked in each trial."""
    if not facts_of(config.study.task).decoder:
        return []
    return [*_base(config), *_answers(config), *_generated(config)]


def _base(config: StudyConfig) -> list[Problem]:
    lora, precision = config.lora, config.train.precision
    searched = {"lora.base", "lora.compute", "train.precision"} & config.space.keys()
    if (not lora.r and "lora.r" not in config.space) or searched or precision is Precision.AUTO:
        return []  # of auto, which no language model has, `checks` says so
    base = base_format(lora, config.train)
    if base.quantised and config.execution.processes > 1:
        found = f'is "{base.name}", of which a process cannot read its slice'
        return [
            Problem(("lora", "base"), found, "another base, or one device: leave execution.tp and execution.dp out")
        ]
    if not (problem := base.problem(precision)):
        return []
    found = f'is "{base.name}", and {problem}'
    return [
        Problem(("lora", "base"), found, PRECISIONS_WITH[base.name], "or leave it out: the base then has that format")
    ]


def _answers(config: StudyConfig) -> list[Problem]:
    data, lm = config.data, config.lm
    if lm.format not in _ASKS_LABELS:
        return []
    if data.multi_label:
        found = f'is true, and lm.format is "{lm.format}", whose answer is the word of one label'
        return [Problem(("data", "multi_label"), found, "false, or another lm.format")]
    words = [word.strip() for word in lm.answers.split(",")]
    if "lm.answers" in config.space or (len(set(words)) == data.num_labels == len(words) and all(words)):
        return []
    found = f"is {lm.answers!r}, and data.num_labels is {data.num_labels}"
    return [Problem(("lm", "answers"), found, "a different word for each label, with commas between them")]


def _generated(config: StudyConfig) -> list[Problem]:
    """Refuse metrics of answers if no answers are generated, and one of quotations if none are asked for."""
    lm, goals = config.lm, (config.study.metric, *config.study.also)
    answered = lm.format != "text" and (lm.generate_rows > 0 or "lm.generate_rows" in config.space)
    of_answers = [metric for metric in goals if metric != Metric.LOSS]
    if of_answers and not answered:
        why = "there are no answers" if lm.format == "text" else "no answer is generated"
        asked = ", ".join(of_answers)
        found = f'asks for {asked}, and with lm.format = "{lm.format}", lm.generate_rows = {lm.generate_rows} {why}'
        return [Problem(("study", "metric"), found, str(Metric.LOSS), "or set lm.generate_rows")]
    if lm.metric is not None and not answered:
        found = f"measures answers, and with lm.generate_rows = {lm.generate_rows} no answer is generated"
        return [Problem(("lm", "metric"), found, hint="set lm.generate_rows, or remove it")]
    if Metric.TOKEN_F1 in goals and lm.format not in _ASKS_EVIDENCE:
        found = (
            f'asks for token_f1, the agreement of quoted evidence, and with lm.format = "{lm.format}" none is quoted'
        )
        return [Problem(("study", "metric"), found, "loss or exact_match", 'or lm.format = "evidence" or "both"')]
    return []


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
    if mirror.startswith(ENVIRONMENT_PREFIX) and not _VARIABLE.fullmatch(mirror):
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
