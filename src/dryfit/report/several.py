"""Several studies that ran one after another: one summary of them all."""

from pydantic import Field

from dryfit.core.errors import ExitStatus
from dryfit.report.summary import StudySummary
from dryfit.report.tables import Table, duration_text, number_text
from dryfit.report.view import Answer, View

FAILED, NOT_BEGUN = "error", "not_begun"


class StudyEntry(View):
    """One of the studies."""

    study: str
    folder: str
    status: ExitStatus | None = Field(description="what `dryfit tune` of it alone exits with; null: not begun")
    end: str = Field(description="why its session ended; error: it could not run; not_begun")
    worked_on: bool = Field(description="false: it was done before, or its turn did not come")
    error: str | None = Field(description="why it could not run")
    advice: str = Field(description="where nothing fits the device: what would")
    summary: StudySummary | None = Field(description="as `dryfit status --json` prints it; null: it has no ledger")


class SeveralSummary(Answer):
    """The answer of ``dryfit tune`` with several studies, in the order in which they were named."""

    status: ExitStatus = Field(description="what the command exits with")
    studies: tuple[StudyEntry, ...]


def several_table(several: SeveralSummary) -> Table:
    """One row a study."""
    heads = ("study", "task", "complete", "pruned", "failed", "refused", "open", "of", "best", "exit", "ended", "time")
    return Table((*heads, "folder"), tuple(_row(entry) for entry in several.studies))


def _row(entry: StudyEntry) -> tuple[str, ...]:
    summary = entry.summary
    if summary is None:
        known = ("-",) * 8
    else:
        counts = summary.trials
        numbers = (counts.complete, counts.pruned, counts.failed, counts.refused, counts.running, counts.total)
        known = (summary.task, *map(str, numbers), _best_cell(summary))
    status = "-" if entry.status is None else str(int(entry.status))
    ended = entry.end if entry.worked_on or entry.status is None else f"{entry.end} (before)"
    time = "-" if summary is None else duration_text(summary.wall_s)
    return (entry.study, *known, status, ended.replace("_", " "), time, entry.folder)


def _best_cell(summary: StudySummary) -> str:
    """The best value by the study's metric, and how many trials no other beats where it has several goals."""
    if summary.best is None:
        return "-"
    best = f"{summary.metric} {number_text(summary.best.value)}"
    return f"{best} (front of {len(summary.pareto)})" if summary.pareto else best
