"""Which numbers of a Trainer's evaluations count, and which evaluation is the best."""

import math
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dryfit.settings.choices import Direction
from dryfit.settings.errors import ObjectiveError
from dryfit.settings.tables import ObjectiveSettings
from dryfit.training.current_trial import Evaluation, Goals, ReadParams, numbers_of

LOSS = Goals(("eval_loss",), Direction.MINIMIZE)


def seen(*values: float, name: str = "eval_loss") -> list[Evaluation]:
    return [Evaluation(step=at, epoch=0.0, metrics={name: value}) for at, value in enumerate(values)]


def test_numbers_of_the_clock_are_left_out() -> None:
    said = {"eval_loss": 1, "eval_runtime": 2.0, "eval_samples_per_second": 3.0, "epoch": 1.0, "eval_text": "a"}
    assert numbers_of({**said, "eval_right": True, "eval_a_model_preparation_time": 1.0}) == {"eval_loss": 1.0}


@given(st.lists(st.floats(), min_size=1, max_size=8), st.booleans())
def test_the_best_is_the_first_of_the_best_that_is_a_number(values: list[float], minimized: bool) -> None:
    goals = Goals(("loss",), Direction.MINIMIZE if minimized else Direction.MAXIMIZE)
    found = goals.best(seen(*values))
    numbers = [value for value in values if not math.isnan(value)]
    if not numbers:
        assert found is None and math.isnan(goals.values(seen(*values))[0])
        return
    best = (min if minimized else max)(numbers)
    assert found is not None and found.step == values.index(best)
    assert goals.values(seen(*values)) == (best,)
    better = [goals.is_better(value, seen(*values[:at])) for at, value in enumerate(values)]
    assert found.step == max(at for at, is_better in enumerate(better) if is_better)


def test_several_goals_are_those_of_one_evaluation() -> None:
    directions = (Direction.MAXIMIZE, Direction.MINIMIZE)
    goals = Goals.of(ObjectiveSettings(function="m:f", goals=("f1", "eval_loss"), directions=directions))
    evaluations = [
        Evaluation(step=at, epoch=0.0, metrics={"eval_f1": f1, "eval_loss": loss})
        for at, (f1, loss) in enumerate([(0.1, 0.1), (0.9, 0.5), (0.2, 0.0)])
    ]
    assert goals.values(evaluations) == (0.9, 0.5)
    with pytest.raises(ObjectiveError, match="there are eval_f1"):
        goals.demand(Evaluation(step=1, epoch=0.0, metrics={"eval_f1": 1.0}))
    with pytest.raises(ObjectiveError, match="no numbers at all"):
        LOSS.demand(Evaluation(step=1, epoch=0.0, metrics={}))


def test_parameters_know_who_read_them() -> None:
    def unread(look: object) -> tuple[str, ...]:
        params = ReadParams({"a": 1, "b": 2})
        assert callable(look)
        look(MappingProxyType(params))  # as a trial has them
        return params.unread

    assert unread(lambda params: None) == unread(len) == unread(list) == unread(repr) == ("a", "b")
    assert unread(lambda params: params["a"]) == unread(lambda params: params.get("a")) == ("b",)
    assert unread(lambda params: params.get("c")) == unread(lambda params: "a" in params) == ("a", "b")
    for whole in (dict, lambda params: dict(**params), lambda params: params | {}, lambda params: {} | params):
        assert unread(whole) == unread(lambda params: params.items()) == unread(lambda params: params.values()) == ()
    assert unread(lambda params: params.copy()) == ()
