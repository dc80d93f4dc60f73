"""Trials on devices: packed by their plans, kept from memory that is not there, and what is told of it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import instant
import plan_jobs
from device_bench import GIB, MIB, NEED, OTHER, PID, Bench, events_of
from dryfit.documents.story import story_lines, trial_story
from dryfit.ledger.events import AttemptPlaced, DeviceSetAside, FirstStepDone, ParallelSet, TrialPlanned
from dryfit.ledger.folder import StudyLayout
from dryfit.ledger.replay import StudyState
from dryfit.processes.gpus import ProcessOwner
from dryfit.processes.node import DeviceFacts, HostMemory, NodeFacts, local_facts
from dryfit.search.follower_runs import user_attributes
from dryfit.settings.devices import HERE, place_on
from dryfit.settings.errors import Evidence, Failure, FailureKind
from dryfit.settings.execution import ExecutionChoice, PlanSubject
from dryfit.settings.memory_terms import DeviceKind, DeviceSpec, VerdictKind
from dryfit.settings.plan_messages import PlanAnswer, PlanRequest
from dryfit.settings.study_file_checks import cross_problems
from dryfit.settings.trial import Outcome
from dryfit.settings.wire import FirstStep
from dryfit.study.context import StudyContext, StudySnapshot, degrees_at_hand
from dryfit.study.next_step import End
from dryfit.study.placements import RETURN_WAIT_S
from dryfit.study.trial_plans import host_bytes_for, kind_of, plan_here, planned_devices
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


# ---- ``execution.tp = "auto"``: trials that fit on one device have one, the others a group; planned by stand-ins


AUTO = {"memory_limit": None, "tp": "auto"}
BIG = 32
"""Rows of a batch that the stand-in planner cuts."""


def cutting(subject: PlanSubject, body: PlanRequest) -> PlanAnswer:
    """The stand-in's answer; a large batch takes two ranks, and either may fall back to the next number."""
    rows, length = subject.settings.train.batch_size, subject.settings.train.max_length
    assert body.execution.tp == "auto"
    own, more = (2, 4) if rows == BIG else (None, 2)
    choice = ExecutionChoice(micro_batch=rows, accumulation=1, tp=own)
    further = [choice.model_copy(update={"tp": more})] if more in body.degrees else []
    if own is not None and own not in body.degrees:
        return plan_jobs.answer(subject, body)
    return PlanAnswer(
        verdict=VerdictKind.FITS if own is None else VerdictKind.FITS_WITH,
        device=body.device,
        memory=plan_jobs.memory(rows if own is None else rows // own, length),
        execution=choice,
        fallbacks=tuple(further),
        torch="2.0",
        planner_s=0.1,
    )


MIXED = {"space": {"train.batch_size": [8, BIG]}, "search": {"sampler": "random"}, "execution": AUTO}


def test_small_trials_have_a_device_and_large_ones_a_group(bench, tmp_path: Path) -> None:
    found = bench(3 * NEED, 4)
    done = found.run(**MIXED, answerer=cutting, study={"trials": 12})
    assert done.end is End.DONE and done.state.counts[Outcome.COMPLETE] == 12
    placed = events_of(done, AttemptPlaced)
    sizes = {event.number: len(event.device.split(",")) for event in placed}
    rows = {trial.number: trial.params["train.batch_size"] for trial in done.state.trials}
    assert sizes == {number: 2 if batch == BIG else 1 for number, batch in rows.items()}
    assert set(sizes.values()) == {1, 2}
    for body in done.supervisor.trained():
        cut = body.plan.effective_batch == BIG
        assert body.plan.tp == body.plan.processes == (2 if cut else 1)
        assert body.visible_device is not None and len(body.visible_device.split(",")) == body.plan.processes
        assert body.plan.threads == (16 // (4 * body.plan.processes))
    assert not found.watcher.notes, "no device stays idle: a trial of one takes it"
    (large, *_) = [number for number, batch in rows.items() if batch == BIG]
    trial = done.state.trials[large]
    assert trial.plan is not None and trial.plan.execution is not None and trial.plan.execution.tp == 2
    lines = story_lines(trial_story(done.state, large, done.events, StudyLayout(tmp_path / "study")))
    assert "    run with tensor parallelism over 2 ranks, micro-batch 32 x 1" in lines
    attributes = {number: user_attributes(one) for number, one in enumerate(done.state.trials)}
    assert {number: one.get("tp", 1) for number, one in attributes.items()} == sizes


def test_a_resumed_trial_keeps_its_ranks_and_other_devices_are_planned_for_anew(bench, tmp_path: Path) -> None:
    large = {"train": {"batch_size": BIG, "max_length": 16}, "execution": AUTO, "study": {"trials": 1}}
    study = instant.config(**large)
    found = bench(3 * NEED, 2)
    at = next(n for n, one in enumerate(found.run(**large, answerer=cutting).events) if isinstance(one, AttemptPlaced))
    folder = tmp_path / "killed"
    instant.run(folder, study, change=found.on_cuda, kill_after=at + 1, devices=found.devices, answerer=cutting)
    again = instant.run(folder, study, change=found.on_cuda, devices=found.devices, answerer=cutting)
    assert again.end is End.DONE and not again.supervisor.planned()
    assert [event.device for event in events_of(again, AttemptPlaced)] == ["here/0,here/1"] * 2
    fewer = replace(found, folder=tmp_path / "fewer", count=1, specs=())
    instant.run(fewer.folder, study, change=found.on_cuda, kill_after=at + 1, devices=found.devices, answerer=cutting)
    one = instant.run(fewer.folder, study, change=fewer.on_cuda, devices=found.devices, answerer=cutting)
    assert [body.degrees for body in one.supervisor.planned()] == [()]
    assert one.state.trials[0].attempts[-1].device == "here/0", "checkpoints are whole: it goes on with what there is"


def test_after_running_out_of_memory_the_next_fallback_may_be_more_ranks(bench) -> None:
    def runs_out(body: Any) -> Any:
        if body.plan.tp == 1:
            raise plan_jobs.OutOfMemoryError("CUDA out of memory")

    done = bench(3 * NEED, 2).run(execution=AUTO, study={"trials": 1}, script=runs_out, answerer=cutting)
    (trial,) = done.state.trials
    assert trial.outcome is Outcome.COMPLETE
    assert [attempt.device for attempt in trial.attempts] == ["here/0", "here/0,here/1"]
    assert [body.plan.tp for body in done.supervisor.trained()] == [1, 2]
    assert user_attributes(trial)["tp"] == 2


@pytest.mark.parametrize(
    ("cores", "runtime", "threads", "expected"),
    [(1, 1, None, ()), (2, 1, None, (2,)), (8, 1, None, (2, 4, 8)), (8, 2, 2, (2,)), (8, "auto", None, (2, 4))],
)
def test_on_the_cpu_each_rank_of_every_trial_needs_cores(
    cores: int, runtime: Any, threads: int | None, expected: tuple[int, ...]
) -> None:
    study = instant.config(execution={"tp": "auto", "threads": threads}, runtime={"parallel": runtime})
    nodes = instant.one_node(cores, *map(DeviceFacts, "01234"))
    assert degrees_at_hand(study, DeviceKind.CPU, nodes) == expected
    fixed = instant.config(execution={"tp": 2})
    assert degrees_at_hand(fixed, DeviceKind.CPU, nodes) == ()
    assert degrees_at_hand(study, DeviceKind.CUDA, nodes) == (2, 4)


def test_on_the_cpu_the_host_must_have_room_for_all_ranks(tmp_path: Path) -> None:
    gib = 2**30

    def host(pids: Any) -> HostMemory:
        return HostMemory(16 * gib, 16 * gib, dict.fromkeys(pids, 0))

    study = instant.config(
        execution={"tp": "auto", "memory_limit": "512MiB"},
        study={"trials": 1},
        train={"batch_size": BIG, "max_length": 16},
    )
    done = instant.run(
        tmp_path,
        study,
        change=lambda one: replace(one, nodes=instant.one_node(2, host_bytes=16 * gib)),
        host=host,
        answerer=cutting,
    )
    (request,) = done.supervisor.planned()
    assert (request.degrees, request.host_bytes) == ((2,), 14 * gib)
    (body,) = done.supervisor.trained()
    assert (body.plan.tp, body.plan.threads, body.visible_device) == (2, 1, None)
    (placed,) = events_of(done, AttemptPlaced)
    assert placed.device is None and placed.needs_bytes == 2 * plan_jobs.needs(BIG // 2, 16)
    nodes = instant.one_node(2).values()
    assert host_bytes_for(instant.config(execution={"tp": 2}).execution, DeviceKind.CPU, nodes) is None
    assert host_bytes_for(study.execution, DeviceKind.CUDA, nodes) is None


# ---- Trials on devices of several kinds: each is planned for every kind, and placed by the plan for the one it gets


SMALL = DeviceSpec(name="small", capacity_bytes=NEED, capability=(8, 6))
LARGE = DeviceSpec(name="large", capacity_bytes=4 * NEED, capability=(9, 0))
SIZES = {"train.batch_size": [4, 8, 16, 32]}
"""With 16 tokens: 64 MiB to 512 MiB; the small device takes the larger ones with checkpointing and smaller batches."""


@pytest.fixture
def bench_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Bench]:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return lambda *specs: Bench(tmp_path / "study", 0, specs=specs)


def placed_by(done: instant.Run) -> dict[int, tuple[str, Any]]:
    """The kind of device, and the execution of the plan, that each trial was placed by at last."""
    return {
        trial.number: (trial.plan.answer.device.name, trial.plan.execution)
        for trial in done.state.trials
        if trial.plan is not None
    }


def test_each_trial_is_planned_for_every_kind_and_runs_by_the_plan_of_its_own(bench_of) -> None:
    done = bench_of(SMALL, LARGE).run(space=SIZES, study={"trials": 12, "seed": 1}, runtime={"parallel": 4})
    assert done.end is End.DONE and done.state.counts[Outcome.COMPLETE] == 12
    names = {"here/0": "small", "here/1": "large"}
    seen = set[tuple[str, bool]]()
    bodies = {body.config.number: body for body in done.supervisor.trained()}
    for trial in done.state.trials:
        assert {plan.answer.device.name for plan in trial.plans.values()} == {"small", "large"}
        kind, choice = placed_by(done)[trial.number]
        assert kind == names[trial.attempts[-1].place], "its plan is that of the device that it got"
        plan, train = bodies[trial.number].plan, bodies[trial.number].config.settings.train
        assert (plan.micro_batch, plan.checkpointing) == (choice.micro_batch, choice.checkpointing)
        used = plan_jobs.needs(plan.micro_batch, train.max_length, checkpointing=plan.checkpointing)
        assert used <= (NEED if kind == "small" else 4 * NEED), "it fits the device it runs on"
        seen.add((kind, plan.checkpointing))
    assert ("large", False) in seen and ("small", True) in seen, "one space, two ways to run it"


def test_what_fits_the_large_kind_alone_runs_there_and_is_not_refused(bench_of) -> None:
    tiny = SMALL.model_copy(update={"capacity_bytes": 7 * MIB})  # not even one row with checkpointing: 8 MiB
    done = bench_of(tiny, LARGE).run(study={"trials": 6}, runtime={"parallel": 4})
    assert done.end is End.DONE and done.state.counts[Outcome.COMPLETE] == 6
    assert {event.device for event in events_of(done, AttemptPlaced)} == {"here/1"}
    verdicts = {
        event.answer.device.name: event.answer.verdict for event in events_of(done, TrialPlanned) if event.answer
    }
    assert verdicts == {"small": VerdictKind.REFUSED, "large": VerdictKind.FITS}


def test_what_fits_no_kind_is_refused_with_the_numbers_of_each(bench_of) -> None:
    kinds = [one.model_copy(update={"capacity_bytes": size * MIB}) for one, size in ((SMALL, 6), (LARGE, 7))]
    done = bench_of(*kinds).run(study={"trials": 2})
    assert done.end is End.REFUSED
    first = done.state.trials[0]
    assert first.outcome is Outcome.REFUSED
    assert "small has 6 MiB" in first.reason and "large has 7 MiB" in first.reason


def test_an_empty_device_comes_before_a_shared_one_and_a_small_one_before_a_large_one(bench_of) -> None:
    small = SMALL.model_copy(update={"capacity_bytes": 4 * NEED})
    large = LARGE.model_copy(update={"capacity_bytes": 8 * NEED})
    done = bench_of(large, small).run(runtime={"parallel": 4})
    assert [event.device for event in events_of(done, AttemptPlaced)] == ["here/1", "here/0", "here/1", "here/0"]


def test_a_ledger_says_by_which_plan_each_attempt_ran(bench_of) -> None:
    done = bench_of(SMALL, LARGE).run(space=SIZES, study={"trials": 6, "seed": 2}, runtime={"parallel": 3})
    again = StudyState()
    for event in done.events:
        again.apply(type(event).model_validate_json(event.model_dump_json()))
    assert {trial.number: trial.plan.key for trial in again.trials if trial.plan} == {
        event.number: event.plan for event in events_of(done, AttemptPlaced)
    }


def stopped_once(done_on: dict[int, list[str]]) -> Callable[[Any], instant.Ends | None]:
    """Trials that each lose their first process."""

    def script(body: Any) -> instant.Ends | None:
        places = done_on.setdefault(body.config.number, [])
        places.append(body.visible_device)
        return instant.Ends(None, instant.Evidence(server_lost=True)) if len(places) == 1 else None

    return script


@pytest.mark.parametrize("change", [False, True])
def test_an_interrupted_trial_keeps_to_its_kind_unless_it_may_change(bench_of, change: bool) -> None:
    """The small device is lost to a neighbour once the trial has begun there."""
    found, places = bench_of(SMALL, LARGE), dict[int, list[str]]()
    script = stopped_once(places)

    def taken(body: Any) -> instant.Ends | None:
        if body.visible_device == "0":
            found.devices.set("0", NEED, (OTHER, NEED, ProcessOwner.OTHER))
        return script(body)

    done = found.run(
        script=taken,
        study={"trials": 1},
        runtime={"parallel": 1, "device_wait_s": 60},
        nodes={"change_device": change},
    )
    assert places[0][0] == "0"
    if change:
        assert done.end is End.DONE and places == {0: ["0", "1"]}
    else:
        assert done.end is End.PAUSED and places == {0: ["0"]}
        assert "of device 0, which has 128 MiB, 128 MiB of them held by others" in found.watcher.notes[-1]


def test_trials_in_bf16_keep_to_gpus_that_compute_in_it(bench_of) -> None:
    old = LARGE.model_copy(update={"name": "old", "capability": (7, 5)})
    runs = {"runtime": {"parallel": 2}, "nodes": {}, "study": {"trials": 8, "seed": 1}}
    mixed = {"train.precision": ["bf16", "fp32"]}
    done = bench_of(LARGE, old).run(**runs, space=mixed)
    places = {(trial.params["train.precision"], trial.attempts[-1].place) for trial in done.state.trials}
    assert ("bf16", "here/1") not in places and {("bf16", "here/0"), ("fp32", "here/1")} <= places


def test_a_trial_is_trained_once_more_by_the_plan_for_the_device_that_is_there(bench_of) -> None:
    done = bench_of(SMALL, LARGE).run(study={"trials": 1}, train={"batch_size": 16}, runtime={"parallel": 1})
    (trial,) = done.state.trials
    assert placed_by(done)[0][0] == "small"
    for there, name in ((LARGE, "large"), (SMALL, "small"), (A100, "small")):
        plan = plan_here(planned_devices(study_of({"here": [there]}, there, nodes=None)), trial)
        assert plan is not None and plan.answer.device.name == name, "where nothing is known of a device, as it ran"


# ---- which kinds there are


def study_of(machines: dict[str, Sequence[DeviceSpec | None]], spec: DeviceSpec | None, **tables: Any) -> StudySnapshot:
    """A study on nodes with these devices, the first machine of which has ``spec``."""
    facts = {
        name: NodeFacts(4, 2**34, tuple(DeviceFacts(str(at), spec=one) for at, one in enumerate(devices)))
        for name, devices in machines.items()
    }
    found = {"device": DeviceKind.CUDA, "device_count": 1 if spec else 0, "device_spec": spec}
    known = {"execution": {"memory_limit": None}, "nodes": {}} | tables
    config = instant.config(**{name: keys for name, keys in known.items() if keys is not None})
    resolved = plan_jobs.resolved().model_copy(update=found)
    return StudySnapshot(config=config, layout=None, state=StudyState(), resolved=resolved, nodes=facts)  # type: ignore[arg-type]


A100 = DeviceSpec(name="NVIDIA A100-SXM4-80GB", capacity_bytes=81_151 * MIB, capability=(8, 0))
RTX = DeviceSpec(name="NVIDIA GeForce RTX 4090", capacity_bytes=24_118 * MIB, capability=(8, 9))


def test_gpus_of_one_model_are_one_kind_though_tools_count_them_differently() -> None:
    other = A100.model_copy(update={"capacity_bytes": A100.capacity_bytes - 30 * MIB})
    study = study_of({"here": [A100], "n1": [other, RTX], "n2": [RTX]}, A100)
    kinds = planned_devices(study)
    assert [kind.name for kind in kinds] == [RTX.name, A100.name], "smallest first"
    assert all(kind.capacity_bytes % (128 * MIB) == 0 for kind in kinds)
    assert kinds[1].capacity_bytes <= other.capacity_bytes
    alone = study_of({"here": [A100]}, A100, nodes=None)
    assert planned_devices(alone) == (A100,), "without other machines nothing is rounded: plans of old stay good"


def test_gpus_of_two_models_in_one_machine_are_two_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    twin = A100.model_copy(update={"capacity_bytes": A100.capacity_bytes - 30 * MIB})
    alone = study_of({}, RTX, nodes=None)
    found = {"device_count": 3, "device_specs": (A100, RTX, twin)}
    resolved = alone.resolved.model_copy(update=found)
    kinds = planned_devices(replace(alone, resolved=resolved, nodes={"here": local_facts(resolved)}))
    assert [kind.name for kind in kinds] == [RTX.name, A100.name]


def test_a_device_that_nobody_describes_counts_as_one_of_the_first_machine() -> None:
    study = study_of({"here": [RTX], "n1": [None]}, RTX)
    assert len(planned_devices(study)) == 1
    assert kind_of(DeviceFacts("0"), study_of({"n1": [None]}, None)) is None
    assert planned_devices(study_of({"n1": [None]}, None)) == ()


def test_a_limit_is_one_of_every_kind() -> None:
    limited = planned_devices(study_of({"here": [RTX], "n1": [A100]}, RTX, execution={"memory_limit": "40GiB"}))
    assert [kind.capacity_bytes // GIB for kind in limited] == [23, 40]


def test_what_is_expected_counts_until_something_as_large_is_there() -> None:
    expecting = {"nodes": {"expect": "a100-80"}}
    waiting = planned_devices(study_of({"here": [RTX]}, RTX, **expecting))
    assert [kind.name for kind in waiting] == [RTX.name, "a100-80"]
    there = planned_devices(study_of({"here": [RTX], "n1": [A100]}, RTX, **expecting))
    assert [kind.name for kind in there] == [RTX.name, A100.name]


def test_what_fits_only_what_is_expected_waits_for_it_and_runs_when_it_has_come(bench_of) -> None:
    found = bench_of(SMALL.model_copy(update={"capacity_bytes": 7 * MIB}))
    nodes: dict[str, NodeFacts] = {}
    on_cuda = found.on_cuda

    def joining(study: StudyContext) -> StudyContext:
        study = on_cuda(study)
        nodes.update(study.nodes)
        return replace(study, nodes=nodes)

    def come() -> None:
        if found.idled == 3:
            found.devices.set("1", 24 * GIB)
            nodes["here"] = replace(nodes["here"], devices=(*nodes["here"].devices, DeviceFacts("1", spec=RTX)))

    found.on_cuda, found.on_idle = joining, come  # type: ignore[method-assign]
    done = found.run(study={"trials": 2}, nodes={"expect": "rtx4090"}, runtime={"parallel": 1})
    assert done.end is End.DONE and done.state.counts[Outcome.COMPLETE] == 2
    assert {event.device for event in events_of(done, AttemptPlaced)} == {"here/1"}


@pytest.mark.parametrize(
    ("expect", "said"), [("rtx9999", "rtx9999"), ("cpu:16GiB", "is no GPU"), ("", "no device of that name")]
)
def test_what_is_no_gpu_is_refused_as_an_expectation(expect: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        instant.config(nodes={"expect": expect})


@pytest.mark.parametrize("says", [{"expect": "h100"}, {"change_device": True}])
def test_what_is_said_of_gpus_is_refused_where_trials_run_on_cpus(says: dict[str, Any]) -> None:
    config = instant.config(nodes=says)
    assert not [problem for problem in cross_problems(config) if problem.path[0] == "nodes"]
    on_cpus = config.model_copy(update={"execution": config.execution.model_copy(update={"device": "cpu"})})
    (problem,) = [problem for problem in cross_problems(on_cpus) if problem.path[0] == "nodes"]
    assert problem.path == ("nodes", *says) and "trials run on CPUs" in problem.found
