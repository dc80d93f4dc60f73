"""Trials on devices: packed by their plans, kept from memory that is not there, and what is told of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import instant
import plan_jobs
from device_bench import GIB, MIB, NEED, OTHER, PID, Bench, events_of
from dryfit.ledger.events import AttemptPlaced, DeviceSetAside, ParallelSet
from dryfit.processes.gpus import ProcessOwner
from dryfit.processes.node import HostMemory
from dryfit.settings.errors import Failure, FailureKind
from dryfit.settings.plan_messages import PlanAnswer
from dryfit.settings.trial import Outcome
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


def test_what_does_not_fit_beside_waits_and_the_reason_is_told(bench) -> None:
    done = bench(2 * NEED - 1, 2).run()
    assert done.end is End.DONE and done.supervisor.most_at_once == 2
    told = [(event.parallel, event.reason) for event in events_of(done, ParallelSet)]
    assert told[0][0] == 2
    assert "needs 128 MiB of device 0, which has 256 MiB, 128 MiB of them planned for trial 0" in told[0][1]
    assert told[-1] == (4, "runtime.parallel is 4"), "in the end nothing waits for room"


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
    crash = instant.InstantSupervisor._work

    def work(self: instant.InstantSupervisor, spec: Any) -> Any:
        if getattr(spec.body, "visible_device", None) == "0":
            raise AssertionError if len(self.trained()) > 1 else instant.Crash
        return crash(self, spec)

    def crashing(self: instant.InstantSupervisor, spec: Any) -> Any:
        try:
            return work(self, spec)
        except instant.Crash:
            return [instant.ChildExited(spec.key, None, instant.Evidence(exit_code=1))]

    monkeypatch.setattr(instant.InstantSupervisor, "_work", crashing)
    lost = Failure(FailureKind.DEVICE_LOST, "Xid 79: fell off the bus")
    monkeypatch.setattr("dryfit.study.trial_ends.classify", lambda *_args, **_known: lost)
    found = bench(2 * NEED, 2)
    done = found.run(runtime={"parallel": 1})
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
