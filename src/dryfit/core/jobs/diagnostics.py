"""Jobs that look at checkpoints, machines and models before anything is trained."""

from typing import Literal

from pydantic import Field

from dryfit.core.jobs.checkpoint_health import Health
from dryfit.core.jobs.names import Job
from dryfit.core.jobs.train import TrainRequest
from dryfit.core.settings.execution import DeviceSpec
from dryfit.core.settings.trial import Scalar, TrialConfig
from dryfit.core.wire import ErrorParts, Wire


class CheckRequest(Wire):
    """Look at a checkpoint; no weight is read."""

    job: Literal[Job.CHECK] = Job.CHECK
    folder: str = Field(description="a model's folder, or `minilm`")
    task: str | None = Field(description="as in `dryfit.load`; None: what the folder itself says")
    trust: bool = Field(description="run code that comes with the model")


class CheckResult(Wire):
    """What CHECK found. A checkpoint that cannot be loaded is a finding, not an error."""

    health: Health


class ProbeRequest(Wire):
    """Say what this build of torch can use of the machine."""

    job: Literal[Job.PROBE] = Job.PROBE


class ProbeResult(Wire):
    """What PROBE found.

    Attributes:
        cuda_build: Version of CUDA that torch was built for; None: a CPU build.
        devices: The CUDA devices on which a small sum came out right.
        bf16: Whether all of them have bf16.
        trouble: Why torch can use no device, or not all; empty where nothing went wrong.
    """

    torch: str
    cuda_build: str | None
    devices: tuple[DeviceSpec, ...] = ()
    bf16: bool = True
    trouble: str = ""


class BatchCheckRequest(Wire):
    """Walk through one model's batches and do one step of them; nothing is learned, and nothing is kept.

    Attributes:
        trial: The study's own values with this model, its largest batch and its longest input.
        lengths: Every ``train.max_length`` that this model can get.
        points: Further trials that the space can ask for with this model; each does one small step.
    """

    job: Literal[Job.BATCH_CHECK] = Job.BATCH_CHECK
    trial: TrainRequest
    lengths: tuple[int, ...]
    points: tuple[TrialConfig, ...] = ()


class BatchWalk(Wire):
    """All batches of one split at one length.

    Attributes:
        longest: Tokens of the longest row.
        faults: What is wrong with batches, in words; the first few.
    """

    max_length: int
    split: str
    rows: int
    batches: int
    longest: int
    faults: tuple[str, ...] = ()


class StepFacts(Wire):
    """What one forward and backward pass gave.

    Attributes:
        step_s: Seconds of a step on rows of median length; None where the largest was the only one.
        not_finite: Trainable parameters whose gradient is infinite or NaN.
        untouched: Trainable parameters that got no gradient, or zeros alone.
        micro_batch: Rows in memory at once; fewer than asked for where the device had no more room.
    """

    parameters: int
    trainable: int
    rows: int
    length: int
    micro_batch: int
    loss: float
    largest_s: float
    step_s: float | None = None
    not_finite: tuple[str, ...] = ()
    untouched: tuple[str, ...] = ()


class ProbeFailure(Wire):
    """A dryfit error that a check met on its way; it went on with what it could.

    Attributes:
        stage: What was being done: ``tokens``, ``weights``, ``step``, or a point's values.
    """

    stage: str
    error: ErrorParts


class PointFacts(Wire):
    """One small step of a trial that the space can ask for."""

    params: dict[str, Scalar]
    step: StepFacts | None = None
    error: ErrorParts | None = None


class BatchCheckResult(Wire):
    """What BATCH_CHECK found. A model that cannot be trained is a finding, not an error.

    Attributes:
        step: The largest batch; None where it was not reached.
    """

    walks: tuple[BatchWalk, ...] = ()
    remarks: tuple[str, ...] = Field(default=(), description="what should be known of the rows, and is no error")
    step: StepFacts | None = None
    points: tuple[PointFacts, ...] = ()
    stumbles: tuple[ProbeFailure, ...] = ()
