"""A trial as the user's own function sees it."""

import math
import operator
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, final

from dryfit.core.channel import ChildChannel
from dryfit.core.errors import NonFiniteError, ObjectiveError
from dryfit.core.jobs.train import ObjectiveRequest, StopReason, TrainResult
from dryfit.core.process import peak_rss_bytes
from dryfit.core.settings.trial import MetricPoint, Scalar
from dryfit.core.wire import Checkpointed
from dryfit.jobs.own.read_params import ReadParams

_A_NUMBER = "a number"


@final
class Trial:
    """The argument of an objective. Only dryfit makes one.

    Attributes:
        params: The searched values, by the names of the space.
        number: The trial's number in its study, from 0.
        seed: A seed of the trial's own: the same in every attempt. ``random``, and NumPy and PyTorch where they are
            imported by the time the function is called, are seeded with it.
        attempt: Which process of the trial this is, from 1.
        checkpoint_dir: A folder for what the trial needs to go on; every attempt finds what those before it left there,
            in a copy of its own. It is removed when the trial has ended. ``.dryfit-trial.json`` in it is dryfit's.
        folder: The same folder; where ``TrainingArguments.output_dir`` of a Trainer is.
    """

    def __init__(self, request: ObjectiveRequest, channel: ChildChannel) -> None:
        self._read = ReadParams(request.params)
        self.params: Mapping[str, Scalar] = MappingProxyType(self._read)
        self.number = request.number
        self.seed = request.seed
        self.attempt = request.attempt
        self.checkpoint_dir = self.folder = Path(request.checkpoint_dir)
        self._channel = channel
        self._timeout_s = request.verdict_timeout_s
        self._goals = request.objective.goals
        self._reported = list(request.reported)
        self._checkpoint_step = -1 if request.checkpoint_step is None else request.checkpoint_step
        self._last_step: int | None = None
        self._stopped_by: StopReason | None = None

    def __repr__(self) -> str:
        params = {name: dict.__getitem__(self._read, name) for name in self._read}
        return f"Trial(number={self.number}, attempt={self.attempt}, params={params})"

    @property
    def should_stop(self) -> bool:
        """Whether the function is to return now: the study was asked to stop, or a report was answered so.

        Once it is True, what the function returns does not matter: the trial was pruned, or goes on later.
        """
        if self._stopped_by is None:
            self._stopped_by = self._channel.stop_requested()
        return self._stopped_by is not None

    @property
    def unread(self) -> tuple[str, ...]:
        """The names of parameters that nobody has read so far."""
        return self._read.unread

    @property
    def stopped_by(self) -> StopReason | None:
        """Why the function is to return, as far as it was told."""
        return self._stopped_by

    def report(
        self, value: float, step: int, *, epoch: float = 0.0, metrics: Mapping[str, float] | None = None
    ) -> bool:
        """Report how good the trial is by now, and hear whether to stop.

        An attempt that goes over steps again that an earlier one has reported gets the answers of then. So report
        before a checkpoint of the step is written: a trial that is killed between the two then loses no report.

        Args:
            value: The first of the study's goals, as far as it is known. May be NaN.
            step: Where the trial is; it grows from report to report.
            epoch: Passes over the data done, if it makes any.
            metrics: Further numbers to keep with the report, by their names.

        Returns:
            Whether the function is to return now; see :attr:`should_stop`.

        Raises:
            ObjectiveError: The value is no number, or the step is no integer, is negative or does not grow.
        """
        doing = f"reporting step {step!r}"
        number = as_number(value, doing)
        at = self._as_step(step, doing)
        if self._last_step is not None and at <= self._last_step:
            raise ObjectiveError(doing, f"the report before was of step {self._last_step}", "steps that grow")
        self._last_step = at
        if self._stopped_by is StopReason.VERDICT:
            return True
        # Also where a stop was asked for: a checkpoint may follow, behind which nobody would report this step again.
        n = self._index(at)
        if n is not None:
            said = {name: as_number(one, doing) for name, one in (metrics or {}).items()}
            point = MetricPoint(n=n, step=at, epoch=float(epoch), value=number, metrics=said | {self._goals[0]: number})
            if not self._channel.report(point, timeout_s=self._timeout_s):
                self._stopped_by = StopReason.VERDICT
        return self.should_stop

    def checkpointed(self, step: int) -> None:
        """Say that ``checkpoint_dir`` now holds all that is needed to go on from ``step``.

        A trial that reaches a new checkpoint in each attempt is started again however often it is killed; one that
        does not fails after a few.

        Raises:
            ObjectiveError: The step is no integer, or negative.
        """
        at = self._as_step(step, f"noting a checkpoint of step {step!r}")
        if at > self._checkpoint_step:
            self._checkpoint_step = at
            self._channel.send(Checkpointed(step=at))

    def result(self, returned: object) -> TrainResult:
        """Return the trial's result from what the function has returned.

        Raises:
            ObjectiveError: It did not return one number for each goal.
            NonFiniteError: One of them is NaN or infinite.
        """
        steps = max(self._last_step or 0, self._checkpoint_step, 0)
        if self._stopped_by is not None:
            return TrainResult(value=None, best=None, steps=steps, stopped_by=self._stopped_by)
        values = as_values(returned, self._goals)
        return TrainResult(value=values[0], also=values[1:], best=None, steps=steps, peak_rss_bytes=peak_rss_bytes())

    def _index(self, step: int) -> int | None:
        """Return the number of a step's report; None where an earlier attempt has passed the step without one."""
        if step in self._reported:
            return self._reported.index(step)
        if self._reported and step < self._reported[-1]:
            return None
        self._reported.append(step)
        return len(self._reported) - 1

    def _as_step(self, step: object, doing: str) -> int:
        try:
            at = operator.index(step)  # pyright: ignore[reportArgumentType]  # that is the question
        except TypeError:
            at = -1
        if at < 0 or isinstance(step, bool):
            raise ObjectiveError(doing, f"it is a {type(step).__name__}", "an integer from 0")
        return at


def as_number(value: object, doing: str) -> float:
    """Return a number as a float; scalars of libraries are converted by their ``item`` method.

    Raises:
        ObjectiveError: It is something else.
    """
    plain: Any = value
    if callable(item := getattr(value, "item", None)):
        try:
            plain = item()
        except (TypeError, ValueError, RuntimeError):  # an array of several numbers
            plain = value
    if isinstance(plain, bool) or not isinstance(plain, int | float):
        raise ObjectiveError(doing, f"the value is {_shown(value)}", _A_NUMBER)
    return float(plain)


def as_values(returned: object, goals: tuple[str, ...]) -> tuple[float, ...]:
    """Return what an objective returned as one number for each goal.

    Raises:
        ObjectiveError: It is something else.
        NonFiniteError: A number is NaN or infinite.
    """
    wanted = _A_NUMBER if len(goals) == 1 else f"a tuple of {len(goals)} numbers: {', '.join(goals)}"
    doing = "taking what the objective returned"
    several = tuple(returned) if isinstance(returned, tuple | list) else None
    if several is None and len(goals) == 1:
        several = (returned,)
    if several is None or len(several) != len(goals):
        raise ObjectiveError(doing, f"it is {_shown(returned)}", wanted, "return what objective.goals names")
    values = tuple(as_number(value, doing) for value in several)
    bad = [f"{name} is {value}" for name, value in zip(goals, values, strict=True) if not math.isfinite(value)]
    if bad:
        raise NonFiniteError(doing, ", ".join(bad), wanted)
    return values


def _shown(value: object) -> str:
    if value is None:
        return "None (does every path of the function return a value?)"
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
