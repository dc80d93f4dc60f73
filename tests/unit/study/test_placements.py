"""Trials on devices: packed by their plans, kept from memory that is not there, and what is told of it."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import instant
import plan_jobs
from device_bench import GIB, MIB, NEED, OTHER, PID, Bench, events_of
from dryfit.ledger.events import AttemptPlaced, DeviceSetAside, FirstStepDone, ParallelSet
from dryfit.processes.gpus import ProcessOwner
from dryfit.processes.node import HostMemory
from dryfit.settings.devices import HERE, place_on
from dryfit.settings.errors import Evidence, Failure, FailureKind
from dryfit.settings.plan_messages import PlanAnswer
from dryfit.settings.trial import Outcome
from dryfit.settings.wire import FirstStep
from dryfit.study.next_step import End
from dryfit.study.placements import RETURN_WAIT_S
from nvml import ScriptedDevices


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Bench]:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return lambda capacity_bytes, count=1: Bench(tmp_path / "study", capacity_bytes, count)


def test_trials_share_devices_by_what_was_planned(bench) -> None:
    done = bench(2 * NEED, 2).run()
    assert done.end is End.DONE and done.state.counts[Outcome.COMPLETE] == 4
    assert done.supervisor.most_at_once == 4
    placed = events_of(done, AttemptPlaced)
    assert [event.device for event in placed] == ["here/0", "here/1", "here/0", "here/1"]
    assert {event.needs_bytes for event in placed} == {NEED}
    assert [body.memory_fraction for body in done.supervisor.trained()] == [0.5] * 4
    assert events_of(done, ParallelSet) == []


def test_a_trial_that_nothing_can_come_beside_is_not_fenced(bench) -> None:
    done = bench(2 * NEED).run(runtime={"parallel": 1})
    assert [body.memory_fraction for body in done.supervisor.trained()] == [None] * 4
    assert bench(2 * NEED).devices.asked == 0


def test_an_unknown_plan_has_a_device_for_itself_and_others_use_the_other(bench) -> None:
    def answer(subject: Any, body: Any) -> PlanAnswer:
        return plan_jobs.answer(subject, body)

    done = bench(8 * NEED, 2).run(space={"head.layers": [plan_jobs.UNKNOWN, 0, 1]}, study={"trials": 6, "seed": 3})
    assert done.end is End.DONE
    unknown = {trial.number for trial in done.state.trials if trial.plan and not trial.plan.answer.verdict.fits}
    assert 0 < len(unknown) < 6
    bodies = {body.config.number: body.memory_fraction for body in done.supervisor.trained()}
    assert all((fraction is None) is (number in unknown) for number, fraction in bodies.items())


# ---- memory that is not returned


def leak(devices: ScriptedDevices, device: str, capacity_bytes: int) -> None:
    devices.set(device, capacity_bytes, (PID, NEED, ProcessOwner.GONE))


def test_memory_that_is_late_is_waited_for(bench) -> None:
    found = bench(2 * NEED)
    leak(found.devices, "0", 2 * NEED)
    waits: list[float] = []

    def returned() -> None:
        waits.append(found.now_s)
        if len(waits) == 3:
            found.devices.set("0", 2 * NEED)

    found.on_idle = returned
    done = found.run(runtime={"parallel": 1})
    assert done.end is End.DONE and len(waits) == 3
    assert found.devices.owned == [PID] * 5, "four trials and a planner"
    assert events_of(done, DeviceSetAside) == []
    reasons = [event.reason for event in events_of(done, ParallelSet)]
    assert reasons[0] == "128 MiB of device 0 are not back since trial 0 has ended"


def test_a_device_that_keeps_memory_is_set_aside_and_the_study_goes_on_elsewhere(bench) -> None:
    found = bench(2 * NEED, 2)
    leak(found.devices, "0", 2 * NEED)
    found.tick_s = 2.0
    done = found.run(runtime={"parallel": 1}, study={"trials": 30})
    assert done.end is End.DONE
    (aside,) = events_of(done, DeviceSetAside)
    assert aside.device == "here/0" and aside.reason == "128 MiB of device 0 are not back since trial 0 has ended"
    places = [event.device for event in events_of(done, AttemptPlaced)]
    assert places == ["here/0"] + ["here/1"] * 29
    assert done.state.sessions[-1].set_aside == {"here/0": aside.reason}


def test_without_a_device_left_the_study_pauses(bench) -> None:
    found = bench(2 * NEED)
    leak(found.devices, "0", 2 * NEED)
    began_s = found.now_s
    done = found.run(runtime={"parallel": 1})
    assert done.end is End.PAUSED
    assert RETURN_WAIT_S <= found.now_s - began_s <= RETURN_WAIT_S + 60
    assert done.state.counts[Outcome.COMPLETE] == 1 and len(events_of(done, DeviceSetAside)) == 1
    assert found.watcher.notes[-1] == "no device is left to run on: 0 set aside"
    found.devices.set("0", 2 * NEED)
    assert found.run(runtime={"parallel": 1}).end is End.DONE, "the next session tries again"


def test_memory_of_nobody_counts_where_ours_are_listed(bench) -> None:
    found = bench(4096 * MIB)
    found.devices.set("0", 4096 * MIB, (PID, NEED, ProcessOwner.OURS))

    def gone() -> None:
        found.devices.set("0", 4096 * MIB, extra=1024 * MIB)

    found.on_idle = gone
    done = found.run(runtime={"parallel": 1})
    assert done.end is End.DONE, "what was never looked at while quiet tells nothing"


# ---- neighbours


def test_a_neighbour_is_waited_for(bench) -> None:
    found = bench(2 * NEED)
    found.devices.set("0", 2 * NEED, (OTHER, NEED + MIB, ProcessOwner.OTHER))

    def leaves() -> None:
        if found.idled == 20:
            found.devices.set("0", 2 * NEED)

    found.on_idle = leaves
    done = found.run()
    assert done.end is End.DONE and found.idled >= 20
    first = events_of(done, ParallelSet)[0]
    assert (first.parallel, first.reason) == (
        0,
        "trial 0 needs 128 MiB of device 0, which has 256 MiB, 129 MiB of them held by others",
    )
    assert all(len(trial.attempts) == 1 for trial in done.state.trials), "nobody failed"


def test_the_longer_a_neighbour_stays_the_rarer_it_is_looked_at(bench) -> None:
    found = bench(2 * NEED)
    found.devices.set("0", 2 * NEED, (OTHER, 2 * NEED, ProcessOwner.OTHER))
    done = found.run(runtime={"parallel": 4, "device_wait_s": 3600})
    assert done.end is End.PAUSED
    assert found.idled >= 350 and found.devices.asked < found.idled / 2


def test_a_neighbour_that_stays_pauses_the_study(bench) -> None:
    found = bench(2 * NEED)
    found.devices.set("0", 2 * NEED, (OTHER, 2 * NEED, ProcessOwner.OTHER))
    done = found.run(runtime={"parallel": 4, "device_wait_s": 60})
    assert done.end is End.PAUSED and not events_of(done, AttemptPlaced)
    (note,) = found.watcher.notes
    assert "s for room (runtime.device_wait_s): trial 0 needs 128 MiB of device 0" in note
    assert "free it, or set execution.memory_limit to what is left, then resume" in note


def test_a_small_neighbour_only_takes_the_place_of_some(bench) -> None:
    found = bench(4 * NEED)
    found.devices.set("0", 4 * NEED, (OTHER, 2 * NEED, ProcessOwner.OTHER))
    done = found.run()
    assert done.end is End.DONE and done.supervisor.most_at_once == 2


# ---- lost devices


def test_a_lost_device_is_set_aside_and_its_trial_goes_on_elsewhere(bench, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = Failure(FailureKind.DEVICE_LOST, "Xid 79: fell off the bus")
    monkeypatch.setattr("dryfit.study.loop.classify", lambda *_args, **_known: lost)
    script = iter([instant.Ends(None, instant.Evidence(exit_code=1))])
    done = bench(2 * NEED, 2).run(script=lambda _: next(script, None), runtime={"parallel": 1})
    assert done.end is End.DONE and done.state.counts[Outcome.COMPLETE] == 4
    (aside,) = events_of(done, DeviceSetAside)
    assert (aside.device, aside.reason) == ("here/0", "device_lost in trial 0: Xid 79: fell off the bus")
    assert [event.device for event in events_of(done, AttemptPlaced)] == ["here/0", *["here/1"] * 4]


# ---- as many as there is room for


def test_auto_on_a_device_goes_by_plans_and_cores(bench) -> None:
    found = bench(6 * NEED)
    done = found.run(runtime={"parallel": "auto"}, study={"trials": 12})
    assert done.end is End.DONE and done.supervisor.most_at_once == 6
    reasons = {event.reason for event in events_of(done, ParallelSet)}
    assert any("needs 128 MiB of device 0" in reason for reason in reasons)
    many = Bench(found.folder.with_name("many"), 100 * NEED)
    done = many.run(runtime={"parallel": "auto"}, study={"trials": 12})
    assert done.supervisor.most_at_once == 8, "sixteen cores, two for each trial"
    assert events_of(done, ParallelSet)[0].reason == "16 core(s), 2 for each trial"


def test_auto_keeps_to_the_hosts_memory(bench) -> None:
    def host(pids: Any) -> HostMemory:
        return HostMemory(GIB, 650 * MIB, dict.fromkeys(pids, 200 * MIB))

    done = bench(100 * NEED).run(host=host, runtime={"parallel": "auto"}, study={"trials": 8})
    assert done.end is End.DONE
    assert 1 < done.supervisor.most_at_once < 8
    reasons = [event.reason for event in events_of(done, ParallelSet)]
    assert reasons[0] == "16 core(s), 2 for each trial"
    assert reasons[1] == "nothing is known yet of the host memory of a trial: waiting for the first step of one"
    assert any("takes 130 MiB of the host's memory, which has room for" in reason for reason in reasons)


# ---- trials of several processes: a group of devices each, or on the CPU as many trials

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
    monkeypatch.setattr("dryfit.study.loop.classify", lambda *_args, **_known: lost)
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
