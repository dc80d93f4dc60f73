"""The pure decider: what follows from a ledger and what runs."""

from collections.abc import Collection, Mapping
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from dryfit.ledger.events import (
    AttemptEnded,
    AttemptPlaced,
    FailureFacts,
    SessionOpened,
    StudyCreated,
    TrialAsked,
    TrialFinished,
)
from dryfit.ledger.replay import StudyState
from dryfit.processes.packing import CPU, Allocation, Cluster
from dryfit.settings.choices import BuiltInTask, Direction, Metric
from dryfit.settings.errors import Action, FailureKind
from dryfit.settings.training_messages import StopReason, TrainResult
from dryfit.settings.trial import FoldScore, Outcome
from dryfit.study.loop import finish_trial
from dryfit.study.next_step import (
    AskTrial,
    End,
    EndSession,
    Limits,
    Live,
    PlaceTrial,
    PlanTrial,
    Readiness,
    RefuseTrial,
    StopTrials,
    Wait,
    next_step,
    tripped,
)

LIMITS = Limits(total=4, parallel=2, max_wall_s=None, patience=None, max_failed_in_a_row=3, max_refused_in_a_row=5)


def study(*outcomes: Outcome | None, values: Mapping[int, float] | None = None) -> StudyState:
    """A study whose trials ended so; None: open."""
    state = StudyState()
    state.apply(
        StudyCreated(
            id="i",
            name="n",
            task=BuiltInTask.CRITERIA,
            metric=Metric.F1_MACRO,
            direction=Direction.MAXIMIZE,
            seed=0,
            space="",
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


def cluster(*running: int, alone: Collection[int] = ()) -> Cluster:
    """A machine without a device on which trials run, some of them alone."""
    return Cluster(allocations=[Allocation(number, CPU.place, exclusive=number in alone) for number in running])


def live(*running: int, stopping: End | None = None, waiting: Mapping[int, float] | None = None) -> Live:
    return Live(cluster(*running), waiting or {}, stopping, now_s=100.0)


C, P, F, R = Outcome.COMPLETE, Outcome.PRUNED, Outcome.FAILED, Outcome.REFUSED


def test_new_trials_are_asked_for_while_a_process_is_free() -> None:
    assert next_step(study(), LIMITS, live()) == AskTrial(0)
    assert next_step(study(None), LIMITS, live(0)) == AskTrial(1)
    assert next_step(study(None, None), LIMITS, live(0, 1)) == Wait()


def test_trials_that_exist_come_first() -> None:
    assert next_step(study(C, None, None), LIMITS, live()) == PlaceTrial(1)
    assert next_step(study(C, None, None), LIMITS, live(1)) == PlaceTrial(2)


def test_a_refused_trial_costs_no_budget_a_failed_one_does() -> None:
    assert next_step(study(C, R, F, P), LIMITS, live()) == AskTrial(4)
    assert next_step(study(C, C, F, P), LIMITS, live()) == EndSession(End.DONE)


def test_never_more_than_the_total_is_open() -> None:
    assert next_step(study(C, C, C, None), LIMITS, live(3)) == Wait()
    assert next_step(study(C, C, C, None), LIMITS, live(3, waiting={9: 5.0})) == Wait()


def test_a_waiting_trial_is_waited_for() -> None:
    assert next_step(study(C, C, C, None), LIMITS, live(waiting={3: 107.0})) == Wait(107.0)
    assert next_step(study(C, None), LIMITS, live(waiting={1: 107.0})) == AskTrial(2)
    assert next_step(study(C, C, C, None), LIMITS, live(waiting={3: 99.0})) == PlaceTrial(3)


def test_a_stop_starts_nothing_and_leaves_when_all_have_gone() -> None:
    assert next_step(study(None), LIMITS, live(0, stopping=End.STOPPED)) == Wait()
    assert next_step(study(None), LIMITS, live(stopping=End.STOPPED)) == EndSession(End.STOPPED)


def test_hours_failures_and_patience_end_a_study() -> None:
    hours = Limits(4, 2, max_wall_s=0.0, patience=None, max_failed_in_a_row=3, max_refused_in_a_row=5)
    assert next_step(study(None), hours, live(0)) == StopTrials(End.MAX_HOURS)
    assert next_step(study(F, F, F), LIMITS, live()) == EndSession(End.TOO_MANY_FAILURES)
    assert next_step(study(F, F, F, None), LIMITS, live(3)) == Wait()
    patient = Limits(9, 2, None, patience=2, max_failed_in_a_row=9, max_refused_in_a_row=9)
    assert next_step(study(C, C, values={1: 0.4}), patient, live()) == AskTrial(2)
    assert next_step(study(C, C, P), patient, live()) == EndSession(End.NO_IMPROVEMENT)
    assert next_step(study(C, C, P, None), patient, live(3)) == Wait()
    assert next_step(study(C, C, P, None), patient, live()) == PlaceTrial(3)


def failing(*facts: FailureFacts, well: int = 0, after: int = 0) -> StudyState:
    """A study whose trials failed so, after ``well`` that completed; ``after`` complete at the end."""
    state = study(*[C] * well)
    for one in facts:
        number = len(state.trials)
        state.apply(TrialAsked(number=number, params={}, internal={}, distributions={}, seed=0, fingerprint=""))
        state.apply(AttemptPlaced(number=number, attempt=1))
        state.apply(AttemptEnded(number=number, attempt=1, failure=one))
        state.apply(TrialFinished(number=number, outcome=F))
    for _ in range(after):
        number = len(state.trials)
        state.apply(TrialAsked(number=number, params={}, internal={}, distributions={}, seed=0, fingerprint=""))
        state.apply(TrialFinished(number=number, outcome=C, value=0.1))
    return state


def facts(kind: FailureKind, error: str = "a.Odd", place: str = "m.py:7 in f", said: str = "odd") -> FailureFacts:
    return FailureFacts(kind=kind, sentence="s", action=Action.GIVE_UP, error_type=error, place=place, error=said)


def test_the_breaker_tells_failures_apart() -> None:
    limits = replace(LIMITS, total=99, max_failed_in_a_row=9)
    own, config, data = (facts(kind) for kind in (FailureKind.USER_CODE, FailureKind.CONFIG, FailureKind.DATA))
    elsewhere = facts(FailureKind.USER_CODE, place="m.py:9 in g")
    other_value = facts(FailureKind.CONFIG, said="another model")
    memory = facts(FailureKind.OOM_DEVICE)
    killed = facts(FailureKind.KILLED)

    def end(state: StudyState) -> End | None:
        trip = tripped(state, limits)
        assert trip is None or trip.sentence
        return trip.end if trip is not None else None

    assert end(failing(own, own)) is None
    assert end(failing(own, own, own)) is End.SAME_FAILURE
    assert end(failing(own, elsewhere, own, own)) is End.SAME_FAILURE
    assert end(failing(own, elsewhere, facts(FailureKind.USER_CODE, error="b.Odd"))) is None
    assert end(failing(own, own, own, well=1)) is None  # others ran: it is not the study
    assert end(failing(own, own, own, after=1)) is None
    assert end(failing(config, config, config, well=1)) is End.SAME_FAILURE
    assert end(failing(config, config, other_value, well=1)) is None
    assert end(failing(config, config, config, after=1)) is None
    assert end(failing(data)) is End.BAD_DATA
    assert end(failing(data, well=1)) is None
    assert end(failing(*[memory] * 8)) is None  # the parameters are to blame, and the sampler hears of it
    assert end(failing(*[memory] * 9)) is End.TOO_MANY_FAILURES
    assert end(failing(*[killed] * 99)) is None
    assert end(failing(*[own, *[killed] * 9, own], well=1)) is None


U, E, X = Readiness.UNPLANNED, Readiness.EXCLUSIVE, Readiness.REFUSED


def planned(
    *running: int,
    planning: tuple[int, ...] = (),
    readiness: Mapping[int, Readiness] | None = None,
    waiting: Mapping[int, float] | None = None,
) -> Live:
    alone = [number for number, ready in (readiness or {}).items() if ready is E]
    return Live(cluster(*running, alone=alone), waiting or {}, None, 100.0, frozenset(planning), readiness or {})


def test_a_trial_is_planned_before_it_is_placed_and_nothing_is_asked_meanwhile() -> None:
    alone = replace(LIMITS, parallel=1)
    assert next_step(study(None), alone, planned(readiness={0: U})) == PlanTrial(0)
    assert next_step(study(None), alone, planned(planning=(0,), readiness={0: U})) == Wait()
    assert next_step(study(None), alone, planned()) == PlaceTrial(0)
    assert next_step(study(None), LIMITS, planned(planning=(0,), readiness={0: U})) == AskTrial(1)


def test_planning_runs_beside_a_full_house_but_only_so_many_at_once() -> None:
    full = planned(0, 1, readiness={2: U, 3: U})
    assert next_step(study(None, None, None, None), LIMITS, full) == PlanTrial(2)
    busy = planned(0, 1, planning=(2, 3), readiness={2: U, 3: U})
    assert next_step(study(None, None, None, None), LIMITS, busy) == Wait()
    three = planned(planning=(0, 1), readiness={0: U, 1: U, 2: U})
    assert next_step(study(None, None, None), replace(LIMITS, parallel=3), three) == Wait()


def test_a_planner_that_must_wait_is_waited_for() -> None:
    later = planned(readiness={0: U}, waiting={0: 107.0})
    assert next_step(study(None), replace(LIMITS, parallel=1), later) == Wait(107.0)
    assert next_step(study(None), LIMITS, planned(readiness={0: U}, waiting={0: 99.0})) == PlanTrial(0)


def test_what_does_not_fit_is_refused_at_once_and_costs_no_budget() -> None:
    assert next_step(study(None, None, None), LIMITS, planned(0, 1, readiness={2: X})) == RefuseTrial(2)
    assert next_step(study(C, R, C, C), LIMITS, planned()) == AskTrial(4)


def test_refusals_in_a_row_end_a_study_in_which_nothing_else_is_left() -> None:
    assert next_step(study(R, R, R, R), LIMITS, planned()) == AskTrial(4)
    assert next_step(study(R, R, R, R, R), LIMITS, planned()) == EndSession(End.REFUSED)
    assert next_step(study(C, R, R, R, R, R), LIMITS, planned()) == EndSession(End.REFUSED)
    assert next_step(study(R, R, R, R, R, None), LIMITS, planned()) == PlaceTrial(5)
    assert next_step(study(R, R, R, R, R, None), LIMITS, planned(5)) == Wait()
    assert next_step(study(R, R, R, R, R, C), LIMITS, planned()) == AskTrial(6)


def test_an_exclusive_trial_waits_for_the_others_and_they_for_it() -> None:
    assert next_step(study(None, None), LIMITS, planned(0, readiness={1: E})) == Wait()
    assert next_step(study(C, None), LIMITS, planned(readiness={1: E})) == PlaceTrial(1)
    assert next_step(study(C, None), LIMITS, planned(1, readiness={1: E})) == Wait()
    assert next_step(study(None, None), LIMITS, planned(0, readiness={0: E})) == Wait()
    assert next_step(study(None, None), LIMITS, planned(readiness={1: E})) == PlaceTrial(0)
    assert next_step(study(None, None), LIMITS, planned(0, readiness={0: E, 1: U})) == PlanTrial(1)


@given(
    st.lists(st.sampled_from([C, P, F, R, None]), max_size=8),
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(1, 6),
    st.data(),
)
def test_whatever_plans_say_the_study_ends(
    outcomes: list[Outcome | None], total: int, parallel: int, refusals: int, data: st.DataObject
) -> None:
    """Every trial is planned once before it runs, an exclusive one runs alone, and the study ends with its total."""
    limits = Limits(total, parallel, None, None, 10**6, refusals)
    state = study(*outcomes)
    before = state.counted + len(state.open_trials)
    readiness = {trial.number: U for trial in state.open_trials}
    running: set[int] = set()
    planning: set[int] = set()
    planned_once: set[int] = set()
    answers = st.sampled_from([Readiness.PLANNED, E, X, X])
    for _ in range(1000):
        alone = [number for number, ready in readiness.items() if ready is E]
        now = Live(cluster(*running, alone=alone), {}, None, 100.0, frozenset(planning), dict(readiness))
        match next_step(state, limits, now):
            case AskTrial(number):
                assert len(running | planning) < parallel
                state.apply(TrialAsked(number=number, params={}, internal={}, distributions={}, seed=0, fingerprint=""))
                readiness[number] = U
            case PlanTrial(number):
                assert readiness[number] is U and number not in planned_once
                planning.add(number)
                planned_once.add(number)
                assert len(planning) <= limits.planners
            case RefuseTrial(number):
                assert readiness[number] is X
                state.apply(TrialFinished(number=number, outcome=R))
            case PlaceTrial(number):
                assert readiness[number] in (Readiness.PLANNED, E)
                running.add(number)
                assert len(running) <= parallel
                assert len(running) == 1 or not any(readiness[one] is E for one in running)
            case Wait():
                number = data.draw(st.sampled_from(sorted(running | planning)))
                if number in planning:
                    planning.remove(number)
                    readiness[number] = data.draw(answers)
                else:
                    running.remove(number)
                    outcome = data.draw(st.sampled_from([C, P, F]))
                    state.apply(TrialFinished(number=number, outcome=outcome, value=0.1 if outcome is C else None))
            case EndSession(why):
                assert why is (End.DONE if state.counted >= total else End.REFUSED)
                assert why is End.DONE or state.refused_in_a_row >= refusals
                break
            case StopTrials():
                raise AssertionError
    else:
        raise AssertionError("no end")
    assert not state.open_trials
    assert state.counted == total or before > total or why is End.REFUSED


def test_results_become_ends() -> None:
    trial = study(None).trials[0]
    done = finish_trial(trial, TrainResult(value=0.7, best=1, steps=9))
    assert (done.outcome, done.value, done.best) == (C, 0.7, 1)
    early = finish_trial(trial, TrainResult(value=0.7, best=0, steps=9, stopped_by=StopReason.EARLY_STOPPING))
    assert (early.outcome, early.reason) == (C, "early stopping")
    pruned = finish_trial(trial, TrainResult(value=0.7, best=0, steps=9, stopped_by=StopReason.VERDICT))
    assert (pruned.outcome, pruned.value) == (P, None)
    for reason in (StopReason.REQUEST, StopReason.SIGTERM):
        assert finish_trial(trial, TrainResult(value=0.7, best=0, steps=9, stopped_by=reason)) is None
    for nothing in (None, float("nan")):
        lost = finish_trial(trial, TrainResult(value=nothing, best=None, steps=9))
        assert lost.outcome is P


def test_folds_go_with_the_end_of_their_trial() -> None:
    trial = study(None).trials[0]
    folds = tuple(FoldScore(value, (), 4, steps, 9) for value, steps in ((0.5, 9), (0.7, 5), (0.6, 9)))
    early = TrainResult(value=0.6, best=None, steps=23, folds=folds, stopped_by=StopReason.EARLY_STOPPING)
    done = finish_trial(trial, early)
    assert (done.outcome, done.folds, done.best, done.steps) == (C, folds, None, 23)
    assert done.reason == "early stopping in 1 of 3 folds"
    pruned = finish_trial(
        trial, TrainResult(value=None, best=None, steps=9, folds=folds[:1], stopped_by=StopReason.VERDICT)
    )
    assert pruned is not None and (pruned.outcome, pruned.folds) == (P, folds[:1])
    lost = finish_trial(trial, TrainResult(value=None, best=None, steps=18, folds=folds[:1]))
    assert lost is not None and (lost.outcome, lost.folds, lost.value) == (P, folds[:1], None)
