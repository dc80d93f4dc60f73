"""The history of a study: trials by number, and folds that hear of each ended trial once."""

import pytest

from dryfit.ledger.state import History, Ranking, as_history
from dryfit.settings.errors import InternalError
from dryfit.settings.trial import Outcome, TrialRecord


def running(number: int) -> TrialRecord:
    return TrialRecord(number, {}, {})


def ended(number: int, value: float | None = 0.5, outcome: Outcome = Outcome.COMPLETE) -> TrialRecord:
    return TrialRecord(number, {}, {}, outcome, value)


class Heard:
    def __init__(self) -> None:
        self.numbers: list[int] = []

    def apply(self, record: TrialRecord) -> None:
        self.numbers.append(record.number)


def test_trials_stand_by_number_and_end_in_any_order() -> None:
    past = History([ended(4), running(1), running(2)])
    assert [record.number for record in past] == [1, 2, 4]
    assert [record.number for record in past.running] == [1, 2]
    past.put(ended(2))
    past.put(running(7))
    assert [record.number for record in past.running] == [1, 7]
    assert (past[1], past[-1], past.get(7), past.get(3)) == (ended(2), running(7), running(7), None)
    assert len(past) == 4
    assert past[1:3] == [ended(2), ended(4)]


def test_what_is_running_may_change_and_what_ended_may_not() -> None:
    past = History([running(0), ended(1)])
    past.put(TrialRecord(0, {"optim.lr": 0.1}, {}))
    assert past[0].params == {"optim.lr": 0.1}
    for again in (ended(1), running(1)):
        with pytest.raises(InternalError, match="trial 1 has ended before"):
            past.put(again)
    with pytest.raises(InternalError, match="trial 3 after 5"):
        for late in (running(5), running(3)):
            past.put(late)


def test_a_fold_hears_of_each_ended_trial_once() -> None:
    past = History([ended(0), running(1), ended(2)])
    heard = past.projected("heard", Heard)
    assert heard.numbers == [0, 2]
    past.put(running(1))
    past.put(ended(3))
    past.put(ended(1))
    assert heard.numbers == [0, 2]
    assert past.projected("heard", Heard) is heard
    assert heard.numbers == [0, 2, 3, 1]
    assert past.projected("another", Heard).numbers == [0, 2, 3, 1]


def test_before_a_number_folds_begin_anew() -> None:
    past = History([ended(0), ended(1), running(2)])
    assert past.before(3) is past
    earlier = past.before(1)
    assert list(earlier) == [ended(0)]
    assert past.projected("heard", Heard).numbers == [0, 1]
    assert earlier.projected("heard", Heard).numbers == [0]
    assert as_history(past) is past
    assert list(as_history([running(2), ended(0)])) == [ended(0), running(2)]


@pytest.mark.parametrize(("sign", "best"), [(1.0, [3, 0, 2, 5]), (-1.0, [5, 0, 2, 3])])
def test_a_ranking_has_complete_trials_with_a_number_the_earlier_of_equals_first(sign: float, best: list[int]) -> None:
    values = [0.5, float("nan"), 0.5, 0.1, None, 0.9]
    past = History(ended(number, value) for number, value in enumerate(values))
    past.put(ended(6, 0.05, Outcome.PRUNED))
    ranking = past.projected("ranking", lambda: Ranking(sign))
    assert ranking.numbers(9) == best
    assert ranking.numbers(2) == best[:2]
    assert ranking.numbers(0) == []
