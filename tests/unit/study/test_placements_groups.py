"""Trials of several processes: each has a group of devices, or on the CPU counts as often."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import instant
import plan_jobs
from device_bench import GIB, NEED, OTHER, PID, Bench, events_of
from dryfit.ledger.events import AttemptPlaced, DeviceSetAside, FirstStepDone, ParallelSet
from dryfit.processes.gpus import ProcessOwner
from dryfit.processes.node import HostMemory
from dryfit.settings.devices import HERE, place_on
from dryfit.settings.errors import Evidence, Failure, FailureKind
from dryfit.settings.trial import Outcome
from dryfit.settings.wire import FirstStep
from dryfit.study.next_step import End


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Bench]:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return lambda capacity_bytes, count=1: Bench(tmp_path / "study", capacity_bytes, count)


here = partial(place_on, HERE)

TWO = {"execution": {"memory_limit": None, "tp": 2}}
"""Each trial has two processes, with a device for each."""


def test_each_trial_gets_a_group_and_groups_are_shared_by_what_was_planned(bench) -> None:
    found = bench(2 * NEED, 5)
    found.devices.set("3", 2 * NEED - 1)
    told: list[tuple[str, str, int | None]] = []
    done = found.run(**TWO, placed=lambda *one: told.append(one), study={"trials": 3})
    assert done.end is End.DONE and done.state.counts[Outcome.COMPLETE] == 3
    assert [event.device for event in events_of(done, AttemptPlaced)] == [here("0,1"), here("2,3"), here("0,1")]
    assert [body.visible_device for body in done.supervisor.trained()] == ["0,1", "2,3", "0,1"]
    assert [body.plan.processes for body in done.supervisor.trained()] == [2] * 3
    names = ["0", "1", "2", "3", "0", "1"]
    assert [(device, planned) for _, device, planned in told] == [(name, NEED) for name in names]
    assert found.watcher.notes == ["device(s) 4 stay idle: a trial takes 2 at once"]


def test_a_group_has_the_room_of_its_device_with_the_least(bench) -> None:
    found = bench(2 * NEED, 2)
    found.devices.set("1", 4 * NEED, (OTHER, 3 * NEED + 1, ProcessOwner.OTHER))
    done = found.run(**TWO)
    assert done.end is End.PAUSED and not events_of(done, AttemptPlaced)
    reason = "128 MiB of each of devices 0, 1, which has 512 MiB, 384 MiB of them held by others"
    assert reason in found.watcher.notes[-1]
    found.devices.set("1", 4 * NEED, (OTHER, 3 * NEED, ProcessOwner.OTHER))
    done = found.run(**TWO)
    assert done.end is End.DONE and done.supervisor.most_at_once == 1
    found.devices.set("1", 4 * NEED)
    done = found.run(**TWO, study={"trials": 8})
    assert done.end is End.DONE and done.supervisor.most_at_once == 2
    fractions = {body.memory_fraction for body in done.supervisor.trained()}
    assert fractions == {0.5}, "of the smaller device, so that each process may take what it was planned with"


@pytest.mark.parametrize("parallel", ["auto", 4])
def test_alone_on_their_devices_there_are_as_many_trials_as_groups(bench, parallel: str | int) -> None:
    unknown = {"space": {"head.layers": [plan_jobs.UNKNOWN]}, "study": {"trials": 6}}
    done = bench(8 * NEED, 7).run(**TWO, **unknown, runtime={"parallel": parallel})
    assert done.end is End.DONE and done.supervisor.most_at_once == 3
    assert {event.device for event in events_of(done, AttemptPlaced)} == {here("0,1"), here("2,3"), here("4,5")}


def test_a_device_that_keeps_memory_leaves_its_group_to_another(bench) -> None:
    found = bench(2 * NEED, 5)
    found.devices.set("1", 2 * NEED, (PID, NEED, ProcessOwner.GONE))
    found.tick_s = 2.0
    done = found.run(**TWO, runtime={"parallel": 1}, study={"trials": 80})
    assert done.end is End.DONE
    (aside,) = events_of(done, DeviceSetAside)
    assert aside.device == "here/1" and aside.reason == "128 MiB of device 1 are not back since trial 0 has ended"
    places = [event.device for event in events_of(done, AttemptPlaced)]
    assert places[0] == here("0,1") and set(places[1:]) == {here("2,3"), here("0,4")}
    assert places[-1] == here("0,4")
    assert found.watcher.notes[0] == "device(s) 4 stay idle: a trial takes 2 at once"
    assert len(found.watcher.notes) == 2, "afterwards none does"


@pytest.mark.parametrize(
    ("evidence", "aside", "then"),
    [
        (Evidence(exit_code=1, xids=(13, 79), xid_devices=("0", "1")), ["1"], "2,3"),
        (Evidence(exit_code=1), ["0", "1"], "2,3"),
    ],
)
def test_a_lost_device_is_known_by_its_error_else_all_of_the_group_are_set_aside(
    bench, monkeypatch: pytest.MonkeyPatch, evidence: Evidence, aside: list[str], then: str
) -> None:
    lost = Failure(FailureKind.DEVICE_LOST, "it fell off the bus")
    monkeypatch.setattr("dryfit.study.trial_ends.classify", lambda *_args, **_known: lost)
    script = iter([instant.Ends(None, evidence)])
    found = bench(2 * NEED, 4)
    done = found.run(**TWO, script=lambda _: next(script, None), runtime={"parallel": 1}, study={"trials": 2})
    assert done.end is End.DONE and done.state.counts[Outcome.COMPLETE] == 2
    assert [event.device for event in events_of(done, DeviceSetAside)] == [here(device) for device in aside]
    assert [event.device for event in events_of(done, AttemptPlaced)] == [here("0,1"), here(then), here(then)]
    assert done.state.trials[0].attempts[1].terms == ("rather not on device 0, 1",)


def test_without_enough_devices_left_the_study_pauses(bench) -> None:
    found = bench(2 * NEED, 3)
    for name in ("0", "2"):
        found.devices.set(name, 2 * NEED, (PID, NEED, ProcessOwner.GONE))
    found.tick_s = 2.0
    done = found.run(**TWO, runtime={"parallel": 1}, study={"trials": 400})
    assert done.end is End.PAUSED
    assert [event.device for event in events_of(done, DeviceSetAside)] == ["here/0", "here/2"]
    assert found.watcher.notes[-1] == "fewer than the 2 devices of a trial are left to run on: 0, 2 set aside"


def test_all_processes_of_a_group_are_looked_at_while_they_live(bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first step, so that what they leave behind is known to be ours."""
    work = instant.InstantSupervisor._work

    def stepping(self: instant.InstantSupervisor, spec: Any) -> list[Any]:
        first = [instant.ChildMessage(spec.key, FirstStep(after_ms=5.0))] if spec.key.startswith("trial") else []
        return [*first, *work(self, spec)]

    monkeypatch.setattr(instant.InstantSupervisor, "_work", stepping)
    found, at = bench(4 * NEED, 4), list[int]()
    found.tick_s = 0.0
    found.watcher.heard = lambda event: at.append(found.devices.asked) if isinstance(event, AttemptPlaced) else None
    look, looked = found.devices.look, list[str]()

    def looking(device: str) -> Any:
        looked.append(device)
        return look(device)

    monkeypatch.setattr(found.devices, "look", looking)
    done = found.run(**TWO, study={"trials": 1}, runtime={"parallel": 1})
    assert done.end is End.DONE and len(events_of(done, FirstStepDone)) == 1
    assert looked[at[0] : at[0] + 2] == ["0", "1"]
    assert looked[at[0] + 2 :] == ["0", "1"], "and as it ends"


def test_the_processes_of_a_trial_on_the_cpu_count_all(tmp_path: Path) -> None:
    """Trials of two processes, each planned with 128 MiB, on a host with room for the fifth such process."""

    def host(pids: Any) -> HostMemory:
        return HostMemory(GIB, GIB // 10 + 3 * NEED, dict.fromkeys(pids, 2 * NEED))

    def run(tp: int) -> instant.Run:
        config = instant.config(
            execution={"memory_limit": "512MiB", "tp": tp, "threads": 1},
            train={"batch_size": 8, "max_length": 16},
            runtime={"parallel": "auto"},
        )
        on_six = {"change": lambda study: replace(study, nodes=instant.one_node(6)), "host": host}
        return instant.run(tmp_path / str(tp), config, **on_six)

    one, two = run(1), run(2)
    assert one.end is End.DONE and two.end is End.DONE
    placed = events_of(two, AttemptPlaced)
    assert {event.device for event in placed} == {None} and {event.needs_bytes for event in placed} == {2 * NEED}
    assert {event.needs_bytes for event in events_of(one, AttemptPlaced)} == {NEED}
    assert events_of(two, ParallelSet)[0].reason == "6 core(s), 1 for each of a trial's 2 processes"
