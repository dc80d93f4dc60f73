"""Answer of ``dryfit check``: what runs take of a GPU's memory beside their budgets and baselines."""

from enum import StrEnum
from typing import Final, Literal

from pydantic import Field

from dryfit.settings.errors import ExitStatus
from dryfit.settings.memory_terms import DeviceSpec, MemoryCategory
from dryfit.settings.rehearsal_messages import RehearsalAnswer
from dryfit.settings.tables import Settings
from dryfit.settings.text import Shown


class HeldLine(Settings):
    """What one line of code holds at the peak.

    Attributes:
        line: ``path:number`` of the script's own code; relative to the file's folder where it lies inside.
        code: The text of that line.
        source: The deepest line outside of torch.
        source_code: The text of that line; empty where it is the same, and in earlier baselines.
    """

    line: str
    code: str
    source: str
    category: MemoryCategory
    bytes: int
    source_code: str = ""

    @property
    def key(self) -> tuple[str, ...]:
        """What stays where lines move: the file and the code, without numbers of lines."""
        return file_of(self.line), self.code.strip(), file_of(self.source), self.source_code, self.category


class Kept(Settings):
    """What a rehearsal on one device took."""

    allocated_bytes: int
    reserved_bytes: int
    required_bytes: int
    versions: dict[str, str]
    lines: tuple[HeldLine, ...]


class Baseline(Settings):
    """A file of ``.dryfit``."""

    format: Literal[1] = 1
    command: str
    devices: dict[str, Kept]


class CheckVerdict(StrEnum):
    """What was found of a run on a device."""

    WITHIN = "within"
    NEW = "no baseline"
    SHRANK = "less than the baseline"
    GREW = "grew"
    OVER = "over budget"
    NO_FIT = "does not fit"
    UNKNOWN = "unknown"


_STATUS: Final = {
    CheckVerdict.GREW: ExitStatus.ANSWER_IS_NO,
    CheckVerdict.OVER: ExitStatus.ANSWER_IS_NO,
    CheckVerdict.NO_FIT: ExitStatus.ANSWER_IS_NO,
    CheckVerdict.UNKNOWN: ExitStatus.CANNOT_RUN,
}


class LineChange(Settings):
    """How much more one line holds at the peak than in the baseline; ``line`` is the present one where there is one."""

    line: str
    code: str
    source: str
    category: MemoryCategory
    before_bytes: int
    after_bytes: int
    source_code: str = ""

    @property
    def difference_bytes(self) -> int:
        """After minus before."""
        return self.after_bytes - self.before_bytes


class RunCheck(Settings):
    """One run on one device.

    Attributes:
        fits: Within the device and the budget; None: unknown.
        before: The baseline; None: there is none.
        after: What was rehearsed now; None: nothing was seen.
        other_versions: Libraries of another version than the baseline's: before, after.
        lines: What changed against the baseline by source line, first in the direction of the peak; the largest first.
        reasons: Why the verdict is what it is.
        answer: The rehearsal itself; not a part of the JSON.
    """

    name: str
    command: str
    device: DeviceSpec
    verdict: CheckVerdict
    fits: bool | None
    budget_bytes: int
    before: Kept | None = None
    after: Kept | None = None
    other_versions: dict[str, tuple[str, str]] = Field(default_factory=dict)
    lines: tuple[LineChange, ...] = ()
    reasons: tuple[str, ...] = ()
    peak_line: str = ""
    peak_code: str = ""
    answer: RehearsalAnswer | None = Field(default=None, exclude=True, repr=False)


class MemoryCheck(Shown, Settings):
    """All runs of a file, or those that were named.

    Attributes:
        updated: Baselines that were written.
    """

    runs: tuple[RunCheck, ...]
    updated: tuple[str, ...] = ()

    @property
    def exit_status(self) -> ExitStatus:
        """0: all within; 1: something grew or does not fit; 2: else something is unknown."""
        found = {_STATUS.get(one.verdict, ExitStatus.DONE) for one in self.runs}
        return next((one for one in (ExitStatus.ANSWER_IS_NO, ExitStatus.CANNOT_RUN) if one in found), ExitStatus.DONE)


def file_of(place: str) -> str:
    """Return the path of ``path:number``."""
    return place.rpartition(":")[0]
