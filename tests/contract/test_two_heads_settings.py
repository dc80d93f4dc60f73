"""Every key that the tasks share and joint read changes what is learned or what is decoded."""

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
from dryfit.tasks.joint import ShareTask
from settings_act import CLASS_HEAD, COMMON, DECIDES, DECODING, ELSEWHERE, OTHER, WINDOWS, Case, Pairs, Tables

BASE: Tables = {"train": {"epochs": 1, "max_length": 40}, "span": {"doc_stride": 6}}

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
    *(("share", key, *case) for key, case in OF_PARTS.items()),
    *(("joint", key, *case) for key, case in {**OF_BOTH, **OF_PARTS}.items()),
    *(("joint", "joint.fusion", {}, fusion) for fusion in ("add", "attention")),
]


def test_every_key_that_the_tasks_read_has_a_case() -> None:
    of_both = OF_BOTH.keys() | OF_PARTS.keys() | DECODING.keys() | ELSEWHERE | DECIDES
    assert {key for key in SEARCHABLE if reads(BuiltInTask.SHARE, key)} == of_both
    assert {key for key in SEARCHABLE if reads(BuiltInTask.JOINT, key)} == of_both | OF_JOINT.keys()


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pairs]:
    model = tiny.model(tmp_path_factory.mktemp("model"))

    def trial(task: str, folder: Path, tables: Tables) -> trials.Trial:
        data = spans.both_data(folder / "data", train=16, validation=6, criterion_repeated=5)
        tables = trials.merged(BASE, tables)
        return trials.Trial(folder, encoder=model, data=data, study={"task": task}, **tables)

    return {task: Pairs(tmp_path_factory.mktemp(task), partial(trial, task)) for task in ("share", "joint")}


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("task", "key", "tables", "value"),
    [
        *(("share", key, *case) for key, case in OF_BOTH.items()),
        *(("joint", key, *case) for key, case in OF_JOINT.items()),
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in LONG),
    ],
)
def test_the_key_changes_training(pairs: dict[str, Pairs], task: str, key: str, tables: Tables, value: Any) -> None:
    pairs[task].assert_acts(key, tables, value)


@pytest.mark.parametrize("key", DECODING)
def test_the_key_changes_decoding_of_spans_alone(key: str) -> None:
    decode = partial(settings_act.decoded, ShareTask, of_classes=True)
    (before, _), (after, _) = settings_act.assert_decodes_otherwise(decode, key)
    assert before["f1_macro"] == after["f1_macro"]
