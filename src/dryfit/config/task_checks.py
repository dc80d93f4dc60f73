"""Checks of a study file's task against its other keys: tables, metrics and required settings."""

import difflib
from collections.abc import Collection, Sequence
from typing import Final

from dryfit.config.problems import Problem
from dryfit.config.schema import PrunerName, SamplerName, SearchSettings, StudyConfig
from dryfit.config.schema_json import TABLES
from dryfit.core.settings.choices import FUNCTION_TASK, SCRIPT_TASK, TRAINER_TASK, Direction, Metric, Precision
from dryfit.core.settings.functions import FunctionName
from dryfit.core.settings.objective_table import ObjectiveSettings
from dryfit.core.settings.tables import DataSettings, LossSettings
from dryfit.core.settings.task_facts import BUILT_IN, OWN_TABLE, OWN_VERSION, facts_of, reads, task_word
from dryfit.core.settings.weight_formats import PRECISIONS_WITH, base_format
from dryfit.core.text.script_command import OF_THE_TRIAL, CommandTemplate

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
