"""What earlier failures ask for reaches the request; nothing of it changes what is learned."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import instant
from dryfit.ledger.events import FailureFacts
from dryfit.processes.child_spec import ChildEvent, ChildExited, ChildSpec
from dryfit.settings.errors import Action, AttemptTerms, ChildFault, Evidence, FailureKind
from dryfit.settings.jobs import ChildResult
from dryfit.settings.tables import ObjectiveSettings, TrainSettings, TrialSettings
from dryfit.settings.training_messages import ObjectiveRequest, TrainRequest
from dryfit.settings.trial import Outcome, TrialConfig
from dryfit.study import context as trial_config
from dryfit.study.context import StudyContext
from dryfit.study.requests import Placement, child_spec, lighter_workers


@pytest.fixture
def study(tmp_path: Path) -> StudyContext:
    kept: list[StudyContext] = []

    def keep(context: StudyContext) -> StudyContext:
        kept.append(context)
        return context

    instant.run(tmp_path, instant.config(study={"trials": 1}, execution={"loader_workers": 5}), change=keep)
    return kept[0]


def asked(study: StudyContext, **terms: object) -> TrainRequest:
    placement = Placement(2, "here/1", terms=AttemptTerms(**terms), memory_fraction=0.25)
    body = child_spec(study, study.state.trials[0], placement).body
    assert isinstance(body, TrainRequest)
    return body


class LaterTrain(TrainSettings):
    later: int = 0


class LaterSettings(TrialSettings):
    train: LaterTrain = LaterTrain()


class LaterConfig(TrialConfig):
    settings: LaterSettings


def later_config(settings: TrialSettings, **fields: Any) -> LaterConfig:
    """What a dryfit makes of a trial that has one key more in ``[train]``."""
    return LaterConfig(settings=LaterSettings.model_validate_json(settings.model_dump_json()), **fields)


def test_a_trial_is_the_one_that_was_recorded_also_for_a_later_version(
    study: StudyContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = study.state.trials[0].fingerprint
    assert asked(study).fingerprint == asked(study).config.fingerprint == recorded
    monkeypatch.setattr(trial_config, "TrialConfig", later_config)
    body = asked(study)
    assert '"later":0' in body.config.model_dump_json()
    assert body.config.fingerprint != recorded
    assert body.fingerprint == recorded


def test_a_trial_that_was_moved_is_the_one_that_was_recorded(study: StudyContext) -> None:
    recorded = study.state.trials[0].fingerprint
    data = study.config.data.model_copy(update={"train": "/elsewhere/a.jsonl"})
    body = asked(replace(study, config=study.config.model_copy(update={"data": data})))
    assert body.config.fingerprint != recorded
    assert body.fingerprint == recorded


def test_a_trial_without_a_record_is_what_its_configuration_is_hashed_to(study: StudyContext) -> None:
    study.state.trials[0].fingerprint = ""
    body = asked(study)
    assert body.fingerprint == body.config.fingerprint


def test_without_terms_nothing_is_special(study: StudyContext) -> None:
    body = asked(study)
    assert (body.attempt, body.visible_device, body.memory_fraction) == (2, "1", 0.25)
    assert (body.diagnostic, body.file_sharing, body.plan.loader_workers) == (False, False, 5)


@pytest.mark.parametrize(("lighter", "workers"), [(1, 2), (2, 1), (3, 0), (4, 0)])
def test_a_lighter_attempt_has_fewer_workers_and_in_the_end_none(
    study: StudyContext, lighter: int, workers: int
) -> None:
    body = asked(study, lighter=lighter)
    assert (body.plan.loader_workers, body.file_sharing) == (workers, True)


def test_even_many_workers_come_to_none_in_the_end() -> None:
    assert [lighter_workers(32, lighter) for lighter in range(5)] == [32, 16, 8, 0, 0]


def test_the_pace_of_a_trial_is_learned_until_it_was_taken_to_hang(study: StudyContext) -> None:
    trial = study.state.trials[0]
    limits = child_spec(study, trial, Placement(2, "here/1")).limits
    assert limits.hang_learned
    assert limits.hang_s == study.config.runtime.hang_timeout_s
    hung = FailureFacts(kind=FailureKind.HANG, sentence="silent", action=Action.RETRY)
    trial.attempts.append(replace(trial.attempts[0], number=2, failure=hung))
    assert not child_spec(study, trial, Placement(3, "here/1")).limits.hang_learned


def test_a_function_of_the_users_own_beats_from_a_thread_that_knows_no_pace(study: StudyContext) -> None:
    own = ObjectiveSettings(function="module:function", goals=("loss",))
    called = replace(study, config=study.config.model_copy(update={"objective": own}))
    spec = child_spec(called, study.state.trials[0], Placement(1, "here/1"))
    assert isinstance(spec.body, ObjectiveRequest)
    assert spec.body.visible_device == "1"
    assert not spec.limits.hang_learned


def test_the_loop_places_the_next_attempt_on_the_terms_of_the_failures_before(tmp_path: Path) -> None:
    """The first attempt runs out of shared memory; the second has half the workers, and the ledger says so."""
    started: list[TrainRequest] = []

    class Full(instant.InstantSupervisor):
        def _work(self, spec: ChildSpec) -> list[ChildEvent]:
            if isinstance(spec.body, TrainRequest):
                started.append(spec.body)
                if len(started) == 1:
                    text = "unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)"
                    fault = ChildFault(type_names=("builtins.RuntimeError",), code="", message=text)
                    return [ChildExited(spec.key, ChildResult(fault=fault), Evidence(exit_code=1, fault=fault))]
            return super()._work(spec)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(instant, "InstantSupervisor", Full)
        config = instant.config(study={"trials": 1}, execution={"loader_workers": 4})
        state = instant.run(tmp_path, config).state
    assert [(body.plan.loader_workers, body.file_sharing) for body in started] == [(4, False), (2, True)]
    assert [len(attempt.terms) for attempt in state.trials[0].attempts] == [0, 1]
    assert state.trials[0].outcome is Outcome.COMPLETE
