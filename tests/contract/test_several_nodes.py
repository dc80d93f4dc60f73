"""A study on two nodes: the same loop, trials on both, and the results that one node gives."""

import json
from pathlib import Path

import pytest

import dryfit
import dryfit.study.functions as api
import objectives
import two_nodes
from agents import address_of, end, joined, start_agent, write_study
from dryfit.ledger.events import AttemptPlaced, Event
from dryfit.ledger.folder import StudyLayout
from dryfit.ledger.ledger import each_event
from dryfit.ledger.replay import StudyState
from dryfit.settings.errors import ExitStatus
from dryfit.settings.trial import Outcome
from dryfit.study.next_step import End
from study_runs import DEADLINE_S, ends, marked_processes, start, wait_for

TRIALS, PARALLEL = 8, 4


def study(folder: Path, *, trials: int = TRIALS) -> dryfit.TuneResult:
    return dryfit.tune(
        objective=objectives.stepwise,
        space=objectives.SPACE,
        trials=trials,
        folder=folder,
        search={"sampler": "random", "mirror": "none", "pruner": "none"},
        runtime={"parallel": PARALLEL},
        execution={"device": "cpu"},
    )


def ledger(folder: Path) -> tuple[StudyState, list[Event]]:
    state, events = StudyState(), list(each_event(StudyLayout(folder).ledger))
    for event in events:
        state.apply(event)
    return state, events


def running_at_once(events: list[Event]) -> dict[str, int]:
    """The most attempts that a node had at the same time."""
    node, now, most = dict[tuple[int, int], str](), dict[str, int](), dict[str, int]()
    for event in events:
        if isinstance(event, AttemptPlaced):
            node[event.number, event.attempt] = event.node
            now[event.node] = now.get(event.node, 0) + 1
            most[event.node] = max(most.get(event.node, 0), now[event.node])
        elif event.type == "attempt_ended":
            now[node[event.number, event.attempt]] -= 1
    return most


@pytest.mark.slow
def test_a_study_on_two_nodes_comes_to_what_one_comes_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert study(tmp_path / "one").end is End.DONE
    with pytest.MonkeyPatch.context() as patch:
        two_nodes.use_two_nodes(patch)
        assert study(tmp_path / "two").end is End.DONE
    one, _ = ledger(tmp_path / "one")
    two, events = ledger(tmp_path / "two")
    assert [trial.outcome for trial in two.trials] == [Outcome.COMPLETE] * TRIALS
    values = [[(trial.params, trial.value) for trial in state.trials] for state in (one, two)]
    assert values[0] == values[1]
    placed = [event for event in events if isinstance(event, AttemptPlaced)]
    assert {event.node for event in placed} == set(two_nodes.NAMES)
    assert {trial.attempts[0].place for trial in two.trials} == {"n1/cpu", "n2/cpu"}
    assert all(event.device is None for event in placed)
    most = running_at_once(events)
    assert all(most[name] <= PARALLEL // 2 for name in two_nodes.NAMES), "each node has its share"
    # What one machine goes on with afterwards is no longer where it was.
    assert study(tmp_path / "two", trials=TRIALS + 1).end is End.DONE
    later, _ = ledger(tmp_path / "two")
    assert later.trials[TRIALS].attempts[0].place == "here/cpu"


@pytest.mark.slow
def test_a_study_over_tls_has_the_agents_that_know_its_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEP_PAUSE_S", "0.1")
    folder = write_study(tmp_path / "study", trials=16, parallel=4, lease_s=5.0, tls=True)
    control = start("tune", folder)
    agents = [start_agent(folder)]
    try:
        host, port = address_of(folder)
        there = ("--join", f"{host}:{port}", "--token-file", folder / "nodes" / "token")
        in_the_plain = start("agent", *there, "--wait", "2")
        mistaken = start("agent", *there, "--fingerprint", "0" * 64, "--wait", "2")
        fingerprint = json.loads((folder / "nodes" / "address.json").read_text(encoding="utf-8"))["fingerprint"]
        agents.append(start_agent(*there, "--fingerprint", fingerprint))
        wait_for(lambda: len(joined(ledger(folder)[1])) == 2, control)
        wait_for(lambda: [one.heard_s is not None for one in api.nodes(folder).nodes] == [True, True], control)
        _, said = control.communicate(timeout=DEADLINE_S)
        assert control.returncode == ExitStatus.DONE, said
        assert f"--fingerprint {fingerprint}" in said
        assert "does not speak TLS" in said and "another certificate" in said
        assert "the other side speaks TLS" in in_the_plain.communicate(timeout=60)[1]
        assert f"fingerprint {fingerprint}, not {'0' * 64}" in mistaken.communicate(timeout=60)[1]
        assert [agent.wait(60) for agent in agents] == [0, 0]
        assert in_the_plain.returncode and mistaken.returncode
    finally:
        for process in (control, *agents):
            end(process)
    assert [trial.outcome for trial in ends(folder)] == [Outcome.COMPLETE] * 16
    assert (folder / "nodes" / "certificate.pem").stat().st_mode & 0o777 == 0o600
    assert marked_processes(folder) == []
