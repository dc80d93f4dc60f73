"""Which settings decide a trial's memory: every key of them has been thought of."""

import json
from typing import Any

import pytest

from dryfit.settings.choices import BuiltInTask
from dryfit.settings.execution import PlanSubject
from dryfit.settings.memory_key import IRRELEVANT, NEUTRAL, SET_OR_UNSET, memory_key
from dryfit.settings.tables import LoraSettings, TrialSettings

OTHER: dict[str, Any] = {
    "model.name": "x",
    "model.revision": "main",
    "model.trust_remote_code": True,
    "train.batch_size": 7,
    "train.max_length": 77,
    "train.precision": "bf16",
    "train.group_by_length": False,
    "optim.name": "sgd",
    "head.pooling": "cls",
    "head.layers": 2,
    "head.hidden": 64,
    "head.activation": "relu",
    "loss.name": "focal",
    "loss.class_balance": "weighted",
    "span.doc_stride": 7,
    "span.topk": 3,
    "multitask.weighting": "uncertainty",
    "joint.criteria_model": "y",
    "joint.criterion_length": 9,
    "joint.fusion": "gate",
    "joint.share_ratio": 0.5,
    "regularization.freeze_layers": 1,
    "regularization.frozen_dropout": False,
    "lora.r": 3,
    "lora.targets": "q_proj",
    "lora.base": "fp32",
    "train.epochs": 9,
    "train.evals_per_epoch": 3,
    "train.early_stopping": 2,
    "train.early_stopping_min_delta": 0.5,
    "optim.lr": 0.1,
    "optim.beta2": 0.5,
    "optim.eps": 0.5,
    "sched.name": "cosine",
    "sched.warmup_ratio": 0.5,
    "sched.cycles": 5,
    "sched.power": 3.0,
    "head.threshold": "calibrated",
    "loss.gamma": 5.0,
    "loss.effective_beta": 0.5,
    "span.max_answer_len": 5,
    "span.nms_iou": 0.25,
    "span.reranker": "product",
    "span.null_policy": "ratio",
    "span.null_threshold": 1.0,
    "span.null_ratio": 2.0,
    "multitask.criteria_weight": 0.25,
    "lora.alpha": 5.0,
    "lm.format": "both",
    "lora.double_quant": True,
    "lora.compute": "fp16",
    "lm.criteria_prompt": "{text}?",
    "lm.evidence_prompt": "{text}?",
    "lm.answers": "a,b",
    "lm.no_evidence": "-",
    "lm.mix": 0.3,
    "lm.chat": "off",
    "lm.learn_prompt": True,
    "lm.packing": True,
    "lm.generate_rows": 0,
    "lm.max_new_tokens": 7,
    "lm.num_beams": 3,
    "lm.metric": "answers.py:judged",
}


def key_of(*changes: tuple[str, Any], lora: bool = True) -> str:
    tables: dict[str, dict[str, Any]] = {"lora": {}}
    for name, value in changes:
        table, _, key = name.partition(".")
        tables.setdefault(table, {})[key] = value
    adapters = LoraSettings.model_validate_json(json.dumps(tables.pop("lora")))
    settings = TrialSettings.model_validate_json(json.dumps(tables))
    return memory_key(PlanSubject(task=BuiltInTask.CAUSAL_LM, settings=settings, lora=adapters if lora else None))


def every_key() -> set[str]:
    tables = {name: info.annotation for name, info in TrialSettings.model_fields.items()} | {"lora": LoraSettings}
    return {f"{table}.{key}" for table, cls in tables.items() for key in getattr(cls, "model_fields")}  # noqa: B009


def test_every_setting_was_thought_of() -> None:
    """A new setting is added here, and where it moves no tensor, to one of the two tables."""
    assert set(OTHER) | set(NEUTRAL) | SET_OR_UNSET == every_key()
    assert IRRELEVANT <= set(OTHER)


@pytest.mark.parametrize("name", sorted(OTHER))
def test_what_changes_memory_changes_the_key(name: str) -> None:
    assert (key_of((name, OTHER[name])) == key_of()) == (name in IRRELEVANT)


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_of_some_only_matters_whether_they_are_there(name: str) -> None:
    assert key_of((name, 0.25)) == key_of((name, 0.5))
    assert key_of((name, NEUTRAL[name])) != key_of((name, 0.5))


@pytest.mark.parametrize("name", sorted(SET_OR_UNSET))
def test_of_some_only_matters_whether_they_are_set(name: str) -> None:
    assert key_of((name, 0.25)) == key_of((name, 0.5)) != key_of()


def test_unset_dropout_is_the_pretrained_one() -> None:
    keys = {key_of(("regularization.dropout", value)) for value in (None, 0.0, 0.1)}
    assert len(keys) == 3


def test_task_labels_and_adapters_count() -> None:
    settings = TrialSettings()
    subjects = [
        PlanSubject(task=BuiltInTask.CRITERIA, settings=settings),
        PlanSubject(task=BuiltInTask.CRITERIA, settings=settings, num_labels=3),
        PlanSubject(task=BuiltInTask.CRITERIA, settings=settings, num_labels=3, multi_label=True),
        PlanSubject(task=BuiltInTask.CAUSAL_LM, settings=settings),
        PlanSubject(task=BuiltInTask.CAUSAL_LM, settings=settings, lora=LoraSettings()),
    ]
    assert len({memory_key(subject) for subject in subjects}) == 5


def test_tf32_takes_the_memory_of_fp32() -> None:
    assert key_of(("train.precision", "tf32"), lora=False) == key_of(lora=False)
