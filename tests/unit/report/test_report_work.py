"""How long processes worked, and how much of that was lost: pauses, checkpoints, clocks that jump."""

import pytest

from dryfit.documents.document import duration_text
from dryfit.documents.live_study import LiveStudy
from dryfit.documents.report_tables import csv_text, failures_by_kind, outcomes_table, trials_table
from dryfit.documents.summary import summarise
from dryfit.ledger.events import AttemptEnded, CheckpointMade
from dryfit.settings.errors import Action, FailureKind
from dryfit.settings.trial import Outcome
from ledgers import Script, begun

NIGHT_S = 9 * 3600.0


def with_a_trial() -> Script:
    script = begun()
    script.ask(0, {})
    return script


def overnight() -> Script:
    """A trial whose control process is killed 10 s after its checkpoint; the next run begins after a night."""
    script = with_a_trial()
    script.place(0)
    script.say(CheckpointMade(number=0, attempt=1, step=20), 30)
    script.report(0, 0, 0.5)  # 5.2 s, with a checkpoint at their end
    script.say(CheckpointMade(number=0, attempt=1, step=21), 4.8)
    script.ask(1, {})  # the last sign of life of that run
    script.now_s += NIGHT_S
    script.open()
    script.fail(0, 1, FailureKind.LOST, "lost with the process that ran it", Action.RETRY)
    script.place(0, 2)
    script.say(AttemptEnded(number=0, attempt=2), 7)
    script.finish(0, Outcome.COMPLETE, 0.7)
    return script


def test_a_night_between_two_runs_is_nobodys_work() -> None:
    state = overnight().state()
    first, second = state.trials[0].attempts
    assert first.time_s == pytest.approx(1.1 + 30 + 5.2 + 4.8 + 0.1)
    assert second.time_s == pytest.approx(1.1 + 7)
    whole_s = first.time_s + second.time_s
    assert state.trials[0].time_s == pytest.approx(whole_s)


def test_every_place_that_tells_a_time_tells_the_same() -> None:
    script = overnight()
    state = script.state()
    time_s = state.trials[0].time_s
    assert str(round(time_s, 3)) in csv_text(state)
    assert duration_text(time_s) in trials_table(state).rows[0]
    assert outcomes_table(state).rows[0] == ("complete", "1", duration_text(time_s))
    live, told = LiveStudy(), []
    live._finished_s = told
    fold = Script().state()
    for event in script.events:
        fold.apply(event)
        live.on_event(event, fold)
    assert live._finished_s == [pytest.approx(time_s)]


def test_what_a_checkpoint_kept_is_not_lost() -> None:
    state = overnight().state()
    first, second = state.trials[0].attempts
    assert first.lost_s == pytest.approx(0.1)
    assert second.lost_s == 0.0
    (row,) = failures_by_kind(state)
    assert (row.kind, row.attempts, row.trials, row.actions) == (FailureKind.LOST, 1, (0,), {"retry": 1})
    assert row.lost_s == pytest.approx(0.1) and row.time_s > 40
    (view,) = summarise(state).troubles.failures
    assert (view.lost_s, view.actions) == (pytest.approx(0.1), {"retry": 1})


@pytest.mark.parametrize(
    ("action", "lost_s"),
    [
        (Action.RETRY, 3.0),
        (Action.FALLBACK, 3.0),
        (Action.PAUSE, 3.0),
        (Action.GIVE_UP, 14.1),  # no checkpoint is of use to a trial that is over
        (Action.PRUNE, 0.0),  # a result
    ],
)
def test_how_much_is_lost_depends_on_what_follows(action: Action, lost_s: float) -> None:
    script = with_a_trial()
    script.place(0)
    script.say(CheckpointMade(number=0, attempt=1, step=20), 10)
    script.now_s += 1
    script.fail(0, 1, FailureKind.KILLED, "killed", action)
    state = script.state()
    assert state.trials[0].attempts[0].lost_s == pytest.approx(lost_s)


def test_without_a_checkpoint_all_of_it_is_lost() -> None:
    script = with_a_trial()
    script.place(0)
    script.fail(0, 1, FailureKind.KILLED, "killed", Action.RETRY)
    state = script.state()
    (attempt,) = state.trials[0].attempts
    assert attempt.lost_s == attempt.time_s == pytest.approx(3.1)


def test_a_clock_that_was_set_back_gives_no_negative_time() -> None:
    script = with_a_trial()
    script.place(0)
    script.say(CheckpointMade(number=0, attempt=1, step=20), 10)
    script.now_s -= 3600
    script.fail(0, 1, FailureKind.KILLED, "killed", Action.RETRY)
    script.place(0, 2)
    script.say(AttemptEnded(number=0, attempt=2), 4)
    state = script.state()
    first, second = state.trials[0].attempts
    assert first.time_s == first.lost_s == 0.0
    assert second.time_s == pytest.approx(5.1)
