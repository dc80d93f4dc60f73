"""Messages between processes: versioned JSON, written atomically and read with bounds."""

import hashlib
import json
import time
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Final, Generic, Literal, NamedTuple, Self, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from dryfit.settings.errors import DryfitError, error_class
from dryfit.settings.text import sendable
from dryfit.settings.trial import MetricPoint

# A clock in Unix seconds that does not jump when the system time is set.


_SINCE_BOOT = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Also counts while the machine sleeps, and cannot be set."""


def since_boot_s() -> float:
    """Return the seconds of a clock that is never set."""
    return time.clock_gettime(_SINCE_BOOT)


def steady_clock(steady: Callable[[], float] = since_boot_s) -> Callable[[], float]:
    """Return a clock in Unix seconds that does not jump when the system time is set.

    Otherwise a wait or a time limit could last a day longer, or end at once, when somebody sets the time.
    """
    offset_s = time.time() - steady()
    return lambda: steady() + offset_s


# Reading of JSON that anybody may have written: no key twice, bounded in depth, only text that UTF-8 can encode.


MOST_DEPTH: Final = 64
"""Lists and objects inside one another, at most: what handles values one level a call has room for so many."""


def parse_json(text: str) -> Any:
    """Parse JSON of an untrusted file.

    Args:
        text: One JSON value.

    Raises:
        ValueError: It is not JSON (:class:`json.JSONDecodeError`), has a key twice, a number of thousands of digits or
            half a surrogate pair, or is nested deeper than ``MOST_DEPTH``; the message says which.
    """
    too_deep = f"it is nested deeper than {MOST_DEPTH} levels"
    try:
        value = json.loads(text, object_pairs_hook=unique_keys)
    except RecursionError as error:
        raise ValueError(too_deep) from error
    if text.count("[") + text.count("{") > MOST_DEPTH and is_too_deep(value):
        raise ValueError(too_deep)
    if "\\ud" in text or "\\uD" in text:
        _check_pairs(value)
    return value


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object of its pairs; the standard library would silently take the last of equal keys.

    Raises:
        ValueError: A key is there twice.
    """
    content = dict(pairs)
    if len(content) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {ascii(twice)[:80]} is there twice")
    return content


def is_too_deep(value: object) -> bool:
    """Whether more than ``MOST_DEPTH`` lists and objects stand inside one another, found out without recursion."""
    level = [value]
    for _ in range(MOST_DEPTH + 1):
        inner = [items for item in level if (items := _items(item)) is not None]
        if not inner:
            return False
        level = [item for items in inner for item in items]
    return True


def _items(value: object) -> list[object] | None:
    """Return what a list or an object has in it; None of anything else."""
    if isinstance(value, dict):
        return list(cast("dict[str, object]", value).values())
    return cast("list[object]", value) if isinstance(value, list) else None


def _check_pairs(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        raise ValueError(f"{half} is half a surrogate pair, which is no character") from error


# A child process does one job. In its folder the control process writes ``request.json``, ``verdict.json`` and
# ``stop``, and the child ``messages.jsonl``, ``beat``, ``log.txt`` and, last of all, ``result.json``.


REQUEST_FILE = "request.json"
VERDICT_FILE = "verdict.json"
STOP_FILE = "stop"
MESSAGES_FILE = "messages.jsonl"
BEAT_FILE = "beat"
DISK_FULL_BEAT_NS = 3
"""Time of a beat that says that the disk is full: unlike a message it takes no room on it."""
LOG_FILE = "log.txt"
STACKS_FILE = "stacks.txt"
RESULT_FILE = "result.json"

STEP_PREFIX = "step-"
"""A checkpoint's folder is named so, and by its step in eight digits."""
UNREADABLE_PREFIX = "unreadable-"
"""An entry of this prefix and a checkpoint's name, in an attempt's own folder, says that it cannot be read."""


MARKER_VARIABLE = "DRYFIT_STUDY"
"""Environment variable that marks every process of a study, by which orphans are found."""


class Wire(BaseModel):
    """Base of every message: frozen, strict, versioned. Validate from JSON."""

    # A field with an alias has that name in files, so that older ones can be read; our code uses its own name.
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        ser_json_inf_nan="constants",
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
    )

    v: Literal[1] = 1


class ErrorParts(Wire):
    """The parts of a dryfit error, for a file."""

    code: str
    doing: str
    found: str
    allowed: str = ""
    hint: str = ""

    @classmethod
    def of(cls, error: DryfitError) -> "ErrorParts":
        """Take the parts of an error."""
        doing, found, allowed, hint = map(sendable, (error.doing, error.found, error.allowed, error.hint))
        return cls(code=error.code, doing=doing, found=found, allowed=allowed, hint=hint)

    def rebuilt(self) -> DryfitError:
        """Rebuild the error, with its own class."""
        return error_class(self.code)(self.doing, self.found, self.allowed, self.hint)


class Started(Wire):
    """The child's first message: everything is imported."""

    type: Literal["started"] = "started"
    pid: int
    overhead_ms: float


VALIDATING: Final = "evaluate"
"""Name of the phase in which rows are scored."""


class Phase(Wire):
    """The child began a phase, ``after_ms`` milliseconds after placement; None: an earlier version said it."""

    type: Literal["phase"] = "phase"
    name: Literal["load", "train", "evaluate", "save"]
    step: int = 0
    after_ms: float | None = None


class Progress(Wire):
    """Progress of training; at most a few messages per second."""

    type: Literal["progress"] = "progress"
    step: int
    total_steps: int
    epoch: float
    loss: float | None = None
    device_bytes: int | None = Field(default=None, description="device memory in use; None on the CPU")


class FirstStep(Wire):
    """The first optimizer step is done."""

    type: Literal["first_step"] = "first_step"
    after_ms: float


class Report(Wire):
    """One validation; the child waits for the verdict with the same ``n``.

    Attributes:
        last: Training ends with it, whatever the verdict. A function of the user's own never says so.
    """

    type: Literal["report"] = "report"
    point: MetricPoint
    last: bool = False


class Checkpointed(Wire):
    """A checkpoint was written."""

    type: Literal["checkpointed"] = "checkpointed"
    step: int


class Note(Wire):
    """A remark for the trial's story."""

    type: Literal["note"] = "note"
    text: str


Message = Annotated[Started | Phase | Progress | FirstStep | Report | Checkpointed | Note, Field(discriminator="type")]
MESSAGE: TypeAdapter[Message] = TypeAdapter(Message)


class Verdict(Wire):
    """The control process's answer to report ``n``."""

    n: int
    proceed: bool


def canonical_json(value: Any) -> str:
    """Return JSON with sorted keys and no spaces: equal values give equal texts."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def digest(value: Any, chars: int = 16) -> str:
    """Return a hash of what can be written as JSON: equal values have equal ones."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:chars]


# The jobs that child processes do, and the base of their requests.


class Job(StrEnum):
    """The job of a child process."""

    RESOLVE = "resolve"
    BASELINES = "baselines"
    TRAIN = "train"
    CHECK = "check"
    PLAN = "plan"
    REHEARSE = "rehearse"
    CALIBRATE = "calibrate"
    PROBE = "probe"
    PACE = "pace"
    BATCH_CHECK = "batch-check"
    IMPORT = "import"
    OBJECTIVE = "objective"
    TRAINER = "trainer"
    SCRIPT = "script"
    SCRIPT_ARGUMENTS = "script-arguments"
    FINAL = "final"
    PREDICT = "predict"
    MERGE = "merge"
    EXPORT = "export"
    TINY_LM = "tiny-lm"
    ROWS = "rows"


class ProcessNeeds(NamedTuple):
    """What a job needs of its process.

    Attributes:
        hides_devices: It sees no CUDA device but ``visible_device``.
        visible_device: Value of CUDA_VISIBLE_DEVICES; None: no device.
        diagnostic: Blocking launches and device assertions: slow, but exact.
        of_the_user: The process belongs to the user's own function, which may change torch as it likes.
    """

    hides_devices: bool = False
    visible_device: str | None = None
    diagnostic: bool = False
    of_the_user: bool = False


R = TypeVar("R", bound=Wire)
"""The result of a job."""


class JobRequest(Wire, Generic[R]):
    """Base of the requests: a job's request says of which type its result is.

    Attributes:
        job: The job; each request has its own ``Literal``, by which it is recognised in a file.
        needs: What the job needs of its process, whichever request it is.
    """

    job: Any
    needs: ClassVar[ProcessNeeds] = ProcessNeeds()

    def __class_getitem__(cls, _result: Any) -> type[Self]:
        # For type checkers only: pydantic would make a class of its own for each result, a millisecond each.
        return cls

    def process_needs(self) -> ProcessNeeds:
        """Return what the job needs of its process: the device and the diagnosis are asked for by the request."""
        asked = {name: getattr(self, name) for name in ("visible_device", "diagnostic") if hasattr(self, name)}
        return self.needs._replace(**asked)
