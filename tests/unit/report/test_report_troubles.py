"""What is said of a study that is not all well."""

import pytest

from dryfit.documents.report_tables import trouble_lines, troubles_of
from dryfit.ledger.events import AttemptEnded, DeviceSetAside, ParallelSet
from dryfit.settings.errors import Action, FailureKind
from dryfit.settings.trial import Outcome
from golden import Golden
from ledgers import Script, eventful


def begun() -> Script:
    script = Script()
    script.begin()
    return script


def test_counts_of_a_study_in_which_everything_happens() -> None:
    state = eventful().state()
    troubles = troubles_of(state)
    hit = {trial.number for trial in state.trials if any(attempt.failure for attempt in trial.attempts)}
    tried = [trial for trial in state.trials if trial.outcome is not None and trial.attempts]
    assert troubles.success.trials == len(tried)
    assert troubles.success.clean_trials == len(tried) - len(hit)
    ended = [attempt for trial in state.trials for attempt in trial.attempts if attempt.ended]
    assert troubles.success.attempts == len(ended)
    assert troubles.success.clean_attempts == sum(attempt.failure is None for attempt in ended)
    assert troubles.success.vanished == 0
    kinds = {view.kind: view for view in troubles.failures}
    assert set(kinds) == {FailureKind.LOST, FailureKind.NATIVE_CRASH, FailureKind.USER_CODE}
    crashes = [one for one in ended if one.failure is not None and one.failure.kind is FailureKind.NATIVE_CRASH]
    of_crashes = kinds[FailureKind.NATIVE_CRASH]
    assert (of_crashes.trials, of_crashes.attempts, len(crashes)) == ((7, 17, 27, 37), 4, 4)
    assert of_crashes.time_s == pytest.approx(sum(attempt.time_s for attempt in crashes), abs=1e-3)
    assert kinds[FailureKind.USER_CODE].actions == {"give_up": 4}
    costs = [view.lost_s for view in troubles.failures]
    assert costs == sorted(costs, reverse=True)


def test_a_killed_run_is_told_of_before_anybody_looks_at_it(golden: Golden) -> None:
    script = eventful()
    script.now_s += 3600
    script.open()
    troubles = troubles_of(script.state())
    assert troubles.success.vanished == 1
    golden("status", trouble_lines(troubles))


def test_what_was_asked_for_and_what_is_a_result_are_no_failures() -> None:
    script = begun()
    script.ask(0, {})
    script.place(0)
    script.fail(0, 1, FailureKind.INTERRUPTED, "stopped as asked", Action.PAUSE)
    script.place(0, 2)
    script.fail(0, 2, FailureKind.NONFINITE, "loss is nan at step 7", Action.PRUNE)
    script.finish(0, Outcome.PRUNED, reason="nonfinite: loss is nan at step 7")
    troubles = troubles_of(script.state())
    assert (troubles.success.trials, troubles.success.clean_trials) == (1, 1)
    assert (troubles.success.attempts, troubles.success.clean_attempts) == (2, 2)
    assert {view.kind for view in troubles.failures} == {FailureKind.INTERRUPTED, FailureKind.NONFINITE}


def test_reasons_that_differ_in_numbers_are_one(golden: Golden) -> None:
    script = begun()
    for number in range(4):
        script.ask(number, {})
        script.place(number)
        script.say(AttemptEnded(number=number, attempt=1), 1)
    script.finish(0, Outcome.PRUNED, reason="worse than the median of 5 trials at report 2")
    script.finish(1, Outcome.PRUNED, reason="worse than the median of 12 trials at report 0")
    script.finish(2, Outcome.PRUNED, reason="nonfinite: the loss is nan at step 7, learning rate 3e-05")
    script.finish(3, Outcome.FAILED, reason="hang: gave no sign of life for 600 s")
    golden("status", trouble_lines(troubles_of(script.state())))


def test_many_reasons_are_cut_and_counted(golden: Golden) -> None:
    script = begun()
    for number in range(9):
        script.ask(number, {})
        script.finish(number, Outcome.PRUNED, reason=f"because of {'x' * (number + 1)}")
    golden("status", trouble_lines(troubles_of(script.state())))


def test_a_failure_kind_is_one_line_with_what_followed(golden: Golden) -> None:
    script = begun()
    for number, action in ((0, Action.RETRY), (1, Action.GIVE_UP)):
        script.ask(number, {})
        script.place(number)
        script.fail(number, 1, FailureKind.HANG, f"gave no sign of life for {number}", action)
    golden("status", trouble_lines(troubles_of(script.state())))


def test_why_no_more_trials_run_at_once(golden: Golden) -> None:
    script = begun()
    before = trouble_lines(troubles_of(script.state()))
    script.say(ParallelSet(parallel=3, reason="a fourth trial of 7.1 GiB does not fit beside them"))
    script.say(DeviceSetAside(device="2", reason="2.0 GiB are not given back"))
    golden("status", before, trouble_lines(troubles_of(script.state())))


def test_shares_of_nothing_are_not_told(golden: Golden) -> None:
    script = begun()
    script.complete(0, {}, [0.5])
    golden("status", *(trouble_lines(troubles_of(one.state())) for one in (begun(), script)))
