"""Requests and results of the jobs that examine checkpoints, the machine, models and scripts before training."""

from typing import ClassVar, Literal

from pydantic import Field

from dryfit.core.jobs.checkpoint_health import Health
from dryfit.core.jobs.job import Job, JobRequest, ProcessNeeds
from dryfit.core.jobs.train import TrainRequest
from dryfit.core.settings.execution import DeviceSpec
from dryfit.core.settings.trial import Scalar, TrialConfig
from dryfit.core.wire import ErrorParts, Wire


class CheckResult(Wire):
    """The result of CHECK. A checkpoint that cannot be loaded is a finding, not an error."""

    health: Health


class CheckRequest(JobRequest[CheckResult]):
    """Examine a checkpoint without reading its weights."""

    job: Literal[Job.CHECK] = Job.CHECK
    folder: str = Field(description="a model's folder, or `minilm`")
    task: str | None = Field(description="as in `dryfit.load`; None: what the folder itself says")
    trust: bool = Field(description="run code that comes with the model")


class ProbeResult(Wire):
    """The result of PROBE.

    Attributes:
        cuda_build: Version of CUDA that torch was built for; None: a CPU build.
        devices: The CUDA devices that computed a small sum correctly.
        bf16: Whether all of them support bf16.
        trouble: Why torch cannot use all devices; empty if it can.
    """

    torch: str
    cuda_build: str | None
    devices: tuple[DeviceSpec, ...] = ()
    bf16: bool = True
    trouble: str = ""


class ProbeRequest(JobRequest[ProbeResult]):
    """List the devices that this build of torch can use."""

    job: Literal[Job.PROBE] = Job.PROBE


class BatchWalk(Wire):
    """What checking all batches of one split at one length found.

    Attributes:
        longest: Tokens in the longest row.
        faults: The first few faults found in batches, in words.
    """

    max_length: int
    split: str
    rows: int
    batches: int
    longest: int
    faults: tuple[str, ...] = ()


class StepCheck(Wire):
    """The check of one forward and backward pass.

    Attributes:
        step_s: Seconds for rows of median length; None if only the largest batch was run.
        not_finite: Trainable parameters with an infinite or NaN gradient.
        untouched: Trainable parameters with no gradient, and matrices with only zeros for one.
        micro_batch: Rows in memory at once; fewer than requested if device memory did not suffice.
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
    """A dryfit error in one stage of a check, which went on with the other stages.

    Attributes:
        stage: The stage: ``tokens``, ``weights``, ``step``, or a point's values.
    """

    stage: str
    error: ErrorParts


class PointCheck(Wire):
    """The check of one small step at a point of the search space."""

    params: dict[str, Scalar]
    step: StepCheck | None = None
    error: ErrorParts | None = None


class BatchCheckResult(Wire):
    """The result of BATCH_CHECK. A model that cannot be trained is a finding, not an error.

    Attributes:
        step: The step on the largest batch; None if it was not reached.
        failures: Errors of the stages that failed.
    """

    walks: tuple[BatchWalk, ...] = ()
    remarks: tuple[str, ...] = Field(default=(), description="remarks about the rows that are no errors")
    step: StepCheck | None = None
    points: tuple[PointCheck, ...] = ()
    failures: tuple[ProbeFailure, ...] = ()


class BatchCheckRequest(JobRequest[BatchCheckResult]):
    """Collate and check all batches of one model and do one training step; nothing is saved.

    Attributes:
        trial: The study file's values with this model, its largest batch and its longest input.
        lengths: Every ``train.max_length`` in the search space for this model.
        points: Further points of the search space with this model; each does one small step.
    """

    job: Literal[Job.BATCH_CHECK] = Job.BATCH_CHECK
    trial: TrainRequest
    lengths: tuple[int, ...]
    points: tuple[TrialConfig, ...] = ()

    def process_needs(self) -> ProcessNeeds:
        """Return what the job needs of its process."""
        return ProcessNeeds(hides_devices=True, visible_device=self.trial.visible_device)


class PaceResult(Wire):
    """The result of PACE.

    Attributes:
        step_s: Median seconds of an optimizer step, after a first one that is not counted.
        steps: Steps that were counted.
        together: Whether all children that were to run side by side did.
    """

    step_s: float = Field(gt=0)
    steps: int = Field(ge=1)
    together: bool


class PaceRequest(JobRequest[PaceResult]):
    """Time optimizer steps of a trial while others of these children do the same; nothing is learned or saved.

    Attributes:
        trial: The trial; its plan says the threads, its settings the number format.
        rows: Rows of each step, the first of the first batch.
        child: Number of this child among those that run side by side, from 0.
        side_by_side: How many they are.
        meeting: A folder that they share, in which they wait for each other after their first step.
        measured_s: How long steps are counted; one at least is.
    """

    job: Literal[Job.PACE] = Job.PACE
    trial: TrainRequest
    rows: int = Field(ge=1)
    child: int = Field(ge=0)
    side_by_side: int = Field(ge=1)
    meeting: str
    measured_s: float = Field(gt=0)

    def process_needs(self) -> ProcessNeeds:
        """Return what the job needs of its process."""
        return ProcessNeeds(hides_devices=True, visible_device=self.trial.visible_device)


class ScriptArgument(Wire):
    """An argument that a script's parser defines.

    Attributes:
        option: As a command line has it: ``--learning_rate``.
        kind: ``float``, ``int``, ``bool``, ``flag`` (an option without a value), ``choice`` or ``text``.
        default: Its value where the command line does not name it, as JSON has it; None: there is none.
        given: Its value by the command line, where it names it; None: it does not.
        choices: The values that it may have; empty: any of its kind.
        of_trainer: It is a field of transformers' ``TrainingArguments``.
    """

    option: str
    kind: Literal["float", "int", "bool", "flag", "choice", "text"]
    default: bool | int | float | str | None = None
    given: bool | int | float | str | None = None
    choices: tuple[bool | int | float | str, ...] = ()
    of_trainer: bool = False


class ScriptArgumentsResult(Wire):
    """The result of SCRIPT_ARGUMENTS.

    Attributes:
        arguments: In the order of their definition; none that takes several values.
        makes_trainer: The parser fills transformers' ``TrainingArguments``.
    """

    arguments: tuple[ScriptArgument, ...]
    makes_trainer: bool


class ScriptArgumentsRequest(JobRequest[ScriptArgumentsResult]):
    """Run a script up to where it parses its command line, and read which arguments it takes.

    Attributes:
        command: The command, as in ``[script]``.
        folder: The folder that it is run in.
    """

    job: Literal[Job.SCRIPT_ARGUMENTS] = Job.SCRIPT_ARGUMENTS
    needs: ClassVar = ProcessNeeds(hides_devices=True, of_the_user=True)
    command: str
    folder: str
