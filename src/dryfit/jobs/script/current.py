"""What a script may ask and tell of the trial that it is run for; outside of one it runs as ever."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final, final

from dryfit.core.errors import ObjectiveError
from dryfit.core.wire import Wire, read_model, write_model
from dryfit.jobs.own.objective_trial import Trial, as_number
from dryfit.jobs.own.trainer_checkpoints import Evaluation
from dryfit.jobs.own.trainer_goals import Goals

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


@final
class RehearsedReports:
    """What a script finds that is only rehearsed: it has a trial, and nobody hears what it says.

    Attributes:
        trial: The trial.
    """

    def __init__(self, trial: Trial) -> None:
        self.trial = trial

    def report(self, value: float, step: int, metrics: Mapping[str, float]) -> bool:
        """Say nothing; the script goes on."""
        return False

    def checkpointed(self, step: int) -> None:
        """Say nothing."""


_running: list[ScriptReports | RehearsedReports] = []
_process: list[int] = []
"""The id of the process in which the script runs."""


def begin(reports: ScriptReports | RehearsedReports) -> None:
    """Let the script that is about to run in this process report to a trial."""
    _running[:] = [reports]
    _process[:] = [os.getpid()]


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
    return bool(_running) and _running[0].report(value, step, metrics or {})


def checkpointed(step: int) -> None:
    """Say that the trial's folder now holds all that the script needs to go on from ``step``.

    The next attempt's folder then begins as a copy of it; without this call it begins empty. Outside of a trial nothing
    happens.
    """
    if _running:
        _running[0].checkpointed(step)


def current_trial() -> Trial | None:
    """Return the trial that the script is run for; None: it is run by itself."""
    return _running[0].trial if _running else None
