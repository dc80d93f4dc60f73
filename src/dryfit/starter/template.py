"""Write the files of ``dryfit init``: a commented study file and a small synthetic data set."""

import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dryfit.config.freeze import toml_value
from dryfit.config.schema_json import key_description, legal_values
from dryfit.core.errors import ConfigError
from dryfit.core.settings.choices import DEFAULT_TASK, BuiltInTask
from dryfit.core.settings.tables import DataSettings
from dryfit.core.settings.task_facts import TaskFacts, facts_of, reads
from dryfit.core.wire import write_text_atomic
from dryfit.starter.own_rows import OwnRows, Written, is_regression
from dryfit.starter.posts import DEFAULT_DIFFICULTY, write_splits
from dryfit.starter.preset import TASKS, preset_study, preset_tasks, preset_text

STUDY_FILE: Final = "study.toml"
DATA_FOLDER: Final = "data"
MODEL_FOLDER: Final = "model"
"""Where ``init --task causal-lm`` writes its toy model, which the study file names."""

_DATA_FILES: Final = {split: f"{DATA_FOLDER}/{split}.jsonl" for split in ("train", "validation", "test")}


@dataclass(frozen=True, slots=True)
class SplitSizes:
    """Rows of each split of the synthetic data."""

    train: int = 800
    validation: int = 240
    test: int = 400


@dataclass(frozen=True, slots=True)
class _Off:
    """A key that is not set: a comment for the file's reader to find, with a value to try."""

    value: Written


# What the starter file sets, table by table; of a task's file, the keys that it reads.
_KEYS: Final[dict[str, dict[str, Written | _Off]]] = {
    "study": {
        "name": "",
        "task": "",
        "trials": 6,
        "seed": 1,
        "metric": "",
        "max_hours": _Off(1.5),
        "patience": _Off(5),
    },
    "data": {
        **_DATA_FILES,
        "num_labels": 2,
        "multi_label": _Off(False),
    },
    "model": {"name": "minilm", "revision": _Off("main"), "trust_remote_code": _Off(False)},
    "train": {
        "epochs": 2,
        "batch_size": 16,
        "max_length": 96,
        "precision": "auto",
        "evals_per_epoch": 2,
        "early_stopping": _Off(2),
    },
    "optim": {"name": "adamw", "lr": 2e-4, "weight_decay": 0.01, "layer_decay": _Off(0.9)},
    "sched": {"name": "linear", "warmup_ratio": 0.1},
    "head": {"pooling": "mean", "layers": 0, "dropout": 0.1},
    "loss": {
        "name": "cross_entropy",
        "label_smoothing": _Off(0.1),
        "class_balance": _Off("effective"),
        "effective_beta": _Off(0.99),
    },
    "regularization": {"max_grad_norm": 1.0, "freeze_layers": _Off(2), "frozen_dropout": False},
    "span": {
        "doc_stride": 32,
        "max_answer_len": 64,
        "null_policy": "calibrated",
        "null_threshold": _Off(0.0),
        "reranker": "sum",
        "negatives": _Off(3.0),
    },
    "multitask": {"criteria_weight": 0.5, "weighting": "fixed", "criteria_share": _Off(0.5)},
    "joint": {"criteria_model": _Off("minilm"), "criterion_length": 16, "fusion": "concat", "share_ratio": 1.0},
    "lora": {"r": 8, "alpha": 16.0, "dropout": 0.05, "targets": "all-linear", "base": _Off("bf16")},
    "lm": {
        "format": "criteria",
        "answers": "no,yes",
        "chat": _Off("off"),
        "learn_prompt": _Off(False),
        "packing": False,
        "generate_rows": 32,
        "max_new_tokens": 4,
    },
    # The median begins after the default's five complete trials. On the curves of docs/benchmarks.md ("What pruners
    # save") three save 11 % of the epochs of six trials and five save 2 %; but with --trials 24 the winner of three is
    # worse by 0.0048 on average, that of five by 0.0017. A search that is begun small is made larger, with one file.
    "search": {"sampler": "tpe", "startup_trials": 4, "pruner": "median", "pruner_startup_trials": _Off(3)},
    "execution": {"device": "auto", "micro_batch": _Off(8), "threads": _Off(2)},
    "runtime": {"parallel": "auto", "retries": _Off(3), "trial_timeout_s": _Off(3600.0)},
}

_HEAD: Final = """\
# A dryfit study. `dryfit tune` with this file searches, and goes on where it stopped.
# Any key can be given on the command line too: --set optim.lr=2e-4
# `dryfit schema` prints every key, with its type, range and default.
"""

_SPACE: Final = """\
What is searched: any key of the tables from [model] to [{last}]{but}, by dotted name. A list is categorical; low and
high are a range; `when` makes a key conditional on another one. What is not searched keeps its value."""

_LARGEST_BATCH: Final = 24
"""Rows of the largest batch that is searched: with no more an epoch may have one step, and one validation."""

_WIDTH: Final = 116
_COMMENT_COLUMN: Final = 34


def study_toml(task: BuiltInTask, name: str, own: OwnRows | None = None) -> str:
    """The text of a starter study file: every table, each key with what it means and what it takes.

    Args:
        task: What the model learns.
        name: Name of the study.
        own: What to say of the user's own rows; None: the study is of the synthetic ones.
    """
    facts = facts_of(task)
    keys = _KEYS if own is None else {**_KEYS, "data": {**own.data}}
    regression = own is not None and is_regression(own.data)
    if regression:
        keys = {table: keys[table] for table in keys if table != "loss"}  # it has no keys to choose by
    given: dict[str, Written] = {
        **facts.starter,
        **(_of_length(own.max_length) if own is not None else {}),
        **({"train.evals_per_epoch": 1} if own is not None and own.train_rows <= _LARGEST_BATCH else {}),
        "study.name": name,
        "study.task": task.value,
        "study.metric": str(facts.metrics(DataSettings(num_labels=1) if regression else DataSettings())[0]),
    }
    if facts.decoder:
        given |= {"model.name": MODEL_FOLDER, "train.precision": "fp32"}
    tables = [table for table in keys if reads(task, table)]
    parts = [_HEAD]
    for table in tables:
        if table == "search":
            parts.append(_space(facts, last=tables[tables.index(table) - 1]))
        lines = [f"# {key_description((table,)).capitalize()}", f"[{table}]"]
        for key, usual in keys[table].items():
            if reads(task, f"{table}.{key}"):
                lines += _line(table, key, given.get(f"{table}.{key}", usual))
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _of_length(max_length: int) -> dict[str, Written]:
    """Return the keys that depend on the length of the rows: windows must be longer than what they share."""
    return {"train.max_length": max_length, "span.doc_stride": min(32, max_length // 4)}


def _space(facts: TaskFacts, last: str) -> str:
    """Return the table of searched keys.

    Args:
        facts: Of the task.
        last: The last table whose keys may be searched.
    """
    but = f" but {', '.join(facts.not_searched)}" if facts.not_searched else ""
    lines = [f"# {line}" for line in textwrap.wrap(_SPACE.format(last=last, but=but), _WIDTH)]
    lines += ["[space]", *(f'"{key}" = {drawn}' for key, drawn in facts.starter_space.items())]
    return "\n".join(lines) + "\n"


def _line(table: str, key: str, value: Written | _Off) -> list[str]:
    """Return one key with its comment."""
    off = isinstance(value, _Off)
    assignment = f"{'# ' if off else ''}{key} = {toml_value(value.value if off else value)}"
    comment = key_description((table, key))
    legal = legal_values((table, key))
    if not legal.startswith("text") and not all(
        choice in comment for choice in legal.removeprefix("one of ").split(", ")
    ):
        comment += f" ({legal})"
    line = f"{assignment:<{_COMMENT_COLUMN}}  # {comment}"
    if len(line) <= _WIDTH:
        return [line]
    return [f"# {part}" for part in textwrap.wrap(f"{key}: {comment}", _WIDTH - 2)] + [assignment]


def init_folder(
    folder: Path,
    *,
    task: BuiltInTask | None = None,
    sizes: SplitSizes = SplitSizes(),
    seed: int = 1,
    difficulty: float = DEFAULT_DIFFICULTY,
    force: bool = False,
    preset: str | None = None,
) -> list[Path]:
    """Write a study file and a synthetic data set.

    Args:
        folder: The target, made if absent. Its name becomes the study's.
        task: What the model learns; None: the preset's task, or classes.
        sizes: Rows of each split.
        seed: Seed of the data.
        difficulty: Difficulty of the data, from 0 to 1.
        force: Overwrite existing files.
        preset: The study file that comes with dryfit to write; None: a small commented one.

    Returns:
        The files written, the study file first.

    Raises:
        ConfigError: As :func:`starter_study`; nothing is written then.
    """
    text = starter_study(folder, task=task, force=force, preset=preset)
    (folder / DATA_FOLDER).mkdir(parents=True, exist_ok=True)
    written = write_splits(folder / DATA_FOLDER, (sizes.train, sizes.validation, sizes.test), seed, difficulty)
    write_text_atomic(folder / STUDY_FILE, text)
    return [folder / STUDY_FILE, *written]


def init_own(folder: Path, own: OwnRows, *, task: BuiltInTask, force: bool, preset: str | None) -> Path:
    """Write a study file of the user's own rows, which stay where they are.

    Args:
        folder: The target, made if absent. Its name becomes the study's.
        own: What to say of the rows.
        task: What the model learns.
        force: Overwrite an existing file.
        preset: The study file that comes with dryfit to write; None: a small commented one.

    Returns:
        The study file.

    Raises:
        ConfigError: As :func:`check_own`.
    """
    check_own(folder, task=task, force=force, preset=preset)
    name, file = study_name(folder), folder / STUDY_FILE
    text = study_toml(task, name, own) if preset is None else f"{_HEAD}#\n{preset_study(preset, name, own.data, task)}"
    folder.mkdir(parents=True, exist_ok=True)
    write_text_atomic(file, text)
    return file


def check_own(folder: Path, *, task: BuiltInTask, force: bool, preset: str | None) -> None:
    """Refuse what :func:`init_own` would not write, before rows are read.

    Raises:
        ConfigError: The file exists and ``force`` is not set, there is no such preset, it is for another task, or the
            task has no rows of this form or no packaged model.
    """
    doing = f"writing a study of your own rows to {folder}"
    if facts_of(task).decoder or facts_of(task).calls_function:
        found = f"the task {task} needs more than rows"
        fits = [one.value for one in TASKS if not facts_of(one).decoder]
        raise ConfigError(
            doing, found, ", ".join(fits), f"write a study with `dryfit init DIR --task {task}`, and edit it"
        )
    if preset is not None and task not in preset_tasks(preset):
        preset_text(preset, task)  # says which it is for
    if (folder / STUDY_FILE).exists() and not force:
        raise ConfigError(
            doing, f"{folder / STUDY_FILE} exists", "a new or an empty folder", "another folder, or --force"
        )


def starter_study(folder: Path, *, task: BuiltInTask | None, force: bool, preset: str | None) -> str:
    """Return the study file that :func:`init_folder` would write; nothing is written.

    Raises:
        ConfigError: One of the files exists and ``force`` is not set, there is no such preset, it is for another task,
            or the task is a function of the user's own.
    """
    task = task or (DEFAULT_TASK if preset is None else preset_tasks(preset)[0])
    if facts_of(task).calls_function:
        raise ConfigError(
            f"writing a study to {folder}",
            f"a study of the task {task} is about a function of your own",
            str(DEFAULT_TASK),
            "call dryfit.tune(objective=..., space=...), or trainer= for objective=; "
            "docs/objective.md and docs/trainer.md have examples",
        )
    name = study_name(folder)
    text = study_toml(task, name) if preset is None else f"{_HEAD}#\n{preset_study(preset, name, _DATA_FILES, task)}"
    targets = [folder / file for file in (STUDY_FILE, *_DATA_FILES.values())]
    toys = [folder / MODEL_FOLDER] if facts_of(task).decoder and preset is None else []
    for target in (*toys, *targets):
        if target.exists() and not force:
            raise ConfigError(
                f"writing a study to {folder}",
                f"{target} exists",
                "a new or an empty folder",
                "another folder, or --force",
            )
    return text


def study_name(folder: Path) -> str:
    """Return a legal study name that resembles the folder's."""
    plain = "".join(
        char if char.isascii() and (char.isalnum() or char in "._-") else "-" for char in folder.resolve().name
    )
    return plain.lstrip("._-")[:100] or "study"
