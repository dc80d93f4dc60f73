"""What ``dryfit init`` writes: a commented study file, a preset, or one for a training script."""

import json
import re
import shlex
import textwrap
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Final, cast

from dryfit.settings.check_messages import ScriptArgument, ScriptArgumentsResult
from dryfit.settings.choices import DEFAULT_TASK, PRESETS, SCRIPT_TASK, TRAINER_METRIC, BuiltInTask, Metric
from dryfit.settings.errors import ConfigError
from dryfit.settings.files import write_text_atomic
from dryfit.settings.study_file_text import key_description, legal_values, toml_value
from dryfit.settings.tables import DataSettings, LossSettings
from dryfit.settings.task_facts import TaskFacts, facts_of, reads
from dryfit.settings.text import did_you_mean
from dryfit.settings.user_code import OF_THE_TRIAL, Value, shown
from dryfit.study.example_posts import write_splits
from dryfit.study.own_data import OwnRows, Written, is_regression

# Presets: study files that come with dryfit, by name.
#
# A preset of every task has two files: ``NAME.toml`` for models that read a text at once, of which a task's study has
# the keys that the task reads, and ``NAME.decoder.toml`` for those that write. Any other has one, and is for the task
# that this file names.


TASKS: Final = tuple(task for task in BuiltInTask if not facts_of(task).calls_function)
"""The tasks that a study file can be written of."""

_FOLDER: Final = files("dryfit.study") / "presets"
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


# The study file of a training script: its command with placeholders, and a space of the arguments that it takes.


_RATES: Final = re.compile(r"(^|_)(lr|learning_rate)$")
_BATCH: Final = re.compile(r"^(per_device_)?(train_)?batch_size$")
_RANGES: Final = {
    "weight_decay": (0.0, 0.1),
    "warmup_ratio": (0.0, 0.2),
    "label_smoothing_factor": (0.0, 0.2),
    "adam_beta1": (0.8, 0.95),
    "adam_beta2": (0.95, 0.999),
}
_SCHEDULES: Final = ("linear", "cosine", "constant_with_warmup")
_EPOCHS: Final = re.compile(r"^(num_)?(train_)?epochs$")
_DROPOUT: Final = re.compile(r"dropout")
_OF_TRAINER: Final = frozenset(
    {
        *("learning_rate", "weight_decay", "warmup_ratio", "warmup_steps", "label_smoothing_factor", "max_grad_norm"),
        *("lr_scheduler_type", "per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs"),
        *("adam_beta1", "adam_beta2", "neftune_noise_alpha"),
    }
)
"""Of the many arguments of a Trainer those that change what is learned."""

_NEVER: Final = re.compile(
    r"seed|path|dir$|file|name|device|rank|worker|thread|port|log|save|eval|verbos|debug|cache|token$|version|resume|"
    r"max_.*samples|(^|_)(max_)?steps$"
)
"""What is searched by nobody, by its name."""


@dataclass(frozen=True, slots=True)
class SearchedArgument:
    """An argument that can be searched.

    Attributes:
        name: In ``[space]``, and between the braces of the placeholder.
        words: What the command has for it.
        values: Its value in ``[space]``, as TOML.
        remark: Its type and default, in words.
        at_once: It is searched unless the user says otherwise.
    """

    name: str
    words: tuple[str, ...]
    values: str
    remark: str
    at_once: bool


def script_toml(name: str, script: str, words: Sequence[str], folder: str, found: ScriptArgumentsResult) -> str:
    """Return a study file.

    Args:
        name: The study's.
        script: The script, as the command has it: its path from the folder it is run in, or ``-m`` and a module.
        words: Its arguments, as the user gave them.
        folder: The folder that it is run in, seen from the study file.
        found: What its parser defines.

    Raises:
        ConfigError: None of its arguments can be searched.
    """
    every = [one for argument in found.arguments if (one := searched_argument(argument)) is not None]
    active = [one for one in every if one.at_once] or every[:1]
    if not active:
        raise ConfigError(
            f"writing a study of {script}",
            "its parser defines no argument that can be searched",
            "a number, a choice or a flag",
            "write the study file by hand: docs/script.md",
        )
    command = " ".join([script, *map(_quoted, _with_placeholders(words, active))])
    lines = [
        f"# A study of {script}. Every argument that can be searched is below, with its type and default.",
        "# Check it with `dryfit doctor`, search with `dryfit tune`; docs/script.md says what a script may do.",
        "",
        "[study]",
        f"name = {toml_value(name)}",
        f'task = "{SCRIPT_TASK}"',
        *_goal(found.makes_trainer),
        "trials = 20",
        "",
        "[script]",
        f"folder = {toml_value(folder)}  # where it is run, seen from this file",
        f"command = {toml_value(command)}",
        "",
        "[space]",
        *(f"{one.name} = {one.values}  # {one.remark}" for one in active),
    ]
    others = [one for one in every if one not in active]
    if others:
        lines += ["", "# To search one of these, uncomment it and add its placeholder to the command:"]
        lines += [f"# {one.name} = {one.values}  # {' '.join(one.words)}: {one.remark}" for one in others]
    return "\n".join([*lines, ""])


def _goal(makes_trainer: bool) -> list[str]:
    if makes_trainer:
        return [
            f'metric = "{TRAINER_METRIC}"  # a name in the evaluations of its Trainer',
            "# with --eval_strategy epoch in the command, poor trials are pruned while they train",
        ]
    return ['metric = "value"  # of dryfit.report(value, step=...) in the script', 'direction = "minimize"']


def searched_argument(argument: ScriptArgument) -> SearchedArgument | None:
    """Return the search range of an argument; None if it is not usually searched.

    A range lies around the value that the command line gives, or else the default.
    """
    name = argument.option.lstrip("-").replace("-", "_")
    if not name.isidentifier() or name in OF_THE_TRIAL or _NEVER.search(name):
        return None
    if argument.of_trainer and name not in _OF_TRAINER:
        return None
    values = _values(name, argument)
    if values is None:
        return None
    flag = argument.kind == "flag"
    default = "no default" if argument.default is None else f"default {shown(argument.default)}"
    known = (_RATES, _BATCH, _DROPOUT)
    return SearchedArgument(
        name=name,
        words=(f"{{{name}}}",) if flag else (argument.option, f"{{{name}}}"),
        values=values,
        remark=f"{argument.kind}, {default}",
        at_once=name in ("weight_decay", "warmup_ratio") or any(one.search(name) for one in known),
    )


def _values(name: str, argument: ScriptArgument) -> str | None:
    value: Value = argument.default if argument.given is None else argument.given
    if name == "lr_scheduler_type" and argument.of_trainer:
        return toml_value(list(_SCHEDULES))
    if argument.choices:
        return toml_value(list(argument.choices))
    match argument.kind:
        case "flag":
            return toml_value(["", argument.option])
        case "bool":
            return toml_value([True, False])
        case "text" | "choice":
            return toml_value([value]) if isinstance(value, str) and value else None
        case "float" | "int":
            return _range(name, value, whole=argument.kind == "int")


def _range(name: str, value: Value, *, whole: bool) -> str | None:
    if not isinstance(value, int | float) or isinstance(value, bool) or value < 0:
        return None
    if _BATCH.match(name):
        return toml_value(sorted({max(1, int(value) // 2), int(value), int(value) * 2}))
    if name in _RANGES or (_DROPOUT.search(name) and value < 1):
        low, high = _RANGES.get(name, (0.0, 0.5))
        return f"{{low = {low}, high = {max(high, float(value))}}}"
    if _EPOCHS.match(name):
        return toml_value(sorted({max(1, int(value) // 2), int(value), int(value) * 2}))
    if whole:
        return f"{{low = {max(1, int(value) // 2)}, high = {max(2, int(value) * 2)}}}"
    if value == 0:
        return "{low = 0.0, high = 1.0}"
    return f"{{low = {_rounded(value / 10)}, high = {_rounded(value * 10)}, log = true}}"


def _rounded(value: float) -> str:
    return repr(float(f"{value:.3g}"))


def _with_placeholders(words: Sequence[str], searched: Sequence[SearchedArgument]) -> Iterator[str]:
    """Yield the words of a command with placeholders for values that it gives, and for those that it does not."""
    left = {one.words[0]: one for one in searched if len(one.words) > 1}
    flags = {f"--{one.name}": one for one in searched if len(one.words) == 1}
    rest, given = list(words), set[str]()
    while rest:
        word = rest.pop(0)
        option, equals, _ = word.partition("=")
        plain = f"--{option.lstrip('-').replace('-', '_')}"
        one = left.get(option) or flags.get(plain)
        if one is None:
            yield word
            continue
        given.add(one.name)
        if len(one.words) == 1:
            yield one.words[0]
        elif equals:
            yield f"{option}={one.words[1]}"
        else:
            yield from one.words
            del rest[:1]
    for one in searched:
        if one.name not in given:
            yield from one.words


def _quoted(word: str) -> str:
    """Return a word as a shell would have it; braces need no quotes here."""
    return word if re.fullmatch(r"[\w@%+=:,./{}-]+", word) else shlex.quote(word)


# Write the files of ``dryfit init``: a commented study file and a small synthetic data set.


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
    force: bool = False,
    preset: str | None = None,
) -> list[Path]:
    """Write a study file and a synthetic data set.

    Args:
        folder: The target, made if absent. Its name becomes the study's.
        task: What the model learns; None: the preset's task, or classes.
        sizes: Rows of each split.
        seed: Seed of the data.
        force: Overwrite existing files.
        preset: The study file that comes with dryfit to write; None: a small commented one.

    Returns:
        The files written, the study file first.

    Raises:
        ConfigError: As :func:`starter_study`; nothing is written then.
    """
    text = starter_study(folder, task=task, force=force, preset=preset)
    (folder / DATA_FOLDER).mkdir(parents=True, exist_ok=True)
    written = write_splits(folder / DATA_FOLDER, (sizes.train, sizes.validation, sizes.test), seed)
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
