"""Remaining times from what has been seen; no number where that is too little."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dryfit.documents.live_study import Pace, Running, expected_end, study_left_s, trial_left_s


def test_a_trials_pace_is_that_of_this_process():
    assert trial_left_s(Pace(first_step=0, step=25, total_steps=100, elapsed_s=50.0)) == 150.0
    # Resumed at step 80: the steps before the checkpoint took no time of this process.
    assert trial_left_s(Pace(first_step=80, step=90, total_steps=100, elapsed_s=20.0)) == 20.0
    assert trial_left_s(Pace(first_step=0, step=100, total_steps=100, elapsed_s=20.0)) == 0.0


@pytest.mark.parametrize(
    "pace",
    [
        Pace(0, 0, 100, 30.0),  # no step yet
        Pace(7, 8, 100, 30.0),  # one step tells nothing of the next
        Pace(0, 50, 0, 30.0),  # nobody knows how many
        Pace(0, 50, 100, 0.2),  # too short to be measured
    ],
)
def test_too_little_is_known_of_a_trial(pace):
    assert trial_left_s(pace) is None


def test_trials_that_were_cut_short_count_for_those_that_have_not_come_so_far():
    assert expected_end(0.1, ()) == 1.0
    assert expected_end(0.1, (0.25, 0.25, 1.0)) == 0.5
    assert expected_end(0.3, (0.25, 0.25, 1.0)) == 1.0
    assert expected_end(1.0, (0.25, 1.0)) == 1.0


def running(step: int, elapsed_s: float, total: int = 100) -> Running:
    return Running(elapsed_s, Pace(0, step, total, elapsed_s))


def test_a_study_of_finished_trials_only():
    assert study_left_s(waiting=4, running=(), finished_s=(10.0, 30.0), parallel=1) == 80.0
    assert study_left_s(waiting=4, running=(), finished_s=(10.0, 30.0), parallel=2) == 40.0
    assert study_left_s(waiting=1, running=(), finished_s=(10.0, 30.0), parallel=8) == 20.0
    assert study_left_s(waiting=0, running=(), finished_s=()) == 0.0


def test_running_trials_are_asked_for_their_own_pace():
    assert study_left_s(waiting=0, running=(running(50, 10.0), running(20, 10.0)), finished_s=(5.0,), parallel=2) == 40
    # The longest trial bounds the study, however many places there are.
    assert study_left_s(waiting=1, running=(running(10, 10.0),), finished_s=(20.0,), parallel=2) == 90.0
    # Nothing has finished: the running trial says what a trial takes.
    assert study_left_s(waiting=3, running=(running(50, 10.0),), finished_s=(), parallel=1) == 10.0 + 3 * 20.0


def test_pruning_shortens_what_is_expected():
    whole = study_left_s(waiting=0, running=(running(20, 10.0),), finished_s=(50.0,), ends=())
    cut = study_left_s(waiting=0, running=(running(20, 10.0),), finished_s=(50.0,), ends=(0.3, 0.5))
    assert whole == 40.0
    assert cut == pytest.approx(10.0)  # to 40 % of its steps, of which it has done 20 %
    past = study_left_s(waiting=0, running=(running(60, 30.0),), finished_s=(50.0,), ends=(0.3, 0.5))
    assert past == pytest.approx(20.0)  # it came further than any that was cut


def test_a_trial_without_a_pace_takes_what_the_others_took():
    young = Running(5.0, Pace(0, 0, 0, 0.0))
    assert study_left_s(waiting=0, running=(young,), finished_s=(20.0,)) == 15.0
    assert study_left_s(waiting=0, running=(Running(50.0, young.pace),), finished_s=(20.0,)) == 0.0
    assert study_left_s(waiting=2, running=(young,), finished_s=()) is None
    assert study_left_s(waiting=0, running=(young,), finished_s=()) is None
    assert study_left_s(waiting=2, running=(), finished_s=()) is None


@given(
    waiting=st.integers(0, 50),
    steps=st.lists(st.tuples(st.integers(0, 100), st.floats(0, 1e5)), max_size=5),
    finished=st.lists(st.floats(0, 1e5), max_size=5),
    ends=st.lists(st.floats(0, 1), max_size=5),
    parallel=st.integers(1, 8),
)
def test_an_estimate_is_never_negative_and_more_places_never_make_it_longer(waiting, steps, finished, ends, parallel):
    trials = [running(step, elapsed_s) for step, elapsed_s in steps]
    known = {"waiting": waiting, "running": trials, "finished_s": finished, "ends": ends}
    found = study_left_s(**known, parallel=parallel)
    assert found is None or found >= 0
    more = study_left_s(**known, parallel=parallel + 1)
    assert (found is None) == (more is None)
    assert found is None or more is None or more <= found
