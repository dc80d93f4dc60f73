"""Every key that the task evidence reads changes what is learned or what is decoded."""

import gc
from collections.abc import Iterator
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
from dryfit.tasks.evidence import EvidenceTask

Tables = dict[str, dict[str, Any]]
LAYER: Tables = {"head": {"layers": 1}}
BASE: Tables = {
    "train": {"epochs": 1, "max_length": 28},
    "span": {"doc_stride": 6},
}

# Key: the tables under which it is tried, and the value it is changed to.
TRAINING: dict[str, tuple[Tables, Any]] = {
    "span.doc_stride": ({}, 3),
    "span.negatives": ({}, 0.5),
    "loss.name": ({}, "focal"),
    "loss.label_smoothing": ({}, 0.2),
    "loss.gamma": ({"loss": {"name": "focal"}}, 0.5),
    "head.layers": ({}, 1),
    "head.hidden": (LAYER, 16),
    "head.activation": (LAYER, "tanh"),
    "head.dropout": ({}, 0.5),
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


def test_every_key_that_the_task_reads_has_a_case() -> None:
    read = {key for key in searchable_keys() if reads(Task.EVIDENCE, key)}
    assert read == TRAINING.keys() | COMMON.keys() | DECODING.keys() | ELSEWHERE


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


def learned(folder: Path, models: dict[str, Path], tables: Tables) -> list[tuple[int, float]]:
    """When it was scored, and the plain loss then."""
    data = spans.evidence_data(folder / "data", train=16, validation=6)
    merged = {name: BASE.get(name, {}) | tables.get(name, {}) for name in BASE.keys() | tables.keys()}
    trial = trials.Trial(folder, encoder=models["FIRST"], data=data, study={"task": "evidence"}, **merged)
    return [(point.step, point.metrics["loss"]) for point in trial.run()[1].points]


@pytest.mark.parametrize(
    ("key", "tables", "value"),
    [
        *((key, *case) for key, case in TRAINING.items()),
        *(pytest.param(key, *case, marks=pytest.mark.slow) for key, case in COMMON.items()),
    ],
)
def test_the_key_changes_training(
    tmp_path: Path, models: dict[str, Path], seen: dict[str, Any], key: str, tables: Tables, value: Any
) -> None:
    name = repr(tables)
    if name not in seen:
        seen[name] = learned(seen["folder"] / str(len(seen)), models, tables)
    table, _, field = key.partition(".")
    own = str(models.get(value, value)) if table == "model" else value
    changed = tables | {table: tables.get(table, {}) | {field: own}}
    assert learned(tmp_path, models, changed) != seen[name]


def decoded(**settings: Any) -> tuple[dict[str, float], list[dict[str, object]]]:
    """Metrics, and what is predicted, of the same scores."""
    logits, windows = spans.drawn_windows(60, seed=8, golds=True)
    # So that null wins in about half of the rows, by more or less.
    nulls = torch.arange(len(windows)), windows.nulls_W
    logits[nulls] += 4 + windows.rows_W.unsqueeze(1) % 7
    given = Given(TrialSettings(span=SpanSettings(**settings)), DataSettings())
    task = EvidenceTask(given)
    kept = task.keep(logits, spans.span_batch(windows))
    fitted = task.fit(kept, windows.tokens)
    rows = [spans.SpanRow("x" * 4000)] * 60
    known = EvidenceTask(Given(given.settings, given.data, fitted=fitted))
    return task.metrics(kept, windows.tokens, fitted), list(known.predictions(kept, windows.tokens, rows))


@pytest.mark.parametrize(("key", "settings", "value"), [(key, *case) for key, case in DECODING.items()])
def test_the_key_changes_decoding(key: str, settings: dict[str, Any], value: Any) -> None:
    field = key.partition(".")[2]
    (before, said), (after, said_after) = decoded(**settings), decoded(**settings | {field: value})
    assert said != said_after
    # Overlapping candidates are of use to whoever reads them: the first of them stays what it is.
    assert before != after or field == "nms_iou"


@pytest.mark.parametrize("value", ["sum", "product", "softmax"])
def test_each_reranker_decides_differently(value: str) -> None:
    policy = {"null_policy": "threshold", "null_threshold": 0.3}
    found = {name: decoded(reranker=name, **policy)[0] for name in ("sum", "product", "softmax")}
    assert all(found[value] != other for name, other in found.items() if name != value)


def test_overlapping_candidates_decide_where_they_share_probability() -> None:
    shared = {"reranker": "softmax", "null_policy": "threshold"}
    thresholds = [tenth / 10 for tenth in range(-6, 7)]
    pairs = [
        [decoded(**shared, null_threshold=threshold, nms_iou=iou)[0] for iou in (1.0, 0.05)] for threshold in thresholds
    ]
    assert any(one != other for one, other in pairs)
