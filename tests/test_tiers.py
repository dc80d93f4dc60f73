"""Which tests run when: what the night has besides, what a change reaches, what needs no torch."""

import json
import subprocess
import sys
from collections.abc import Sequence
from itertools import combinations, product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import durations
import reach
from thinning import cover

_SIZES = st.lists(st.integers(1, 6), min_size=1, max_size=4)


def _rows(sizes: Sequence[int]) -> list[dict[str, int]]:
    return [dict(zip("abcd", values, strict=False)) for values in product(*map(range, sizes))]


@given(_SIZES, st.integers(1, 2))
def test_every_combination_of_values_is_kept_by_few_members(sizes: list[int], strength: int) -> None:
    rows = _rows(sizes)
    kept = [rows[at] for at in cover(rows, strength)]
    strength = min(strength, len(sizes))
    for names in combinations("abcd"[: len(sizes)], strength):
        seen, all_there_are = ({tuple(row[name] for name in names) for row in some} for some in (kept, rows))
        assert seen == all_there_are
    largest = max(size * other for size, other in combinations([*sizes, 1], 2)) if strength == 2 else max(sizes)
    assert len(kept) <= 2 * largest


_OF_MARKS = """
import pytest

@pytest.mark.each_value
@pytest.mark.parametrize("a", range(4))
@pytest.mark.parametrize("b", range(3))
def test_values(a, b): pass

@pytest.mark.every(2)
@pytest.mark.parametrize("a", range(4))
def test_first(a): pass

@pytest.mark.every(2)
@pytest.mark.parametrize("a", range(4))
def test_second(a): pass

@pytest.mark.parametrize("a", range(4))
def test_all(a): pass
"""


def test_marks_leave_members_to_the_night_and_the_night_has_all(tmp_path: Path) -> None:
    root = Path(__file__).parents[1]
    (tmp_path / "test_marks.py").write_text(_OF_MARKS, encoding="utf-8")
    (tmp_path / "conftest.py").write_text(
        f"import sys\nsys.path.insert(0, {str(root / 'tests' / 'support')!r})\n"
        "import pytest, thinning\n"
        "@pytest.hookimpl(tryfirst=True)\n"
        "def pytest_collection_modifyitems(items): thinning.leave_to_nightly(items)\n",
        encoding="utf-8",
    )

    def collected(*words: str) -> list[str]:
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *words, "."]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        return [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]

    kept = collected("-m", "not nightly")
    assert len([name for name in kept if name.startswith("test_values")]) == 4
    first, second = ([name[-2] for name in kept if name.startswith(f"test_{which}")] for which in ("first", "second"))
    assert sorted(first + second) == list("0123")
    assert len([name for name in kept if name.startswith("test_all")]) == 4
    assert len(collected()) == 12 + 3 * 4


def _names(*changed: str) -> set[str]:
    return {path.name for path in reach.affected(changed, reach.test_files())}


def test_a_change_reaches_who_imports_it_and_who_starts_processes() -> None:
    seen = _names("src/dryfit/meta/construction/tape.py")
    assert {"test_tape.py", "test_cli.py", "test_train_resume.py"} <= seen
    assert not {"test_eta.py", "test_ladder.py"} & seen
    assert "test_eta.py" in _names("src/dryfit/reporting/eta.py")
    assert "test_presets.py" in _names("src/dryfit/starter/presets/max.toml")


def test_a_change_of_tests_reaches_who_shares_it() -> None:
    assert _names("tests/unit/report/test_eta.py") == {"test_eta.py"}
    assert "test_cli.py" in _names("tests/support/tiny.py") and "test_eta.py" not in _names("tests/support/tiny.py")
    assert {path.name for path in reach.test_files()} == _names("tests/conftest.py") == _names("pyproject.toml")


def test_pages_reach_what_reads_pages_and_benchmarks_nothing() -> None:
    assert {"test_docs.py", "test_readme_tour.py"} <= _names("README.md")
    assert "test_tape.py" not in _names("README.md")
    assert not _names("benchmarks/plain.py")


def test_light_files_are_many_and_touch_no_torch() -> None:
    light = [path for path in reach.test_files() if reach.reach(path).light]
    assert len(light) > 100
    assert not {"test_tape.py", "test_train_resume.py"} & {path.name for path in light}


def test_an_import_that_must_not_be_fails() -> None:
    code = "import reach; reach.refuse_heavy_imports(); import json, numpy\nimport torch.nn"
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(reach.__file__).parent, capture_output=True, text=True)
    assert done.returncode == 1 and "counts as light imports torch" in done.stderr


_TIMES = """
{"test": "tests/test_a.py::test_x[1]", "tier": "test", "cpu_s": 1.5, "wall_s": 9, "modules": 0}
{"test": "tests/test_a.py::test_x[2]", "tier": "test", "cpu_s": 1.0, "wall_s": 9, "modules": 0}
{"test": "tests/test_a.py::test_y", "tier": "slow", "cpu_s": 30.0, "wall_s": 9, "modules": 50}
{"test": "tests/test_b.py::test_z", "tier": "test", "cpu_s": 3.5, "wall_s": 90, "modules": 200}
{"test": "tests/nodes/test_n.py::test_n", "tier": "nodes", "cpu_s": 20, "wall_s": 20, "modules": 0}
""".strip().splitlines()


def test_times_are_summed_by_file_and_tier_and_renew_a_table() -> None:
    measured = durations.table_of(_TIMES)
    assert measured == {"tests/test_a.py": {"slow": 30.0, "test": 2.5}, "tests/test_b.py": {"test": 3.5}}
    before = {"tests/test_a.py": {"test": 9.0}, "tests/test_b.py": {"slow": 4.0}, "tests/gone.py": {"test": 1.0}}
    after = durations.renewed(before, measured, ["tests/test_a.py", "tests/test_b.py"])
    assert after == {**measured, "tests/test_b.py": {"slow": 4.0, "test": 3.5}}


def test_a_file_that_takes_long_must_be_in_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert durations.unknown({}, _TIMES) == {"tests/test_a.py": 32.0}, "the other one imports a library"
    assert not durations.unknown({"tests/test_a.py": {"test": 1.0}}, _TIMES)
    times, table = tmp_path / "times", tmp_path / "tests" / "durations.json"
    table.parent.mkdir()
    (table.parent / "test_a.py").touch()
    times.write_text("\n".join(_TIMES), encoding="utf-8")
    monkeypatch.setattr(durations, "TABLE", table)
    statuses = [durations.main(action, str(times)) for action in ("check", "write", "check")]
    assert statuses == [1, 0, 0]


def test_what_an_earlier_run_ran_is_not_run_again(request: pytest.FixtureRequest) -> None:
    """As `make test` does after `make check` in one run of .ci/run."""
    items = list(request.session.items)
    lines = [json.dumps({"test": request.node.nodeid}), *_TIMES]
    assert durations.take_done(items, lines) == [request.node]
    assert items == [item for item in request.session.items if item is not request.node]
