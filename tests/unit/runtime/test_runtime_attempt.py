"""Limits of one child on the supervisor's own clock, and what the control plane imports."""

import os

import pytest

from dryfit.processes.attempt import Attempt
from dryfit.processes.child_spec import ChildLimits, ChildSpec
from dryfit.settings.wire import Started
from runtime_jobs import request


@pytest.fixture
def attempt(tmp_path):
    limits = ChildLimits(start_s=10.0, hang_s=20.0, total_s=100.0, stop_grace_s=5.0)
    return Attempt(ChildSpec("a", tmp_path, request("noop"), limits), token="0", begun_s=0.0)


def say_started(attempt):
    line = Started(pid=1, overhead_ms=1.0).model_dump_json()
    (attempt.spec.folder / "messages.jsonl").write_text(f"{line}\n")


def test_without_a_first_line_only_the_start_limit_holds(attempt):
    assert [attempt.overdue(now_s) for now_s in (10.0, 10.1)] == ["", "start"]


def test_silence_is_counted_from_the_last_change_whatever_the_wall_clock_says(attempt):
    beat = attempt.spec.folder / "beat"
    beat.touch()
    say_started(attempt)
    assert len(attempt.look(1.0)) == 1 and attempt.look(1.0) == []
    assert attempt.overdue(21.0) == "" and attempt.overdue(21.1) == "hang"
    for wall_clock_ns in (1, 2**62):  # a jump far back, then far forward
        os.utime(beat, ns=(wall_clock_ns, wall_clock_ns))
        attempt.look(21.0)
        assert attempt.overdue(41.0) == ""
    attempt.look(41.0)
    assert attempt.overdue(41.1) == "hang"


def test_the_total_counts_from_the_first_line(attempt):
    say_started(attempt)
    attempt.look(8.0)
    attempt.alive_s = 108.0
    assert [attempt.overdue(now_s) for now_s in (108.0, 108.1)] == ["", "timeout"]


def test_the_grace_counts_from_the_request_and_one_kill_is_enough(attempt):
    attempt.stop_asked_s = 2.0
    assert [attempt.overdue(now_s) for now_s in (7.0, 7.1)] == ["", "now"]
    attempt.killed_by_us = "now"
    assert attempt.overdue(1000.0) == ""
