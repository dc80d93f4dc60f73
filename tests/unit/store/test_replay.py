"""The fold of the ledger: counts, the best trial, runs of failures, histories."""

from dryfit.core.failure import Action, FailureKind
from dryfit.core.settings import Direction, Metric, Task
from dryfit.core.trial import MetricPoint, Outcome
from dryfit.store.events import (
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
    VerdictGiven,
)
from dryfit.store.replay import StudyState


def fold(*events: Event) -> StudyState:
    state = StudyState()
    for index, event in enumerate(events):
        state.apply(event.model_copy(update={"seq": index, "at": float(index)}))
    return state


def created(direction: Direction = Direction.MAXIMIZE) -> StudyCreated:
    return StudyCreated(
        id="i", name="n", task=Task.CRITERIA, metric=Metric.F1_MACRO, direction=direction, seed=0, space="{}"
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
        assert state.best is not None
        assert state.best.number == expected
        assert state.finished_since_best == len(ends) - 1 - expected


def test_failures_in_a_row_are_counted_within_a_session() -> None:
    opened = SessionOpened(pid=1, host="h", version="0", total=9)
    events: list[Event] = [created(), opened]
    for number in range(3):
        events += [asked(number), finished(number, Outcome.FAILED)]
    assert fold(*events).failed_in_a_row == 3
    assert fold(*events, asked(3), finished(3, Outcome.COMPLETE, 1.0)).failed_in_a_row == 0
    assert fold(*events, opened).failed_in_a_row == 0


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
