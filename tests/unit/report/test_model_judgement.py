"""What `dryfit train` says first: whether the model that it made beats the strongest baseline of the study."""

from pathlib import Path

import pytest

from dryfit.documents import worth
from dryfit.ledger.folder import StudyLayout
from dryfit.ledger.replay import StudyState
from dryfit.search.follower_runs import parse_event
from dryfit.settings.choices import Direction
from dryfit.settings.training_messages import BaselineScore
from dryfit.tasks.row_metrics import Interval
from golden import Golden
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


def test_a_model_is_compared_by_its_own_value(state: StudyState, golden: Golden) -> None:
    """Of another seed the rows of the trial are not its own: no interval is known; neither where trials are several."""
    assert state.direction is Direction.MAXIMIZE and state.trials[5].score == 5.5
    golden("train", *(said(state, value) for value in (5.5, 5.6, 4.0)), said(state, 5.5, number=None))


def test_where_values_are_of_other_rows_the_search_is_told(state: StudyState, golden: Golden) -> None:
    golden("train", said(state, None), said(state, 5.5, folds=3), said(state, None, number=None))


def test_without_baselines_nothing_is_said(state: StudyState, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worth, "strongest_baseline", lambda state: None)
    assert said(state, 5.5) == () and said(state, None) == ()
