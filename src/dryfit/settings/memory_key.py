"""The settings that decide a trial's memory, as a key: trials with equal keys have the same memory plan."""

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

from dryfit.settings.execution import PlanSubject
from dryfit.settings.tables import ModelSettings
from dryfit.settings.wire import canonical_json

IRRELEVANT: Final = frozenset(
    {
        "train.epochs",
        "train.evals_per_epoch",
        "train.early_stopping",
        "train.early_stopping_min_delta",
        "optim.lr",
        "optim.beta2",
        "optim.eps",
        "sched.name",
        "sched.warmup_ratio",
        "sched.cycles",
        "sched.power",
        "head.threshold",
        "loss.gamma",
        "loss.effective_beta",
        "span.max_answer_len",
        "span.nms_iou",
        "span.reranker",
        "span.null_policy",
        "span.null_threshold",
        "span.null_ratio",
        "multitask.criteria_weight",
        "lora.alpha",
        "lm.mix",
        "lm.metric",
    }
)
"""Keys that change numbers and time, but no tensor."""

NEUTRAL: Final[Mapping[str, float]] = {
    "optim.weight_decay": 0.0,
    "optim.beta1": 0.0,
    "optim.layer_decay": 1.0,
    "optim.head_lr_factor": 1.0,
    "head.dropout": 0.0,
    "loss.label_smoothing": 0.0,
    "regularization.max_grad_norm": 0.0,
    "regularization.dropout": 0.0,
    "regularization.attention_dropout": 0.0,
    "lora.dropout": 0.0,
}
"""Keys for which it only matters whether they have this value.

With it, a mask, a momentum, a norm or a parameter group (the unit in which optimizers allocate) does not exist.
Unset is a third state: the pretrained configuration decides.
"""

SET_OR_UNSET: Final = frozenset({"loss.alpha", "span.negatives", "multitask.criteria_share"})
"""Keys for which it only matters whether they are set."""

AS_MUCH_AS: Final[Mapping[str, Mapping[str, str]]] = {"train.precision": {"tf32": "fp32"}}
"""Values of keys that take the memory of another value."""

FEWER_IS_LESS: Final = frozenset(
    {
        "train.batch_size",
        "train.max_length",
        "head.layers",
        "head.hidden",
        "joint.criterion_length",
        "lora.r",
        "lm.generate_rows",
        "lm.max_new_tokens",
        "lm.num_beams",
    }
)
"""Keys of which a smaller number never takes more memory, all else being equal."""

MORE_IS_LESS: Final = frozenset({"regularization.freeze_layers"})
"""Keys of which a larger number never takes more memory, all else being equal."""


def memory_key(subject: PlanSubject) -> str:
    """Return everything about a subject that decides its memory, as canonical JSON.

    A setting counts unless :data:`IRRELEVANT`, :data:`NEUTRAL` or :data:`SET_OR_UNSET` says otherwise: a new one makes
    keys differ too often, never too rarely.
    """
    lora = subject.lora.model_dump(mode="json") if subject.lora is not None else None
    tables = {**subject.settings.model_dump(mode="json"), "lora": lora}
    reduced = {table: _reduced(table, keys) for table, keys in tables.items() if keys is not None}
    classes = {"num_labels": subject.num_labels, "multi_label": subject.multi_label}
    source = {"source": subject.source} if subject.source else {}
    return canonical_json({**reduced, "task": str(subject.task), **source, **classes})


def _reduced(table: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in keys.items():
        key = f"{table}.{name}"
        if key in IRRELEVANT:
            continue
        if key in SET_OR_UNSET:
            kept[name] = value is not None
            continue
        neutral = NEUTRAL.get(key)
        same = AS_MUCH_AS.get(key, {}).get(value, value) if isinstance(value, str) else value
        kept[name] = same if neutral is None or value is None else value != neutral
    return kept


def any_shape(subject: PlanSubject) -> PlanSubject:
    """Return the subject with a fixed batch size, length and model name: equal for all that differ only there."""
    settings = subject.settings
    same = {
        "model": settings.model.model_copy(update={"name": "any", "revision": None}),
        "train": settings.train.model_copy(update={"batch_size": 1, "max_length": 8}),
    }
    return subject.model_copy(update={"settings": settings.model_copy(update=same)})


StepKey: TypeAlias = tuple[ModelSettings, str]
"""A model, and everything else that decides a training step but its batch size and length."""


def step_key(subject: PlanSubject) -> StepKey:
    """Return the key that subjects share which differ only in batch size and length."""
    return subject.settings.model, memory_key(any_shape(subject))
