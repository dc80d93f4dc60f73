"""Every key that the task evidence reads changes what is learned or what is decoded."""

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
from settings_act import COMMON, DECODING, ELSEWHERE, HEAD, WINDOWS, Pairs, Tables

BASE: Tables = {"train": {"epochs": 1, "max_length": 28}, "span": {"doc_stride": 6}}
decoded = partial(settings_act.decoded, EvidenceTask, of_classes=False)


def test_every_key_that_the_task_reads_has_a_case() -> None:
    read = {key for key in SEARCHABLE if reads(BuiltInTask.EVIDENCE, key)}
    assert read == WINDOWS.keys() | HEAD.keys() | COMMON.keys() | DECODING.keys() | ELSEWHERE


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    model = tiny.model(tmp_path_factory.mktemp("model"))

    def trial(folder: Path, tables: Tables) -> trials.Trial:
        data = spans.evidence_data(folder / "data", train=16, validation=6)
        tables = trials.merged(BASE, tables)
        return trials.Trial(folder, encoder=model, data=data, study={"task": "evidence"}, **tables)

    return Pairs(tmp_path_factory.mktemp("pairs"), trial)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("key", "tables", "value"),
    [
        *((key, *case) for key, case in {**WINDOWS, **HEAD}.items()),
        *(pytest.param(key, *case, marks=pytest.mark.nightly) for key, case in COMMON.items()),
    ],
)
def test_the_key_changes_training(pairs: Pairs, key: str, tables: Tables, value: Any) -> None:
    pairs.assert_acts(key, tables, value)


@pytest.mark.parametrize("key", DECODING)
def test_the_key_changes_decoding(key: str) -> None:
    settings_act.assert_decodes_otherwise(decoded, key)


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
