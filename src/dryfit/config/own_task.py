"""Checks of a study file with a user's own task, as far as they do not need its class."""

from dryfit.config.problems import Problem
from dryfit.config.schema import StudyConfig
from dryfit.core.settings.choices import Direction, Metric
from dryfit.core.settings.task_facts import OWN_TABLE, is_own, task_word

_DIRECTIONS = " or ".join(Direction)


def own_task_problems(config: StudyConfig) -> list[Problem]:
    """Return all problems between keys of such a study; its class checks the rest."""
    study = config.study
    problems: list[Problem] = []
    if not isinstance(study.metric, Metric) and study.direction is None:
        found = f"is unset, and {study.metric} is a metric of {task_word(study.task)}: nobody else knows what is better"
        problems.append(
            Problem(("study", "direction"), found, _DIRECTIONS, 'write direction = "minimize" or "maximize"')
        )
    unknown = [metric for metric in study.also if not isinstance(metric, Metric)]
    if unknown and study.also_directions is None:
        found = f"is unset, and {', '.join(unknown)} of study.also has no direction that dryfit knows"
        problems.append(Problem(("study", "also_directions"), found, f"{_DIRECTIONS} for each metric of study.also"))
    return problems


def unread_own(config: StudyConfig) -> list[Problem]:
    """Return the keys that only a user's own task reads, in a study of a built-in task."""
    task = config.study.task
    if is_own(task):
        return []
    found = f"is read only with a task of your own, and study.task = {task}"
    keys = [(OWN_TABLE, name) for name in config.own.knobs]
    keys += [("space", name) for name in config.space if name.startswith(f"{OWN_TABLE}.")]
    keys += [("study", "task_version")] if config.study.task_version != 1 else []
    return [Problem(key, found, hint="remove it") for key in keys]
