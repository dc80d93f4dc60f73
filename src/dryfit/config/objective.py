"""Checks of a study file with a user's own function, which reads no key about models or training."""

from typing import Final

from dryfit.config.problems import Problem
from dryfit.config.schema import PrunerName, StudyConfig
from dryfit.config.schema_json import TABLES
from dryfit.core.settings.choices import BuiltInTask

# The tables that such a study reads, with the keys if not all are read; any other key is an error.
_READ: Final[dict[str, tuple[str, ...] | None]] = {
    "study": ("name", "task", "trials", "seed", "max_hours", "patience"),
    "objective": None,
    "space": None,
    "search": None,
    "execution": ("device", "threads"),
    "runtime": (
        "parallel",
        "isolation",
        "start_timeout_s",
        "hang_timeout_s",
        "trial_timeout_s",
        "stop_grace_s",
        "verdict_timeout_s",
        "retries",
        "device_wait_s",
        "max_failed_in_a_row",
        "max_same_failure",
    ),
}
_UNREAD_SEARCH: Final = ("defaults_first",)
_ELSEWHERE: Final = {
    "study.metric": "name what the function returns in objective.goals",
    "study.also": "name all that the function returns in objective.goals",
    "study.direction": 'write directions = ["maximize"] into [objective]',
    "study.also_directions": "write objective.directions, one for each goal",
    "search.defaults_first": "your function's parameters have no defaults that dryfit knows",
}


def is_read(table: str, key: str) -> bool:
    """Whether a study with a user's own function reads a key."""
    if table not in _READ or (table == "search" and key in _UNREAD_SEARCH):
        return False
    keys = _READ[table]
    return keys is None or key in keys


def objective_problems(config: StudyConfig, *, planned: bool) -> list[Problem]:
    """Return all problems between keys of a study with the task ``objective``.

    Args:
        planned: The study file is read to plan memory, which is not possible for a function.
    """
    if planned:
        found = f"is {BuiltInTask.OBJECTIVE}: what your own function takes of a device cannot be planned"
        return [Problem(("study", "task"), found, f"{BuiltInTask.CRITERIA} or {BuiltInTask.CAUSAL_LM}")]
    problems = _unread(config)
    own = config.objective
    if own is None:
        hint = 'add [objective] with function = "package.module:function"'
        return [
            *problems,
            Problem(("study", "task"), f"is {BuiltInTask.OBJECTIVE}, and there is no [objective]", hint=hint),
        ]
    if not config.space:
        problems.append(Problem(("space",), "is empty", "at least one parameter of your function"))
    if len(set(own.goals)) != len(own.goals) or not all(own.goals):
        problems.append(Problem(("objective", "goals"), "repeats a name, or has an empty one", "each name once"))
    if len(own.goals) > 1 and config.search.pruner is not PrunerName.NONE:
        found = f"is {config.search.pruner}, and there are {len(own.goals)} goals: reports know only the first"
        problems.append(Problem(("search", "pruner"), found, str(PrunerName.NONE)))
    elif config.search.pruner is PrunerName.HYPERBAND:
        found = "is hyperband, which must know how many reports a trial makes: of your own function nobody does"
        problems.append(Problem(("search", "pruner"), found, "none, median, asha or patient"))
    if own.directions is not None and len(own.directions) != len(own.goals):
        found = f"has {len(own.directions)} directions for {len(own.goals)} goals"
        problems.append(Problem(("objective", "directions"), found, "one for each, or none at all"))
    return problems


def _unread(config: StudyConfig) -> list[Problem]:
    """Return the keys that are set and that such a study does not read.

    A frozen study file has the defaults too, so only a value that differs from its default was set by the user.
    """
    found = f"is not read by study.task = {BuiltInTask.OBJECTIVE}"
    keys = [(table, key) for table, names in TABLES.items() for key in names if not is_read(table, key)]
    set_keys = [(table, key) for table, key in keys if config.is_changed(f"{table}.{key}")]
    return [Problem(("own", key), found) for key in config.own.knobs] + [
        Problem(key, found, hint=_ELSEWHERE.get(".".join(key), "remove it")) for key in set_keys
    ]
