"""Run several studies one after another, each in a session of its own, and say how far several are."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dryfit.api.files import layout_of, space_of, study_file_of
from dryfit.api.studies import TuneResult, result_of, with_total
from dryfit.config.load import load_study_file
from dryfit.config.schema import StudyConfig
from dryfit.core.errors import ConfigError, DryfitError, ExitStatus
from dryfit.core.text.secrets import redacted, secrets_of
from dryfit.reporting.summary import (
    FAILED,
    NOT_BEGUN,
    SeveralStatuses,
    SeveralSummary,
    StudyEntry,
    StudyStatus,
    StudySummary,
    summarise,
)
from dryfit.runtime.children.environment import demand_secrets
from dryfit.search.mirror.handle import storage_url
from dryfit.search.space.space import Space
from dryfit.store.layout import StudyLayout
from dryfit.store.lock import lock_owner
from dryfit.study.loop.finished import finished
from dryfit.study.loop.next_step import End
from dryfit.study.loop.observers import Observer, threaded
from dryfit.study.loop.session import read_study, run_session
from dryfit.study.loop.stops import StopSignals

_GRAVEST_FIRST: Final = (
    ExitStatus.INTERRUPTED,
    ExitStatus.BUG,
    ExitStatus.STOPPED,
    ExitStatus.CANNOT_RUN,
    ExitStatus.ANSWER_IS_NO,
    ExitStatus.DONE,
)
"""A study that the same command would continue (3) comes before those for which it would do nothing (2, 1)."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The place of a study among several.

    Attributes:
        number: From 1.
        of: How many there are.
        name: ``study.name``.
        folder: Where it lives.
    """

    number: int
    of: int
    name: str
    folder: Path


@dataclass(frozen=True, slots=True)
class StudyRun:
    """The outcome of one of the studies.

    Attributes:
        turn: Which one.
        result: How its session ended; None where there was none.
        error: Why it could not run.
        worked_on: False where it was done before, or its turn did not come.
    """

    turn: Turn
    result: TuneResult | None = None
    error: DryfitError | None = None
    worked_on: bool = True

    @property
    def status(self) -> ExitStatus | None:
        """The exit status for this study alone; None where its turn did not come."""
        if self.error is not None:
            return self.error.exit_status
        return None if self.result is None else self.result.status


@dataclass(frozen=True, slots=True)
class TuneAllResult:
    """The outcome of several studies.

    Attributes:
        studies: One for each, in the given order.
        stopped: How a signal ended the run before its last study; None: no signal came.
        summary: All of them in numbers.
    """

    studies: tuple[StudyRun, ...]
    stopped: End | None
    summary: SeveralSummary

    @property
    def status(self) -> ExitStatus:
        """The exit status of the command."""
        return self.summary.status


@dataclass(frozen=True, slots=True)
class _Ready:
    """A study that was read and checked, and has not begun."""

    turn: Turn
    config: StudyConfig
    space: Space
    layout: StudyLayout


def tune_all(
    studies: Sequence[Path | str],
    *,
    overrides: Sequence[str] = (),
    trials: int | None = None,
    observers: Sequence[Observer] = (),
    on_turn: Callable[[Turn], None] = lambda _: None,
    on_end: Callable[[StudyRun], None] = lambda _: None,
) -> TuneAllResult:
    """Search several studies one after another, going on where an earlier run stopped.

    All files are read and checked before the first study begins. Each has a session of its own, which releases
    everything before the next one begins. A study that fails, pauses or cannot run does not keep the others from
    running. A signal stops the running one, and no further one begins; so does an internal error. The same call
    continues: for a study that is done, and whose file and rows have not changed, no process is started.

    Args:
        studies: Study files, or folders with a ``study.toml``; each lives where :func:`layout_of` says.
        overrides: ``key=value`` pairs that replace keys of every file.
        trials: Each study's total of counted trials; replaces ``study.trials``.
        observers: Called with what happens in each of the studies.
        on_turn: Called with each study before anything is done for it.
        on_end: Called with the outcome of each study.

    Raises:
        ConfigError: A file is wrong, or two studies are one; all problems of all files at once. Nothing has begun.
    """
    rows = _checked(studies, with_total(overrides, trials))
    threads = [threaded(observer) for observer in observers]  # one that is detached is so for all the studies
    runs: list[StudyRun] = []
    stopped = None
    with StopSignals() as signals:
        for ready in rows:
            stopped = signals.why
            if stopped is not None or any(run.status is ExitStatus.BUG for run in runs):
                runs.append(StudyRun(ready.turn, worked_on=False))
                continue
            on_turn(ready.turn)
            run = _run(ready, threads, signals)
            runs.append(run)
            on_end(run)
    return TuneAllResult(tuple(runs), stopped, _summary(rows, runs, stopped))


def status_all(studies: Sequence[Path | str]) -> SeveralStatuses:
    """Return how far several studies are, running or not; one that cannot be read does not hide the others.

    Args:
        studies: Their folders, or their study files.
    """
    entries = tuple(_status(layout_of(study)) for study in studies)
    unreadable = any(entry.error is not None for entry in entries)
    return SeveralStatuses(status=ExitStatus.CANNOT_RUN if unreadable else ExitStatus.DONE, studies=entries)


def _status(layout: StudyLayout) -> StudyStatus:
    try:
        summary, owner = summarise(read_study(layout), layout), lock_owner(layout.lock)
    except (DryfitError, OSError) as error:
        text = redacted(str(error), secrets_of(os.environ))
        return StudyStatus(folder=str(layout.folder), owner=None, error=text, summary=None)
    return StudyStatus(folder=str(layout.folder), owner=owner, error=None, summary=summary)


def overall(statuses: Sequence[ExitStatus]) -> ExitStatus:
    """Return the gravest of several exit statuses.

    3 comes before 2 and 1: a script that repeats the command on a 3 must do so also where another study is at fault.
    """
    return next(status for status in _GRAVEST_FIRST if status in statuses)


def _run(ready: _Ready, observers: Sequence[Observer], signals: StopSignals) -> StudyRun:
    try:
        before = finished(ready.config, ready.layout)
        if before is not None:
            return StudyRun(ready.turn, result_of(before), worked_on=False)
        session = run_session(ready.config, ready.space, ready.layout, observers, signals)
        return StudyRun(ready.turn, result_of(session))
    except DryfitError as error:
        return StudyRun(ready.turn, error=error)


def _checked(studies: Sequence[Path | str], overrides: Sequence[str]) -> list[_Ready]:
    """Read and check every study; nothing is started, and nothing written.

    Raises:
        ConfigError: With all problems of all files.
    """
    if not studies:
        raise ConfigError("starting several studies", "none was named", "study files, or folders with a study.toml")
    rows: list[_Ready] = []
    problems: list[DryfitError] = []
    folders: dict[Path, Path | str] = {}
    for number, study in enumerate(studies, start=1):
        try:
            file = study_file_of(Path(study))
            layout = layout_of(file)
            if layout.folder in folders:
                raise _same_folder(study, folders[layout.folder], layout)
            folders[layout.folder] = study
            loaded = load_study_file(file, overrides)
            storage_url(loaded.config.search.mirror, os.environ)
            demand_secrets(loaded.config.function, os.environ, table=loaded.config.function_table)
            turn = Turn(number, len(studies), loaded.config.study.name, layout.folder)
            rows.append(_Ready(turn, loaded.config, space_of(loaded), layout))
        except DryfitError as error:
            problems.append(_naming(study, error))
    if problems:
        raise _all_problems(problems, len(studies))
    return rows


def _same_folder(study: Path | str, first: Path | str, layout: StudyLayout) -> ConfigError:
    return ConfigError(
        f"looking for a study at {study}",
        f"it lives in {layout.folder}, and so does {first}, which was named before it",
        "each study once, and a folder for each",
    )


def _naming(study: Path | str, error: DryfitError) -> DryfitError:
    """Name the study in an error: they may all be called study.toml."""
    if str(study) in error.doing:
        return error
    return type(error)(f"{error.doing}, of {study}", error.found, error.allowed, error.hint)


def _all_problems(problems: Sequence[DryfitError], of: int) -> DryfitError:
    """Return one error with all problems, each with its parts."""
    if len(problems) == 1:
        return problems[0]
    texts = [line for problem in problems for line in str(problem).splitlines()]
    found = [f"{len(problems)} cannot run:", *(f"  {line}" for line in texts), "none has begun"]
    return ConfigError(f"reading {of} studies", "\n".join(found))


def _summary(rows: Sequence[_Ready], runs: Sequence[StudyRun], stopped: End | None) -> SeveralSummary:
    statuses = [run.status for run in runs if run.status is not None]
    if stopped is not None:
        statuses.append(ExitStatus.INTERRUPTED if stopped is End.INTERRUPTED else ExitStatus.STOPPED)
    entries = tuple(_entry(ready.layout, run) for ready, run in zip(rows, runs, strict=True))
    return SeveralSummary(status=overall(statuses), studies=entries)


def _entry(layout: StudyLayout, run: StudyRun) -> StudyEntry:
    result, error = run.result, run.error
    return StudyEntry(
        study=run.turn.name,
        folder=str(run.turn.folder),
        status=run.status,
        end=str(result.end) if result is not None else FAILED if error is not None else NOT_BEGUN,
        worked_on=run.worked_on,
        error=None if error is None else redacted(str(error), secrets_of(os.environ)),
        advice="" if result is None else result.advice,
        summary=_so_far(layout) if result is None else result.summary,
    )


def _so_far(layout: StudyLayout) -> StudySummary | None:
    """Return the summary of earlier runs; None where there was none, or the ledger cannot be read."""
    try:
        return summarise(read_study(layout), layout)
    except (DryfitError, OSError):
        return None
