"""A study over agents comes to what it comes to at one slot, whatever is killed, stopped or not heard."""

import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agents import Proxy, address_of, agents_of, end, joined, start_agent, write_study
from dryfit.ledger.events import (
    AttemptEnded,
    AttemptPlaced,
    AttemptStarted,
    NodeLost,
    ReportMade,
    TrialFinished,
    VerdictGiven,
)
from dryfit.settings.errors import ExitStatus
from dryfit.settings.trial import Outcome
from study_runs import DEADLINE_S, ends, events_of, fold, marked_processes, run, start, wait_for

TRIALS = 24
LEASE_S = 3.0


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same study at one slot, without agents."""
    folder = write_study(tmp_path_factory.mktemp("alone") / "study", trials=TRIALS, parallel=1)
    done = run("tune", folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A study that listens."""
    monkeypatch.setenv("STEP_PAUSE_S", "0.1")
    return write_study(tmp_path / "study", trials=TRIALS, parallel=4, lease_s=LEASE_S)


def assert_same(folder: Path, alone: Path, trials: int = TRIALS) -> None:
    """Every trial once, with the values of the undisturbed study; nothing runs any more."""
    assert [(one.params, one.value) for one in ends(folder)] == [(one.params, one.value) for one in ends(alone)]
    finished = [event.number for event in events_of(folder) if isinstance(event, TrialFinished)]
    assert sorted(finished) == list(range(trials))
    assert {trial.outcome for trial in fold(folder).trials} == {Outcome.COMPLETE}
    assert marked_processes(folder) == []


def lost(folder: Path) -> list[NodeLost]:
    return [event for event in events_of(folder) if isinstance(event, NodeLost)]


def ended_well(control: subprocess.Popen[str]) -> None:
    _, said = control.communicate(timeout=DEADLINE_S)
    assert control.returncode == ExitStatus.DONE, said


def finished(folder: Path) -> int:
    """How many trials have ended so far."""
    ledger = folder / "ledger.jsonl"
    return ledger.read_bytes().count(b'"trial_finished"') if ledger.exists() else 0


def wait_for_trials(folder: Path, count: int, control: subprocess.Popen[str]) -> None:
    wait_for(lambda: finished(folder) >= count, control)


@pytest.fixture
def control(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """The control process of the study, which ends with the test."""
    process = start("tune", folder)
    yield process
    end(process)


@pytest.mark.slow
def test_four_agents_come_to_the_values_of_one_slot(control: subprocess.Popen[str], folder: Path, alone: Path) -> None:
    with agents_of(folder, 4) as agents:
        wait_for_trials(folder, 1, control)
        listens = address_of(folder)
        second = run("resume", folder)
        assert second.returncode == ExitStatus.CANNOT_RUN, second.stderr
        assert address_of(folder) == listens, "agents find the one that runs"
        ended_well(control)
        assert [agent.wait(60) for agent in agents] == [0] * 4
    assert_same(folder, alone)
    events = events_of(folder)
    assert sorted(joined(events)) == ["n1", "n2", "n3", "n4"]
    used = {event.node for event in events if isinstance(event, AttemptPlaced)}
    assert len(used) > 1 and "here" not in used
    assert (folder / "nodes" / "token").stat().st_mode & 0o777 == 0o600
    assert not (folder / "nodes" / "address.json").exists()
    again = run("resume", folder)  # nothing is left to do: no agent is waited for
    assert again.returncode == ExitStatus.DONE, again.stderr
    assert_same(folder, alone)


@pytest.mark.slow
def test_agents_killed_and_stopped(control: subprocess.Popen[str], folder: Path, alone: Path) -> None:
    with agents_of(folder, 4) as agents:
        wait_for_trials(folder, 2, control)
        agents[0].kill()
        agents.append(start_agent(folder))
        agents[1].send_signal(signal.SIGSTOP)
        wait_for(lambda: len(lost(folder)) == 2, control)  # it was silent for too long: its trials go elsewhere
        agents[1].send_signal(signal.SIGCONT)
        ended_well(control)
        for agent in agents[4:]:
            end(agent)
    assert_same(folder, alone)
    assert "its agent was ended" in {event.why for event in lost(folder)}
    failures = [one.failure for trial in fold(folder).trials for one in trial.attempts if one.failure is not None]
    assert {failure.kind.value for failure in failures} <= {"lost", "preempted"}


@pytest.mark.slow
def test_trials_on_nodes_outlive_a_killed_control_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: Path
) -> None:
    monkeypatch.setenv("STEP_PAUSE_S", "0.1")
    folder = write_study(tmp_path / "study", trials=TRIALS, parallel=4, lease_s=DEADLINE_S)
    control = start("tune", folder)
    with agents_of(folder, 2) as agents:
        for turn in (1, 2):
            wait_for_trials(folder, 6 * turn, control)
            end(control)
            control = start("resume", folder)
        ended_well(control)
        assert [agent.wait(60) for agent in agents] == [0, 0]
    assert_same(folder, alone)
    assert_each_once(folder)
    state = fold(folder)
    # An attempt without a process was written down, and its control process killed before a node heard of it.
    begun = [sum(bool(attempt.pid) for attempt in trial.attempts) for trial in state.trials]
    assert begun == [1] * TRIALS, "none began a second time"
    again = [event.number for event in events_of(folder) if isinstance(event, AttemptStarted) and event.again]
    assert again


SHORT, LONG = (6.0, (1.0, 4.0, 9.0)), (60.0, (10.0, 40.0, 90.0))
"""A lease, and how long traffic is lost: less than may be silent, less than the lease, and more than it."""


@pytest.mark.slow
def test_an_agent_that_is_asked_to_stop_hands_its_trials_over(
    control: subprocess.Popen[str], folder: Path, alone: Path
) -> None:
    with agents_of(folder, 2) as agents:
        wait_for_trials(folder, 2, control)
        agents[0].send_signal(signal.SIGTERM)
        assert agents[0].wait(60) == 0
        ended_well(control)
    assert_same(folder, alone)
    (left,) = lost(folder)
    # A trial may have been placed there while it was leaving: it never began, and is placed elsewhere.
    assert left.why == "its agent was asked to stop"


MANY, TURNS = 300, 12
FEW, FEW_TURNS = 30, 4
LEARNING = 'sampler = "tpe"\nstartup_trials = 10\npruner = "asha"\nmirror = "none"'


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trials", "turns", "pauses_s"),
    [
        pytest.param(FEW, FEW_TURNS, (1.0, LEASE_S + 1), id="few"),
        pytest.param(MANY, TURNS, (1.0, 2.0, LEASE_S + 9), marks=pytest.mark.nightly, id="many"),
    ],
)
def test_a_search_that_learns_and_prunes_over_agents_that_anything_happens_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trials: int, turns: int, pauses_s: tuple[float, ...]
) -> None:
    """What is suggested depends on who ends first, so no two such studies are the same; but each loses nothing."""
    monkeypatch.setenv("STEP_PAUSE_S", "0.1")
    folder = write_study(tmp_path / "study", trials=trials, parallel=6, lease_s=LEASE_S, search=LEARNING)
    assert disturb(folder, trials=trials, turns=turns, pauses_s=pauses_s) == ExitStatus.DONE
    state = fold(folder)
    assert len(state.trials) == trials
    outcomes = {trial.outcome for trial in state.trials}
    assert outcomes == {Outcome.COMPLETE, Outcome.PRUNED}
    for trial in state.trials:
        *earlier, last = [trial.verdicts[point.n].proceed for point in trial.reports]
        assert all(earlier), "nothing is reported after the verdict that ends a trial"
        assert last is (trial.outcome is Outcome.COMPLETE)
    assert_each_once(folder)


def assert_each_once(folder: Path) -> None:
    """No trial, attempt, report or verdict is in the ledger twice; nothing runs any more."""
    events = events_of(folder)
    reports = [(event.number, event.point.n) for event in events if isinstance(event, ReportMade)]
    verdicts = [(event.number, event.n) for event in events if isinstance(event, VerdictGiven)]
    for named in (
        reports,
        verdicts,
        [event.number for event in events if isinstance(event, TrialFinished)],
        [(event.number, event.attempt) for event in events if isinstance(event, AttemptPlaced)],
        [(event.number, event.attempt) for event in events if isinstance(event, AttemptEnded)],
    ):
        assert named and len(set(named)) == len(named)
    assert set(verdicts) == set(reports)
    assert marked_processes(folder) == []


def disturb(folder: Path, *, trials: int, turns: int, pauses_s: tuple[float, ...]) -> int:
    """Run a study over four agents, two of them through a proxy, and disturb it so many times.

    An agent is killed, or stopped for a while; what two of them say and hear is lost for a while; or the control
    process is killed and another one goes on.

    Args:
        folder: The study's, which is to listen for agents.
        trials: How many it has.
        turns: How many times.
        pauses_s: Of these one is drawn for each "while".

    Returns:
        The exit status of the last control process.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with (folder / "study.toml").open("a", encoding="utf-8") as file:
        file.write(f"port = {port}\n")
    draw, control = random.Random(3), start("tune", folder)
    proxy = Proxy(address_of(folder))
    through = ("--join", f"127.0.0.1:{proxy.port}", "--token-file", folder / "nodes" / "token")
    agents = [start_agent(*through), start_agent(*through), start_agent(folder), start_agent(folder)]
    ended: list[subprocess.Popen[str]] = []
    try:
        for turn in range(turns):
            wait_for_trials(folder, (turn + 1) * trials // (turns + 4), control)
            at = draw.randrange(len(agents))
            match turn % 4:
                case 0:
                    agents[at].kill()
                    ended.append(agents[at])
                    agents[at] = start_agent(*(through if at < 2 else (folder,)))
                case 1:
                    agents[at].send_signal(signal.SIGSTOP)
                    time.sleep(draw.choice(pauses_s))
                    agents[at].send_signal(signal.SIGCONT)
                case 2:
                    proxy.loses_up, proxy.loses_down = draw.choice(((True, False), (False, True), (True, True)))
                    time.sleep(draw.choice(pauses_s))
                    proxy.loses_up = proxy.loses_down = False
                case _:
                    end(control)
                    control = start("resume", folder)
        _, said = control.communicate(timeout=DEADLINE_S)
        print(said)  # shown where the test fails
        return control.returncode
    finally:
        for process in (*agents, *ended, control):
            end(process)
        proxy.close()
