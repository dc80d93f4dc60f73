"""The result of a check: passed, a warning, or a failure, with its fix."""

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from dryfit.core.errors import DryfitError
from dryfit.core.wire import ErrorParts


class Status(StrEnum):
    """How a check ended."""

    PASS = "pass"
    WARN = "warn"
    """Trials run, but not as one may expect."""
    FAIL = "fail"
    """Trials would not run, or not all of them."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One check.

    Attributes:
        about: Its subject: ``machine``, ``study``, ``data``, or ``model NAME``.
        check: What was checked.
        found: What was found, with values.
        fix: What to do; empty only where it passed.
    """

    about: str
    check: str
    status: Status
    found: str
    fix: str = ""

    def __post_init__(self) -> None:
        if self.status is not Status.PASS and not self.fix:
            raise ValueError(f"{self.about}, {self.check}: a finding to act on must say how")


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All findings, in order."""

    findings: tuple[Finding, ...]

    @property
    def healthy(self) -> bool:
        """Whether no check failed."""
        return not any(finding.status is Status.FAIL for finding in self.findings)

    @property
    def counts(self) -> dict[Status, int]:
        """The number of checks by status."""
        counts = Counter(finding.status for finding in self.findings)
        return {status: counts[status] for status in Status}


def passed(about: str, check: str, found: str) -> Finding:
    """Return a finding that passed."""
    return Finding(about, check, Status.PASS, found)


def warned(about: str, check: str, found: str, fix: str) -> Finding:
    """Return a warning."""
    return Finding(about, check, Status.WARN, found, fix)


def failed(about: str, check: str, found: str, fix: str) -> Finding:
    """Return a failure."""
    return Finding(about, check, Status.FAIL, found, fix)


def failed_by(about: str, check: str, error: DryfitError | ErrorParts) -> Finding:
    """Return a failed check with an error's message."""
    allowed = f"allowed: {error.allowed}" if error.allowed else ""
    advice = "; ".join(part for part in (error.hint, allowed) if part)
    return failed(about, check, f"{error.doing}: {error.found}", advice or "put that right, and look again")
