"""A trial as the user's own code sees it: parameters, reports, checkpoints, goals."""

import math
import operator
import os
import shutil
import sys
import traceback
from collections.abc import ItemsView, Iterator, Mapping, Sequence, ValuesView
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Final, final

from pydantic import ValidationError

from dryfit.processes.channel import ChildChannel
from dryfit.processes.process import peak_rss_bytes
from dryfit.settings.choices import Direction
from dryfit.settings.errors import FileError, NonFiniteError, ObjectiveError
from dryfit.settings.files import read_model, sync_tree, write_model
from dryfit.settings.tables import CalledCode
from dryfit.settings.training_messages import ObjectiveRequest, StopReason, TrainResult
from dryfit.settings.trial import MetricPoint, Scalar, better
from dryfit.settings.wire import Checkpointed, Wire

# The line of the user's own file in an exception that libraries have raised.


class OwnLine:
    """Adds to an exception the line of the user's file where it began: what follows are lines of libraries.

    Args:
        file: The user's file, as frames name it.
    """

    def __init__(self, file: str) -> None:
        self._file = file

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        own = [frame for frame in traceback.extract_tb(trace) if frame.filename == self._file]
        if error is not None and own:
            error.add_note(f"from {own[-1].filename}:{own[-1].lineno} in {own[-1].name}: {own[-1].line}")


# The parameters of a trial, which know whether they were read.


@final
class ReadParams(dict[str, Scalar]):
    """Searched values by their names; whoever looks at all values at once has read them all.

    Args:
        values: The values.
    """

    def __init__(self, values: Mapping[str, Scalar]) -> None:
        super().__init__(values)
        self._unread = dict.fromkeys(values)

    @property
    def unread(self) -> tuple[str, ...]:
        """The parameters that nobody has read so far."""
        return tuple(self._unread)

    def __getitem__(self, name: str) -> Scalar:
        self._unread.pop(name, None)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value, or the default where there is none of that name."""
        self._unread.pop(name, None)
        return super().get(name, default)

    def items(self) -> ItemsView[str, Scalar]:  # pyright: ignore[reportIncompatibleMethodOverride]  # dict's own class
        """Return all names with their values."""
        self._unread.clear()
        return super().items()

    def values(self) -> ValuesView[Scalar]:  # pyright: ignore[reportIncompatibleMethodOverride]  # dict's own class
        """Return all values."""
        self._unread.clear()
        return super().values()

    def copy(self) -> dict[str, Scalar]:
        """Return a plain copy."""
        return dict(self.items())

    def __or__(self, other: Mapping[str, Any]) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.copy() | dict(other)

    def __ror__(self, other: Mapping[str, Any]) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return dict(other) | self.copy()


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
        return completed(returned, self._goals, steps)

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


def completed(returned: object, goals: tuple[str, ...], steps: int) -> TrainResult:
    """Return the result of the user's own code that has come to its end; PyTorch is asked where that is imported.

    Args:
        returned: One number for each goal.
        goals: Their names.
        steps: Optimizer steps done.

    Raises:
        ObjectiveError: It is something else.
        NonFiniteError: A number is NaN or infinite.
    """
    values, torch = as_values(returned, goals), sys.modules.get("torch")
    cuda: Any = torch.cuda if torch is not None and torch.cuda.is_initialized() else None
    return TrainResult(
        value=values[0],
        also=values[1:],
        best=None,
        steps=steps,
        peak_allocated_bytes=None if cuda is None else cuda.max_memory_allocated(),
        peak_reserved_bytes=None if cuda is None else cuda.max_memory_reserved(),
        peak_rss_bytes=peak_rss_bytes(),
    )


def _shown(value: object) -> str:
    if value is None:
        return "None (does every path of the function return a value?)"
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


# Checkpoints that a Trainer of the user's own writes: each is marked once it is whole, and no other is used.


MARK_FILE: Final = ".dryfit-checkpoint.json"
"""In a checkpoint of which every file is on disk: the last one written."""

_CHECKPOINT: Final = "checkpoint-"


class Evaluation(Wire):
    """The numbers of one evaluation."""

    step: int
    epoch: float
    metrics: dict[str, float]


class CheckpointMark(Wire):
    """What a whole checkpoint says of itself.

    Attributes:
        step: Optimizer steps done.
        done: Training had ended: nothing is left to train.
        evaluations: All evaluations so far, those of earlier attempts included.
        sizes: Sizes of its files in bytes, by their paths in it.
    """

    step: int
    done: bool
    evaluations: tuple[Evaluation, ...]
    sizes: dict[str, int]


def mark_whole(folder: Path, *, step: int, done: bool, evaluations: Sequence[Evaluation]) -> None:
    """Mark a checkpoint that the Trainer has just finished, after its files are on disk.

    Raises:
        OSError: They cannot be brought there.
    """
    sync_tree(folder)
    mark = CheckpointMark(step=step, done=done, evaluations=tuple(evaluations), sizes=_sizes(folder))
    write_model(folder / MARK_FILE, mark)


def newest_whole(folder: Path) -> tuple[Path, CheckpointMark] | None:
    """Return the newest checkpoint that is whole; None: there is none.

    The others in the folder, which must be the caller's own, are removed, and those that stay are given times in the
    order of their steps: by these the Trainer finds the oldest.
    """
    whole: list[tuple[Path, CheckpointMark]] = []
    for checkpoint in folder.glob(f"{_CHECKPOINT}*"):
        mark = _mark_of(checkpoint)
        if mark is None:
            shutil.rmtree(checkpoint, ignore_errors=True)
        else:
            os.utime(checkpoint, (mark.step, mark.step))
            whole.append((checkpoint, mark))
    return max(whole, key=lambda each: each[1].step, default=None)


def _mark_of(checkpoint: Path) -> CheckpointMark | None:
    try:
        mark = read_model(checkpoint / MARK_FILE, CheckpointMark)
    except (FileError, ValidationError, NotADirectoryError):
        return None
    return mark if mark is not None and mark.sizes == _sizes(checkpoint) else None


def _sizes(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_size for path in _files(folder)}


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MARK_FILE)


# What a study of a Trainer optimises: metrics of its evaluations, and which of them is the best.


_EVAL: Final = "eval_"
_OF_THE_CLOCK: Final = ("runtime", "per_second", "preparation_time", "alloc_delta")
"""Ends of names of numbers that say how long an evaluation took."""


def numbers_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of an evaluation, without those of the clock and the epoch."""
    return {
        name: float(value)
        for name, value in metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
        if name != "epoch" and not name.endswith(_OF_THE_CLOCK)
    }


@dataclass(frozen=True, slots=True)
class Goals:
    """The metrics of a study, the first of which decides.

    Attributes:
        names: As the study file has them; the Trainer's ``eval_`` before a name may be missing.
        direction: Of the first.
    """

    names: tuple[str, ...]
    direction: Direction

    @classmethod
    def of(cls, objective: CalledCode) -> "Goals":
        """Return the goals of a request."""
        return cls(objective.goals, (objective.directions or (Direction.MINIMIZE,))[0])

    def first(self, numbers: Mapping[str, float]) -> float | None:
        """Return the value that decides; None: this evaluation has none."""
        return _value(numbers, self.names[0])

    def are_known(self, evaluations: Sequence[Evaluation]) -> bool:
        """Whether an evaluation has the value that decides."""
        return any(self.first(each.metrics) is not None for each in evaluations)

    def is_better(self, value: float, evaluations: Sequence[Evaluation]) -> bool:
        """Whether a value is better than those of all evaluations; NaN never is."""
        best = self.best(evaluations)
        before = self.first(best.metrics) if best is not None else None
        return better(value, math.nan if before is None else before, self.direction)

    def best(self, evaluations: Sequence[Evaluation]) -> Evaluation | None:
        """Return the best evaluation, of equal ones the first; None: none has a number that can be compared."""
        best, best_value = None, math.nan
        for each in evaluations:
            value = self.first(each.metrics)
            if value is not None and better(value, best_value, self.direction):
                best, best_value = each, value
        return best

    def values(self, evaluations: Sequence[Evaluation]) -> tuple[float, ...]:
        """Return the value of each goal at the best evaluation; NaN where no evaluation has a number."""
        best = self.best(evaluations)
        if best is None:
            return (math.nan,) * len(self.names)
        return tuple(self._demanded(best.metrics, name) for name in self.names)

    def demand(self, evaluation: Evaluation) -> None:
        """Check that an evaluation has every metric of the study.

        Raises:
            ObjectiveError: One is missing; the error names those that are there.
        """
        for name in self.names:
            self._demanded(evaluation.metrics, name)

    def _demanded(self, numbers: Mapping[str, float], name: str) -> float:
        value = _value(numbers, name)
        if value is None:
            raise ObjectiveError(
                f"looking for the metric {name} in the Trainer's evaluation",
                f"it is not there; there are {', '.join(numbers) or 'no numbers at all'}",
                "a number that the Trainer evaluates",
                f"name one of these, or return {name.removeprefix(_EVAL)!r} from compute_metrics",
            )
        return value


def _value(numbers: Mapping[str, float], name: str) -> float | None:
    return numbers.get(name, numbers.get(_EVAL + name))


# What a script may ask and tell of the trial that it is run for; outside of one it runs as ever.


TRIAL_VARIABLE: Final = "DRYFIT_TRIAL"
"""Environment variable of a script and of what it starts: the trial's number."""

_REPORTS_FILE: Final = ".dryfit-reports.json"


class ScriptEnded(BaseException):
    """Ends a script that is to end, or has been told to and went on. Not an ``Exception``: scripts catch those."""


class KeptReports(Wire):
    """The reports that were made by the time of a script's own checkpoint."""

    step: int
    evaluations: tuple[Evaluation, ...]


@final
class ScriptReports:
    """The reports of a script that has no Trainer.

    Attributes:
        trial: The trial.
        evaluations: All so far; those of earlier attempts included, where the script goes on from its own checkpoint.
        of_trainer: A Trainer of the script's reports instead.
    """

    def __init__(self, trial: Trial, goals: Goals, folder: Path) -> None:
        self.trial = trial
        self.of_trainer = False
        self._goals, self._file = goals, folder / _REPORTS_FILE
        self._told = False
        kept = read_model(self._file, KeptReports)
        self.evaluations = list(kept.evaluations) if kept is not None else []

    def report(self, value: float, step: int, metrics: Mapping[str, float]) -> bool:
        """Report, and return whether the script is to end; one that was told so before is ended here.

        Raises:
            ObjectiveError: As :meth:`Trial.report`; a Trainer reports already; a goal of the study is not in it.
            ScriptEnded: The script was told to end.
        """
        if self.of_trainer:
            raise ObjectiveError(
                "reporting from a script",
                "its Trainer reports its own evaluations",
                "one of the two",
                "take dryfit.report out; a metric of compute_metrics is found by its name",
            )
        if self._told:
            raise ScriptEnded
        number = as_number(value, f"reporting step {step!r}")
        numbers = {**metrics, self._goals.names[0]: number}
        self._told = self.trial.report(number, step, metrics=metrics)
        self.evaluations.append(Evaluation(step=int(step), epoch=0.0, metrics=numbers))
        self._goals.demand(self.evaluations[-1])
        return self._told

    def checkpointed(self, step: int) -> None:
        """Note that the trial's folder holds all that is needed to go on from a step."""
        write_model(self._file, KeptReports(step=step, evaluations=tuple(self.evaluations)))
        self.trial.checkpointed(step)


_trials: list[Trial] = []
_reports: list[ScriptReports] = []
_process: list[int] = []
"""The id of the process in which the script runs."""


def begin(trial: Trial, *reports: ScriptReports) -> None:
    """Let the script that is about to run in this process report to a trial; a script that is rehearsed does not."""
    _trials[:], _reports[:], _process[:] = [trial], reports, [os.getpid()]


def report(value: float, step: int, *, metrics: Mapping[str, float] | None = None) -> bool:
    """Report how good the script's trial is by now, and hear whether to stop.

    Outside of a trial nothing happens, and the answer is False: the script can be run by itself.

    Args:
        value: The study's metric. May be NaN.
        step: Where the script is; it grows from report to report.
        metrics: Further numbers to keep with the report, by their names; those of ``study.also`` must be there.

    Returns:
        Whether to save what is needed, and end. A script that goes on is ended at its next report.

    Raises:
        ObjectiveError: The value is no number, or the step does not grow, or a Trainer of the script reports already;
            or it is called in a process that the script has started.
    """
    if TRIAL_VARIABLE in os.environ and _process != [os.getpid()]:
        raise ObjectiveError(
            "reporting from a script",
            f"process {os.getpid()} is one that the trial's script has started",
            "reports of the process that runs the script",
            "hand the value over to it; or write lines to the file of script.results",
        )
    return bool(_reports) and _reports[0].report(value, step, metrics or {})


def checkpointed(step: int) -> None:
    """Say that the trial's folder now holds all that the script needs to go on from ``step``.

    The next attempt's folder then begins as a copy of it; without this call it begins empty. Outside of a trial nothing
    happens.
    """
    if _reports:
        _reports[0].checkpointed(step)


def current_trial() -> Trial | None:
    """Return the trial that the script is run for; None: it is run by itself."""
    return _trials[0] if _trials else None
