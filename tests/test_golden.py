"""Golden texts: one that differs fails, the flag rewrites it, and no section outlives its test."""

from pathlib import Path

import pytest

import reach
from golden import FOLDER, Golden, sections


def test_what_differs_fails_until_it_is_rewritten(tmp_path: Path) -> None:
    (tmp_path / "show.txt").write_text("=== a.py::test_a\nkept\n\n=== b.py::test_b\nbefore\n", encoding="utf-8")
    compare, rewrite = (Golden("b.py::test_b", flag, tmp_path) for flag in (False, True))
    with pytest.raises(AssertionError):
        compare("show", "after", ["a line", ("cell", 2)])
    rewrite("show", "after", ["a line", ("cell", 2)])
    compare("show", "after", ["a line", ("cell", 2)])
    assert sections(tmp_path / "show.txt") == {"a.py::test_a": "kept", "b.py::test_b": "after\n\na line\ncell | 2"}


def test_each_section_has_its_test() -> None:
    for name in (name for file in FOLDER.glob("*.txt") for name in sections(file)):
        file, _, test = name.partition("::")
        assert f"def {test.partition('[')[0]}(" in (reach.TESTS / file).read_text("utf-8"), name
