"""The reference pages have every command, option, key, public name and answer."""

import json
import re
from typing import Any

import pytest
import typer

import dryfit
import json_answers
from documents import PAGES
from dryfit.documents.command_line import app
from dryfit.documents.document import Answer, json_text
from dryfit.settings.study_file_text import CASE_KEYS, TABLES
from dryfit.settings.task_facts import OWN_TABLE
from json_answers import ANSWERS, keys_of
from promises import answers
from reference_pages import PAGES as MADE
from reference_pages import command_page, python_page, study_file_page


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


def assert_told(told: dict[str, Any], page: dict[str, Any]) -> None:
    """The keys of an answer, and those of its parts of which the page has a table of their own."""
    assert set(told) == set(page)
    for name, value in told.items():
        (part,) = value if isinstance(value, list) and len(value) == 1 else (value,)
        keys = getattr(page[name].kind, "keys", None)
        if isinstance(part, dict) and isinstance(keys, dict) and keys:  # of a plan in a cell the page tells elsewhere
            assert_told(part, keys)


@pytest.mark.parametrize("name", answers())
def test_every_answer_has_the_keys_of_the_page(name: str) -> None:
    told = json.loads(json_text(answers()[name]))
    command = name.partition(" ")[0]
    (page, *_) = (page for title, page in ANSWERS.items() if command in title and set(page) == set(told))
    assert_told(told, page)


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
