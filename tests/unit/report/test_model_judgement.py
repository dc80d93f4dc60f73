"""What `dryfit train` says first: whether the model that it made beats the strongest baseline of the study."""

from pathlib import Path

import pytest

from dryfit.core.jobs.baselines import BaselineScore
from dryfit.core.settings.choices import Direction
from dryfit.reporting.data import worth
from dryfit.scoring.intervals import Interval
from dryfit.search.mirror.model import parse_event
from dryfit.store.layout import StudyLayout
from dryfit.store.replay import StudyState
from toy_ledger import Ledger

PLAIN = BaselineScore(name="majority", words="the commonest class", metrics={"value": 5.0})


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StudyState:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for _ in ledger.whole_study():
        pass
    monkeypatch.setattr(worth, "strongest_baseline", lambda state: PLAIN)
    known = Interval(value=0.5, low=0.2, high=0.8, groups=9)
    monkeypatch.setattr(worth, "_difference", lambda *of: known)
    made = StudyState()
    for line in ledger.path.read_bytes().splitlines():
        event = parse_event(line)
        assert event is not None
        made.apply(event)
    return made


def said(state: StudyState, value: float | None, *, number: int | None = 5, folds: int = 0) -> tuple[str, ...]:
    trial = state.trials[number] if number is not None else None
    layout = StudyLayout(Path("study"))
    return worth.model_judgement(state, layout, value, subject="This model", trial=trial, folds=folds)


def test_a_model_is_compared_by_its_own_value(state: StudyState) -> None:
    assert state.direction is Direction.MAXIMIZE and state.trials[5].score == 5.5
    (same,) = said(state, 5.5)
    assert same.startswith("This model beats the strongest baseline (the commonest class: 5.0000): 0.5000 higher")
    assert "+0.2000 to +0.8000, over 9 groups" in same
    (other,) = said(state, 5.6)  # another seed: the rows of the trial are not its own
    assert other.startswith("This model is not surely better") and other.endswith("no interval is known.")
    (worse,) = said(state, 4.0)
    assert worse.startswith("This model does not beat") and "1.0000 lower" in worse and "interval" not in worse
    (several,) = said(state, 5.5, number=None)
    assert "no interval is known" in several


def test_where_values_are_of_other_rows_the_search_is_told(state: StudyState) -> None:
    first, then = said(state, None)
    assert first.startswith("In the search, trial 5 beats the strongest baseline")
    assert then == "This model was trained on validation too, so it cannot be compared with the baselines."
    first, then = said(state, 5.5, folds=3)
    assert first.startswith("In the search, trial 5 beats") and "one split, not on the folds" in then
    (only,) = said(state, None, number=None)
    assert only == "This model was trained on validation too, so it cannot be compared with the baselines."


def test_without_baselines_nothing_is_said(state: StudyState, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worth, "strongest_baseline", lambda state: None)
    assert said(state, 5.5) == () and said(state, None) == ()
