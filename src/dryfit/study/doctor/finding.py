"""What a check found: passed, to be looked at, or in the way; with what to do about it."""

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from dryfit.core.errors import DryfitError
from dryfit.core.wire import ErrorParts


class Status(StrEnum):
    """How a check ended."""

    PASS = "pass"
    WARN = "warn"
    """Trials run, but something may surprise."""
    FAIL = "fail"
    """Trials would not run, or not all of them."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One check.

    Attributes:
        about: What it belongs to: ``machine``, ``study``, ``data``, or ``model NAME``.
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
    """Everything that was checked, in order."""

    findings: tuple[Finding, ...]

    @property
    def healthy(self) -> bool:
        """Whether nothing is in the way."""
        return not any(finding.status is Status.FAIL for finding in self.findings)

    @property
    def counts(self) -> dict[Status, int]:
        """How many checks ended in which way."""
        found = Counter(finding.status for finding in self.findings)
        return {status: found[status] for status in Status}


def passed(about: str, check: str, found: str) -> Finding:
    """All is well."""
    return Finding(about, check, Status.PASS, found)


def warned(about: str, check: str, found: str, fix: str) -> Finding:
    """Something may surprise."""
    return Finding(about, check, Status.WARN, found, fix)


def failed(about: str, check: str, found: str, fix: str) -> Finding:
    """Something is in the way."""
    return Finding(about, check, Status.FAIL, found, fix)


def failed_by(about: str, check: str, error: DryfitError | ErrorParts) -> Finding:
    """What an error says, as a finding."""
    allowed = f"allowed: {error.allowed}" if error.allowed else ""
    advice = "; ".join(part for part in (error.hint, allowed) if part)
    return failed(about, check, f"{error.doing}: {error.found}", advice or "put that right, and look again")
