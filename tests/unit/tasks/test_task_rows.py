"""The row of each built-in task says what its class does: which metrics, which keys it reads."""

import sys
from pathlib import Path
from typing import Any

import pytest

import spans
import tiny
import tiny_lms
import trials
from dryfit.meta.pretrained import Kind
from dryfit.settings.choices import BuiltInTask, Metric
from dryfit.settings.tables import DataSettings, LmSettings, Settings, TrialSettings
from dryfit.settings.task_facts import BUILT_IN, TASK_TABLES, facts_of, reads
from dryfit.tasks.base import TaskContext
from dryfit.tasks.own import make_task, task_class

TRAINED = [task for task, facts in BUILT_IN.items() if not facts.calls_function]
GENERIC = ("dryfit.tasks.saved_models", "dryfit.tasks.base")
"""Modules of ``tasks/`` that copy settings of any task."""


def context(**data: Any) -> TaskContext:
    return TaskContext(TrialSettings(lm=LmSettings(generate_rows=4, format="both")), DataSettings(**data))


def test_every_task_has_a_row_and_all_but_a_function_a_class() -> None:
    assert list(BUILT_IN) == list(BuiltInTask)
    calling = [BuiltInTask.OBJECTIVE, BuiltInTask.TRAINER, BuiltInTask.SCRIPT]
    assert [task for task in BuiltInTask if task not in TRAINED] == calling
    assert len({task_class(task) for task in TRAINED}) == len(TRAINED)
    assert facts_of("own.py:Class").own and not any(facts.own for facts in BUILT_IN.values())


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("task", TRAINED)
def test_the_metrics_are_those_of_the_class(task: BuiltInTask, several: bool) -> None:
    for classes in (2, 3):
        given = context(num_labels=classes, multi_label=several)
        assert facts_of(task).metrics(given.data) == make_task(task, given).metric_names()


@pytest.mark.parametrize("task", TRAINED)
def test_the_row_says_what_the_class_reads_and_trains(task: BuiltInTask) -> None:
    facts, made = facts_of(task), make_task(task, context())
    assert facts.decoder == (made.kind is Kind.CAUSAL_LM)
    assert ("evidence" in made.required) >= facts.spans


@pytest.mark.parametrize("task", TRAINED)
def test_the_class_reads_the_tables_of_its_row_and_no_other_key(
    task: BuiltInTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that the modules of tasks/ look at while a trial is prepared and trained."""
    decoder = facts_of(task).decoder
    model = (tiny_lms.causal_lm if decoder else tiny.model)(tmp_path / "model")
    data = spans.both_data(tmp_path / "data", train=16, validation=6, criterion_repeated=2)
    length, lm = (96, {"generate_rows": 1, "max_new_tokens": 2}) if decoder else (40, {})
    tables = {"train": {"epochs": 1, "max_length": length}, "span": {"doc_stride": 6}, "lm": lm}
    trial = trials.Trial(tmp_path, encoder=model, data=data, study={"task": task, "metric": Metric.LOSS}, **tables)
    tables_by_type = {type(getattr(TrialSettings(), name)): name for name in TrialSettings.model_fields}
    seen: set[str] = set()

    def recorded(settings: Settings, name: str) -> Any:
        table = tables_by_type.get(type(settings))
        asker = sys._getframe(1).f_globals["__name__"]
        if table is not None and name in type(settings).model_fields and asker.startswith("dryfit.tasks."):
            if not asker.startswith(GENERIC):
                seen.add(f"{table}.{name}")
        return object.__getattribute__(settings, name)

    with monkeypatch.context() as patched:
        patched.setattr(Settings, "__getattribute__", recorded)
        trial.run()
    assert not {key for key in seen if not reads(task, key)}
    assert {key.partition(".")[0] for key in seen} & TASK_TABLES == facts_of(task).tables
