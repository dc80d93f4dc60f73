"""Leases are counted on a clock that nobody sets: a machine whose time of day jumps loses no trial, and keeps none."""

import ast
import time
from pathlib import Path

import pytest

import dryfit.processes
from dryfit.processes import agent
from dryfit.settings.wire import since_boot_s
from dryfit.study import session

PACKAGE = Path(dryfit.processes.__file__).parent
OF_THE_DAY = {"time", "time_ns", "ctime", "localtime", "gmtime", "strftime", "CLOCK_REALTIME", "now", "utcnow", "today"}


def clocks_of(source: str) -> set[str]:
    """The names in a module that tell the time of day, which is set: by a person, by NTP, by a resumed machine."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name(id="time" | "datetime" | "date"), attr=name) if name in OF_THE_DAY:
                found.add(name)
            case ast.ImportFrom(module="time", names=names):
                found |= {one.name for one in names} & OF_THE_DAY
            case ast.Import(names=names) | ast.ImportFrom(module="datetime", names=names):
                found |= {one.name for one in names if one.name == "datetime"}
            case _:
                pass
    return found


@pytest.mark.parametrize("module", sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py")), ids=str)
def test_nothing_of_nodes_asks_for_the_time_of_day(module: Path) -> None:
    dates = {"datetime"} if module.name == "connection.py" else set[str]()  # constants: those in a certificate
    assert clocks_of((PACKAGE / module).read_text(encoding="utf-8")) == dates


@pytest.mark.parametrize(
    "source",
    ["import time\ntime.time()", "from time import time_ns", "import datetime", "from datetime import datetime"],
)
def test_a_module_that_did_would_be_found(source: str) -> None:
    assert clocks_of(source)


def test_agents_and_control_process_count_on_the_clock_since_the_start_of_their_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert agent.since_boot_s is since_boot_s and session.since_boot_s is since_boot_s
    asked: list[int] = []

    def told(which: int) -> float:
        asked.append(which)
        return 7.0

    monkeypatch.setattr(time, "clock_gettime", told)
    monkeypatch.setattr(time, "time", lambda: pytest.fail("the time of day"))
    assert since_boot_s() == 7.0
    assert asked == [getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)], "it also counts while the machine sleeps"
