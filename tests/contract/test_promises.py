"""What docs/stability.md promises: within one format no key, type, name or status of the record is gone."""

import copy
import importlib
import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from promises import Promise, broken, promises, python_names

RECORD = Path(__file__).parents[1] / "golden" / "promises.json"
KEPT: dict[str, Promise] = json.loads(RECORD.read_text("utf-8")) if RECORD.exists() else {}
PYTHON = "names of Python"
TASKS = ("base", "encoder", "rows", "tokens")
"""What a task of one's own imports (docs/own-task.md)."""


def hold(now: Mapping[str, Promise], request: pytest.FixtureRequest) -> None:
    """Compare with the record, or extend the record, of which nothing is taken away within one format."""
    before = {name: kept for name, kept in KEPT.items() if (name == PYTHON) is (PYTHON in now)}
    assert not broken(before, now)
    if request.config.getoption("--rewrite-golden"):
        written = json.loads(RECORD.read_text("utf-8")) if RECORD.exists() else {}
        RECORD.write_text(json.dumps(written | dict(now), indent=1, sort_keys=True) + "\n", "utf-8")
    else:
        assert before == now, "promise what is new, too: pytest --rewrite-golden tests/contract/test_promises.py"


def test_answers_files_and_statuses_keep_what_they_promised(request: pytest.FixtureRequest) -> None:
    hold(promises(), request)


@pytest.mark.heavy
def test_python_keeps_its_names_and_parameters(request: pytest.FixtureRequest) -> None:
    names = ("dryfit", "dryfit.meta", "dryfit.parallel", *(f"dryfit.tasks.{name}" for name in TASKS))
    hold({PYTHON: python_names([importlib.import_module(name) for name in names])}, request)


def test_a_broken_promise_is_noticed() -> None:
    before = {"a": {"format": 1, "keys": {"x": "integer", "y[].z": "string"}}, "b": {"format": None, "keys": {}}}
    now = copy.deepcopy(before)
    now["a"]["keys"] = {"x": "integer", "y[].z": "string", "more": "array"}
    assert not broken(before, now)
    now["a"]["keys"] = {"x": "number"}
    said = ["a: x was integer, is number", "a: y[].z was string, is gone"]
    assert broken(before, now) == said
    assert not broken(before, {**now, "a": {**now["a"], "format": 2}})
    assert broken(before, {**now, "a": {**now["a"], "format": 0}}) == ["a: format 1 became 0"]
    assert broken(before, {"a": before["a"]}) == ["b is gone"]
    names = {"p": {"format": None, "keys": {"f": ["study"], "t.k": "integer"}}}
    assert not broken(names, {"p": {"format": None, "keys": {"f": ["study", "new"], "t.k": "integer, string"}}})
    assert len(broken(names, {"p": {"format": None, "keys": {"f": ["other"], "t.k": "string"}}})) == 2
