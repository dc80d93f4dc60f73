"""A study on a GPU whose driver is played by a stand-in: memory that others hold, and a driver that hangs.

All but the driver, the device and what children compute is real: control process, children, the process that asks NVML.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import dryfit
import plan_jobs
from dryfit.ledger.events import AttemptPlaced, Event, ParallelSet
from dryfit.processes.gpus import NvmlLink
from dryfit.settings.errors import PERMITTED, Action, FailureKind
from dryfit.settings.jobs import JOBS
from dryfit.settings.trial import Outcome
from dryfit.settings.wire import Job
from dryfit.study.next_step import End
from nvml import Driver


@dataclass
class Watcher:
    """Hears of everything; the neighbour leaves once the study waits for it."""

    driver: Driver
    events: list[Event] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def on_open(self, layout: Any) -> None: ...

    def on_event(self, event: Event, state: Any) -> None:
        self.events.append(event)
        if isinstance(event, ParallelSet) and "held by others" in event.reason:
            self.driver.set({})

    def on_message(self, number: int, message: Any) -> None: ...

    def on_note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    plan_jobs.use_stand_ins(monkeypatch, Job.PLAN)
    monkeypatch.setitem(JOBS, Job.RESOLVE, JOBS[Job.RESOLVE]._replace(entry="plan_jobs:resolve_cuda"))
    monkeypatch.setitem(JOBS, Job.TRAIN, JOBS[Job.TRAIN]._replace(entry="plan_jobs:train_beside"))
    return Driver.install(tmp_path / "driver", monkeypatch)


def study(folder: Path) -> Path:
    """Two trials of 128 MiB each, none of which may be run again for a fault of its own."""
    return plan_jobs.write_study(
        folder,
        study={"trials": 2},
        train={"batch_size": 8, "max_length": 16},
        space={'"optim.lr"': "{low = 1e-5, high = 1e-3}"},
        runtime={"retries": 0},
    )


@pytest.mark.slow
def test_a_neighbour_that_takes_the_memory_is_waited_for_and_costs_nothing(
    tmp_path: Path, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = replace(PERMITTED[FailureKind.OOM_NEIGHBOUR], first_delay_s=0.0)
    monkeypatch.setitem(PERMITTED, FailureKind.OOM_NEIGHBOUR, at_once)
    driver.mark("comes")
    watcher = Watcher(driver)
    done = dryfit.tune(study(tmp_path / "study"), observers=[watcher])
    assert done.end is End.DONE
    first, second = dryfit.open_study(tmp_path / "study").trials
    failed, whole = first.attempts
    assert failed.failure is not None and whole.failure is None
    assert (failed.failure.kind, failed.failure.action) == (FailureKind.OOM_NEIGHBOUR, Action.RETRY)
    for fact in ("planned 128 MiB", "asked for 100 MiB", "held by others 1000 MiB", "of 1.0 GiB"):
        assert fact in failed.failure.sentence
    assert first.plan is not None and (first.plan.fallbacks_taken, first.plan.misses) == (0, 0), "its plan was right"
    assert [trial.outcome for trial in (first, second)] == [Outcome.COMPLETE] * 2
    assert len(second.attempts) == 1
    # It is placed again only after the study has seen that the neighbour has left.
    waits = [at for at, event in enumerate(watcher.events) if isinstance(event, ParallelSet)]
    placed = [at for at, event in enumerate(watcher.events) if isinstance(event, AttemptPlaced)]
    assert placed[0] < waits[0] < placed[1]
    told = watcher.events[waits[0]]
    assert isinstance(told, ParallelSet)
    assert "needs 128 MiB of device 0, which has 1.0 GiB, 1000 MiB of them held by others" in told.reason
    assert not any("NVML" in note for note in watcher.notes)


def test_a_driver_that_hangs_costs_a_study_its_evidence_and_nothing_else(
    tmp_path: Path, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dryfit.study.session.NvmlLink", partial(NvmlLink, answer_s=2.0))
    driver.mark("hangs")
    watcher = Watcher(driver)
    done = dryfit.tune(study(tmp_path / "study"), observers=[watcher])
    assert done.end is End.DONE
    trials = dryfit.open_study(tmp_path / "study").trials
    assert [(trial.outcome, len(trial.attempts)) for trial in trials] == [(Outcome.COMPLETE, 1)] * 2
    assert sum("has not answered for 2 s" in note for note in watcher.notes) == 1
