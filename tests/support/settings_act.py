"""Keys that several tasks read, each with a value that must change what is learned or decoded, and how that is seen."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import spans
import tiny
from dryfit.settings.tables import DataSettings, SpanSettings, TrialSettings
from dryfit.tasks.base import Task, TaskContext
from dryfit.tasks.tokens import CLASSES
from trials import Trial

Tables = dict[str, dict[str, Any]]
Case = tuple[Tables, Any]
"""The tables under which a key is tried, and the value it is changed to."""
Decoded = tuple[Mapping[str, float], list[dict[str, object]]]
"""Metrics, and what is predicted."""
Learned = Mapping[str, object]
"""What training has come to, by name: two trainings are the same where all that both have is equal."""

OTHER = "another model"
LAYER: Tables = {"head": {"layers": 1}}
FOCAL: Tables = {"loss": {"name": "focal"}}

COMMON: dict[str, Case] = {
    "model.name": ({}, OTHER),
    "train.epochs": ({}, 2),
    "train.batch_size": ({}, 10),
    "train.max_length": ({}, 24),
    "train.precision": ({}, "bf16"),
    "train.group_by_length": ({}, False),
    "train.evals_per_epoch": ({}, 2),
    "train.early_stopping": ({"optim": {"lr": 0.5}, "train": {"epochs": 6}}, 1),
    "train.early_stopping_min_delta": ({"optim": {"lr": 5e-3}, "train": {"epochs": 8, "early_stopping": 3}}, 5.0),
    "optim.name": ({}, "sgd"),
    "optim.lr": ({}, 1e-3),
    "optim.weight_decay": ({}, 0.5),
    "optim.beta1": ({}, 0.8),
    "optim.beta2": ({}, 0.9),
    "optim.eps": ({}, 1e-4),
    "optim.layer_decay": ({}, 0.5),
    "optim.head_lr_factor": ({}, 3.0),
    "sched.name": ({}, "constant"),
    "sched.warmup_ratio": ({}, 0.5),
    "sched.cycles": ({"sched": {"name": "cosine_restarts"}}, 3),
    "sched.power": ({"sched": {"name": "polynomial"}}, 1.0),
    "regularization.max_grad_norm": ({}, 0.01),
    "regularization.dropout": ({}, 0.4),
    "regularization.attention_dropout": ({}, 0.4),
    "regularization.freeze_layers": ({}, 1),
    "regularization.frozen_dropout": ({"regularization": {"freeze_layers": 1}}, False),
}
"""Read by all tasks that train an encoder."""

HEAD: dict[str, Case] = {
    "loss.name": ({}, "focal"),
    "loss.label_smoothing": ({}, 0.2),
    "loss.gamma": (FOCAL, 0.5),
    "head.layers": ({}, 1),
    "head.hidden": (LAYER, 16),
    "head.activation": (LAYER, "tanh"),
    "head.dropout": ({}, 0.5),
}
"""Of any head and its loss."""

CLASS_HEAD: dict[str, Case] = {
    **HEAD,
    "loss.alpha": (FOCAL, 0.25),
    "loss.class_balance": ({}, "weighted"),
    "loss.effective_beta": ({"loss": {"class_balance": "effective"}}, 0.9),
    "head.pooling": ({}, "max"),
}
"""Of a head that chooses a class."""

WINDOWS: dict[str, Case] = {"span.doc_stride": ({}, 3), "span.negatives": ({}, 0.5)}

DECODING: dict[str, tuple[dict[str, Any], Any]] = {
    "span.max_answer_len": ({"null_policy": "none"}, 3),
    "span.topk": ({"null_policy": "none"}, 1),
    "span.nms_iou": ({}, 0.1),
    "span.reranker": ({"null_policy": "none"}, "product"),
    "span.null_policy": ({}, "none"),
    "span.null_threshold": ({"null_policy": "threshold"}, -4.0),
    "span.null_ratio": ({"null_policy": "ratio"}, 0.01),
}
"""Of spans, with other settings of ``[span]``: no training is needed to see them act."""

WHOLE = {
    *("train.epochs", "train.evals_per_epoch", "train.early_stopping", "train.early_stopping_min_delta"),
    *("sched.name", "sched.cycles", "sched.power"),
}
"""How long training is, when it is scored, how the rate falls after its warmup: the first steps do not show it."""
RADAM = "radam"
"""An optimizer without second moments in its first five steps."""

STEPS = 2
"""The first moves nothing that knows only the direction of one gradient: Adam's betas act from the second on."""

DECIDES = {"head.threshold"}
"""Scores become classes by it, after training: tests/contract/test_class_threshold_trials.py."""

ELSEWHERE = {"model.revision", "model.trust_remote_code"}
"""They only act on models of the hub, or with code of their own: tests/contract/test_train_remote_models.py."""


def some_steps(trial: Trial) -> Learned:
    """Train a little: a digest of each tensor after :data:`STEPS` steps."""
    result, _ = trial.run(stop_at=STEPS)
    saved = trial.folder / "best" if result.stopped_by is None else trial.folder / f"checkpoints/step-{STEPS:08d}"
    assert result.steps == STEPS
    tensors = load_file(saved / "model.safetensors")
    return {
        name: hashlib.sha256(one.flatten().view(torch.uint8).numpy().tobytes()).digest()
        for name, one in tensors.items()
    }


def whole_training(trial: Trial) -> Learned:
    """Train to the end: how many steps, and when and how well it was scored."""
    result, channel = trial.run()
    return {"steps": result.steps, "scored": [(point.step, point.metrics["loss"]) for point in channel.points]}


class Pairs:
    """What is learned under some tables, and with one key changed; the former once for all keys that share it.

    Args:
        folder: For the trials.
        make: Makes one in a folder, under some tables.
    """

    def __init__(self, folder: Path, make: Callable[[Path, Tables], Trial]) -> None:
        self._folder = folder
        self._make = make
        self._other = tiny.model(folder / "other", seed=1)
        self._plain: dict[str, Learned] = {}

    def assert_acts(self, key: str, tables: Tables, value: Any) -> None:
        """With the key's value a tensor that both have, or the course of the training, is another one."""
        train = whole_training if key in WHOLE or tables.get("optim", {}).get("name") == RADAM else some_steps
        name = f"{train.__name__} {tables!r}"
        if name not in self._plain:
            self._plain[name] = self._learned(train, tables)
        table, _, field = key.partition(".")
        own = str(self._other) if value == OTHER else value
        after = self._learned(train, tables | {table: tables.get(table, {}) | {field: own}})
        assert any(after[one] != found for one, found in self._plain[name].items() if one in after)

    def _learned(self, train: Callable[[Trial], Learned], tables: Tables) -> Learned:
        folder = self._folder / f"trial-{len(list(self._folder.iterdir()))}"
        folder.mkdir()
        return train(self._make(folder, tables))


def decoded(cls: type[Task], *, of_classes: bool, **settings: Any) -> Decoded:
    """What a task with spans, and classes or not, makes of the same scores."""
    logits, windows = spans.drawn_windows(60, seed=8, golds=True)
    # So that null wins in about half of the rows, by more or less.
    logits[torch.arange(len(windows)), windows.nulls_W] += 4 + windows.rows_W.unsqueeze(1) % 7
    tokens = replace(windows.tokens, extra={**windows.tokens.extra, CLASSES: windows.rows_W % 2})
    classes = torch.randn(len(windows), 2, generator=torch.Generator().manual_seed(1))
    context = TaskContext(TrialSettings(span=SpanSettings(**settings)), DataSettings())
    task = cls(context)
    kept = task.keep((classes, logits) if of_classes else logits, spans.span_batch(windows))
    fitted = task.fit(kept, tokens)
    rows = [spans.SpanRow("x" * 4000)] * 60
    known = cls(TaskContext(context.settings, context.data, fitted=fitted))
    return task.metrics(kept, tokens, fitted), list(known.predictions(kept, tokens, rows))


def assert_decodes_otherwise(decode: Callable[..., Decoded], key: str) -> tuple[Decoded, Decoded]:
    """A key of ``DECODING`` changes what is predicted, and what that is worth."""
    settings, value = DECODING[key]
    field = key.partition(".")[2]
    before, after = decode(**settings), decode(**settings | {field: value})
    assert before[1] != after[1]
    # Overlapping candidates are of use to whoever reads them: the first of them stays what it is.
    assert before[0] != after[0] or field == "nms_iou"
    return before, after
