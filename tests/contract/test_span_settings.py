"""Every key that the tasks evidence, share and joint read changes what is learned or what is decoded."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

import settings_act
import spans
import tiny
import trials
from dryfit.settings.choices import BuiltInTask
from dryfit.settings.study_file_text import SEARCHABLE
from dryfit.settings.task_facts import reads
from dryfit.tasks.evidence import EvidenceTask
from dryfit.tasks.joint import ShareTask
from settings_act import CLASS_HEAD, COMMON, DECIDES, DECODING, ELSEWHERE, HEAD, OTHER, WINDOWS, Case, Pairs, Tables

OF_SPANS: dict[str, Case] = {**WINDOWS, **HEAD}
OF_BOTH: dict[str, Case] = {
    "multitask.criteria_weight": ({}, 0.9),
    "multitask.weighting": ({}, "uncertainty"),
    "multitask.criteria_share": ({}, 0.5),
}
OF_JOINT: dict[str, Case] = {
    "joint.criteria_model": ({}, OTHER),
    "joint.criterion_length": ({}, 8),
    "joint.fusion": ({}, "gate"),
    "joint.share_ratio": ({}, 0.5),
}
OF_PARTS: dict[str, Case] = {**WINDOWS, **CLASS_HEAD, **COMMON}
LONG = [
    *(("evidence", key, *case) for key, case in COMMON.items()),
    *(("share", key, *case) for key, case in OF_PARTS.items()),
    *(("joint", key, *case) for key, case in {**OF_BOTH, **OF_PARTS}.items()),
    *(("joint", "joint.fusion", {}, fusion) for fusion in ("add", "attention")),
]
decoded = partial(settings_act.decoded, EvidenceTask, of_classes=False)


def test_every_key_that_the_tasks_read_has_a_case() -> None:
    of_both = OF_BOTH.keys() | OF_PARTS.keys() | DECODING.keys() | ELSEWHERE | DECIDES
    has_case = {
        BuiltInTask.EVIDENCE: OF_SPANS.keys() | COMMON.keys() | DECODING.keys() | ELSEWHERE,
        BuiltInTask.SHARE: of_both,
        BuiltInTask.JOINT: of_both | OF_JOINT.keys(),
    }
    assert {task: {key for key in SEARCHABLE if reads(task, key)} for task in has_case} == has_case


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pairs]:
    model = tiny.model(tmp_path_factory.mktemp("model"))

    def trial(task: str, folder: Path, tables: Tables) -> trials.Trial:
        if task == "evidence":
            data, length = spans.evidence_data(folder / "data", train=16, validation=6), 28
        else:
            data, length = spans.both_data(folder / "data", train=16, validation=6, criterion_repeated=5), 40
        tables = trials.merged({"train": {"epochs": 1, "max_length": length}, "span": {"doc_stride": 6}}, tables)
        return trials.Trial(folder, encoder=model, data=data, study={"task": task}, **tables)

    tasks = ("evidence", "share", "joint")
    return {task: Pairs(tmp_path_factory.mktemp(task), partial(trial, task)) for task in tasks}


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("task", "key", "tables", "value"),
    [
        *(("evidence", key, *case) for key, case in OF_SPANS.items()),
        *(("share", key, *case) for key, case in OF_BOTH.items()),
        *(("joint", key, *case) for key, case in OF_JOINT.items()),
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in LONG),
    ],
)
def test_the_key_changes_training(pairs: dict[str, Pairs], task: str, key: str, tables: Tables, value: Any) -> None:
    pairs[task].assert_acts(key, tables, value)


@pytest.mark.parametrize("key", DECODING)
def test_the_key_changes_decoding_of_spans_alone(key: str) -> None:
    settings_act.assert_decodes_otherwise(decoded, key)
    decode = partial(settings_act.decoded, ShareTask, of_classes=True)
    (before, _), (after, _) = settings_act.assert_decodes_otherwise(decode, key)
    assert before["f1_macro"] == after["f1_macro"]


@pytest.mark.parametrize("value", ["sum", "product", "softmax"])
def test_each_reranker_decides_differently(value: str) -> None:
    policy = {"null_policy": "threshold", "null_threshold": 0.3}
    found = {name: decoded(reranker=name, **policy)[0] for name in ("sum", "product", "softmax")}
    assert all(found[value] != other for name, other in found.items() if name != value)


def test_overlapping_candidates_decide_where_they_share_probability() -> None:
    shared = {"reranker": "softmax", "null_policy": "threshold"}
    thresholds = [tenth / 10 for tenth in range(-6, 7)]
    found = [
        [decoded(**shared, null_threshold=threshold, nms_iou=iou)[0] for iou in (1.0, 0.05)] for threshold in thresholds
    ]
    assert any(one != other for one, other in found)
