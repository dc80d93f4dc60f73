"""What several studies ran to one after another, and how far several studies are."""

from collections.abc import Sequence
from typing import Final

from pydantic import Field

from dryfit.core.errors import ExitStatus
from dryfit.reporting.data.json_view import Answer, View
from dryfit.reporting.data.summary import StudySummary, TrialCounts
from dryfit.reporting.terminal.tables import Table, duration_text, measured_text

FAILED, NOT_BEGUN = "error", "not_begun"
_OUTCOMES: Final = tuple(name for name in TrialCounts.model_fields if name != "total")
_HEADS: Final = {"running": "open"}


class StudyEntry(View):
    """One of the studies."""

    study: str
    folder: str
    status: ExitStatus | None = Field(description="what `dryfit tune` of it alone exits with; null: not begun")
    end: str = Field(description="why its session ended; error: it could not run; not_begun")
    worked_on: bool = Field(description="false: it was done before, or its turn did not come")
    error: str | None = Field(description="why it could not run")
    advice: str = Field(description="where nothing fits the device: what would; where it was paused: why")
    summary: StudySummary | None = Field(description="as `dryfit status --json` prints it; null: it has no ledger")


class SeveralSummary(Answer):
    """What ``dryfit tune`` of several studies prints with ``--json``, in the order given."""

    status: ExitStatus = Field(description="what the command exits with")
    studies: tuple[StudyEntry, ...]


class StudyStatus(View):
    """How far one of several studies is."""

    folder: str
    owner: int | None = Field(description="the process that runs it now; null: none does")
    error: str | None = Field(description="why it cannot be read")
    summary: StudySummary | None = Field(description="as `dryfit status --json` prints it; null: it cannot be read")


class SeveralStatuses(Answer):
    """What ``dryfit status`` of several studies prints with ``--json``, in the order given."""

    status: ExitStatus = Field(description="what the command exits with: 2 where a study cannot be read")
    studies: tuple[StudyStatus, ...]


def statuses_table(several: SeveralStatuses) -> Table:
    """Return one row for each study, with a column for each outcome that occurred."""
    shown = _shown_outcomes([entry.summary for entry in several.studies])
    heads = ("study", "task", *(_HEADS.get(name, name) for name in shown), "of", "best", "now", "time", "folder")
    return Table(heads, tuple(_status_row(entry, shown) for entry in several.studies))


def _status_row(entry: StudyStatus, outcomes: Sequence[str]) -> tuple[str, ...]:
    summary = entry.summary
    name = "-" if summary is None else summary.study
    now = "cannot be read" if summary is None else f"process {entry.owner}" if entry.owner else "not running"
    known, time = _known_cells(summary, outcomes)
    return (name, *known, now, time, entry.folder)


def several_table(several: SeveralSummary) -> Table:
    """Return one row for each study, with a column for each outcome that occurred."""
    shown = _shown_outcomes([entry.summary for entry in several.studies])
    heads = ("study", "task", *(_HEADS.get(name, name) for name in shown), "of", "best", "exit", "ended", "time")
    return Table((*heads, "folder"), tuple(_row(entry, shown) for entry in several.studies))


def _row(entry: StudyEntry, outcomes: Sequence[str]) -> tuple[str, ...]:
    known, time = _known_cells(entry.summary, outcomes)
    status = "-" if entry.status is None else str(int(entry.status))
    before = " before" if entry.status is not None and not entry.worked_on else ""
    return (entry.study, *known, status, entry.end.replace("_", " ") + before, time, entry.folder)


def _shown_outcomes(summaries: Sequence[StudySummary | None]) -> list[str]:
    counts = [summary.trials for summary in summaries if summary is not None]
    return [name for name in _OUTCOMES if any(getattr(count, name) for count in counts)]


def _known_cells(summary: StudySummary | None, outcomes: Sequence[str]) -> tuple[tuple[str, ...], str]:
    """Return the task, the counts, the total and the best value, and the time worked."""
    if summary is None:
        return ("-",) * (len(outcomes) + 3), "-"
    numbers = [str(getattr(summary.trials, name)) for name in (*outcomes, "total")]
    return (summary.task, *numbers, _best_cell(summary)), duration_text(summary.wall_s)


def _best_cell(summary: StudySummary) -> str:
    """Return the best value of the study's metric, and the size of the Pareto front where there are several goals."""
    if summary.best is None:
        return "-"
    best = f"{summary.metric} {measured_text(summary.best.value, summary.best.spread)}"
    return f"{best} (front of {len(summary.pareto)})" if summary.pareto else best
