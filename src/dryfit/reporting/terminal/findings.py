"""What ``dryfit doctor``, its drill, ``tune --dry-run`` and ``bug-report`` print, as lines and as JSON."""

from collections.abc import Iterator

from pydantic import Field

from dryfit.core.settings.trial import Outcome
from dryfit.reporting.data.json_view import Answer, View
from dryfit.reporting.terminal.tables import Table, number_text
from dryfit.study.doctor.drill import Drill, Kill, TrialEnd
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


class KillView(View):
    """One kill of a drill."""

    victim: str
    moment: str
    trial: int | None
    after_s: float


class EndView(View):
    """What a trial of a drill came to."""

    outcome: Outcome | None
    value: float | None
    validations: int


class DrilledTrial(View):
    """A trial of a drill, with and without kills."""

    number: int
    undisturbed: EndView
    disturbed: EndView | None
    same: bool = Field(description="all is equal: parameters, outcome, value, and step and value of each validation")


class DrillView(Answer):
    """What ``dryfit doctor --drill --json`` prints."""

    passed: bool
    troubles: tuple[str, ...] = Field(description="why it did not pass")
    kills: tuple[KillView, ...]
    trials: tuple[DrilledTrial, ...]
    left: int = Field(description="processes that were left over")
    wall_s: float


def drill_view(drill: Drill) -> DrillView:
    """Return the JSON view of a drill."""
    later = (*drill.disturbed, *[None] * len(drill.undisturbed))
    return DrillView(
        passed=not drill.troubles,
        troubles=drill.troubles,
        kills=tuple(
            KillView(victim=one.moment.victim, moment=one.moment.words, trial=one.trial, after_s=round(one.after_s, 1))
            for one in drill.kills
        ),
        trials=tuple(
            DrilledTrial(
                number=number,
                undisturbed=_end_view(calm),
                disturbed=None if killed is None else _end_view(killed),
                same=calm == killed,
            )
            for number, (calm, killed) in enumerate(zip(drill.undisturbed, later, strict=False))
        ),
        left=drill.left,
        wall_s=round(drill.wall_s, 1),
    )


def _end_view(end: TrialEnd) -> EndView:
    return EndView.of(end, validations=len(end.reports))


def kill_line(kill: Kill) -> str:
    """Return a kill in one line."""
    at = f", trial {kill.trial}" if kill.trial is not None else ""
    return f"{kill.after_s:5.1f} s  killed the {kill.moment.victim} {kill.moment.words}{at}"


def drill_table(view: DrillView) -> Table:
    """Return a row for each trial of a drill."""
    rows = [
        (
            str(trial.number),
            number_text(trial.undisturbed.value),
            "-" if trial.disturbed is None else number_text(trial.disturbed.value),
            str(trial.undisturbed.validations),
            "equal" if trial.same else "DIFFERENT",
        )
        for trial in view.trials
    ]
    return Table(("trial", "undisturbed", "with kills", "validations", "every value"), tuple(rows))


def drill_line(view: DrillView) -> str:
    """Return the verdict on a drill."""
    if view.passed:
        return f"nothing is lost: {len(view.kills)} kills, every value equal, nothing left behind, {view.wall_s:.0f} s"
    return f"not shown: {'; '.join(view.troubles)}"
