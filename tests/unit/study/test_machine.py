"""The pure decider: what follows from a ledger and what runs."""

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from dryfit.core.settings import Direction, Metric, Task
from dryfit.core.trial import Outcome
from dryfit.core.wire import StopReason, TrainResult
from dryfit.store.events import SessionOpened, StudyCreated, TrialAsked, TrialFinished
from dryfit.store.replay import StudyState
from dryfit.study.machine import Ask, End, Leave, Limits, Live, Place, StopRunning, Wait, finish_trial, next_step

LIMITS = Limits(total=4, parallel=2, max_wall_s=None, patience=None, max_failed_in_a_row=3)


def study(*outcomes: Outcome | None, values: Mapping[int, float] | None = None) -> StudyState:
    """A study whose trials ended so; None: open."""
    state = StudyState()
    state.apply(
        StudyCreated(
            id="i", name="n", task=Task.CRITERIA, metric=Metric.F1_MACRO, direction=Direction.MAXIMIZE, seed=0, space=""
        )
    )
    state.apply(SessionOpened(pid=1, host="h", version="0", total=4, at=100.0))
    for number, outcome in enumerate(outcomes):
        state.apply(
            TrialAsked(number=number, params={}, internal={}, distributions={}, seed=0, fingerprint="", at=100.0)
        )
        if outcome is not None:
            value = (values or {}).get(number, 0.5) if outcome is Outcome.COMPLETE else None
            state.apply(TrialFinished(number=number, outcome=outcome, value=value, at=100.0))
    return state


def live(*running: int, stopping: End | None = None, waiting: Mapping[int, float] | None = None) -> Live:
    return Live(frozenset(running), waiting or {}, stopping, now_s=100.0)


C, P, F, R = Outcome.COMPLETE, Outcome.PRUNED, Outcome.FAILED, Outcome.REFUSED


def test_new_trials_are_asked_for_while_a_process_is_free() -> None:
    assert next_step(study(), LIMITS, live()) == Ask(0)
    assert next_step(study(None), LIMITS, live(0)) == Ask(1)
    assert next_step(study(None, None), LIMITS, live(0, 1)) == Wait()


def test_trials_that_exist_come_first() -> None:
    assert next_step(study(C, None, None), LIMITS, live()) == Place(1)
    assert next_step(study(C, None, None), LIMITS, live(1)) == Place(2)


def test_a_refused_trial_costs_no_budget_a_failed_one_does() -> None:
    assert next_step(study(C, R, F, P), LIMITS, live()) == Ask(4)
    assert next_step(study(C, C, F, P), LIMITS, live()) == Leave(End.DONE)


def test_never_more_than_the_total_is_open() -> None:
    assert next_step(study(C, C, C, None), LIMITS, live(3)) == Wait()
    assert next_step(study(C, C, C, None), LIMITS, live(3, waiting={9: 5.0})) == Wait()


def test_a_waiting_trial_is_waited_for() -> None:
    assert next_step(study(C, C, C, None), LIMITS, live(waiting={3: 107.0})) == Wait(107.0)
    assert next_step(study(C, None), LIMITS, live(waiting={1: 107.0})) == Ask(2)
    assert next_step(study(C, C, C, None), LIMITS, live(waiting={3: 99.0})) == Place(3)


def test_a_stop_starts_nothing_and_leaves_when_all_have_gone() -> None:
    assert next_step(study(None), LIMITS, live(0, stopping=End.STOPPED)) == Wait()
    assert next_step(study(None), LIMITS, live(stopping=End.STOPPED)) == Leave(End.STOPPED)


def test_hours_failures_and_patience_end_a_study() -> None:
    hours = Limits(4, 2, max_wall_s=0.0, patience=None, max_failed_in_a_row=3)
    assert next_step(study(None), hours, live(0)) == StopRunning(End.MAX_HOURS)
    assert next_step(study(F, F, F), LIMITS, live()) == Leave(End.TOO_MANY_FAILURES)
    assert next_step(study(F, F, F, None), LIMITS, live(3)) == Wait()
    patient = Limits(9, 2, None, patience=2, max_failed_in_a_row=9)
    assert next_step(study(C, C, values={1: 0.4}), patient, live()) == Ask(2)
    assert next_step(study(C, C, P), patient, live()) == Leave(End.NO_IMPROVEMENT)
    assert next_step(study(C, C, P, None), patient, live(3)) == Wait()
    assert next_step(study(C, C, P, None), patient, live()) == Place(3)


@given(
    st.lists(st.sampled_from([C, P, F, R, None]), max_size=8),
    st.integers(1, 6),
    st.integers(1, 4),
    st.data(),
)
def test_whatever_has_happened_the_study_ends_with_exactly_its_total(
    outcomes: list[Outcome | None], total: int, parallel: int, data: st.DataObject
) -> None:
    limits = Limits(total, parallel, None, None, 10**6)
    state = study(*outcomes)
    before = state.counted + len(state.open_trials)
    running: set[int] = set()
    for _ in range(500):
        match next_step(state, limits, live(*running)):
            case Ask(number):
                state.apply(TrialAsked(number=number, params={}, internal={}, distributions={}, seed=0, fingerprint=""))
            case Place(number):
                assert number not in running
                running.add(number)
                assert len(running) <= parallel
            case Wait():
                number = data.draw(st.sampled_from(sorted(running)))
                running.remove(number)
                outcome = data.draw(st.sampled_from([C, C, P, F, R]))
                state.apply(TrialFinished(number=number, outcome=outcome, value=0.1 if outcome is C else None))
            case Leave(why):
                assert why is End.DONE
                break
            case StopRunning():
                raise AssertionError
    else:
        raise AssertionError("no end")
    assert not state.open_trials
    refused_later = sum(1 for trial in state.trials if trial.outcome is R)
    if before <= total:
        assert state.counted == total
    assert len(state.trials) == state.counted + refused_later


def test_results_become_ends() -> None:
    trial = study(None).trials[0]
    done = finish_trial(trial, TrainResult(value=0.7, best=1, steps=9))
    assert done is not None
    assert (done.outcome, done.value, done.best) == (C, 0.7, 1)
    early = finish_trial(trial, TrainResult(value=0.7, best=0, steps=9, stopped_by=StopReason.EARLY_STOPPING))
    assert early is not None
    assert (early.outcome, early.reason) == (C, "early stopping")
    pruned = finish_trial(trial, TrainResult(value=0.7, best=0, steps=9, stopped_by=StopReason.VERDICT))
    assert pruned is not None
    assert (pruned.outcome, pruned.value) == (P, None)
    for reason in (StopReason.REQUEST, StopReason.SIGTERM):
        assert finish_trial(trial, TrainResult(value=0.7, best=0, steps=9, stopped_by=reason)) is None
    for nothing in (None, float("nan")):
        lost = finish_trial(trial, TrainResult(value=nothing, best=None, steps=9))
        assert lost is not None
        assert lost.outcome is P
