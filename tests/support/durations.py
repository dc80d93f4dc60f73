"""What tests take, measured: the order in which their files are begun.

``python tests/support/durations.py TIMES`` writes the table anew from the lines that a run left in the file that
``DRYFIT_TEST_TIMES`` names (``make durations``).
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import pytest

VARIABLE: Final = "DRYFIT_TEST_TIMES"
"""Names the file that each test's times are appended to, one JSON object a line."""
TABLE: Final = Path(__file__).parents[1] / "durations.json"
"""CPU seconds of each file's tests, by the tier that runs them."""
TIERS: Final = ("nightly", "slow")
"""Marks of the tests that `make test` leaves out; `make proof` leaves out the first."""
_LEAST_S: Final = 1.0


def tier_of(item: pytest.Item) -> str:
    """Return which tier a test belongs to: a mark of :data:`TIERS`, or ``test``."""
    return next((name for name in TIERS if item.get_closest_marker(name)), "test")


def note(file: Path, item: pytest.Item, before: os.times_result, after: os.times_result) -> None:
    """Append what a test took: CPU seconds with those of the processes it waited for, and seconds."""
    times = {"cpu_s": round(sum(after[:4]) - sum(before[:4]), 2), "wall_s": round(after.elapsed - before.elapsed, 2)}
    line = json.dumps({"test": item.nodeid, "tier": tier_of(item), **times})
    with file.open("a", encoding="utf-8") as lines:  # one write of one line: the other worker appends here too
        lines.write(line + "\n")


def longest_first(items: Sequence[pytest.Item]) -> Callable[[pytest.Item], float]:
    """Return a sorting key: minus what the measured tests take of the file that a test stands in.

    By their number of tests, which is the order of the runner's own, the few files with long tests would come last,
    and one process would still be at them when the others are done.
    """
    table: dict[str, dict[str, float]] = json.loads(TABLE.read_text(encoding="utf-8")) if TABLE.exists() else {}
    tiers: dict[str, set[str]] = {}
    for item in items:
        tiers.setdefault(_file_of(item.nodeid), set()).add(tier_of(item))
    took = {file: sum(table.get(file, {}).get(tier, 0.0) for tier in present) for file, present in tiers.items()}
    return lambda item: -took[_file_of(item.nodeid)]


def table_of(lines: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return the table of what a run has left; files that take less than a second are left out."""
    sums: dict[str, Counter[str]] = {}
    for line in lines:
        row = json.loads(line)
        sums.setdefault(_file_of(row["test"]), Counter())[row["tier"]] += row["cpu_s"]
    rounded = {
        file: {tier: round(cpu_s, 1) for tier, cpu_s in sorted(tiers.items()) if cpu_s >= _LEAST_S}
        for file, tiers in sorted(sums.items())
    }
    return {file: tiers for file, tiers in rounded.items() if tiers}


def _file_of(test: str) -> str:
    return test.partition("::")[0]


if __name__ == "__main__":
    measured = table_of(Path(sys.argv[1]).read_text(encoding="utf-8").splitlines())
    TABLE.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
