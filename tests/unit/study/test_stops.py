"""Requests to stop, by signals to this very process."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dryfit.processes.process import end_of_command
from dryfit.study.driver import StopRequests, StopSignals, stacks_on_request
from dryfit.study.next_step import End


@pytest.fixture(autouse=True)
def not_under_nohup() -> Iterator[None]:
    """These tests are about a process that hears of every signal, whoever started it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def woken() -> list[int]:
    return []


@pytest.fixture
def stops(tmp_path: Path, woken: list[int]) -> Iterator[StopRequests]:
    with StopRequests(tmp_path / "stop", lambda: woken.append(1)) as requests:
        yield requests


def send(number: signal.Signals) -> None:
    """To ourselves; a handler has run when this returns."""
    os.kill(os.getpid(), number)
    time.sleep(0)


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (signal.SIGINT, End.INTERRUPTED),
        (signal.SIGTERM, End.STOPPED),
        (signal.SIGHUP, End.STOPPED),
        (signal.SIGUSR2, End.STOPPED),
    ],
)
def test_each_signal_is_a_request(stops: StopRequests, woken: list[int], number: signal.Signals, why: End) -> None:
    assert stops.why is None
    send(number)
    assert (stops.why, stops.at_once, woken) == (why, False, [1])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2])
def test_what_repeats_itself_is_no_more_urgent(stops: StopRequests, woken: list[int], number: signal.Signals) -> None:
    """``timeout`` sends SIGTERM twice, a closing terminal and its shell a SIGHUP each."""
    send(signal.SIGUSR2)
    send(number)
    send(number)
    assert (stops.why, stops.at_once) == (End.STOPPED, False)
    assert woken == [1]  # the others do nothing: a flood of them must not pile up handler upon handler


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_after_a_request_means_now(stops: StopRequests, first: signal.Signals) -> None:
    send(first)
    send(signal.SIGINT)
    assert stops.at_once
    assert stops.why is (End.INTERRUPTED if first is signal.SIGINT else End.STOPPED)


def test_dryfit_stop_asks_by_a_file_and_ctrl_c_hurries_it(stops: StopRequests, tmp_path: Path) -> None:
    (tmp_path / "stop").write_text("graceful")
    stops.look()
    assert (stops.why, stops.at_once) == (End.STOPPED, False)
    send(signal.SIGINT)
    assert stops.at_once


def test_handlers_are_given_back(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)]
    with StopRequests(tmp_path / "stop", lambda: None):
        pass
    after = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)]
    assert before == after


def test_signals_that_are_heard_already_are_not_taken_over(tmp_path: Path, woken: list[int]) -> None:
    """Several studies in a row: what comes between two of them is heard, and the next one knows of it."""
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals() as signals:
        heard_by = signal.getsignal(signal.SIGTERM)
        with StopRequests(tmp_path / "stop", lambda: woken.append(1), signals) as first:
            assert signal.getsignal(signal.SIGTERM) == heard_by
            (tmp_path / "stop").write_text("graceful")
            first.look()
        assert (first.why, signals.why) == (End.STOPPED, None)  # `dryfit stop` is for that study alone
        assert signal.getsignal(signal.SIGTERM) == heard_by
        send(signal.SIGTERM)
        assert (signals.why, woken) == (End.STOPPED, [])
        with StopRequests(tmp_path / "stop", lambda: woken.append(1), signals) as second:
            assert (second.why, second.at_once, woken) == (End.STOPPED, False, [])
            send(signal.SIGINT)
            assert (second.why, second.at_once, woken) == (End.STOPPED, True, [1])
        send(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):  # nobody works: it ends at once
            send(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_sighup_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequests(tmp_path / "stop", lambda: None) as stops:
            send(signal.SIGHUP)
            assert stops.why is None
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_stacks_are_written_on_request(tmp_path: Path) -> None:
    file = tmp_path / "stacks.txt"
    with stacks_on_request(file):
        send(signal.SIGUSR1)
    assert "test_stacks_are_written_on_request" in file.read_text()


def test_a_handler_of_whoever_embeds_us_is_left_alone(tmp_path: Path) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    try:
        with stacks_on_request(tmp_path / "stacks.txt"):
            send(signal.SIGUSR1)
        assert heard == [signal.SIGUSR1]
        assert not (tmp_path / "stacks.txt").exists()
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("asked", [False, True])
def test_a_command_that_was_stopped_ignores_what_comes_again(tmp_path: Path, asked: bool) -> None:
    before = signal.signal(signal.SIGUSR2, end_of_command)
    try:
        with StopRequests(tmp_path / "stop", lambda: None) as requests:
            if asked:
                send(signal.SIGTERM)
        assert (requests.why is not None) == asked
        assert signal.getsignal(signal.SIGUSR2) is (signal.SIG_IGN if asked else end_of_command)
    finally:
        signal.signal(signal.SIGUSR2, before)
