"""The reference pages have every command, option, key, public name and answer."""

import re
from typing import Any

import pytest
import typer

import dryfit
import json_answers
from documents import PAGES
from dryfit.documents.command_line import app
from dryfit.documents.device_answers import device_answers_json, largest_values_json, step_calibrated_json
from dryfit.documents.document import Answer, json_of
from dryfit.documents.memory_checks import check_json
from dryfit.documents.plans import plan_json
from dryfit.documents.rehearsals import rehearsal_json
from dryfit.settings.device_answers import DeviceAnswer, DeviceAnswers
from dryfit.settings.largest_value import LargestValue
from dryfit.settings.memory_check import CheckVerdict, Kept, LineChange, MemoryCheck, RunCheck
from dryfit.settings.memory_terms import DeviceSpec, MemoryCategory, VerdictKind
from dryfit.settings.plan_messages import CalibrateResult, PlanAnswer
from dryfit.settings.reach_calibrations import ReachCalibration
from dryfit.settings.study_file_text import CASE_KEYS, TABLES
from dryfit.settings.task_facts import OWN_TABLE
from dryfit.study.machine_checks import Diagnosis
from dryfit.study.planning import PlannedCell, SpacePlan
from dryfit.study.step_calibrations import StepCalibrated
from json_answers import ANSWERS, keys_of
from reference_pages import PAGES as MADE
from reference_pages import command_page, python_page, study_file_page
from rehearsal_stand_in import GIB, answer_of

DEVICE = DeviceSpec(name="rtx4090", capacity_bytes=24 * GIB)
REHEARSED = answer_of(40 * GIB, DEVICE)
PLANNED = PlanAnswer(verdict=VerdictKind.UNKNOWN, device=DEVICE, torch="", planner_s=0.0)


def test_each_command_has_its_arguments_and_options() -> None:
    page = command_page()
    for name, command in typer.main.get_command(app).commands.items():
        (section,) = re.findall(rf"^## `dryfit {name}`\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE)
        assert f"(#dryfit-{name})" in page
        for one in command.params:
            shown = one.opts if one.param_type_name == "option" else [one.metavar or one.name]
            assert all(text in section for text in shown), (name, shown)


def test_each_key_of_a_study_file_has_a_row() -> None:
    page = study_file_page()
    for table, keys in TABLES.items():
        section = page.split(f"## `[{table}]`")[1].split("\n## ")[0]
        rows = re.findall(r"^\| `(\w+)` \| (.+) \| (.+) \| (.+) \|$", section, re.MULTILINE)
        assert table == OWN_TABLE or [row[0] for row in rows] == list(keys)
        assert all(default and takes and what.strip() for _, default, takes, what in rows), table
    assert all(f"| `{key}` |" in page.split("## `[space]`")[1] for key in CASE_KEYS)
    assert "| `epochs` | `2` | an integer from 1 to 1000 |" in page


def test_each_public_name_has_a_section() -> None:
    page = python_page()
    for name in set(dryfit.__all__) - {"events"}:
        assert f"::: dryfit.{name}\n" in page or f"`dryfit.{name}`" in page, name


def keys(told: Any) -> set[str]:
    told = told if isinstance(told, dict) else told.model_dump(by_alias=True)
    return set(told)


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("rehearse", rehearsal_json(REHEARSED, with_timeline=True)),
        ("rehearse --device A,B", device_answers_json(DeviceAnswers((DeviceAnswer(REHEARSED, "rtx4090"),), 1, 2.0))),
        ("rehearse --largest NAME", largest_values_json([LargestValue("--batch", DEVICE, None, None, None, ())])),
        ("plan", plan_json(PLANNED)),
        (
            "plan (of a search space)",
            json_of(
                SpacePlan(
                    device=DEVICE,
                    varied=(),
                    kept={},
                    cells=(PlannedCell(params={}, checkpointing=False, answer=PLANNED),),
                    planner_s=1.0,
                    trials=2,
                )
            ),
        ),
        ("calibrate", json_of(CalibrateResult())),
        (
            "calibrate --time",
            step_calibrated_json(
                StepCalibrated(
                    kept=ReachCalibration(
                        device="l4",
                        quantity="tensor",
                        value=0.5,
                        measured_s=1.0,
                        torch="",
                        watts=None,
                        day="2026-01-01",
                        command="train.py",
                    ),
                    before=None,
                    estimated_s=None,
                )
            ),
        ),
        ("doctor", json_of(Diagnosis(()))),
    ],
)
def test_answers_that_are_put_together_have_the_keys_of_the_page(command: str, told: Any) -> None:
    assert keys(told) == set(ANSWERS[command])
    for name in ("devices", "cells"):
        for one in told.get(name) or ():
            assert keys(one) == set(ANSWERS[command][name].kind.keys), name


def test_the_answer_of_check_has_the_keys_of_the_page() -> None:
    kept = Kept(allocated_bytes=1, reserved_bytes=1, required_bytes=1, versions={}, lines=())
    changed = LineChange(
        line="a.py:1", code="", source="", category=MemoryCategory.WEIGHTS, before_bytes=1, after_bytes=2
    )
    run = RunCheck(
        name="small",
        command="a.py",
        device=DEVICE,
        verdict=CheckVerdict.GREW,
        fits=True,
        budget_bytes=1,
        before=kept,
        after=kept,
        lines=(changed,),
    )
    told: Any = check_json(MemoryCheck(runs=(run,)))
    page = ANSWERS["check"]
    (one,) = told["runs"]
    assert keys(told) == set(page) and keys(one) == set(page["runs"].kind.keys)
    for name in ("before", "lines"):
        (part,) = one[name] if name == "lines" else (one[name],)
        assert keys(part) == set(page["runs"].kind.keys[name].kind.keys), name


def kinds(kind: type) -> set[type]:
    return {one for below in kind.__subclasses__() for one in (below, *kinds(below))}


def test_each_command_that_prints_json_and_each_type_of_answer_is_there() -> None:
    said = ", ".join(ANSWERS)
    for name, command in typer.main.get_command(app).commands.items():
        assert name in said or all("--json" not in one.opts for one in command.params), name
    for kind in kinds(Answer):
        assert keys_of(kind) in ANSWERS.values(), kind


def test_types_are_told_in_the_words_of_json() -> None:
    assert json_answers.type_text(tuple[int, ...] | None) == "list of integer or null"
    assert json_answers.type_text(dict[str, float]) == "object: number by text"
    assert json_answers.type_text(tuple[int, str]) == "list: integer, text"
    with pytest.raises(TypeError, match="no words"):
        json_answers.type_text(complex)


def test_links_to_reference_pages_lead_to_pages_that_are_made() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((reference/[^)#]+)", page.read_text(encoding="utf-8")):
            assert target in MADE, (page.name, target)
