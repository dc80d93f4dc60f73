"""What `make versions` runs, shown on made-up interpreters and projects."""

import sys
import tomllib
from pathlib import Path

import pytest

from throwaway import CheckError
from versions import Bounds, Row, find_python, lowest_pins, status, wanted_runs

ROOT = Path(__file__).resolve().parents[1]
OURS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
RUNS = [("3.9", Bounds.LOWEST), ("3.10", Bounds.HIGHEST)]


def test_the_oldest_python_has_the_lowest_versions_and_every_other_the_highest():
    classifiers = [f"Programming Language :: Python :: {name}" for name in ("3.10", "3", "3.9", "3 :: Only", "3.11")]
    assert wanted_runs({"classifiers": classifiers}) == [*RUNS, ("3.11", Bounds.HIGHEST)]
    assert f">={wanted_runs(OURS)[0][0]}" == OURS["requires-python"]


def test_the_lowest_versions_are_those_of_the_bounds():
    pins = lowest_pins(OURS)
    assert {pin.partition("==")[0] for pin in pins} == {"torch", "transformers", "accelerate", "optuna", "peft"}
    made_up = {"dependencies": ["torch>=2.11,<3", "transformers", "other>=1"], "optional-dependencies": {}}
    with pytest.raises(CheckError):
        lowest_pins(made_up)


def interpreter(path: Path, says: str, status: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho {says}\nexit {status}\n")
    path.chmod(0o755)
    return path


def test_an_interpreter_is_found_on_path_by_uv_or_in_pyenvs_folder(tmp_path):
    nowhere = tmp_path / "nowhere"
    running = "{}.{}".format(*sys.version_info)
    assert find_python(running, nowhere, lambda name: None) == sys.executable
    assert find_python("3.99", nowhere, lambda name: None) is None
    pyenv = interpreter(tmp_path / "home/.pyenv/versions/3.99.1/bin/python", "3.99")
    assert find_python("3.99", tmp_path / "home", lambda name: None) == pyenv
    by_uv = interpreter(tmp_path / "by-uv", "3.99")
    uv = interpreter(tmp_path / "uv", str(by_uv))
    assert find_python("3.99", nowhere, {"uv": str(uv)}.get) == str(by_uv)
    on_path = interpreter(tmp_path / "python3.99", "3.99")
    assert find_python("3.99", tmp_path / "home", {"python3.99": str(on_path)}.get) == str(on_path)


@pytest.mark.parametrize(("says", "ends"), [("3.99", 127), ("3.9", 0)])
def test_a_shim_that_does_nothing_and_another_version_are_passed_over(tmp_path, says, ends):
    shim = interpreter(tmp_path / "python3.99", says, ends)
    pyenv = interpreter(tmp_path / ".pyenv/versions/3.99.1/bin/python", "3.99")
    assert find_python("3.99", tmp_path, {"python3.99": str(shim)}.get) == pyenv


def test_it_fails_where_nothing_ran_or_anything_failed():
    good = Row("3.9", Bounds.LOWEST, (), "1 passed", passed=True)
    bad = Row("3.9", Bounds.LOWEST, (), "1 failed", passed=False)
    assert [status(rows) for rows in ([], [good], [bad], [good, bad], [good, good])] == [1, 0, 1, 1, 0]
