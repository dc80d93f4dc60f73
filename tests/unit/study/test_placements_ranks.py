"""``execution.tp = "auto"``: trials that fit on one device have one, the others a group; planned by stand-ins."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import instant
import plan_jobs
from device_bench import NEED, Bench, events_of
from dryfit.documents.story import story_lines, trial_story
from dryfit.ledger.events import AttemptPlaced
from dryfit.ledger.folder import StudyLayout
from dryfit.processes.node import DeviceFacts, HostMemory
from dryfit.search.follower_runs import user_attributes
from dryfit.settings.execution import ExecutionChoice, PlanSubject
from dryfit.settings.memory_terms import DeviceKind, VerdictKind
from dryfit.settings.plan_messages import PlanAnswer, PlanRequest
from dryfit.settings.trial import Outcome
from dryfit.study.context import degrees_at_hand
from dryfit.study.next_step import End
from dryfit.study.trial_plans import host_bytes_for

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


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Bench]:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return lambda capacity_bytes, count=1: Bench(tmp_path / "study", capacity_bytes, count)


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
