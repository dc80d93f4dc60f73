"""What tests take, measured: the order in which their files are begun, and which files are the slowest.

A run appends a line for each test to the file that ``DRYFIT_TEST_TIMES`` names. Of such a file TIMES,
``python tests/support/durations.py write TIMES`` takes what it measured into the table, ``... slowest TIMES`` prints
the ten slowest files, and ``... check TIMES`` fails where a file takes long and the table does not know it.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

VARIABLE: Final = "DRYFIT_TEST_TIMES"
"""Names the file that each test's times are appended to, one JSON object a line."""
DONE_VARIABLE: Final = "DRYFIT_TESTS_DONE"
"""Names such a file of an earlier run: what it ran is not run again."""
TABLE: Final = Path(__file__).parents[1] / "durations.json"
"""CPU seconds of each file's tests, by the tier that runs them."""
TIERS: Final = ("nightly", "nodes", "slow")
"""Marks of the tests that `make test` leaves out; `make proof` leaves out all but the last."""
MOST_UNKNOWN_S: Final = 3.0
"""CPU seconds of a file's tests from which on the table must have it."""
_LEAST_S: Final = 1.0
"""Less is not kept. Far below what the check asks for: a loaded machine makes no file three times as slow."""
_IMPORT_S: Final = 0.01
"""What the check allows for each module that a test imports: of a process, the first test that needs a library pays."""
_UNORDERED: Final = "nodes"
"""Tests that run one after the other, whatever they take."""
_SLOWEST: Final = 10
Table = dict[str, dict[str, float]]


def tier_of(item: pytest.Item) -> str:
    """Return which tier a test belongs to: a mark of :data:`TIERS`, or ``test``."""
    return next((name for name in TIERS if item.get_closest_marker(name)), "test")


@dataclass(frozen=True)
class Moment:
    """How far a process is: its times, and how many modules it has imported."""

    times: os.times_result
    modules: int

    @classmethod
    def now(cls) -> "Moment":
        """Return how far this process is."""
        return cls(os.times(), len(sys.modules))


def note(file: Path, item: pytest.Item, before: Moment, after: Moment) -> None:
    """Append what a test took: CPU seconds with those of the processes it waited for, seconds, and modules imported."""
    cpu_s = sum(after.times[:4]) - sum(before.times[:4])
    took = {"cpu_s": round(cpu_s, 2), "wall_s": round(after.times.elapsed - before.times.elapsed, 2)}
    line = json.dumps({"test": item.nodeid, "tier": tier_of(item), **took, "modules": after.modules - before.modules})
    with file.open("a", encoding="utf-8") as lines:  # one write of one line: the other worker appends here too
        lines.write(line + "\n")


def longest_first(items: Sequence[pytest.Item]) -> Callable[[pytest.Item], float]:
    """Return a sorting key: minus what the measured tests take of the file that a test stands in.

    By their number of tests, which is the order of the runner's own, the few files with long tests would come last,
    and one process would still be at them when the others are done.
    """
    table = known()
    tiers: dict[str, set[str]] = {}
    for item in items:
        tiers.setdefault(_file_of(item.nodeid), set()).add(tier_of(item))
    took = {file: sum(table.get(file, {}).get(tier, 0.0) for tier in present) for file, present in tiers.items()}
    return lambda item: -took[_file_of(item.nodeid)]


def known() -> Table:
    """Return the table as it was written last."""
    return json.loads(TABLE.read_text(encoding="utf-8")) if TABLE.exists() else {}


def take_done(items: list[pytest.Item], lines: Iterable[str]) -> list[pytest.Item]:
    """Take out of a list, and return, the tests that an earlier run has left times of."""
    names = frozenset(json.loads(line)["test"] for line in lines)
    done = [item for item in items if item.nodeid in names]
    items[:] = [item for item in items if item.nodeid not in names]
    return done


def table_of(lines: Iterable[str]) -> Table:
    """Return the table of what a run has left; files that take less than a second are left out."""
    sums: dict[str, Counter[str]] = {}
    for line in lines:
        row = json.loads(line)
        if row["tier"] != _UNORDERED:
            sums.setdefault(_file_of(row["test"]), Counter())[row["tier"]] += row["cpu_s"]
    rounded = {
        file: {tier: round(cpu_s, 1) for tier, cpu_s in sorted(tiers.items()) if cpu_s >= _LEAST_S}
        for file, tiers in sorted(sums.items())
    }
    return {file: tiers for file, tiers in rounded.items() if tiers}


def renewed(table: Table, measured: Table, files: Iterable[str]) -> Table:
    """Return a table with what a run has measured, of files that are there.

    Args:
        table: What was known before: it stays for each file's tiers that the run has not measured.
        measured: The table of the run.
        files: The test files that there are.
    """
    merged = {file: {**table.get(file, {}), **measured.get(file, {})} for file in sorted({*table, *measured})}
    present = set(files)
    return {file: dict(sorted(tiers.items())) for file, tiers in merged.items() if file in present}


def unknown(table: Table, lines: Iterable[str]) -> dict[str, float]:
    """Return what each file took that a table does not have and that took more than :data:`MOST_UNKNOWN_S`."""
    took = Counter[str]()
    for line in lines:
        row = json.loads(line)
        if row["tier"] != _UNORDERED:
            took[_file_of(row["test"])] += max(0.0, row["cpu_s"] - _IMPORT_S * row["modules"])
    return {file: round(cpu_s, 1) for file, cpu_s in took.items() if file not in table and cpu_s > MOST_UNKNOWN_S}


def slowest(lines: Iterable[str], count: int = _SLOWEST) -> list[str]:
    """Return the files whose tests took most seconds, one a line after a heading."""
    wall_s, cpu_s = Counter[str](), Counter[str]()
    for line in lines:
        row = json.loads(line)
        file = _file_of(row["test"])
        wall_s[file] += row["wall_s"]
        cpu_s[file] += row["cpu_s"]
    rows = [f"{taken_s:9.0f}{cpu_s[file]:9.0f}  {file}" for file, taken_s in wall_s.most_common(count)]
    return [f"{'seconds':>9}{'CPU s':>9}  the {len(rows)} slowest test files", *rows]


def _file_of(test: str) -> str:
    return test.partition("::")[0]


def main(action: str, file: str) -> int:
    """Do with a file of times what the command line asks for; the exit status."""
    times = Path(file)
    lines = times.read_text(encoding="utf-8").splitlines() if times.exists() else []
    if action == "write":
        root = TABLE.parents[1]
        files = (path.relative_to(root).as_posix() for path in TABLE.parent.rglob("test_*.py"))
        TABLE.write_text(json.dumps(renewed(known(), table_of(lines), files), indent=1) + "\n", encoding="utf-8")
        return 0
    if action == "slowest":
        print("\n".join(slowest(lines)))
        return 0
    missing = unknown(known(), lines)
    for test_file, cpu_s in missing.items():
        print(f"{test_file} takes {cpu_s} CPU seconds and {TABLE.name} does not know it", file=sys.stderr)
    if missing:
        print(f"take what was measured into it: make durations TIMES={file}", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
