"""A diagnosis for people and for programs: what ``dryfit doctor`` and ``tune --dry-run`` print."""

from collections.abc import Iterator

from dryfit.reporting.data.json_view import Answer, View
from dryfit.study.doctor.finding import Diagnosis, Finding, Status


class CheckView(View):
    """One check."""

    about: str
    check: str
    status: Status
    found: str
    fix: str


class DiagnosisView(Answer):
    """What ``doctor --json`` prints."""

    healthy: bool
    counts: dict[Status, int]
    checks: tuple[CheckView, ...]


def diagnosis_view(diagnosis: Diagnosis) -> DiagnosisView:
    """Everything that was checked."""
    checks = tuple(
        CheckView(about=one.about, check=one.check, status=one.status, found=one.found, fix=one.fix)
        for one in diagnosis.findings
    )
    return DiagnosisView(healthy=diagnosis.healthy, counts=diagnosis.counts, checks=checks)


def finding_lines(finding: Finding) -> Iterator[str]:
    """A check in one line that ``grep FAIL`` finds; where something is to be done, a second one says what."""
    found = " ".join(finding.found.split())
    yield f"{finding.status.upper():4}  {finding.about}: {finding.check}: {found}"
    if finding.status is not Status.PASS:
        yield f"      fix: {' '.join(finding.fix.split())}"


def verdict_line(diagnosis: Diagnosis) -> str:
    """The end of the matter."""
    counts = diagnosis.counts
    said = f"{counts[Status.PASS]} passed, {counts[Status.WARN]} to look at, {counts[Status.FAIL]} failed"
    if not diagnosis.healthy:
        return f"not ready: {said}"
    return f"ready: {said}"
