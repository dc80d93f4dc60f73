"""What an objective may report and return, and what each of it comes to."""

import math
import sys
from dataclasses import dataclass, field
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest

from dryfit.settings.errors import NonFiniteError, ObjectiveError
from dryfit.settings.tables import ObjectiveSettings
from dryfit.settings.training_messages import ObjectiveRequest, StopReason
from dryfit.settings.trial import MetricPoint
from dryfit.training.current_trial import Trial, as_number, as_values, completed
from dryfit.training.objective import limit_memory


@dataclass
class Wire:
    """Stands for the control process: it answers reports, and may ask to stop."""

    pruned_at: int = 1000
    asked: StopReason | None = None
    points: list[MetricPoint] = field(default_factory=list)
    said: list[int] = field(default_factory=list)

    def report(self, point, *, timeout_s):
        self.points.append(point)
        return point.n < self.pruned_at

    def stop_requested(self):
        return self.asked

    def send(self, message):
        self.said.append(message.step)


def trial(wire, *, reported=(), checkpoint_step=None, goals=("value",)):
    request = ObjectiveRequest(
        objective=ObjectiveSettings(function="m:f", goals=goals),
        number=4,
        fingerprint="f",
        params={"x": 1.0},
        seed=9,
        attempt=2,
        reported=reported,
        checkpoint_step=checkpoint_step,
        checkpoint_dir="attempt-2/checkpoints",
        kept_checkpoint_dir="checkpoints",
        verdict_timeout_s=1.0,
        threads=1,
    )
    return Trial(request, wire)


@pytest.mark.parametrize("value", [1, 1.0, np.float32(1), np.int64(1), np.array(1.0), np.array([1.0])])
def test_numbers_of_python_and_of_libraries(value):
    assert as_number(value, "reporting") == 1.0


@pytest.mark.parametrize("value", [None, "1", True, np.bool_(True), [1.0], np.zeros(2), 1j, Fraction(1, 2), object()])
def test_what_is_no_number(value):
    with pytest.raises(ObjectiveError, match="allowed: a number"):
        as_number(value, "reporting")


def test_what_may_be_returned():
    assert as_values(2, ("value",)) == (2.0,)
    assert as_values((2.0,), ("value",)) == (2.0,)
    assert as_values([1, 2.5], ("a", "b")) == (1.0, 2.5)


@pytest.mark.parametrize(
    ("returned", "goals", "said"),
    [
        (None, ("value",), "does every path of the function return a value"),
        ((1.0, 2.0), ("value",), "allowed: a number"),
        (1.0, ("a", "b"), "a tuple of 2 numbers: a, b"),
        ((1.0,), ("a", "b"), "a tuple of 2 numbers: a, b"),
        ((1.0, "x"), ("a", "b"), "'x' (str)"),
        ("x" * 500, ("value",), "..."),
    ],
)
def test_what_may_not(returned, goals, said):
    with pytest.raises(ObjectiveError) as caught:
        as_values(returned, goals)
    assert said in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_a_result_of_its_own(bad):
    with pytest.raises(NonFiniteError, match="b is"):
        as_values((1.0, bad), ("a", "b"))


def test_reports_are_numbered_and_steps_must_grow():
    wire = Wire()
    one = trial(wire)
    assert not one.report(0.5, 3)
    assert not one.report(math.nan, np.int64(10))
    assert [(point.n, point.step) for point in wire.points] == [(0, 3), (1, 10)]
    assert wire.points[0].metrics == {"value": 0.5}
    for step in (10, 9, 0):
        with pytest.raises(ObjectiveError, match="the report before was of step 10"):
            one.report(0.1, step)
    assert one.result(1.5).steps == 10


@pytest.mark.parametrize("step", [-1, 0.5, "1", None, True])
def test_a_step_is_an_integer(step):
    with pytest.raises(ObjectiveError, match="an integer from 0"):
        trial(Wire()).report(1.0, step)
    with pytest.raises(ObjectiveError, match="an integer from 0"):
        trial(Wire()).checkpointed(step)


def test_a_later_attempt_goes_over_the_same_reports_again():
    wire = Wire()
    one = trial(wire, reported=(2, 4, 6))
    for step in (1, 2, 3, 6, 7):
        assert not one.report(0.0, step)
    # Steps that no report was of are passed over; those that were have the numbers of then; new ones come after.
    assert [(point.n, point.step) for point in wire.points] == [(0, 2), (2, 6), (3, 7)]


def test_a_verdict_to_stop_ends_the_trial_whatever_it_returns():
    wire = Wire(pruned_at=1)
    one = trial(wire)
    assert not one.report(1.0, 1)
    assert not one.should_stop
    assert one.report(2.0, 2)
    assert one.should_stop
    assert one.report(3.0, 3)
    assert len(wire.points) == 2
    for returned in (None, 5.0, "x"):
        result = one.result(returned)
        assert (result.value, result.stopped_by) == (None, StopReason.VERDICT)


@pytest.mark.parametrize("asked", [StopReason.REQUEST, StopReason.SIGTERM])
def test_a_request_to_stop_counts_only_where_the_function_has_heard_of_it(asked):
    deaf = trial(Wire(asked=asked))
    assert (deaf.result(2.0).value, deaf.result(2.0).stopped_by) == (2.0, None)
    wire = Wire(asked=asked)
    hears = trial(wire)
    assert hears.report(1.0, 1)
    assert [point.n for point in wire.points] == [0]  # a checkpoint may follow, behind which it would be lost
    assert hears.result(2.0).stopped_by is asked


def test_a_verdict_outweighs_a_request_to_stop():
    one = trial(Wire(pruned_at=0, asked=StopReason.REQUEST))
    assert one.should_stop
    assert one.report(1.0, 1)
    assert one.result(None).stopped_by is StopReason.VERDICT


def test_only_new_checkpoints_are_progress():
    wire = Wire()
    one = trial(wire, checkpoint_step=3)
    for step in (1, 3, 4, 4, 7):
        one.checkpointed(step)
    assert wire.said == [4, 7]


def test_parameters_cannot_be_changed():
    one = trial(Wire())
    with pytest.raises(TypeError):
        one.params["x"] = 2.0
    assert repr(one) == "Trial(number=4, attempt=2, params={'x': 1.0})"


@pytest.mark.parametrize("used", [True, False])
def test_the_peaks_of_a_device_are_those_of_a_pytorch_that_has_used_it(monkeypatch, used):
    cuda = SimpleNamespace(is_initialized=lambda: used, max_memory_allocated=lambda: 7, max_memory_reserved=lambda: 9)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    result = completed((2.0, 3.0), ("a", "b"), 5)
    assert (result.value, result.also, result.steps) == (2.0, (3.0,), 5)
    assert (result.peak_allocated_bytes, result.peak_reserved_bytes) == ((7, 9) if used else (None, None))
    assert result.peak_rss_bytes


@pytest.mark.parametrize(("fraction", "there", "asked"), [(0.25, True, [0.25]), (0.25, False, []), (None, True, [])])
def test_a_share_of_a_device_is_asked_for_where_there_is_one(fraction, there, asked):
    found: list[float] = []
    cuda = SimpleNamespace(is_available=lambda: there, set_per_process_memory_fraction=found.append)
    limit_memory(fraction, SimpleNamespace(cuda=cuda))
    assert found == asked
