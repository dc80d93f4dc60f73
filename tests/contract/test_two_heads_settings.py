"""Every key that the tasks share and joint read changes what is learned or what is decoded."""

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import spans
import tiny
import trials
from dryfit.core.choices import Task
from dryfit.core.settings import DataSettings, SpanSettings, TrialSettings
from dryfit.core.tasks import reads
from dryfit.search.fields import searchable_keys
from dryfit.tasks.base import Given
from dryfit.tasks.share import ShareTask
from dryfit.tasks.tokens import CLASSES

Tables = dict[str, dict[str, Any]]
LAYER: Tables = {"head": {"layers": 1}}
FOCAL: Tables = {"loss": {"name": "focal"}}
BASE: Tables = {"train": {"epochs": 1, "max_length": 40}, "span": {"doc_stride": 6}}

# Key: the tables under which it is tried, and the value it is changed to.
BOTH: dict[str, tuple[Tables, Any]] = {
    "multitask.criteria_weight": ({}, 0.9),
    "multitask.weighting": ({}, "uncertainty"),
    "multitask.criteria_share": ({}, 0.5),
    "span.doc_stride": ({}, 3),
    "span.negatives": ({}, 0.5),
    "loss.name": ({}, "focal"),
    "loss.label_smoothing": ({}, 0.2),
    "loss.gamma": (FOCAL, 0.5),
    "loss.alpha": (FOCAL, 0.25),
    "loss.class_balance": ({}, "weighted"),
    "loss.effective_beta": ({"loss": {"class_balance": "effective"}}, 0.9),
    "head.pooling": ({}, "max"),
    "head.layers": ({}, 1),
    "head.hidden": (LAYER, 16),
    "head.activation": (LAYER, "tanh"),
    "head.dropout": ({}, 0.5),
}
OF_JOINT: dict[str, tuple[Tables, Any]] = {
    "joint.criteria_model": ({}, "OTHER"),
    "joint.criterion_length": ({}, 8),
    "joint.fusion": ({}, "gate"),
    "joint.share_ratio": ({}, 0.5),
}
# Read by what all tasks have in common; tests/contract/test_train_settings_act.py tries them with criteria each time.
COMMON: dict[str, tuple[Tables, Any]] = {
    "model.name": ({}, "OTHER"),
    "train.epochs": ({}, 2),
    "train.batch_size": ({}, 10),
    "train.max_length": ({}, 24),
    "train.precision": ({}, "bf16"),
    "train.group_by_length": ({}, False),
    "train.evals_per_epoch": ({}, 2),
    "train.early_stopping": ({"optim": {"lr": 0.5}, "train": {"epochs": 6}}, 1),
    "optim.name": ({}, "sgd"),
    "optim.lr": ({}, 1e-3),
    "optim.weight_decay": ({}, 0.5),
    "optim.beta1": ({}, 0.8),
    "optim.beta2": ({}, 0.9),
    "optim.eps": ({}, 1e-4),
    "optim.layer_decay": ({}, 0.5),
    "optim.head_lr_factor": ({}, 3.0),
    "sched.name": ({}, "cosine"),
    "sched.warmup_ratio": ({}, 0.5),
    "sched.cycles": ({"sched": {"name": "cosine_restarts"}}, 3),
    "sched.power": ({"sched": {"name": "polynomial"}}, 1.0),
    "regularization.max_grad_norm": ({}, 0.01),
    "regularization.dropout": ({}, 0.4),
    "regularization.attention_dropout": ({}, 0.4),
    "regularization.freeze_layers": ({}, 1),
}
DECODING: dict[str, tuple[dict[str, Any], Any]] = {
    "span.max_answer_len": ({"null_policy": "none"}, 3),
    "span.topk": ({"null_policy": "none"}, 1),
    "span.nms_iou": ({}, 0.1),
    "span.reranker": ({"null_policy": "none"}, "product"),
    "span.null_policy": ({}, "none"),
    "span.null_threshold": ({"null_policy": "threshold"}, -4.0),
    "span.null_ratio": ({"null_policy": "ratio"}, 0.01),
}
# They only act on models of the hub, or with code of their own: tests/contract/test_train_remote_models.py.
ELSEWHERE = {"model.revision", "model.trust_remote_code"}
FUSIONS = ("add", "gate", "attention")
CASES = [
    *(pytest.param("share", key, *case) for key, case in list(BOTH.items())[:3]),
    *(pytest.param("joint", key, *case) for key, case in OF_JOINT.items()),
    *(pytest.param("joint", "joint.fusion", {}, value, marks=pytest.mark.slow) for value in FUSIONS),
    *(
        pytest.param(task, key, *case, marks=pytest.mark.slow)
        for task in ("share", "joint")
        for key, case in [*list(BOTH.items())[3 if task == "share" else 0 :], *COMMON.items()]
    ),
]


def test_every_key_that_the_tasks_read_has_a_case() -> None:
    of_both = BOTH.keys() | COMMON.keys() | DECODING.keys() | ELSEWHERE
    assert {key for key in searchable_keys() if reads(Task.SHARE, key)} == of_both
    assert {key for key in searchable_keys() if reads(Task.JOINT, key)} == of_both | OF_JOINT.keys()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {"FIRST": tiny.model(folder / "first"), "OTHER": tiny.model(folder / "other", seed=1)}


@pytest.fixture(autouse=True, scope="module")
def _cheap_collections() -> Iterator[None]:
    """Accelerate collects garbage at each start: half a trial's time here, where all libraries are loaded."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {"folder": tmp_path_factory.mktemp("plain")}


def learned(folder: Path, models: dict[str, Path], task: str, tables: Tables) -> list[tuple[int, float]]:
    """When it was scored, and the plain loss then."""
    data = spans.both_data(folder / "data", train=16, validation=6, criterion_repeated=5)
    merged = {name: BASE.get(name, {}) | tables.get(name, {}) for name in BASE.keys() | tables.keys()}
    trial = trials.Trial(folder, encoder=models["FIRST"], data=data, study={"task": task}, **merged)
    return [(point.step, point.metrics["loss"]) for point in trial.run()[1].points]


@pytest.mark.parametrize(("task", "key", "tables", "value"), CASES)
def test_the_key_changes_training(
    tmp_path: Path, models: dict[str, Path], seen: dict[str, Any], task: str, key: str, tables: Tables, value: Any
) -> None:
    name = f"{task} {tables!r}"
    if name not in seen:
        seen[name] = learned(seen["folder"] / str(len(seen)), models, task, tables)
    table, _, field = key.partition(".")
    own = str(models["OTHER"]) if value == "OTHER" else value
    changed = tables | {table: tables.get(table, {}) | {field: own}}
    assert learned(tmp_path, models, task, changed) != seen[name]


def decoded(**settings: Any) -> tuple[dict[str, float], list[dict[str, object]]]:
    """Metrics, and what is predicted, of the same scores."""
    logits, windows = spans.drawn_windows(60, seed=8, golds=True)
    # So that null wins in about half of the rows, by more or less.
    logits[torch.arange(len(windows)), windows.nulls_W] += 4 + windows.rows_W.unsqueeze(1) % 7
    tokens = windows.tokens
    tokens = replace(tokens, extra={**tokens.extra, CLASSES: windows.rows_W % 2})
    given = Given(TrialSettings(span=SpanSettings(**settings)), DataSettings())
    task = ShareTask(given)
    classes = torch.randn(len(windows), 2, generator=torch.Generator().manual_seed(1))
    kept = task.keep((classes, logits), spans.span_batch(windows))
    fitted = task.fit(kept, tokens)
    rows = [spans.SpanRow("x" * 4000)] * 60
    known = ShareTask(Given(given.settings, given.data, fitted=fitted))
    return task.metrics(kept, tokens, fitted), list(known.predictions(kept, tokens, rows))


@pytest.mark.parametrize(("key", "settings", "value"), [(key, *case) for key, case in DECODING.items()])
def test_the_key_changes_decoding(key: str, settings: dict[str, Any], value: Any) -> None:
    field = key.partition(".")[2]
    (before, said), (after, said_after) = decoded(**settings), decoded(**settings | {field: value})
    assert said != said_after
    # Overlapping candidates are of use to whoever reads them: the first of them stays what it is.
    assert before != after or field == "nms_iou"
    assert before["f1_macro"] == after["f1_macro"]
