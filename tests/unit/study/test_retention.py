"""Which weights stay: those of the best few, whichever order the trials end in."""

import random
from pathlib import Path

import pytest

from dryfit.ledger.events import GenerationBegan, StudyCreated, TrialAsked, TrialFinished
from dryfit.ledger.folder import StudyLayout
from dryfit.ledger.replay import StudyState
from dryfit.settings.choices import BuiltInTask, Direction
from dryfit.settings.trial import Goal, Outcome
from dryfit.study.files import forget_what_is_not_needed


def begun() -> StudyState:
    state = StudyState()
    state.apply(
        StudyCreated(
            id="i",
            name="n",
            task=BuiltInTask.CRITERIA,
            metric="f1",
            direction=Direction.MAXIMIZE,
            seed=0,
            space="[]",
            own={},
        )
    )
    return state


def test_only_the_best_keep_their_weights_and_ended_trials_no_checkpoint(tmp_path: Path) -> None:
    layout, state, draw = StudyLayout(tmp_path), begun(), random.Random(0)
    values: dict[int, float] = {}
    for number in range(20):
        state.apply(TrialAsked(number=number, params={}, internal={}, distributions={}, seed=0, fingerprint=""))
        paths = layout.trial(number)
        paths.best.mkdir(parents=True)
        paths.checkpoints.mkdir()
        value = draw.random() if number % 3 else None
        outcome = Outcome.PRUNED if value is None else Outcome.COMPLETE
        state.apply(TrialFinished(number=number, outcome=outcome, value=value))
        if value is not None:
            values[number] = value
        forget_what_is_not_needed(layout, state, keep="best:3", just_finished=number)
        kept = {int(path.parent.name) for path in layout.trials.glob("*/best")}
        assert kept == set(sorted(values, key=lambda one: -values[one])[:3])
        assert not list(layout.trials.glob("*/checkpoints"))


@pytest.mark.parametrize(
    ("keep", "stay"), [("best:1", {2}), ("best:2", {0, 2}), ("best:9", {0, 2}), ("none", set()), ("all", {0, 1, 2, 3})]
)
def test_keep_says_whose_weights_stay(tmp_path: Path, keep: str, stay: set[int]) -> None:
    layout, state = StudyLayout(tmp_path), begun()
    ended = [(Outcome.COMPLETE, 0.5), (Outcome.PRUNED, None), (Outcome.COMPLETE, 0.6), (Outcome.FAILED, None)]
    for number, (outcome, value) in enumerate(ended):
        state.apply(TrialAsked(number=number, params={}, internal={}, distributions={}, seed=0, fingerprint=""))
        layout.trial(number).best.mkdir(parents=True)
        state.apply(TrialFinished(number=number, outcome=outcome, value=value))
        forget_what_is_not_needed(layout, state, keep=keep, just_finished=number)
    assert {int(path.parent.name) for path in layout.trials.glob("*/best")} == stay
    forget_what_is_not_needed(layout, state, keep=keep)
    assert {int(path.parent.name) for path in layout.trials.glob("*/best")} == stay


def test_the_best_of_every_generation_keep_their_weights(tmp_path: Path) -> None:
    layout, state = StudyLayout(tmp_path), begun()
    basis = state.generation.comparability
    worse_is_better = basis.model_copy(update={"goals": (Goal(name="loss", direction=Direction.MINIMIZE),)})
    for number, value in enumerate((0.5, 0.9, 0.7, 0.4, 0.1, 0.3)):
        if number == 3:
            state.apply(GenerationBegan(generation=2, name="n-g2", comparability=worse_is_better))
        state.apply(TrialAsked(number=number, params={}, internal={}, distributions={}, seed=0, fingerprint=""))
        layout.trial(number).best.mkdir(parents=True)
        state.apply(TrialFinished(number=number, outcome=Outcome.COMPLETE, value=value))
        forget_what_is_not_needed(layout, state, keep="best:1", just_finished=number)
    forget_what_is_not_needed(layout, state, keep="best:1")
    assert {int(path.parent.name) for path in layout.trials.glob("*/best")} == {1, 4}
