"""The jobs that child processes do, and the base of their requests."""

from enum import StrEnum
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

from dryfit.settings.wire import Wire


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
