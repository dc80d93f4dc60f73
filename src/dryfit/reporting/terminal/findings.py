"""What ``dryfit doctor``, ``tune --dry-run`` and ``bug-report`` print, as lines and as JSON."""

from collections.abc import Iterator

from pydantic import Field

from dryfit.reporting.data.json_view import Answer, View
from dryfit.reporting.terminal.tables import Table
from dryfit.study.doctor.finding import Diagnosis, Finding, Status


class CheckView(View):
    """One check."""

    about: str
    check: str
    status: Status
    found: str
    fix: str


class DiagnosisView(Answer):
    """What ``dryfit doctor --json`` prints."""

    healthy: bool
    counts: dict[Status, int]
    checks: tuple[CheckView, ...]


class PartView(View):
    """One file of a report on a bug."""

    name: str
    bytes: int
    about: str


class BugReport(Answer):
    """What ``dryfit bug-report --json`` prints."""

    file: str = Field(description="the archive")
    parts: tuple[PartView, ...] = Field(description="what is inside")


def parts_table(report: BugReport) -> Table:
    """Return a row for each file of a report on a bug."""
    rows = tuple((part.name, str(part.bytes), part.about) for part in report.parts)
    return Table(("inside", "bytes", "what it is"), rows)


def diagnosis_view(diagnosis: Diagnosis) -> DiagnosisView:
    """Return the JSON view of a diagnosis."""
    checks = tuple(CheckView.of(finding) for finding in diagnosis.findings)
    return DiagnosisView.of(diagnosis, checks=checks)


def finding_lines(finding: Finding) -> Iterator[str]:
    """Yield a check as one line for ``grep FAIL``, and a second line with the fix unless it passed."""
    result = " ".join(finding.found.split())
    yield f"{finding.status.upper():4}  {finding.about}: {finding.check}: {result}"
    if finding.status is not Status.PASS:
        yield f"      fix: {' '.join(finding.fix.split())}"


def verdict_line(diagnosis: Diagnosis) -> str:
    """Return the verdict on all checks with their counts."""
    counts = diagnosis.counts
    text = f"{counts[Status.PASS]} passed, {counts[Status.WARN]} to look at, {counts[Status.FAIL]} failed"
    return f"{'ready' if diagnosis.healthy else 'not ready'}: {text}"
