"""Presets: study files that come with dryfit, by name.

A preset of every task has two files: ``NAME.toml`` for models that read a text at once, of which a task's study has
the keys that the task reads, and ``NAME.decoder.toml`` for those that write. Any other has one, and is for the task
that this file names.
"""

import json
import re
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Final, cast

from dryfit.config.freeze import toml_value
from dryfit.core.errors import ConfigError
from dryfit.core.settings.choices import DEFAULT_TASK, BuiltInTask, Metric
from dryfit.core.settings.presets import PRESETS
from dryfit.core.settings.tables import LossSettings
from dryfit.core.settings.task_facts import facts_of, reads
from dryfit.core.text.words import did_you_mean
from dryfit.starter.own_rows import is_regression

TASKS: Final = tuple(task for task in BuiltInTask if not facts_of(task).calls_function)
"""The tasks that a study file can be written of."""

_FOLDER: Final = files("dryfit.starter") / "presets"
_OF_TWO_CLASSES: Final = frozenset({"head.threshold", "loss.alpha"})
"""Searched keys that a study of more classes cannot have."""
_OF_CLASSES: Final = _OF_TWO_CLASSES | {f"loss.{key}" for key in LossSettings.model_fields}
"""Searched keys that a regression does not have."""
_TABLE: Final = re.compile(r"\[(\w+)\]")
_KEY: Final = re.compile(r'"?([\w.]+)"? = ')


def preset_tasks(name: str) -> tuple[BuiltInTask, ...]:
    """Return the tasks that a preset is for; the first where none is named.

    Raises:
        ConfigError: There is no such preset.
    """
    if name not in PRESETS:
        found, hint = f"there is no preset {name!r}", did_you_mean(name, PRESETS)
        raise ConfigError("looking for a preset", found, ", ".join(PRESETS), hint)
    if _file(name, decoder=True).is_file():
        return (DEFAULT_TASK, *(task for task in TASKS if task is not DEFAULT_TASK))
    return (BuiltInTask(tomllib.loads(_file(name).read_text(encoding="utf-8"))["study"]["task"]),)


def preset_text(name: str, task: BuiltInTask | None = None, without: Collection[str] = ()) -> str:
    """Return the study file of a preset.

    Args:
        name: The preset.
        task: What the model is to learn; None: the preset's task, or the first of its tasks.
        without: Searched keys to leave out.

    Raises:
        ConfigError: There is no such preset, or it is for another task.
    """
    tasks = preset_tasks(name)
    if task is not None and task not in tasks:
        raise ConfigError(
            f"looking for the preset {name} of the task {task}",
            f"{name} is for {' and '.join(tasks)}",
            ", ".join(one for one in PRESETS if task in preset_tasks(one)) or "a study without a preset",
            f"--task {tasks[0]}, or one of these presets",
        )
    task = task or tasks[0]
    if len(tasks) == 1:
        lines = _file(name).read_text(encoding="utf-8").splitlines(keepends=True)
        return "".join(_read_by(task, lines, without))
    text = _file(name, decoder=facts_of(task).decoder).read_text(encoding="utf-8")
    return re.sub(
        r'(?m)^task = ".*"$', f'task = "{task}"', "".join(_read_by(task, text.splitlines(keepends=True), without))
    )


def preset_study(name: str, study_name: str, data: Mapping[str, object], task: BuiltInTask | None = None) -> str:
    """Return the study file of a preset with another study name and data files.

    Args:
        name: The preset.
        study_name: Name of the study.
        data: Keys of ``[data]``: files, or all that is said of the user's own rows.
        task: As in :func:`preset_text`.

    Raises:
        ConfigError: There is no such preset, or it is for another task.
    """
    classes = data.get("num_labels", data.get("labels", 2))
    regression = is_regression(data)
    several = (classes if isinstance(classes, int) else len(cast("Sequence[str]", classes))) > 2
    without = _OF_TWO_CLASSES if several and not data.get("multi_label") else frozenset[str]()
    text = preset_text(name, task, _OF_CLASSES if regression else without)
    if regression:
        text = re.sub(r"(?m)^metric = .*$", f'metric = "{Metric.MSE}"', text)
    if {"num_labels", "labels"} & data.keys():
        text = re.sub(r"(?m)^num_labels = .*\n", "", text)
    paths = "".join(f"{key} = {toml_value(value)}\n" for key, value in data.items())
    named = text.replace(f'[study]\nname = "{name}"', f"[study]\nname = {json.dumps(study_name)}", 1)
    return named.replace("[data]\n", f"[data]\n{paths}", 1)


def _file(name: str, *, decoder: bool = False) -> Traversable:
    return _FOLDER / (f"{name}.decoder.toml" if decoder else f"{name}.toml")


def _read_by(task: BuiltInTask, lines: Iterable[str], without: Collection[str]) -> Iterator[str]:
    """Yield the lines of a study file without tables and keys that a task does not read, or that are to be left out."""
    table, keeps = "", True
    for line in lines:
        header, key = _TABLE.match(line), _KEY.match(line)
        if header is not None:
            table = header[1]
            keeps = reads(task, table)
        elif key is not None:  # its value may go on in the next lines
            name = key[1] if table == "space" else f"{table}.{key[1]}"
            keeps = reads(task, name) and not (table == "space" and name in without)
        if keeps:
            yield line
        if not line.strip():
            keeps = True
