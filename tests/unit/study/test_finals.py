"""Configurations trained once more, with children that do their work at once."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import instant
import plan_jobs
from dryfit.ledger.folder import StudyLayout
from dryfit.ledger.replay import StudyState
from dryfit.ledger.state import PlanState, TrialState
from dryfit.processes.node import DeviceFacts, LocalNode
from dryfit.settings.errors import ChildError, ConfigError, MachineError
from dryfit.settings.execution import PlanSubject
from dryfit.settings.memory_terms import DeviceKind, DeviceSpec
from dryfit.settings.plan_messages import PlanRequest
from dryfit.settings.training_messages import FinalRequest, FinalResult
from dryfit.settings.trial import FoldScore
from dryfit.study.context import StudySnapshot
from dryfit.study.driver import StopRequests
from dryfit.study.final_training import FinalTraining, final_request, final_run, runs_at_once
from dryfit.study.requests import Placement

DEVICE = DeviceSpec(name="CPU", kind=DeviceKind.CPU, capacity_bytes=512 * plan_jobs.MIB)


def planned_too_low(folder: Path) -> tuple[StudySnapshot, TrialState]:
    """A trial whose plan fits, and which needs twice of it; its plan has four fallbacks."""
    study = instant.config(
        train={"batch_size": 16, "max_length": 64},
        head={"layers": 1, "hidden": plan_jobs.UNDERESTIMATED},
        runtime={"retries": 0},
    )
    subject = PlanSubject(task=study.study.task, settings=study.trial_settings)
    asked = PlanRequest(subjects=(subject,), device=DEVICE, execution=study.execution, trace_dir="")
    trial = TrialState(number=0, params={}, internal={}, distributions={}, seed=5, fingerprint="")
    trial.plan = PlanState("key", plan_jobs.answer(subject, asked))
    state = StudyState()
    state.trials.append(trial)
    snapshot = StudySnapshot(
        config=study,
        layout=StudyLayout(folder),
        state=state,
        resolved=plan_jobs.resolved(),
        nodes=instant.one_node(),
    )
    return snapshot, trial


def work_on(
    study: StudySnapshot, trial: TrialState, script: instant.Script = lambda _: None
) -> tuple[FinalTraining, list[FinalRequest], list[str]]:
    supervisor, told = instant.InstantSupervisor(script=script), list[str]()
    stops = StopRequests(study.layout.stop_request, supervisor.wake)
    work = FinalTraining(study, LocalNode(supervisor), stops, told.append)
    work.do([final_run(trial, seed=None, with_validation=False)], most=1)
    return work, [spec.body for spec in supervisor.started if isinstance(spec.body, FinalRequest)], told


def test_a_device_that_runs_out_of_memory_gets_the_next_fallback_of_the_trials_plan(tmp_path: Path) -> None:
    study, trial = planned_too_low(tmp_path)
    work, asked, told = work_on(study, trial)
    plans = [(one.training.plan.micro_batch, one.training.plan.accumulation) for one in asked]
    assert plans == [(16, 1), (8, 2)]
    assert [one.training.attempt for one in asked] == [1, 2]
    assert all(one.training.plan.checkpointing for one in asked)
    (result,) = work.results.values()
    assert isinstance(result, FinalResult)
    assert "oom_device" in told[0] and told[0].endswith("-> rung")
    assert (
        trial.plan is not None and trial.plan.fallbacks_taken == 0
    )  # what the study knows of its trial is not touched


def test_a_run_begins_with_the_fallback_that_its_trial_came_to(tmp_path: Path) -> None:
    study, trial = planned_too_low(tmp_path)
    trial.plan.fallbacks_taken = 2
    work, asked, _ = work_on(study, trial)
    assert [one.training.plan.micro_batch for one in asked] == [4]
    assert isinstance(*work.results.values(), FinalResult)


def test_without_a_fallback_it_fails_and_says_why(tmp_path: Path) -> None:
    study, trial = planned_too_low(tmp_path)
    trial.plan = None
    work, asked, _ = work_on(study, trial)
    assert len(asked) == 1
    (error,) = work.results.values()
    assert isinstance(error, ChildError)
    assert "oom_device" in str(error)


def test_with_validation_a_trial_of_folds_gives_the_mean_of_their_lengths(tmp_path: Path) -> None:
    study, trial = planned_too_low(tmp_path)
    data = study.config.data.model_copy(update={"folds": 3})
    study = replace(study, config=study.config.model_copy(update={"data": data}))
    with pytest.raises(ConfigError, match="it has none"):
        final_run(trial, seed=None, with_validation=True)
    trial.folds = (FoldScore(0.5, (), 10, 30, 30), FoldScore(0.6, (), 21, 25, 30), FoldScore(0.4, (), 30, 32, 32))
    run = final_run(trial, seed=None, with_validation=True)
    assert (run.last_step, run.schedule_steps) == (20, 31)
    asked = final_request(study, run, Placement(1, "here/cpu"))
    assert (asked.last_step, asked.schedule_steps) == (20, 31)
    assert asked.training.config.data.folds == 1, "a model to use is one"
    alone = final_run(trial, seed=None, with_validation=False)
    assert (alone.last_step, alone.schedule_steps) == (None, None)


def test_runs_of_several_processes_have_a_group_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    study, trial = planned_too_low(tmp_path)
    trial.plan = None
    tables: dict[str, Any] = {"head": study.config.head.model_copy(update={"hidden": 8})}
    tables["execution"] = study.config.execution.model_copy(update={"dp": 2, "memory_limit": None})
    tables["runtime"] = study.config.runtime.model_copy(update={"parallel": "auto"})
    there = study.resolved.model_copy(update={"device": DeviceKind.CUDA, "device_count": 5})
    nodes = instant.one_node(1, *map(DeviceFacts, "01234"))
    study = replace(study, config=study.config.model_copy(update=tables), resolved=there, nodes=nodes)
    assert runs_at_once(study, [final_run(trial, seed=None, with_validation=False)]) == 2
    supervisor = instant.InstantSupervisor()
    work = FinalTraining(study, LocalNode(supervisor), StopRequests(tmp_path / "stop", supervisor.wake), print)
    work.do([final_run(trial, seed=seed, with_validation=False) for seed in (1, 2, 3)], most=2)
    asked = [spec.body for spec in supervisor.started if isinstance(spec.body, FinalRequest)]
    assert [one.training.visible_device for one in asked] == ["0,1", "2,3", "0,1"]
    assert {one.training.plan.processes for one in asked} == {2}
    few = replace(study, nodes=instant.one_node(1, DeviceFacts("0")))
    work = FinalTraining(few, LocalNode(supervisor), StopRequests(tmp_path / "stop", supervisor.wake), print)
    with pytest.raises(MachineError, match="each of a trial's 2 processes a device of its own"):
        work.do([final_run(trial, seed=4, with_validation=False)], most=1)


def test_with_validation_it_is_said_where_what_validation_chose_may_stand(tmp_path: Path) -> None:
    """With the trial's weights, or those of a run that had validation: of its own seed first, then of the asked one."""
    study, trial = planned_too_low(tmp_path)
    trial.folds = (FoldScore(0.5, (), 10, 30, 30),)
    runs = [final_run(trial, seed=seed, with_validation=True) for seed in (None, 9)]
    trained = [study.layout.final(final_run(trial, seed=seed, with_validation=False).name).model for seed in (None, 9)]
    own = study.layout.trial(trial.number).best
    first, other = (final_request(study, run, Placement(1, "here/cpu")).chosen_dirs for run in runs)
    assert first == (str(own), str(trained[0]))
    assert other == (str(own), str(trained[0]), str(trained[1]))
    assert not final_request(
        study, final_run(trial, seed=None, with_validation=False), Placement(1, "here/cpu")
    ).chosen_dirs


def test_a_run_is_identified_by_its_trial_as_it_was_recorded(tmp_path: Path) -> None:
    """Wherever the rows lie now; another seed, other rows and another trial are another run."""
    study, trial = planned_too_low(tmp_path)

    def identity(study: StudySnapshot, trial: TrialState, seed: int | None = None) -> str:
        run = final_run(trial, seed=seed, with_validation=False)
        return final_request(study, run, Placement(1, "here/cpu")).training.fingerprint

    def with_data(**changes: object) -> StudySnapshot:
        data = study.config.data.model_copy(update=changes)
        return replace(study, config=study.config.model_copy(update={"data": data}))

    config = final_request(
        study, final_run(trial, seed=None, with_validation=False), Placement(1, "here/cpu")
    ).training.config
    assert identity(study, trial) == config.fingerprint, "nothing was recorded"
    trial.fingerprint = "recorded"
    own = identity(study, trial)
    assert own != config.fingerprint
    assert identity(with_data(train="/elsewhere/a.jsonl"), trial) == own
    assert identity(study, trial, seed=trial.seed) == own
    others = {
        identity(study, trial, seed=trial.seed + 1),
        identity(replace(study, resolved=study.resolved.model_copy(update={"data_fingerprint": "other"})), trial),
        identity(with_data(num_labels=3), trial),
        identity(with_data(multi_label=True), trial),
        identity(study, replace(trial, fingerprint="another")),
    }
    assert len(others | {own}) == 6
