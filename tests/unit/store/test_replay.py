"""The fold of the ledger: counts, the best trial, runs of failures, histories."""

import json

import pytest

from dryfit.ledger.events import (
    EVENT,
    AttemptEnded,
    AttemptPlaced,
    AttemptStarted,
    CheckpointMade,
    Event,
    FailureFacts,
    ReportMade,
    SessionClosed,
    SessionOpened,
    StudyCreated,
    TrialAsked,
    TrialFinished,
    TrialPlanned,
    VerdictGiven,
)
from dryfit.ledger.replay import StudyState
from dryfit.settings.choices import BuiltInTask, Direction, Metric
from dryfit.settings.errors import Action, FailureKind, LedgerError
from dryfit.settings.execution import ExecutionChoice
from dryfit.settings.memory_terms import DeviceSpec, VerdictKind
from dryfit.settings.plan_messages import PlanAnswer
from dryfit.settings.trial import FoldScore, Goal, MetricPoint, Outcome


def fold(*events: Event) -> StudyState:
    state = StudyState()
    for index, event in enumerate(events):
        state.apply(event.model_copy(update={"seq": index, "at": float(index)}))
    return state


def created(direction: Direction = Direction.MAXIMIZE) -> StudyCreated:
    return StudyCreated(
        id="i", name="n", task=BuiltInTask.CRITERIA, metric=Metric.F1_MACRO, direction=direction, seed=0, space="{}"
    )


def asked(number: int) -> TrialAsked:
    return TrialAsked(number=number, params={}, internal={}, distributions={}, seed=number, fingerprint="f")


def finished(number: int, outcome: Outcome, value: float | None = None) -> TrialFinished:
    return TrialFinished(number=number, outcome=outcome, value=value)


def test_only_complete_pruned_and_failed_count() -> None:
    events: list[Event] = [created(), SessionOpened(pid=1, host="h", version="0", total=9)]
    for number, outcome in enumerate(Outcome):
        events += [asked(number), finished(number, outcome, 0.5 if outcome is Outcome.COMPLETE else None)]
    state = fold(*events, asked(5))
    assert state.counted == 3
    assert [trial.number for trial in state.open_trials] == [5]


def test_the_best_trial_follows_the_direction_and_the_earlier_of_equals_wins() -> None:
    ends = [0.3, 0.9, 0.9, float("nan"), 0.1]
    for direction, expected in ((Direction.MAXIMIZE, 1), (Direction.MINIMIZE, 4)):
        events: list[Event] = [created(direction)]
        for number, value in enumerate(ends):
            events += [asked(number), finished(number, Outcome.COMPLETE, value)]
        state = fold(*events)
        assert state.best.number == expected
        assert state.finished_since_best == len(ends) - 1 - expected


def test_with_several_goals_the_best_is_that_of_the_first() -> None:
    events: list[Event] = [created().model_copy(update={"also": (Goal(name="loss", direction=Direction.MINIMIZE),)})]
    for number, (value, other) in enumerate([(0.9, 0.5), (0.8, 0.4), (0.9, 0.5)]):
        end = TrialFinished(number=number, outcome=Outcome.COMPLETE, value=value, also=(other,))
        events += [asked(number), end]
    state = fold(*events)
    assert state.best.number == 0 and state.history()[1].values == (0.8, 0.4)
    assert state.directions == (Direction.MAXIMIZE, Direction.MINIMIZE)
    assert fold(created(), asked(0), finished(0, Outcome.COMPLETE, 0.5)).front == []


def test_failures_in_a_row_are_counted_within_a_session() -> None:
    opened = SessionOpened(pid=1, host="h", version="0", total=9)
    events: list[Event] = [created(), opened]
    for number in range(3):
        events += [asked(number), finished(number, Outcome.FAILED)]
    assert fold(*events).failures.in_a_row == 3
    assert fold(*events, asked(3), finished(3, Outcome.COMPLETE, 1.0)).failures.in_a_row == 0
    assert fold(*events, opened).failures.in_a_row == 0


def test_a_trial_keeps_its_reports_verdicts_and_attempts() -> None:
    facts = FailureFacts(kind=FailureKind.KILLED, sentence="s", action=Action.RETRY)
    state = fold(
        created(),
        SessionOpened(pid=1, host="h", version="0", total=9),
        asked(0),
        AttemptPlaced(number=0, attempt=1),
        AttemptStarted(number=0, attempt=1, pid=7, overhead_ms=12.5),
        ReportMade(number=0, attempt=1, point=MetricPoint(0, 4, 0.5, 0.6, {"f1_macro": 0.6})),
        VerdictGiven(number=0, n=0, proceed=True, system_attrs={"completed_rung_0": 0.6}),
        CheckpointMade(number=0, attempt=1, step=4),
        AttemptEnded(number=0, attempt=1, failure=facts),
        AttemptPlaced(number=0, attempt=2),
        SessionClosed(reason="x"),
    )
    (record,) = state.history()
    assert record.outcome is None
    assert [point.value for point in record.reports] == [0.6]
    assert record.system_attrs == {"completed_rung_0": 0.6}
    trial = state.trials[0]
    assert [past.reached_checkpoint for past in trial.past_failures] == [True]
    assert [attempt.ended for attempt in trial.attempts] == [True, False]
    assert state.wall_s == 9.0
    assert state.wall_until_s(20.0) == 19.0


ANSWER = PlanAnswer(
    verdict=VerdictKind.FITS_WITH,
    device=DeviceSpec(name="d", capacity_bytes=100),
    execution=ExecutionChoice(micro_batch=8, accumulation=1),
    fallbacks=(ExecutionChoice(micro_batch=4, accumulation=2), ExecutionChoice(micro_batch=2, accumulation=4)),
    torch="2.0",
    planner_s=1.0,
)


def opened() -> SessionOpened:
    return SessionOpened(pid=1, host="h", version="0", total=9)


def ran_out(number: int, attempt: int, action: Action) -> list[Event]:
    facts = FailureFacts(kind=FailureKind.OOM_DEVICE, sentence="s", action=action)
    return [AttemptPlaced(number=number, attempt=attempt), AttemptEnded(number=number, attempt=attempt, failure=facts)]


def test_a_plan_is_kept_and_shared_by_its_key() -> None:
    planned = TrialPlanned(number=0, key="k", answer=ANSWER)
    state = fold(created(), opened(), asked(0), planned, asked(1), TrialPlanned(number=1, key="k"))
    first, second = (trial.plan for trial in state.trials)
    assert first.answer == second.answer == ANSWER
    assert EVENT.validate_json(planned.model_dump_json()) == planned
    with pytest.raises(LedgerError, match="no earlier event has a plan with key x"):
        fold(created(), opened(), asked(0), TrialPlanned(number=0, key="x"))


def test_each_step_down_takes_the_next_fallback_and_a_new_plan_begins_anew() -> None:
    planned = TrialPlanned(number=0, key="k", answer=ANSWER)
    events: list[Event] = [created(), opened(), asked(0), planned]
    for taken, rows in enumerate((8, 4, 2)):
        plan = fold(*events).trials[0].plan
        assert (plan.execution.micro_batch, plan.fallbacks_left, plan.misses) == (rows, 2 - taken, taken)
        events += ran_out(0, taken + 1, Action.FALLBACK)
    again = fold(*events, TrialPlanned(number=0, key="other", answer=ANSWER)).trials[0].plan
    assert (again.fallbacks_taken, again.misses) == (0, 0)
    last = fold(*events[:-2], *ran_out(0, 3, Action.GIVE_UP)).trials[0].plan
    assert (last.fallbacks_taken, last.misses) == (2, 3)


def test_a_validation_that_runs_out_takes_the_next_validation_batch_and_no_fallback() -> None:
    answer = ANSWER.model_copy(update={"eval_batches": (16, 8)})
    events: list[Event] = [created(), opened(), asked(0), TrialPlanned(number=0, key="k", answer=answer)]
    seen: list[tuple[int, int, int]] = []
    for attempt, phase in enumerate(("evaluate", "train", "evaluate", "evaluate", "evaluate"), start=1):
        plan = fold(*events).trials[0].plan
        seen.append((plan.execution.micro_batch, plan.execution.eval_rows, plan.left_after("evaluate")))
        placed, over = ran_out(0, attempt, Action.FALLBACK)
        assert isinstance(over, AttemptEnded) and over.failure is not None
        failure = over.failure.model_copy(update={"phase": phase})
        events += [placed, over.model_copy(update={"failure": failure})]
        if not plan.left_after(phase):
            break
    # Four rows at once validate 16 by themselves: what was taken stays the most.
    assert seen == [(8, 32, 4), (8, 16, 3), (4, 16, 2), (4, 8, 1), (2, 8, 0)]
    plan = fold(*events[:-2]).trials[0].plan
    assert plan is not None and plan.runs_otherwise and plan.left_after("train") == 0


def test_refusals_in_a_row_outlive_a_kill_and_no_session_that_ended() -> None:
    events: list[Event] = [created(), opened()]
    for number in range(3):
        events += [asked(number), finished(number, Outcome.REFUSED)]
    assert fold(*events).refused_in_a_row == 3
    assert fold(*events, opened()).refused_in_a_row == 3
    assert fold(*events, SessionClosed(reason="refused"), opened()).refused_in_a_row == 0
    assert fold(*events, asked(3), finished(3, Outcome.PRUNED)).refused_in_a_row == 0


def test_events_of_older_versions_are_read() -> None:
    """They know no devices and observe no memory."""
    result = {
        "data_fingerprint": "f",
        "splits": {},
        "revisions": {},
        "device": "cuda",
        "device_count": 1,
        "versions": {},
    }
    old = EVENT.validate_json(json.dumps({"v": 1, "type": "resolved", "result": {"v": 1, **result}}))
    end = EVENT.validate_json(json.dumps({"v": 1, "type": "trial_finished", "number": 0, "outcome": "complete"}))
    state = fold(created(), opened(), old, asked(0), end)
    assert state.resolved is not None and state.resolved.device_spec is None
    assert state.trials[0].observed is None


def test_what_older_versions_wrote_of_devices_was_of_this_machine() -> None:
    lines = [
        '{"v":1,"seq":4,"at":1.0,"type":"attempt_placed","number":0,"attempt":1,"device":"0,GPU-b","needs_bytes":7}',
        '{"v":1,"seq":5,"at":1.0,"type":"attempt_placed","number":0,"attempt":2,"device":null}',
        '{"v":1,"seq":6,"at":1.0,"type":"device_set_aside","device":"0","reason":"lost"}',
    ]
    opened = SessionOpened(pid=1, host="h", version="0", total=9)
    state = fold(created(), opened, asked(0), *(EVENT.validate_json(line) for line in lines))
    first, second = state.trials[0].attempts
    assert (first.place, first.device, first.needs_bytes) == ("here/0,here/GPU-b", "here/0,here/GPU-b", 7)
    assert (second.place, second.device) == ("here/cpu", None)
    assert state.sessions[-1].set_aside == {"here/0": "lost"}


def test_an_attempt_is_where_its_node_is() -> None:
    placed = [
        AttemptPlaced(number=0, attempt=1, node="n1", device="n1/0"),
        AttemptPlaced(number=0, attempt=2, node="n2"),
    ]
    again = [EVENT.validate_json(EVENT.dump_json(event)) for event in placed]
    state = fold(created(), SessionOpened(pid=1, host="h", version="0", total=9), asked(0), *again)
    assert [attempt.place for attempt in state.trials[0].attempts] == ["n1/0", "n2/cpu"]


def test_the_history_goes_on_with_the_study() -> None:
    state = fold(created(), asked(0), asked(1), AttemptPlaced(number=1, attempt=1))
    past = state.history()
    assert [record.outcome for record in past] == [None, None]
    point = MetricPoint(0, 1, 1.0, 0.5, {})
    state.apply(ReportMade(number=1, attempt=1, point=point))
    state.apply(VerdictGiven(number=1, n=0, proceed=True, system_attrs={"completed_rung_0": 0.5}, reason="why"))
    state.apply(finished(0, Outcome.COMPLETE, 0.25))
    assert state.history() is past
    assert (past[0].value, past[1].reports, past[1].system_attrs) == (0.25, (point,), {"completed_rung_0": 0.5})
    assert [record.number for record in past.running] == [1]
    assert [trial.number for trial in state.open_trials] == [1]
    assert (state.trials[1].verdicts[0].proceed, state.trials[1].verdicts[0].reason) == (True, "why")


def test_distributions_that_many_trials_share_are_kept_once() -> None:
    texts = {"optim.lr": '{"name": "FloatDistribution"}'}
    events = [asked(number).model_copy(update={"distributions": dict(texts)}) for number in range(3)]
    state = fold(created(), *events)
    assert [trial.distributions for trial in state.trials] == [texts] * 3
    assert len({id(trial.distributions) for trial in state.trials}) == 1


def test_folds_are_remembered_and_those_of_before_had_none() -> None:
    folds = (FoldScore(0.5, (1.0,), 4, 9, 9), FoldScore(0.7, (3.0,), 9, 9, 9))
    finished = TrialFinished(number=0, outcome=Outcome.COMPLETE, value=0.6, also=(2.0,), folds=folds)
    trial = fold(created(), asked(0), EVENT.validate_json(finished.model_dump_json())).trials[0]
    assert trial.folds == folds
    assert trial.spreads == pytest.approx((0.02**0.5, 2**0.5))
    written = json.loads(TrialFinished(number=0, outcome=Outcome.COMPLETE, value=0.6).model_dump_json())
    del written["folds"]
    once = asked(0).model_dump(mode="json")
    del once["fold_reports"]
    report = ReportMade(number=0, attempt=1, point=MetricPoint(0, 1, 1.0, 0.5, {})).model_dump(mode="json")
    del report["point"]["fold"]
    placed = AttemptPlaced(number=0, attempt=1)
    older = fold(created(), *(EVENT.validate_json(json.dumps(e)) for e in (once,)), placed)
    for event in (report, written):
        older.apply(EVENT.validate_json(json.dumps(event)))
    trial = older.trials[0]
    assert (trial.fold_reports, trial.folds, trial.spreads, trial.reports[0].fold) == (1, (), (), 0)
