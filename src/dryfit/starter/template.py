"""Write what ``dryfit init`` makes: a commented study file, and a small synthetic data set beside it."""

import json
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dryfit.config.schema_json import key_description, legal_values
from dryfit.core.errors import ConfigError
from dryfit.core.settings.choices import BuiltInTask
from dryfit.core.settings.task_facts import reads
from dryfit.core.wire import write_text_atomic
from dryfit.starter.posts import DEFAULT_DIFFICULTY, write_splits
from dryfit.starter.preset import preset_study

STUDY_FILE: Final = "study.toml"
DATA_FOLDER: Final = "data"
MODEL_FOLDER: Final = "model"
"""Where ``init --task causal-lm`` writes its toy model, which the study file names."""

_DATA_FILES: Final = {split: f"{DATA_FOLDER}/{split}.jsonl" for split in ("train", "validation", "test")}

Written = str | int | float | bool


@dataclass(frozen=True, slots=True)
class SplitSizes:
    """Rows of each split of the synthetic data."""

    train: int = 800
    validation: int = 240
    test: int = 400


# What the starter file sets, table by table. None: shown as a comment, for its reader to find.
_KEYS: Final[dict[str, dict[str, Written | None]]] = {
    "study": {
        "name": None,
        "task": None,
        "trials": 6,
        "seed": 1,
        "metric": "f1_macro",
        "max_hours": None,
        "patience": None,
    },
    "data": {
        **_DATA_FILES,
        "num_labels": 2,
        "multi_label": None,
    },
    "model": {"name": "minilm", "revision": None, "trust_remote_code": None},
    "train": {
        "epochs": 2,
        "batch_size": 16,
        "max_length": 96,
        "precision": "fp32",
        "evals_per_epoch": 2,
        "early_stopping": None,
    },
    "optim": {"name": "adamw", "lr": 2e-4, "weight_decay": 0.01, "layer_decay": None},
    "sched": {"name": "linear", "warmup_ratio": 0.1},
    "head": {"pooling": "mean", "layers": 0, "dropout": 0.1},
    "loss": {"name": "cross_entropy", "label_smoothing": None, "class_balance": None, "effective_beta": None},
    "regularization": {"max_grad_norm": 1.0, "freeze_layers": None},
    "search": {"sampler": "tpe", "startup_trials": 4, "pruner": "median", "pruner_startup_trials": 3},
    "execution": {"device": "auto", "micro_batch": None, "threads": None},
    "runtime": {"parallel": 1, "retries": None, "trial_timeout_s": None},
}

_EXAMPLES: Final[dict[str, Written]] = {
    "study.max_hours": 1.5,
    "study.patience": 5,
    "data.multi_label": False,
    "model.revision": "main",
    "model.trust_remote_code": False,
    "train.early_stopping": 2,
    "optim.layer_decay": 0.9,
    "loss.label_smoothing": 0.1,
    "loss.class_balance": "effective",
    "loss.effective_beta": 0.99,
    "regularization.freeze_layers": 2,
    "lora.base": "bf16",
    "lm.chat": "off",
    "lm.learn_prompt": False,
    "span.null_threshold": 0.0,
    "span.negatives": 3.0,
    "multitask.criteria_share": 0.5,
    "joint.criteria_model": "minilm",
    "execution.micro_batch": 8,
    "execution.threads": 2,
    "runtime.retries": 3,
    "runtime.trial_timeout_s": 3600.0,
}

_HEAD: Final = """\
# A dryfit study. `dryfit tune` with this file searches, and goes on where it stopped.
# Any key can be given on the command line too: --set optim.lr=2e-4
# `dryfit schema` prints every key, with its type, range and default.
"""

_SPACE: Final = """\
# What is searched: any key of the tables from [model] to [regularization], by dotted name. A list is categorical;
# low and high are a range; `when` makes a key conditional on another one. What is not searched keeps its value.
[space]
"optim.lr" = {low = 1e-4, high = 4e-4, log = true}
"optim.weight_decay" = [0.0, 0.01, 0.1]
"train.batch_size" = [16, 24]
"sched.name" = ["linear", "cosine"]
"head.pooling" = ["cls", "mean"]
"head.dropout" = {low = 0.0, high = 0.3, step = 0.1}
"head.layers" = [0, 1]
"head.hidden" = {choices = [128, 256], when = {"head.layers" = 1}}  # drawn only where there is such a layer
"""

# Where the starter file of another task differs, what it has more, and what it searches.
_INSTEAD: Final[Mapping[BuiltInTask, Mapping[str, Mapping[str, Written | None]]]] = {
    BuiltInTask.EVIDENCE: {"study": {"metric": "token_f1"}},
    BuiltInTask.SHARE: {"study": {"metric": "combined"}},
    BuiltInTask.JOINT: {"study": {"metric": "combined"}},
    # The model is a toy, drawn at random: it learns fast, and from nothing.
    BuiltInTask.CAUSAL_LM: {
        "study": {"trials": 3, "metric": "loss"},
        "data": {"num_labels": 2},
        "model": {"name": MODEL_FOLDER},
        "train": {"epochs": 1, "max_length": 320},
        "optim": {"lr": 2e-3},
    },
}
_OF_SPANS: Final[Mapping[str, Mapping[str, Written | None]]] = {
    "span": {
        "doc_stride": 32,
        "max_answer_len": 64,
        "null_policy": "calibrated",
        "null_threshold": None,
        "reranker": "sum",
        "negatives": None,
    },
}
_OF_BOTH: Final[Mapping[str, Mapping[str, Written | None]]] = {
    **_OF_SPANS,
    "multitask": {"criteria_weight": 0.5, "weighting": "fixed", "criteria_share": None},
}
_MORE: Final[Mapping[BuiltInTask, Mapping[str, Mapping[str, Written | None]]]] = {
    BuiltInTask.EVIDENCE: _OF_SPANS,
    BuiltInTask.SHARE: _OF_BOTH,
    BuiltInTask.JOINT: {
        **_OF_BOTH,
        "joint": {"criteria_model": None, "criterion_length": 16, "fusion": "concat", "share_ratio": 1.0},
    },
    BuiltInTask.CAUSAL_LM: {
        "lora": {"r": 8, "alpha": 16.0, "dropout": 0.05, "targets": "all-linear", "base": None},
        "lm": {
            "format": "criteria",
            "answers": "no,yes",
            "chat": None,
            "learn_prompt": None,
            "packing": False,
            "generate_rows": 32,
            "max_new_tokens": 4,
        },
    },
}
_SPACE_OF_BOTH: Final = f"""\
{_SPACE.replace("[regularization]", "[multitask]")}\
"multitask.criteria_weight" = {{low = 0.3, high = 0.7, step = 0.1}}
"""
_SPACES: Final[Mapping[BuiltInTask, str]] = {
    BuiltInTask.EVIDENCE: """\
# What is searched: any key of the tables from [model] to [span], by dotted name. A list is categorical; low and high
# are a range; `when` makes a key conditional on another one. What is not searched keeps its value.
[space]
"optim.lr" = {low = 1e-4, high = 1e-3, log = true}
"optim.weight_decay" = [0.0, 0.01, 0.1]
"train.batch_size" = [16, 24]
"sched.name" = ["linear", "cosine"]
"head.dropout" = {low = 0.0, high = 0.3, step = 0.1}
"head.layers" = [0, 1]
"head.hidden" = {choices = [128, 256], when = {"head.layers" = 1}}  # drawn only where there is such a layer
"span.negatives" = [1.0, 3.0]  # windows without a span for each with one
""",
    BuiltInTask.SHARE: _SPACE_OF_BOTH,
    BuiltInTask.JOINT: f"""\
{_SPACE_OF_BOTH.replace("[multitask]", "[joint]")}\
"joint.fusion" = ["concat", "add", "gate", "attention"]
""",
    BuiltInTask.CAUSAL_LM: """\
# What is searched: any key of the tables from [model] to [lm] but lm.format, by dotted name. A list is categorical; low
# and high are a range; `when` makes a key conditional on another one. What is not searched keeps its value.
[space]
"optim.lr" = {low = 5e-4, high = 5e-3, log = true}
"lora.r" = [4, 8, 16]
"lora.dropout" = [0.0, 0.1]
""",
}

_WIDTH: Final = 116
_COMMENT_COLUMN: Final = 34


def study_toml(task: BuiltInTask, name: str) -> str:
    """The text of a starter study file: every table, each key with what it means and what it takes.

    Args:
        task: What the model learns.
        name: Name of the study.
    """
    given: dict[str, Written] = {"study.name": name, "study.task": task.value}
    parts = [_HEAD]
    for table, keys in _tables(task).items():
        if table == "search":
            parts.append(_SPACES.get(task, _SPACE))
        lines = [f"# {key_description((table,)).capitalize()}", f"[{table}]"]
        for key, own in keys.items():
            value = given.get(f"{table}.{key}", own)
            lines += _line(table, key, value)
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _tables(task: BuiltInTask) -> Mapping[str, Mapping[str, Written | None]]:
    """Return the keys that the starter file of a task sets, by table; only keys that the task reads."""
    tables: dict[str, Mapping[str, Written | None]] = {}
    for table, keys in _KEYS.items():
        if table == "search":
            tables |= _MORE.get(task, {})
        if reads(task, table):
            kept = {key: value for key, value in keys.items() if reads(task, f"{table}.{key}")}
            tables[table] = kept | _INSTEAD.get(task, {}).get(table, {})
    return tables


def _line(table: str, key: str, value: Written | None) -> list[str]:
    """Return one key with its comment; a key that is not set is commented out, with a value to try."""
    shown = _EXAMPLES[f"{table}.{key}"] if value is None else value
    assignment = ("# " if value is None else "") + f"{key} = {json.dumps(shown)}"
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
    task: BuiltInTask = BuiltInTask.CRITERIA,
    sizes: SplitSizes = SplitSizes(),
    seed: int = 1,
    difficulty: float = DEFAULT_DIFFICULTY,
    force: bool = False,
    preset: str | None = None,
) -> list[Path]:
    """Write a study file and a synthetic data set.

    Args:
        folder: The target, made if absent. Its name becomes the study's.
        task: What the model learns.
        sizes: Rows of each split.
        seed: Seed of the data.
        difficulty: Difficulty of the data, from 0 to 1.
        force: Overwrite existing files.
        preset: The study file that comes with dryfit to write; None: a small commented one.

    Returns:
        The files written, the study file first.

    Raises:
        ConfigError: One of the files exists and ``force`` is not set, there is no such preset, or the task is a
            function of the user's own.
    """
    if task is BuiltInTask.OBJECTIVE:
        raise ConfigError(
            f"writing a study to {folder}",
            f"a study of the task {task} is about a function of your own",
            str(BuiltInTask.CRITERIA),
            "call dryfit.tune(objective=..., space=...); docs/objective.md has an example",
        )
    if preset is None:
        text = study_toml(task, _name(folder))
        if task is BuiltInTask.CAUSAL_LM and (folder / MODEL_FOLDER).exists() and not force:
            found = f"{folder / MODEL_FOLDER} exists"
            raise ConfigError(
                f"writing a study to {folder}", found, "a new or an empty folder", "another one, or --force"
            )
    else:
        text = f"{_HEAD}#\n{preset_study(preset, _name(folder), _DATA_FILES)}"
    study = folder / STUDY_FILE
    targets = [study, *(folder / file for file in _DATA_FILES.values())]
    for target in targets:
        if target.exists() and not force:
            raise ConfigError(
                f"writing a study to {folder}",
                f"{target} exists",
                "a new or an empty folder",
                "another folder, or --force",
            )
    (folder / DATA_FOLDER).mkdir(parents=True, exist_ok=True)
    written = write_splits(folder / DATA_FOLDER, (sizes.train, sizes.validation, sizes.test), seed, difficulty)
    write_text_atomic(study, text)
    return [study, *written]


def _name(folder: Path) -> str:
    """Return a legal study name that resembles the folder's."""
    plain = "".join(
        char if char.isascii() and (char.isalnum() or char in "._-") else "-" for char in folder.resolve().name
    )
    return plain.lstrip("._-")[:100] or "study"
